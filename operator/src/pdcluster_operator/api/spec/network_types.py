"""Who may reach pods over the network: the peers of a Kubernetes NetworkPolicy.

They have types of their own. If a selector were passed through, the API server would drop a
misspelt field from it, and a selector without fields selects every pod.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Final

from pdcluster_operator.api.spec.bounds import CIDR, LABEL_KEY, LABEL_VALUE
from pdcluster_operator.api.spec.enums import SelectorOperator
from pdcluster_operator.api.spec.fields import Cel, Doc, Items, JsonName, Labels


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelRequirement:
    """One expression over a label."""

    RULES: ClassVar[tuple[Cel, ...]] = (
        Cel(
            "(self.operator in ['In', 'NotIn']) == (has(self.values) && size(self.values) > 0)",
            "In and NotIn need values; Exists and DoesNotExist take none (rule PeerUnusable)",
        ),
    )

    key: Annotated[str, Doc("is the key of the label."), LABEL_KEY]
    operator: Annotated[SelectorOperator, Doc("is how the label is compared with values.")]
    values: Annotated[
        tuple[Annotated[str, LABEL_VALUE], ...],
        Doc("are the values for In and NotIn."),
        Items(32),
    ] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelSelector:
    """Objects with certain labels. Without fields it selects all objects."""

    match_labels: Annotated[Labels, Doc("are labels that an object must have.")] = field(
        default_factory=Labels
    )
    match_expressions: Annotated[
        tuple[LabelRequirement, ...], Doc("are expressions that must all hold."), Items(32)
    ] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class IpBlock:
    """A range of addresses."""

    cidr: Annotated[str, Doc("is the range of addresses, e.g. 10.0.0.0/8."), CIDR]
    excluded: Annotated[
        tuple[Annotated[str, CIDR], ...],
        JsonName("except"),
        Doc("are ranges within cidr that are left out."),
        Items(32),
    ] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkPeer:
    """Pods, or a range of addresses: a NetworkPolicyPeer of Kubernetes."""

    RULES: ClassVar[tuple[Cel, ...]] = (
        Cel(
            "has(self.ipBlock) != (has(self.podSelector) || has(self.namespaceSelector))",
            "needs podSelector, namespaceSelector or both, or ipBlock alone (rule PeerUnusable)",
        ),
    )

    pod_selector: Annotated[
        LabelSelector | None,
        Doc("selects pods. Without namespaceSelector, they are those of the cluster's namespace."),
    ] = None
    namespace_selector: Annotated[
        LabelSelector | None,
        Doc("selects namespaces. Without podSelector, it means all pods in them."),
    ] = None
    ip_block: Annotated[IpBlock | None, Doc("is a range of addresses.")] = None


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
