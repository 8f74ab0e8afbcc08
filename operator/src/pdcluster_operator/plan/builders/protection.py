"""ServiceAccount, NetworkPolicies and PodDisruptionBudgets of a cluster's pods.

Without ``spec.transfer.tls``, only the NetworkPolicies protect the side channel and the launchers.
"""

import json
from collections.abc import Mapping
from typing import Any

from pdcluster_operator.api import object_names
from pdcluster_operator.api.conditions import ConditionType, Status, find_condition
from pdcluster_operator.api.spec.fields import as_manifest
from pdcluster_operator.api.spec.parse import parse_cluster
from pdcluster_operator.api.spec.pod_templates import as_mapping
from pdcluster_operator.api.spec.types import Cluster, Role
from pdcluster_operator.plan.builders.router import ROUTER_COMPONENT, router_pods, router_selector
from pdcluster_operator.plan.objects.ownership import child_object, identity
from pdcluster_operator.plan.types import Observed

NOT_STORED = ("monitoring", "verification", "router")
"""Parts of the spec with fields that are stored with neither engines nor routers."""
NOBODY = {"podSelector": {"matchLabels": {object_names.ACCEPTED_ANNOTATION: "unknown"}}}
"""The peer of policies that are made while it is not known which clients were accepted."""
NOT_KNOWN = (
    "which clients were accepted is not known any more, so a NetworkPolicy that is made again lets "
    "in nobody but the operator and the engines"
)


def build_service_account(cluster: Cluster, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ServiceAccount; nothing in the pods talks to the Kubernetes API.

    It exists as long as engines do. So it also carries the fields of ``NOT_STORED`` that have to
    stay in force while another spec is not accepted.

    Args:
        given: the spec as the user wrote it.
    """
    name = object_names.service_account_name(cluster.name)
    labels = object_names.cluster_labels(cluster.name, "identity")
    account = child_object(
        cluster, "v1", "ServiceAccount", name, labels, automountServiceAccountToken=False
    )
    text = json.dumps(_not_stored(given), sort_keys=True, separators=(",", ":"))
    account["metadata"].setdefault("annotations", {})[object_names.ACCEPTED_ANNOTATION] = text
    return account


def _not_stored(given: Mapping[str, Any]) -> dict[str, Any]:
    fields = {part: given[part] for part in NOT_STORED[:2] if given.get(part)}
    if peers := as_mapping(given.get("router")).get("allowFrom"):
        fields["router"] = {"allowFrom": peers}
    return fields


def accepted_fields(observed: Observed) -> Mapping[str, Any]:
    """Return the fields of the last accepted spec that the ServiceAccount carries.

    Somebody may delete it, and release 0.1.0 wrote none. If a rule is stricter than when the spec
    was accepted, the spec has them. Otherwise they are not known, and no fence may be opened.
    """
    metadata = observed.cluster["metadata"]
    name = object_names.service_account_name(metadata["name"])
    found = (one for one in observed.children if identity(one) == ("ServiceAccount", name))
    annotations = as_mapping(next((one["metadata"].get("annotations") for one in found), {}))
    try:
        known = json.loads(annotations.get(object_names.ACCEPTED_ANNOTATION, ""))
    except (ValueError, RecursionError):
        known = None
    # Others may have changed a part of it. Peers that cannot be read must not become the default,
    # which lets in everybody. What another release writes of the verification closes nothing.
    spec = {"model": {"source": {"hostPath": {"path": "/any"}}}, **as_mapping(known)}
    errors = parse_cluster({**observed.cluster, "spec": spec}).errors
    readable = all(one.path.startswith("spec.verification") for one in errors)
    if isinstance(known, Mapping) and known == _not_stored(known) and readable:
        return known
    before = find_condition(observed.cluster.get("status"), ConditionType.ACCEPTED)
    same = before.get("observedGeneration") == metadata.get("generation")
    if same and before.get("status") == Status.TRUE:
        return _not_stored(as_mapping(observed.cluster.get("spec")))
    return {"router": {"allowFrom": [NOBODY]}}


def is_closed(cluster: Cluster) -> bool:
    """Whether nobody knows which clients were accepted."""
    return _clients(cluster) == [NOBODY]


NAMESPACE_LABEL = "kubernetes.io/metadata.name"


def build_engines_policy(cluster: Cluster, operator_namespace: str | None) -> dict[str, Any]:
    """Return what engines let in.

    Engines of the cluster reach each other on every port. The operator reaches their launchers,
    the router their API, and scrapers their metrics. Without routers, clients reach their API.

    Args:
        operator_namespace: where the operator runs; None admits its labels in any namespace.
    """
    namespace = {NAMESPACE_LABEL: operator_namespace} if operator_namespace else {}
    operator = {
        "namespaceSelector": {"matchLabels": namespace} if namespace else {},
        "podSelector": {"matchLabels": dict(object_names.OPERATOR_LABELS)},
    }
    router = {"podSelector": {"matchLabels": router_pods(cluster)}}
    clients = [router] if cluster.spec.router.pods else _clients(cluster)
    ingress = [
        {"from": [{"podSelector": _engines(cluster)}]},
        {"from": [operator], "ports": _ports(object_names.LAUNCHER_PORT)},
        _rule(clients, object_names.HTTP_PORT),
        *_scrapers(cluster, object_names.ENGINE_METRICS_PORT),
    ]
    return _policy(cluster, f"{cluster.name}-engines", "engine", _engines(cluster), ingress)


def operator_namespace_in(policy: Mapping[str, Any]) -> str | None:
    """Return the namespace of the operator that a policy of engines lets in; None if it is any."""
    for rule in (policy.get("spec") or {}).get("ingress") or ():
        for peer in rule.get("from") or ():
            pods = (peer.get("podSelector") or {}).get("matchLabels")
            if pods == object_names.OPERATOR_LABELS:
                labels = (peer.get("namespaceSelector") or {}).get("matchLabels") or {}
                return labels.get(NAMESPACE_LABEL)
    return None


def build_router_policy(cluster: Cluster) -> dict[str, Any] | None:
    """Return what routers let in: their clients, and scrapers to their metrics."""
    if cluster.spec.router.pods == 0:
        return None
    ingress = [
        _rule(_clients(cluster), object_names.ROUTER_PORT),
        *_scrapers(cluster, object_names.ROUTER_METRICS_PORT),
    ]
    name, pods = f"{cluster.name}-router", {"matchLabels": router_pods(cluster)}
    return _policy(cluster, name, ROUTER_COMPONENT, pods, ingress)


def _clients(cluster: Cluster) -> list[dict[str, Any]]:
    peers: list[dict[str, Any]] = as_manifest(cluster.spec.router.allow_from or ())
    return peers


def _rule(peers: list[dict[str, Any]], *ports: int) -> dict[str, Any]:
    """Return an ingress rule. Without peers it lets in everybody."""
    rule: dict[str, Any] = {"ports": _ports(*ports)}
    return {**rule, "from": peers} if peers else rule


def _policy(
    cluster: Cluster,
    name: str,
    component: str,
    pods: dict[str, Any],
    ingress: list[dict[str, Any]],
) -> dict[str, Any]:
    labels = object_names.cluster_labels(cluster.name, component)
    spec = {"podSelector": pods, "policyTypes": ["Ingress"], "ingress": ingress}
    return child_object(cluster, "networking.k8s.io/v1", "NetworkPolicy", name, labels, spec=spec)


def _scrapers(cluster: Cluster, port: int) -> list[dict[str, Any]]:
    """Return the rule for scrapers. Without them there is none: it would let everybody in."""
    peers = as_manifest(cluster.spec.monitoring.scrape_from)
    return [{"from": peers, "ports": _ports(port)}] if peers else []


def _engines(cluster: Cluster) -> dict[str, Any]:
    roles = {
        "key": object_names.ROLE_LABEL,
        "operator": "In",
        "values": sorted(role.value for role in Role),
    }
    return {"matchLabels": {object_names.CLUSTER_LABEL: cluster.name}, "matchExpressions": [roles]}


def _ports(*numbers: int) -> list[dict[str, Any]]:
    return [{"port": number, "protocol": "TCP"} for number in numbers]


def build_disruption_budget(cluster: Cluster, role: Role, pods: int) -> dict[str, Any]:
    """Return the PodDisruptionBudget of a role.

    When a pod is evicted, its engine stops and the other pods of that engine restart. They count
    as unavailable, so no pod of a second engine is evicted before the first engine is back. A pod
    that is not ready may always be evicted. Otherwise a broken engine would block a drain.

    With ``maxUnavailable``, Kubernetes counts the pods that should run from those that exist: each
    names its StatefulSet. An engine without any pod is then forgotten, and another one may be
    evicted. So the budget says how many pods should run.

    Args:
        pods: how many pods all engines of the role should have.
    """
    selector = {object_names.CLUSTER_LABEL: cluster.name, object_names.ROLE_LABEL: role.value}
    return _budget(cluster, role.value, selector, {"minAvailable": max(pods - 1, 0)})


def build_router_budget(cluster: Cluster, pairing_key: str) -> dict[str, Any] | None:
    """Return the routers' PodDisruptionBudget; None for one router: it must be evictable."""
    if cluster.spec.router.pods < 2:
        return None
    selector = router_selector(cluster, pairing_key)
    return _budget(cluster, ROUTER_COMPONENT, selector, {"maxUnavailable": 1})


def _budget(
    cluster: Cluster, component: str, selector: Mapping[str, str], bound: Mapping[str, int]
) -> dict[str, Any]:
    name = f"{cluster.name}-{component}"
    labels = object_names.cluster_labels(cluster.name, component)
    spec = {
        **bound,
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
        "selector": {"matchLabels": dict(selector)},
    }
    return child_object(cluster, "policy/v1", "PodDisruptionBudget", name, labels, spec=spec)
