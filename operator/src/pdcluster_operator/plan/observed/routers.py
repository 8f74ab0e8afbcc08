"""The state of a cluster's routers, from their Deployments and pods."""

from collections.abc import Iterable, Iterator, Set as AbstractSet

from pdcluster_operator.api.object_names import (
    PAIRING_LABEL,
    RENDERED_ANNOTATION,
    EngineName,
    pairing_key_of,
    router_name,
)
from pdcluster_operator.api.spec.types import Cluster
from pdcluster_operator.plan.builders.router import PLACEHOLDERS, ROUTER_COMPONENT, router_selector
from pdcluster_operator.plan.objects.ownership import identity
from pdcluster_operator.plan.observed.pods import (
    is_lost,
    joined,
    metadata_of,
    pod_trouble,
    status_of,
)
from pdcluster_operator.plan.types import Apply, Manifest, Observed, Step

CHANGED = "the routers' Deployment has changed"
NOT_READY = "not every router pod is new and ready"
NOT_ONE_READY = "no router pod is ready"


def why_unreachable(observed: Observed, cluster: Cluster, *, accepted: bool) -> str:
    """Return why clients reach no router; empty if they do, or if none is wanted or offered."""
    key = served_key(observed, cluster)
    # The status keeps the address while another spec is not accepted, unless the status was lost.
    lost = "unknown" if observed.children else ""  # a new PDCluster had none
    offered = key or (not accepted and status_of(observed.cluster).get("endpoint", lost))
    if cluster.spec.router.pods == 0 and not offered:
        return ""
    behind = [one for one in _deployments(observed) if not key or pairing_key_of(one) == key]
    if not (accepted or behind):  # it held the template that was accepted
        return "the routers' Deployment is gone, and is made again when the spec is accepted"
    if not any(status_of(one).get("availableReplicas") for one in behind):
        trouble = router_trouble(observed)
        return joined(NOT_ONE_READY, trouble)
    service = f"Service {router_name(cluster.name)}"
    return "" if key else f"{service} is missing, not of this PDCluster, or selects other pods"


def router_behind(observed: Observed, steps: Iterable[Step] = ()) -> str:
    """Return why the rollout of a router's Deployment is not complete; empty if all are.

    Old pods serve until new ones are ready. So a new template whose pods never start is seen here,
    and not by whether a router is available.

    Args:
        steps: those of the plan. They may be about to change a Deployment.
    """
    if any(isinstance(step, Apply) and step.manifest["kind"] == "Deployment" for step in steps):
        return CHANGED
    for deployment in _deployments(observed):
        if behind := _behind(deployment):
            trouble = router_trouble(observed)
            return behind + (f": {trouble}" if trouble and behind is NOT_READY else "")
    return ""


def _behind(deployment: Manifest) -> str:
    metadata, status = metadata_of(deployment), status_of(deployment)
    if status.get("observedGeneration", 0) < metadata.get("generation", 0):
        return CHANGED
    wanted = deployment["spec"]["replicas"]
    ready = min(status.get("updatedReplicas", 0), status.get("availableReplicas", 0))
    return NOT_READY if ready < wanted or status.get("replicas", wanted) > wanted else ""


def routers_run(observed: Observed, pairing_key: str) -> bool:
    """Whether all router pods of a pairing key are new and ready."""
    found = [child for child in _deployments(observed) if pairing_key_of(child) == pairing_key]
    return bool(found) and not any(map(_behind, found))


def routed_engines(
    observed: Observed, engines: Iterable[EngineName], lost: AbstractSet[str]
) -> frozenset[EngineName]:
    """Return the engines that some router may send requests to.

    While routers are replaced, that is every engine: a pod that ends still has its streams. A pod
    whose Deployment is gone is about to end. Nobody waits for a pod that is lost with its node.

    Args:
        lost: names of the pods that are lost.
    """
    keys = {pairing_key_of(deployment) for deployment in _deployments(observed)}
    ending = any(
        (metadata_of(pod).get("deletionTimestamp") or pairing_key_of(pod) not in keys)
        and not is_lost(pod, lost)
        for pod in _pods(observed)
    )
    if ending or router_behind(observed):
        return frozenset(engines)
    return listed_engines(observed, engines)


def listed_engines(
    observed: Observed, engines: Iterable[EngineName], key: str | None = None
) -> frozenset[EngineName]:
    """Return the engines in the templates of the routers' Deployments, or of those of one key."""
    known = {
        word
        for deployment in _deployments(observed)
        if key in (None, pairing_key_of(deployment))
        for container in deployment["spec"]["template"]["spec"]["containers"]
        for word in container.get("args") or ()
    }
    return frozenset(name for name in engines if name.api_url in known)


def engines_are_listed(observed: Observed, key: str) -> bool:
    """Whether a key's routers get engines as arguments, and not only those of the user's template.

    The stored template has placeholders for them.
    """
    found = (metadata_of(one) for one in _deployments(observed) if pairing_key_of(one) == key)
    stored = [(one.get("annotations") or {}).get(RENDERED_ANNOTATION, "") for one in found]
    return any(word in text for text in stored for word in PLACEHOLDERS.values())


def routed_keys(observed: Observed) -> frozenset[str]:
    """Return the pairing keys that have routers."""
    return frozenset(map(pairing_key_of, _deployments(observed)))


def served_key(observed: Observed, cluster: Cluster) -> str:
    """Return the pairing key whose routers the Service selects; empty if it selects other pods."""
    service = "Service", router_name(cluster.name)
    for child in observed.children:
        if identity(child) == service:
            selector = child["spec"].get("selector") or {}
            key = str(selector.get(PAIRING_LABEL, ""))
            wanted = router_selector(cluster, key)
            noted = service in observed.rewrites and wanted.items() <= selector.items()
            return key if noted or selector == wanted else ""
    return ""


def router_trouble(observed: Observed) -> str:
    """Return why a router pod does not run; empty if all run, or none exists.

    A pod that is being deleted comes last: it serves until another one is ready.
    """
    pods = sorted(_pods(observed), key=lambda pod: bool(metadata_of(pod).get("deletionTimestamp")))
    for pod in pods:
        if found := pod_trouble(pod):
            return f"{metadata_of(pod)['name']}: {found.message}"
    return ""


def _deployments(observed: Observed) -> Iterator[Manifest]:
    return (child for child in observed.children if child.get("kind") == "Deployment")


def _pods(observed: Observed) -> Iterator[Manifest]:
    for pod in observed.pods:
        labels = metadata_of(pod).get("labels") or {}
        if labels.get("app.kubernetes.io/component") == ROUTER_COMPONENT:
            yield pod
