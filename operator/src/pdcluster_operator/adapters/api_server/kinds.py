"""The Kubernetes objects that the operator reads and writes, and where the API server has them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from pdcluster_operator.api import object_names
from pdcluster_operator.api.object_names import KIND as CLUSTER_KIND
from pdcluster_operator.plan.builders.engine_objects import POD_GROUP_KIND
from pdcluster_operator.plan.objects import kept_fields
from pdcluster_operator.plan.rollout.revisions import REVISION_COMPONENT, REVISION_KIND


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of object.

    Attributes:
        group: API group; empty for the core group.
        selector: label selector of the objects that concern us; empty for all of them.
        optional: whether the API server may not have the kind.
        page: how many objects of a LIST are asked for at once: a page is in memory as a whole.
    """

    group: str
    version: str
    plural: str
    name: str
    selector: str = object_names.CLUSTER_LABEL
    optional: bool = False
    page: int = 500

    @property
    def api_version(self) -> str:
        """As a manifest writes it."""
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def selection(self) -> dict[str, str]:
        """The part of a query that selects the objects that concern us."""
        return {"labelSelector": self.selector} if self.selector else {}

    def path(self, namespace: str | None = None, name: str | None = None) -> str:
        """Return the URL path of one object, or of all of a namespace or of the cluster."""
        parts = ["", "apis", self.group] if self.group else ["", "api"]
        parts.append(self.version)
        if namespace is not None:
            parts += ["namespaces", quote(namespace, safe="")]
        parts.append(self.plural)
        if name is not None:
            parts.append(quote(name, safe=""))
        return "/".join(parts)


OURS = f"app.kubernetes.io/managed-by={object_names.FIELD_MANAGER}"
PDCLUSTER = Kind(
    object_names.GROUP, object_names.VERSION, object_names.PLURAL, CLUSTER_KIND, selector=""
)
PREFILL_SCALER = Kind(
    object_names.GROUP,
    object_names.VERSION,
    object_names.SCALER_PLURAL,
    object_names.SCALER_KIND,
    selector="",
    optional=True,
)
POD = Kind("", "v1", "pods", "Pod")
REPLICA_SET = Kind("apps", "v1", "replicasets", "ReplicaSet")
SECRET = Kind("", "v1", "secrets", "Secret")
LEASE = Kind("coordination.k8s.io", "v1", "leases", "Lease")
EVENT = Kind("events.k8s.io", "v1", "events", "Event")
WEBHOOK_CONFIGURATION = Kind(
    "admissionregistration.k8s.io",
    "v1",
    "validatingwebhookconfigurations",
    "ValidatingWebhookConfiguration",
)
WATCHED = (
    PDCLUSTER,
    PREFILL_SCALER,
    Kind("apps", "v1", "statefulsets", "StatefulSet"),
    Kind("apps", "v1", "deployments", "Deployment"),
    # A StatefulSet has revisions of its own, with the labels of its pods.
    Kind(
        "apps",
        "v1",
        "controllerrevisions",
        REVISION_KIND,
        selector=f"{object_names.CLUSTER_LABEL},app.kubernetes.io/component={REVISION_COMPONENT}",
    ),
    Kind("", "v1", "services", "Service"),
    # PDClusters share the connector's ConfigMap, so it has no PDCluster's label. It is large.
    Kind("", "v1", "configmaps", "ConfigMap", selector=OURS, page=50),
    Kind("", "v1", "serviceaccounts", "ServiceAccount"),
    Kind("networking.k8s.io", "v1", "networkpolicies", "NetworkPolicy"),
    Kind("policy", "v1", "poddisruptionbudgets", "PodDisruptionBudget"),
    Kind("batch", "v1", "jobs", "Job"),
    Kind("scheduling.k8s.io", "v1beta1", "podgroups", POD_GROUP_KIND, optional=True),
    POD,
)
BY_NAME: Mapping[str, Kind] = {
    kind.name: kind for kind in (*WATCHED, REPLICA_SET, SECRET, LEASE, EVENT, WEBHOOK_CONFIGURATION)
}


def slim(manifest: Mapping[str, Any], kind: Kind) -> dict[str, Any]:
    """Return an object as the store keeps it: always with its kind, and without what nobody reads.

    That is bookkeeping, most of a status, and of a pod most of its spec: what its template was is
    in its workload.
    """
    metadata = {key: value for key, value in manifest["metadata"].items() if key != "managedFields"}
    named = {"apiVersion": kind.api_version, "kind": kind.name, "metadata": metadata}
    kept = {**manifest, **named}
    if kind is POD:
        kept.pop("spec", None)
        if spec := kept_fields.pod_spec_that_is_read(manifest.get("spec") or {}):
            kept["spec"] = spec
    if kind is PDCLUSTER and "observedGeneration" not in (manifest.get("status") or {}):
        kept.pop("status", None)  # the CRD's default, which nobody wrote
    if kind not in (PDCLUSTER, PREFILL_SCALER):
        kept.pop("status", None)
        if status := kept_fields.status_that_is_read(kind.name, manifest.get("status") or {}):
            kept["status"] = status
    return dict(kept_fields.without_contents(kept))


def namespace_of(path: str) -> str:
    """Return the namespace in a path of the API server; empty if it has none."""
    return path.partition("/namespaces/")[2].partition("/")[0]
