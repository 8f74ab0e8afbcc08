"""The spec of a PDCluster, parsed and defaulted.

One frozen dataclass per object of the API. Marks in ``Annotated`` say bounds and
descriptions; the CRD is generated from them. A field that is None was not given.
Defaults stand only on shared fields: a default on a role's own engine would mask the
shared value.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from .bounds import IMAGE
from .engine_types import EngineOverride, EnvVar, Parallelism, Resources, RoleSpec, SharedEngine
from .enums import (
    Backend,
    ConnectorSource,
    Device,
    LoadFailurePolicy,
    Role,
    RolloutType,
    RouterPolicy,
    Switch,
)
from .fields import Doc, Free, Items, JsonName, Text, Whole
from .model_types import (
    ClaimSource,
    HostPathSource,
    HuggingFaceSource,
    Model,
    ModelCache,
    ModelSource,
    SecretKeyRef,
)

__all__ = [
    "Backend", "Canary", "ClaimSource", "Cluster", "ConnectorSource", "Device", "EngineOverride",
    "EnvVar", "HostPathSource", "HuggingFaceSource", "LoadFailurePolicy", "Model", "ModelCache",
    "ModelSource", "Parallelism", "Rdma", "Resources", "Role", "RoleSpec", "Rollout",
    "RolloutType", "Router", "RouterPolicy", "SecretKeyRef", "SharedEngine", "Spec", "Switch",
    "Transfer", "Verification",
]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Rdma:
    """RDMA devices of an engine's pods."""

    resource: Annotated[
        str,
        Doc("is the extended resource that a device plugin offers, e.g. rdma/ib."),
        Text(253, pattern=r"^[a-z0-9A-Z./_-]+$", says="an extended resource name"),
    ]
    per_gpu: Annotated[
        int, JsonName("perGPU"), Doc("is how many of them a pod asks for each GPU."), Whole(1, 16)
    ] = 1
    networks: Annotated[
        tuple[Annotated[str, Text(253)], ...],
        Doc("are Multus networks that the pods join, in order."),
        Items(32),
    ] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """How KV moves from prefill to decode."""

    device: Annotated[
        Device, Doc("is where KV lives: CUDA for GPU memory, CPU for host memory.")
    ] = Device.CUDA
    backends: Annotated[
        tuple[Backend, ...],
        Doc(
            "are NIXL's transport backends, best first. GDS is refused: it reads and writes files."
        ),
        Items(4, 1),
    ] = (Backend.UCX,)
    load_failure_policy: Annotated[
        LoadFailurePolicy,
        Doc("says what happens to a request whose KV did not arrive."),
    ] = LoadFailurePolicy.FAIL
    lease_seconds: Annotated[
        int, Doc("is how long prefill holds KV for a decode engine, in seconds."), Whole(5, 3600)
    ] = 60
    min_bandwidth_mbps: Annotated[
        int | None,
        JsonName("minBandwidthMBps"),
        Doc("is the least bandwidth of a healthy link, in megabytes a second."),
        Whole(1, 1_000_000),
    ] = None
    rdma: Annotated[Rdma | None, Doc("asks for RDMA devices.")] = None
    nixl_threads: Annotated[
        int | None,
        Doc("is the number of NIXL's threads in each decode worker; by default the connector's."),
        Whole(0, 64),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Router:
    """The router before the engines: vLLM's own vllm-router."""

    replicas: Annotated[int, Doc("is the number of router pods; 0 for none."), Whole(0, 64)] = 1
    policy: Annotated[RouterPolicy, Doc("is how the router picks engines.")] = (
        RouterPolicy.ROUND_ROBIN
    )
    image: Annotated[
        str,
        Doc("is the router's container image: one that holds vllm-router."),
        IMAGE,
    ] = "docker.io/vllm/vllm-router:nightly-20260710-b93cbcb"
    pod_template: Annotated[
        Free | None,
        Doc("is a Kubernetes pod template, merged over ours; containers merge by name (router)."),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """How a change of the spec reaches the engines."""

    type: Annotated[
        RolloutType, Doc("is how engines are replaced when their revision changes.")
    ] = RolloutType.RECREATE
    paused: Annotated[bool, Doc("keeps engines as they are when the spec changes.")] = False
    progress_deadline_seconds: Annotated[
        int,
        Doc("is how long a change may take before Progressing turns False, in seconds."),
        Whole(10, 86_400),
    ] = 3600


@dataclass(frozen=True, slots=True, kw_only=True)
class Canary:
    """The request that proves that KV moves."""

    interval_seconds: Annotated[
        int, Doc("is how often each link is proved again, in seconds."), Whole(5, 86_400)
    ] = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """How the KV path is proved."""

    canary: Annotated[Canary, Doc("is the request that proves that KV moves.")] = field(
        default_factory=Canary
    )


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
