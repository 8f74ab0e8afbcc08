"""How KV moves from prefill to decode."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pdcluster_connector.protocol.prompt_pace import MOST_TOKENS_PER_STEP
from pdcluster_operator.api.spec.bounds import EXTENDED_RESOURCE
from pdcluster_operator.api.spec.enums import (
    Backend,
    Device,
    LoadFailurePolicy,
    TlsMode,
    Visibility,
)
from pdcluster_operator.api.spec.fields import Doc, Example, Items, JsonName, Text, Whole


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
    local_tokens_per_step: Annotated[
        int | None,
        Example(256),
        Doc(
            "is how many prompt tokens a decode engine computes by itself in a mean engine step "
            "while other requests generate on it. Further prompts wait, and none of them fails. A "
            "prompt whose KV comes from prefill does not wait. The connector's default is 512: "
            "prompts and requests that generate then share the engine about equally. 0 turns the "
            "limit off: prompts then take all that vLLM gives them."
        ),
        Whole(0, MOST_TOKENS_PER_STEP),
    ] = None
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
    tls: Annotated[
        TlsMode,
        Example("Disabled"),
        Doc(
            "says whether engines speak TLS with each other and with the operator. With Enabled, "
            "the operator gives each engine a certificate, and each side shows its own. With "
            "Mounted, engines use the files ca.crt, tls.crt and tls.key that podTemplate of both "
            "roles mounts at /pdcluster-tls. With Disabled, whoever reaches an engine's ports can "
            "read where its KV lies. KV itself is not encrypted in any case."
        ),
    ] = TlsMode.ENABLED
    internal_names: Annotated[
        Visibility,
        Example("Hidden"),
        Doc(
            "says whether answers to clients name the engines that KV moved between: their "
            "addresses in the answer's id, and their ids in kv_path. It does not change the "
            "router's own errors and its page /workers, which always name engines."
        ),
    ] = Visibility.HIDDEN
    nixl_threads: Annotated[
        int | None,
        Example(4),
        Doc("is the number of NIXL's threads in each decode worker. The connector has a default."),
        Whole(0, 64),
    ] = None
