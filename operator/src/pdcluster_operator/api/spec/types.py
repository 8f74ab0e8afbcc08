"""The spec of a PDCluster, parsed and defaulted.

One frozen dataclass per object of the API. Marks in ``Annotated`` say bounds and
descriptions; the CRD is generated from them. A field that is None was not given.
Defaults stand only on shared fields: a default on a role's own engine would mask the
shared value.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from pdcluster_operator.api.spec.bounds import EXTENDED_RESOURCE, IMAGE
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
from pdcluster_operator.api.spec.fields import (
    Doc,
    Example,
    Free,
    Items,
    JsonName,
    Quantities,
    Text,
    Whole,
)
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

__all__ = [
    "Backend", "Canary", "ClaimSource", "Cluster", "ConnectorSource", "Device",
    "EngineOverride", "EnvVar", "HostPathSource", "HuggingFaceSource", "LoadFailurePolicy",
    "Model", "ModelCache", "ModelSource", "Monitoring", "NetworkPeer", "Parallelism", "Rdma",
    "Resources", "Role", "RoleSpec", "Rollout", "RolloutType", "Router", "RouterPolicy",
    "RouterResources", "SecretKeyRef", "SharedEngine", "Spec", "Switch", "Transfer",
    "Verification", "Visibility",
]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Rdma:
    """RDMA devices of an engine's pods."""

    resource: Annotated[
        str,
        Example("rdma/ib"),
        Doc("is the extended resource that a device plugin offers, e.g. rdma/ib."),
        EXTENDED_RESOURCE,
    ]
    per_gpu: Annotated[
        int,
        JsonName("perGPU"),
        Example(1),
        Doc("is how many of them a pod asks for each GPU."),
        Whole(1, 16),
    ] = 1
    networks: Annotated[
        tuple[Annotated[str, Text(253)], ...],
        Example(["roce-a", "roce-b"]),
        Doc("are Multus networks that the pods join, in order."),
        Items(32),
    ] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """How KV moves from prefill to decode."""

    device: Annotated[
        Device,
        Example("CUDA"),
        Doc("is where KV lives: CUDA for GPU memory, CPU for host memory."),
    ] = Device.CUDA
    backends: Annotated[
        tuple[Backend, ...],
        Example(["UCX"]),
        Doc(
            "are NIXL's transport backends, best first. GDS is refused: it reads and writes files."
        ),
        Items(4, 1),
    ] = (Backend.UCX,)
    load_failure_policy: Annotated[
        LoadFailurePolicy,
        Example("Recompute"),
        Doc("says what happens to a request whose KV did not arrive."),
    ] = LoadFailurePolicy.FAIL
    lease_seconds: Annotated[
        int,
        Example(120),
        Doc("is how long prefill holds KV for a decode engine, in seconds."),
        Whole(5, 3600),
    ] = 60
    min_bandwidth_mbps: Annotated[
        int | None,
        JsonName("minBandwidthMBps"),
        Example(20000),
        Doc("is the least bandwidth of a healthy link, in megabytes a second."),
        Whole(1, 1_000_000),
    ] = None
    rdma: Annotated[Rdma | None, Doc("asks for RDMA devices.")] = None
    internal_names: Annotated[
        Visibility,
        Example("Hidden"),
        Doc(
            "says whether answers to clients name the engines that KV moved between: their "
            "addresses in the answer's id, their ids in kv_path. The router's own errors name the "
            "engine that it could not reach, whatever stands here, and so does its /workers."
        ),
    ] = Visibility.HIDDEN
    nixl_threads: Annotated[
        int | None,
        Example(4),
        Doc("is the number of NIXL's threads in each decode worker; by default the connector's."),
        Whole(0, 64),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterResources:
    """Compute resources of each router pod.

    The defaults are measured, see docs/operations.md. There is no CPU limit: a router that is
    throttled delays every token of every request.
    """

    requests: Annotated[
        Quantities,
        Example({"cpu": "1", "memory": "512Mi"}),
        Doc("are the resources that a pod is promised."),
    ] = field(default_factory=lambda: Quantities(cpu="250m", memory="256Mi"))
    limits: Annotated[
        Quantities,
        Example({"memory": "4Gi"}),
        Doc("are the resources that a pod may use at most."),
    ] = field(default_factory=lambda: Quantities(memory="2Gi"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Router:
    """The router before the engines: vLLM's own vllm-router."""

    replicas: Annotated[
        int, Example(2), Doc("is the number of router pods; 0 for none."), Whole(0, 64)
    ] = 1
    policy: Annotated[
        RouterPolicy, Example("CacheAware"), Doc("is how the router picks engines.")
    ] = RouterPolicy.ROUND_ROBIN
    image: Annotated[
        str,
        Example("registry.example/team/vllm-router:0.1.17"),
        Doc(
            "is the router's container image: one that holds vllm-router. The default is a tag "
            "that moves every day, for its dated tags are deleted after two weeks; name an image "
            "of your own for what must stay as it is (docs/images.md)."
        ),
        IMAGE,
    ] = "docker.io/vllm/vllm-router:nightly"
    resources: Annotated[RouterResources, Doc("are the compute resources of each router pod.")] = (
        field(default_factory=RouterResources)
    )
    api_key_secret_ref: Annotated[
        SecretKeyRef | None,
        Doc(
            "is the Secret that holds the key that clients must send, as Authorization: Bearer "
            "KEY. The router and the engines ask for it; without it nobody needs one."
        ),
    ] = None
    allow_from: Annotated[
        tuple[NetworkPeer, ...] | None,
        Example(PEERS),
        Doc(
            "are those who may reach the router, or the engines' API where "
            "replicas is 0; anybody if not given."
        ),
        Items(64, 1),
    ] = None
    pod_template: Annotated[
        Free | None,
        Example({"spec": {"priorityClassName": "high"}}),
        Doc("is a Kubernetes pod template, merged over ours; containers merge by name (router)."),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """How a change of the spec reaches the engines."""

    type: Annotated[
        RolloutType,
        Example("Recreate"),
        Doc("is how engines are replaced when their revision changes."),
    ] = RolloutType.RECREATE
    paused: Annotated[
        bool, Example(True), Doc("keeps engines as they are when the spec changes.")
    ] = False
    progress_deadline_seconds: Annotated[
        int,
        Example(7200),
        Doc("is how long a change may take before Progressing turns False, in seconds."),
        Whole(10, 86_400),
    ] = 3600


@dataclass(frozen=True, slots=True, kw_only=True)
class Canary:
    """The request that proves that KV moves."""

    interval_seconds: Annotated[
        int,
        Example(60),
        Doc("is how often each link is proved again, in seconds."),
        Whole(5, 86_400),
    ] = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """How the KV path is proved."""

    canary: Annotated[Canary, Doc("is the request that proves that KV moves.")] = field(
        default_factory=Canary
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Monitoring:
    """Who watches the cluster."""

    scrape_from: Annotated[
        tuple[NetworkPeer, ...],
        Example(PEERS),
        Doc(
            "are those who may read the metrics of engines and routers, such as Prometheus' pods; "
            "nobody if it is empty. It opens no other port."
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
    verification: Annotated[Verification, Doc("is how the KV path is proved.")] = field(
        default_factory=Verification
    )

    monitoring: Annotated[Monitoring, Doc("is who watches the cluster.")] = field(
        default_factory=Monitoring
    )

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
