"""The part of a spec about the router, and about who may reach pods over the network.

The peers of a Kubernetes NetworkPolicy have types of their own. If a selector were passed through,
the API server would drop a misspelt field from it, and a selector without fields selects every pod.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Final

from pdcluster_operator.api.spec import fields


class RouterPolicy(StrEnum):
    """How the router picks engines."""

    ROUND_ROBIN = "RoundRobin"
    RANDOM = "Random"
    CACHE_AWARE = "CacheAware"
    POWER_OF_TWO = "PowerOfTwo"
    CONSISTENT_HASH = "ConsistentHash"
    KV_AWARE = "KVAware"
    STICKY_LEAST_LOADED = "StickyLeastLoaded"


class RouterLogLevel(StrEnum):
    """From which severity on the router logs."""

    DEBUG = "Debug"
    INFO = "Info"
    WARNING = "Warning"
    ERROR = "Error"
    CRITICAL = "Critical"


class RouterType(StrEnum):
    """What sends requests to the engines."""

    VLLM_ROUTER = "VLLMRouter"
    LLMD = "LLMD"
    NONE = "None"


class ServiceType(StrEnum):
    """Where a Service is reached: Kubernetes' own words."""

    CLUSTER_IP = "ClusterIP"
    NODE_PORT = "NodePort"
    LOAD_BALANCER = "LoadBalancer"


class TrafficPolicy(StrEnum):
    """Which nodes' pods get what a node receives from outside: Kubernetes' own words."""

    CLUSTER = "Cluster"
    LOCAL = "Local"


class SelectorOperator(StrEnum):
    """How a label is compared with values."""

    IN = "In"
    NOT_IN = "NotIn"
    EXISTS = "Exists"
    DOES_NOT_EXIST = "DoesNotExist"


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelRequirement:
    """One expression over a label."""

    RULES: ClassVar[tuple[fields.Cel, ...]] = (
        fields.Cel(
            "(self.operator in ['In', 'NotIn']) == (has(self.values) && size(self.values) > 0)",
            "In and NotIn need values; Exists and DoesNotExist take none (rule PeerUnusable)",
        ),
    )

    key: Annotated[str, "is the key of the label.", fields.LABEL_KEY]
    operator: Annotated[SelectorOperator, "is how the label is compared with values."]
    values: Annotated[
        tuple[Annotated[str, fields.LABEL_VALUE], ...],
        "are the values for In and NotIn.",
        fields.Items(32),
    ] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelSelector:
    """Objects with certain labels. Without fields it selects all objects."""

    match_labels: Annotated[fields.Labels, "are labels that an object must have."] = field(
        default_factory=fields.Labels
    )
    match_expressions: Annotated[
        tuple[LabelRequirement, ...], "are expressions that must all hold.", fields.Items(32)
    ] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class IpBlock:
    """A range of addresses."""

    cidr: Annotated[str, "is the range of addresses, e.g. 10.0.0.0/8.", fields.CIDR]
    excluded: Annotated[
        tuple[Annotated[str, fields.CIDR], ...],
        fields.JsonName("except"),
        "are ranges within cidr that are left out.",
        fields.Items(32),
    ] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkPeer:
    """Pods, or a range of addresses: a NetworkPolicyPeer of Kubernetes."""

    RULES: ClassVar[tuple[fields.Cel, ...]] = (
        fields.Cel(
            "has(self.ipBlock) != (has(self.podSelector) || has(self.namespaceSelector))",
            "needs podSelector, namespaceSelector or both, or ipBlock alone (rule PeerUnusable)",
        ),
    )

    pod_selector: Annotated[
        LabelSelector | None,
        "selects pods. Without namespaceSelector, they are those of the cluster's namespace.",
    ] = None
    namespace_selector: Annotated[
        LabelSelector | None,
        "selects namespaces. Without podSelector, it means all pods in them.",
    ] = None
    ip_block: Annotated[IpBlock | None, "is a range of addresses."] = None


LOAD_BALANCER_CLASS: Final = fields.Text(
    317,
    pattern=r"^([a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*/)?"
    r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$",
    says="a name with or without a domain, e.g. service.k8s.aws/nlb",
)

# An example of a list of peers: Prometheus' pods in one namespace, and a range of addresses.
PEERS: Final[list[dict[str, Any]]] = [
    {
        "namespaceSelector": {
            "matchLabels": {"team": "platform"},
            "matchExpressions": [{"key": "env", "operator": "NotIn", "values": ["test"]}],
        },
        "podSelector": {
            "matchLabels": {"app.kubernetes.io/name": "prometheus"},
            "matchExpressions": [{"key": "tier", "operator": "In", "values": ["prod"]}],
        },
    },
    {"ipBlock": {"cidr": "10.20.0.0/16", "except": ["10.20.7.0/24"]}},
]


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterResources:
    """Compute resources of each router pod.

    The defaults are measured, see docs/operations.md. There is no CPU limit, because a router that
    is throttled delays every token of every request.
    """

    requests: Annotated[
        fields.Quantities,
        fields.Example({"cpu": "1", "memory": "512Mi"}),
        "are the resources that Kubernetes reserves for a pod.",
    ] = field(default_factory=lambda: fields.Quantities(cpu="250m", memory="256Mi"))
    limits: Annotated[
        fields.Quantities,
        fields.Example({"memory": "4Gi"}),
        "are the resources that a pod may use at most.",
    ] = field(default_factory=lambda: fields.Quantities(memory="2Gi"))


OF_LOAD_BALANCERS = frozenset({ServiceType.LOAD_BALANCER})
SERVICE_FIELDS = {
    "load_balancer_class": OF_LOAD_BALANCERS,
    "load_balancer_source_ranges": OF_LOAD_BALANCERS,
    "external_traffic_policy": OF_LOAD_BALANCERS | {ServiceType.NODE_PORT},
}
"""Field of RouterService -> the types of Service that have it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterService:
    """The Service for clients. Its fields are those of Kubernetes' Service."""

    RULES: ClassVar[tuple[fields.Cel, ...]] = (
        fields.Cel(
            "self.type == 'LoadBalancer' || !(has(self.loadBalancerClass) || "
            "has(self.loadBalancerSourceRanges) && size(self.loadBalancerSourceRanges) > 0)",
            "loadBalancerClass and loadBalancerSourceRanges do nothing unless type is LoadBalancer "
            "(rule RouterFieldUnused)",
        ),
        fields.Cel(
            "self.type != 'ClusterIP' || !has(self.externalTrafficPolicy)",
            "externalTrafficPolicy does nothing with type ClusterIP (rule RouterFieldUnused)",
        ),
        fields.Cel(
            "[self, oldSelf].exists(one, one.type != 'LoadBalancer') || "
            "(has(self.loadBalancerClass) ? self.loadBalancerClass : '') == "
            "(has(oldSelf.loadBalancerClass) ? oldSelf.loadBalancerClass : '')",
            "Kubernetes never changes the loadBalancerClass while type stays LoadBalancer: "
            "set type to ClusterIP first, and to LoadBalancer with the other class afterwards",
        ),
    )

    type: Annotated[
        ServiceType,
        fields.Example("LoadBalancer"),
        "is where clients reach the Service. ClusterIP: inside the cluster. NodePort: on a port of "
        "each node, too. LoadBalancer: at an address that a cloud or MetalLB gives it, too.",
    ] = ServiceType.CLUSTER_IP
    annotations: Annotated[
        fields.Free,
        fields.Example({"service.beta.kubernetes.io/aws-load-balancer-scheme": "internal"}),
        "are annotations of the Service, keys to strings. They win over spec.commonMetadata. What "
        "a cloud's controller adds to the Service stays.",
    ] = field(default_factory=fields.Free)
    load_balancer_class: Annotated[
        str | None,
        fields.Example("service.k8s.aws/nlb"),
        "is which controller makes the load balancer; Kubernetes' default is the cloud's own.",
        LOAD_BALANCER_CLASS,
    ] = None
    load_balancer_source_ranges: Annotated[
        tuple[Annotated[str, fields.CIDR], ...],
        fields.Example(["10.0.0.0/8"]),
        "are the addresses of clients that the load balancer lets in, if it can do that.",
        fields.Items(64),
    ] = ()
    external_traffic_policy: Annotated[
        TrafficPolicy | None,
        fields.Example("Local"),
        "is whether a node sends what it gets from outside to router pods of its own (Local, which "
        "keeps the client's address) or of any node (Cluster, Kubernetes' default).",
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Router:
    """The router that sends requests to the engines: vLLM's own vllm-router, or llm-d's."""

    type: Annotated[
        RouterType,
        fields.Example("LLMD"),
        "is the kind of router. VLLMRouter: the operator runs vLLM's vllm-router. LLMD: you run "
        "llm-d's router; pods get its labels, and decode pods its sidecar (docs/routers.md). None: "
        "you run another one. LLMD and None take only apiKeySecretRef, allowFrom and sidecarImage.",
    ] = RouterType.VLLM_ROUTER
    sidecar_image: Annotated[
        str,
        fields.Example("registry.example/team/llm-d-router-disagg-sidecar:v0.10.0"),
        "is the image of llm-d's sidecar in decode pods, for type LLMD alone.",
        fields.IMAGE,
    ] = "ghcr.io/llm-d/llm-d-router-disagg-sidecar:v0.10.0"
    replicas: Annotated[
        int,
        fields.Example(2),
        "is the number of pods of vllm-router. 0 means no router, as type None does.",
        fields.Whole(0, 64),
    ] = 1
    policy: Annotated[
        RouterPolicy,
        fields.Example("CacheAware"),
        "is how the router picks engines of both roles. With RoundRobin it takes prefill engines "
        "in turn and decode engines at random: in turn, both would step together and leave links "
        "unused (docs/routers.md).",
    ] = RouterPolicy.ROUND_ROBIN
    prefill_policy: Annotated[
        RouterPolicy | None,
        fields.Example("CacheAware"),
        "is how the router picks prefill engines, if not by policy.",
    ] = None
    decode_policy: Annotated[
        RouterPolicy | None,
        fields.Example("KVAware"),
        "is how the router picks decode engines, if not by policy.",
    ] = None
    log_level: Annotated[
        RouterLogLevel | None,
        fields.Example("Debug"),
        "is the least severe of what the router logs. Without it the router decides: Info.",
    ] = None
    extra_args: Annotated[
        tuple[Annotated[str, fields.Text(16384, shortest=0)], ...],
        fields.Example(["--cache-threshold", "0.5"]),
        "are further arguments of vllm-router, after the operator's own.",
        fields.Items(128),
    ] = ()
    image: Annotated[
        str,
        fields.Example("registry.example/team/vllm-router:0.1.17"),
        "is the router's container image, which must hold vllm-router. The default is a tag "
        "that moves every day, because tags with a date are deleted after two weeks. If the "
        "image must not change, name one of your own (docs/images.md).",
        fields.IMAGE,
    ] = "docker.io/vllm/vllm-router:nightly"
    resources: Annotated[RouterResources, "are the compute resources of each router pod."] = field(
        default_factory=RouterResources
    )
    api_key_secret_ref: Annotated[
        fields.SecretKeyRef | None,
        "is the Secret with the API key. Clients send the key as Authorization: Bearer KEY, "
        "and the router and the engines ask for it. Without this field they ask for no key.",
    ] = None
    service: Annotated[
        RouterService | None,
        "is how clients reach the routers from outside of the cluster. Without this field the "
        "Service has a ClusterIP, and the operator leaves a type alone that somebody else sets.",
    ] = None
    allow_from: Annotated[
        tuple[NetworkPeer, ...] | None,
        fields.Example(PEERS),
        "are the peers that may reach the router, or the engines' API if the operator runs no "
        "router. Without this field everybody may.",
        fields.Items(64, 1),
    ] = None
    pod_template: Annotated[
        fields.Free | None,
        fields.Example({"spec": {"priorityClassName": "high"}}),
        "is a Kubernetes pod template. It is merged over spec.podTemplate and the operator's "
        "own, containers by name. The router's container is called router.",
    ] = None

    @property
    def pods(self) -> int:
        """The number of pods of vllm-router; 0 with another type of router."""
        return self.replicas if self.type is RouterType.VLLM_ROUTER else 0
