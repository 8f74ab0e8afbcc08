"""The spec of a PDCluster, parsed and defaulted.

One frozen dataclass per object of the API. Marks in ``Annotated`` say bounds and
descriptions; the CRD is generated from them. A field that is None was not given.
Only shared fields have defaults. A default of a role's own engine would hide the shared
value. The types of engines are in :mod:`.engine_types`, those of the router in
:mod:`.router_types`.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated

from pdcluster_connector.protocol import messages, prompt_outcomes
from pdcluster_operator.api.spec import autoscaling_types, engine_types, fields
from pdcluster_operator.api.spec.router_types import PEERS, NetworkPeer, Router


class Role(StrEnum):
    """What an engine is for."""

    PREFILL = "prefill"
    DECODE = "decode"


class TlsMode(StrEnum):
    """Whether engines speak TLS, and where their certificates come from."""

    ENABLED = "Enabled"
    MOUNTED = "Mounted"
    DISABLED = "Disabled"


class Certificates(StrEnum):
    """The source of the engines' certificates, in the status."""

    OPERATOR = "Operator"
    MOUNTED = "Mounted"
    NONE = "None"
    MIXED = "Mixed"
    UNKNOWN = "Unknown"


class Device(StrEnum):
    """Where KV lives: in GPU memory or in host memory."""

    CUDA = "CUDA"
    CPU = "CPU"


class Backend(StrEnum):
    """NIXL's transport backends that can carry KV."""

    UCX = "UCX"
    LIBFABRIC = "LIBFABRIC"


class KvLayout(StrEnum):
    """The order of KV in memory: layers, blocks, heads, tokens (N), values (C)."""

    AUTO = "Auto"
    LBHNC = "LBHNC"
    BLHNC = "BLHNC"
    BHLNC = "BHLNC"


class LoadFailurePolicy(StrEnum):
    """What happens to a request whose KV did not arrive."""

    FAIL = "Fail"
    RECOMPUTE = "Recompute"


class Visibility(StrEnum):
    """Whether clients see something."""

    HIDDEN = "Hidden"
    SHOWN = "Shown"


class RolloutType(StrEnum):
    """How engines are replaced when their revision changes."""

    SURGE = "Surge"
    REPLACE = "Replace"
    RECREATE = "Recreate"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rdma:
    """RDMA devices of an engine's pods."""

    resource: Annotated[
        str,
        fields.Example("rdma/ib"),
        "is the extended resource that a device plugin offers, e.g. rdma/ib.",
        fields.EXTENDED_RESOURCE,
    ]
    per_gpu: Annotated[
        int,
        fields.JsonName("perGPU"),
        fields.Example(1),
        "is how many of them a pod asks for each GPU.",
        fields.Whole(1, 16),
    ] = 1
    networks: Annotated[
        tuple[Annotated[str, fields.Text(253)], ...],
        fields.Example(["roce-a", "roce-b"]),
        "are Multus networks that the pods join, in order.",
        fields.Items(32),
    ] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """How KV moves from prefill to decode."""

    device: Annotated[
        Device,
        fields.Example("CUDA"),
        "is where KV lives: CUDA for GPU memory, CPU for host memory.",
    ] = Device.CUDA
    backends: Annotated[
        tuple[Backend, ...],
        fields.Example(["UCX"]),
        "names NIXL's transport backend. UCX carries RDMA, NVLink and TCP. LIBFABRIC is for EFA of "
        "AWS, and the engines' image must hold libfabric. NIXL's others are not known to carry KV "
        "in this version, or they read and write files.",
        fields.Items(4, 1),
    ] = (Backend.UCX,)
    kv_layout: Annotated[
        KvLayout,
        fields.Example("BHLNC"),
        "is the order of KV in memory that vLLM is asked for. LBHNC keeps layers apart. A prompt "
        "moves in far fewer descriptors with BLHNC if both roles have one tensor parallel size, "
        "and with BHLNC if not. Auto stays with that of vLLM's NIXL connector (LBHNC; MLA: any) "
        "until a GPU has shown that attention is no slower. Backends without it are refused.",
    ] = KvLayout.AUTO
    load_failure_policy: Annotated[
        LoadFailurePolicy,
        fields.Example("Recompute"),
        "says what happens to a request whose KV did not arrive.",
    ] = LoadFailurePolicy.FAIL
    local_tokens_per_step: Annotated[
        int | None,
        fields.Example(256),
        "is how many prompt tokens a decode engine computes by itself in a mean engine step "
        "while other requests generate on it. Further prompts wait, and none of them fails. A "
        "prompt whose KV comes from prefill does not wait. The connector's default is 512: "
        "prompts and requests that generate then share the engine about equally. 0 turns the "
        "limit off: prompts then take all that vLLM gives them.",
        fields.Whole(0, prompt_outcomes.MOST_TOKENS_PER_STEP),
    ] = None
    lease_seconds: Annotated[
        int,
        fields.Example(120),
        "is how long prefill holds KV for a decode engine, in seconds.",
        fields.Whole(5, 3600),
    ] = int(messages.LEASE_SECONDS)
    min_bandwidth_mbps: Annotated[
        int | None,
        fields.JsonName("minBandwidthMBps"),
        fields.Example(20000),
        "is the least bandwidth, in MB/s, of a link's probe and of its receives of 8 MiB or more.",
        fields.Whole(1, 1_000_000),
    ] = None
    rdma: Annotated[Rdma | None, "asks for RDMA devices."] = None
    tls: Annotated[
        TlsMode,
        fields.Example("Disabled"),
        "says whether engines speak TLS with each other and with the operator. With Enabled, "
        "the operator gives each engine a certificate, and each side shows its own. With "
        "Mounted, engines use the files ca.crt, tls.crt and tls.key that podTemplate of both "
        "roles mounts at /pdcluster-tls. With Disabled, whoever reaches an engine's ports can "
        "read where its KV lies. KV itself is not encrypted in any case.",
    ] = TlsMode.ENABLED
    internal_names: Annotated[
        Visibility,
        fields.Example("Hidden"),
        "says whether answers to clients name the engines that KV moved between: their "
        "addresses in the answer's id, and their ids in kv_path. It does not change the "
        "router's own errors and its page /workers, which always name engines.",
    ] = Visibility.HIDDEN
    nixl_threads: Annotated[
        int | None,
        fields.Example(4),
        "is the number of NIXL's threads in each decode worker. The connector has a default.",
        fields.Whole(0, 64),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheduling:
    """How the pods of engines get their nodes."""

    gang: Annotated[
        engine_types.Switch,
        fields.Example("Enabled"),
        "says whether pods that need each other get their nodes together or not at all. With "
        "Enabled, these are the pods of the first prefill engine and of the first decode "
        "engine, and the pods of each engine that has several. The API server has to serve "
        "PodGroup of scheduling.k8s.io/v1beta1. Engines that exist are not replaced.",
    ] = engine_types.Switch.DISABLED
    queue_name: Annotated[
        str | None,
        fields.Example("team-a"),
        "is the LocalQueue of Kueue that admits engines, one by one. New engines get the label "
        "kueue.x-k8s.io/queue-name. Engines that exist stay in their queue.",
        fields.QUEUE,
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """How a change of the spec reaches the engines."""

    type: Annotated[
        RolloutType,
        fields.Example("Replace"),
        "is how engines are replaced when their revision changes. Surge starts new engines "
        "first and needs spare GPUs. Replace needs none: an engine of each role leaves before "
        "the next new one starts, and the others serve. Recreate stops all old engines first, "
        "so nothing is served for a while.",
    ] = RolloutType.SURGE
    max_surge: Annotated[
        int,
        fields.Example(2),
        "is how many engines of each role Surge may run beside the replicas of that role.",
        fields.Whole(1, 64),
    ] = 1
    paused: Annotated[
        bool, fields.Example(True), "keeps engines as they are when the spec changes."
    ] = False
    progress_deadline_seconds: Annotated[
        int,
        fields.Example(7200),
        "is how long a change may take before Progressing turns False, in seconds.",
        fields.Whole(10, 86_400),
    ] = 3600
    schedule_timeout_seconds: Annotated[
        int,
        fields.Example(900),
        "is how long an engine of several pods may hold nodes while other pods of it fit "
        "nowhere, in seconds. Then the operator deletes its pods, and tries again later.",
        fields.Whole(30, 86_400),
    ] = 600
    renew: Annotated[
        str | None,
        fields.Example("2026-11-22"),
        "asks for new engines with the operator's own connector and its newest pod template, "
        "although nothing else changed. Each new value asks once. An operator that is "
        "upgraded replaces no engine by itself.",
        fields.Text(64, pattern=r"^[A-Za-z0-9][-A-Za-z0-9._:]*$", says="a word such as a date"),
    ] = None
    revision_history_limit: Annotated[
        int,
        fields.Example(3),
        "is how many revisions of a role are kept beside those that have engines. "
        "The spec of any of them brings back its engines.",
        fields.Whole(0, 100),
    ] = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Canary:
    """The request that proves that KV moves."""

    interval_seconds: Annotated[
        int,
        fields.Example(60),
        "is how often a request proves each link again, in seconds. With very many links it "
        "is less often: all links of a PDCluster together get at most four such requests a "
        "second.",
        fields.Whole(5, 86_400),
    ] = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """How the KV path is proved."""

    canary: Annotated[Canary, "is the request that proves that KV moves."] = Canary()
    max_local_share: Annotated[
        int,
        fields.Example(10),
        "is the largest share of its prompts that a decode engine may compute by itself "
        "although prefill should have, in percent. Above it, TransportHealthy turns False. "
        "100 turns this off.",
        fields.Whole(0, 100),
    ] = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Monitoring:
    """Who watches the cluster."""

    scrape_from: Annotated[
        tuple[NetworkPeer, ...],
        fields.Example(PEERS),
        "are the peers that may read the metrics of engines and routers, such as Prometheus' "
        "pods. If the list is empty, nobody may. It opens no other port.",
        fields.Items(32),
    ] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CommonMetadata:
    """Labels and annotations of all objects of a cluster."""

    labels: Annotated[
        fields.Labels,
        fields.Example({"team": "search", "cost-center": "4711"}),
        "are labels of each object. The operator's own labels are refused here.",
    ] = field(default_factory=fields.Labels)
    annotations: Annotated[
        fields.Free,
        fields.Example({"example.com/owner": "search@example.com"}),
        "are annotations of each object, keys to strings. The operator's own are refused here.",
    ] = field(default_factory=fields.Free)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """What a user wants of a PDCluster."""

    model: Annotated[engine_types.Model, "is the model that the cluster serves."]
    engine: Annotated[engine_types.SharedEngine, "is how the engines of both roles run."] = field(
        default_factory=engine_types.SharedEngine
    )
    transfer: Annotated[Transfer, "is how KV moves from prefill to decode."] = Transfer()
    prefill: Annotated[engine_types.RoleSpec, "are the engines that compute prompts."] = field(
        default_factory=engine_types.RoleSpec
    )
    decode: Annotated[engine_types.RoleSpec, "are the engines that produce tokens."] = field(
        default_factory=engine_types.RoleSpec
    )
    router: Annotated[Router, "sends requests to the engines."] = field(default_factory=Router)
    pod_template: Annotated[
        fields.Free | None,
        fields.Example(
            {
                "spec": {
                    "imagePullSecrets": [{"name": "registry"}],
                    "nodeSelector": {"pool": "inference"},
                }
            }
        ),
        "is a Kubernetes pod template for all engines and routers. It is merged over the "
        "operator's own, and podTemplate of prefill, of decode and of router over it. Its "
        "container engine is for engines alone, and its container router for routers alone.",
    ] = None
    rollout: Annotated[Rollout, "is how a change of the spec reaches the engines."] = Rollout()
    scheduling: Annotated[Scheduling, "is how the pods of engines get their nodes."] = Scheduling()
    autoscaling: Annotated[
        autoscaling_types.Autoscaling | None,
        "has the operator say how many engines of each role are needed, and set it if you wish.",
    ] = None
    verification: Annotated[Verification, "is how the KV path is proved."] = Verification()
    monitoring: Annotated[Monitoring, "is who watches the cluster."] = Monitoring()
    common_metadata: Annotated[
        CommonMetadata,
        "has labels and annotations for every object that the operator makes for this cluster, and "
        "for the pods. What podTemplate says wins. A change replaces engines and routers, as "
        "rollout says: pods cannot get other labels. For pods alone, use podTemplate.metadata. "
        "Secrets that exist get the change when the operator writes them next.",
    ] = field(default_factory=CommonMetadata)
    request_timeout_seconds: Annotated[
        int,
        fields.Example(600),
        "is how long a request may take. The router ends a request that takes longer. A pod "
        "that is told to end waits this long at most for the requests that it serves.",
        fields.Whole(10, 43_200),
    ] = 1800
    operator_class: Annotated[
        str | None,
        fields.Example("blue"),
        "names the operators that work on this cluster: those that were installed with this "
        "`operator.class`. Without it, operators without a class do.",
        fields.CLASS,
    ] = None

    def role(self, role: Role) -> engine_types.RoleSpec:
        """Return the spec of one role."""
        return self.prefill if role is Role.PREFILL else self.decode


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """One PDCluster: its identity and its spec."""

    name: str
    namespace: str
    uid: str
    generation: int
    spec: Spec

    @property
    def served_name(self) -> str:
        """The name that clients ask for."""
        return self.spec.model.name or self.name
