"""The spec of a PDCluster, parsed and defaulted.

One frozen dataclass per object of the API. Marks in ``Annotated`` say bounds and
descriptions; the CRD is generated from them. A field that is None was not given.
Only shared fields have defaults. A default of a role's own engine would hide the shared
value.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from pdcluster_operator.api.spec.bounds import CLASS
from pdcluster_operator.api.spec.engine_types import (
    EngineOverride,
    EnvVar,
    Parallelism,
    Resources,
    RoleSpec,
    SharedEngine,
)
from pdcluster_operator.api.spec.enums import (
    Backend,
    ConnectorSource,
    Device,
    LoadFailurePolicy,
    Role,
    RolloutType,
    RouterPolicy,
    Switch,
    Visibility,
)
from pdcluster_operator.api.spec.fields import Doc, Example, Items, Text, Whole
from pdcluster_operator.api.spec.model_types import (
    ClaimSource,
    HostPathSource,
    HuggingFaceSource,
    Model,
    ModelCache,
    ModelSource,
    SecretKeyRef,
)
from pdcluster_operator.api.spec.network_types import PEERS, NetworkPeer
from pdcluster_operator.api.spec.router_types import Router, RouterResources
from pdcluster_operator.api.spec.scheduling_types import Scheduling
from pdcluster_operator.api.spec.transfer_types import Rdma, Transfer

__all__ = [
    "Backend", "Canary", "ClaimSource", "Cluster", "ConnectorSource", "Device",
    "EngineOverride", "EnvVar", "HostPathSource", "HuggingFaceSource", "LoadFailurePolicy",
    "Model", "ModelCache", "ModelSource", "Monitoring", "NetworkPeer", "Parallelism", "Rdma",
    "Resources", "Role", "RoleSpec", "Rollout", "RolloutType", "Router", "RouterPolicy",
    "RouterResources", "Scheduling", "SecretKeyRef", "SharedEngine", "Spec", "Switch", "Transfer",
    "Verification", "Visibility",
]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """How a change of the spec reaches the engines."""

    type: Annotated[
        RolloutType,
        Example("Replace"),
        Doc(
            "is how engines are replaced when their revision changes. Surge starts new engines "
            "first and needs spare GPUs. Replace needs none: an engine of each role leaves before "
            "the next new one starts, and the others serve. Recreate stops all old engines first, "
            "so nothing is served for a while."
        ),
    ] = RolloutType.SURGE
    max_surge: Annotated[
        int,
        Example(2),
        Doc("is how many engines of each role Surge may run beside the replicas of that role."),
        Whole(1, 64),
    ] = 1
    paused: Annotated[
        bool, Example(True), Doc("keeps engines as they are when the spec changes.")
    ] = False
    progress_deadline_seconds: Annotated[
        int,
        Example(7200),
        Doc("is how long a change may take before Progressing turns False, in seconds."),
        Whole(10, 86_400),
    ] = 3600
    schedule_timeout_seconds: Annotated[
        int,
        Example(900),
        Doc(
            "is how long an engine of several pods may hold nodes while other pods of it fit "
            "nowhere, in seconds. Then the operator deletes its pods, and tries again later."
        ),
        Whole(30, 86_400),
    ] = 600
    renew: Annotated[
        str | None,
        Example("2026-11-22"),
        Doc(
            "asks for new engines with the operator's own connector and its newest pod template, "
            "although nothing else changed. Each new value asks once. An operator that is "
            "upgraded replaces no engine by itself."
        ),
        Text(64, pattern=r"^[A-Za-z0-9][-A-Za-z0-9._:]*$", says="a word such as a date"),
    ] = None
    revision_history_limit: Annotated[
        int,
        Example(3),
        Doc(
            "is how many revisions of a role are kept beside those that have engines. "
            "The spec of any of them brings back its engines."
        ),
        Whole(0, 100),
    ] = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Canary:
    """The request that proves that KV moves."""

    interval_seconds: Annotated[
        int,
        Example(60),
        Doc(
            "is how often a request proves each link again, in seconds. With very many links it "
            "is less often: all links of a PDCluster together get at most four such requests a "
            "second."
        ),
        Whole(5, 86_400),
    ] = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """How the KV path is proved."""

    canary: Annotated[Canary, Doc("is the request that proves that KV moves.")] = field(
        default_factory=Canary
    )
    max_local_share: Annotated[
        int,
        Example(10),
        Doc(
            "is the largest share of its prompts that a decode engine may compute by itself "
            "although prefill should have, in percent. Above it, TransportHealthy turns False. "
            "100 turns this off."
        ),
        Whole(0, 100),
    ] = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Monitoring:
    """Who watches the cluster."""

    scrape_from: Annotated[
        tuple[NetworkPeer, ...],
        Example(PEERS),
        Doc(
            "are the peers that may read the metrics of engines and routers, such as Prometheus' "
            "pods. If the list is empty, nobody may. It opens no other port."
        ),
        Items(32),
    ] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """What a user wants of a PDCluster."""

    model: Annotated[Model, Doc("is the model that the cluster serves.")]
    engine: Annotated[SharedEngine, Doc("is how the engines of both roles run.")] = field(
        default_factory=SharedEngine
    )
    transfer: Annotated[Transfer, Doc("is how KV moves from prefill to decode.")] = field(
        default_factory=Transfer
    )
    prefill: Annotated[RoleSpec, Doc("are the engines that compute prompts.")] = field(
        default_factory=RoleSpec
    )
    decode: Annotated[RoleSpec, Doc("are the engines that produce tokens.")] = field(
        default_factory=RoleSpec
    )
    router: Annotated[Router, Doc("is the router before the engines.")] = field(
        default_factory=Router
    )
    rollout: Annotated[Rollout, Doc("is how a change of the spec reaches the engines.")] = field(
        default_factory=Rollout
    )
    scheduling: Annotated[Scheduling, Doc("is how the pods of engines get their nodes.")] = field(
        default_factory=Scheduling
    )
    verification: Annotated[Verification, Doc("is how the KV path is proved.")] = field(
        default_factory=Verification
    )

    monitoring: Annotated[Monitoring, Doc("is who watches the cluster.")] = field(
        default_factory=Monitoring
    )
    request_timeout_seconds: Annotated[
        int,
        Example(600),
        Doc(
            "is how long a request may take. The router ends a request that takes longer. A pod "
            "that is told to end waits this long at most for the requests that it serves."
        ),
        Whole(10, 43_200),
    ] = 1800
    operator_class: Annotated[
        str | None,
        Example("blue"),
        Doc(
            "names the operators that work on this cluster: those that were installed with this "
            "`operator.class`. Without it, operators without a class do."
        ),
        CLASS,
    ] = None

    def role(self, role: Role) -> RoleSpec:
        """Return the spec of one role."""
        return self.prefill if role is Role.PREFILL else self.decode


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """One PDCluster: who it is and what it wants."""

    name: str
    namespace: str
    uid: str
    generation: int
    spec: Spec

    @property
    def served_name(self) -> str:
        """The name that clients ask for."""
        return self.spec.model.name or self.name
