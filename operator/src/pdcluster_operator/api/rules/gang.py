"""Rules of ``spec.scheduling.gang``: an API server with PodGroups, and pods of one priority."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from pdcluster_operator.api.findings import FieldError, Rule, shown
from pdcluster_operator.api.spec.enums import Role, Switch
from pdcluster_operator.api.spec.pod_templates import pod_spec
from pdcluster_operator.api.spec.types import Cluster

GANG = "spec.scheduling.gang"
FIELDS = ("priorityClassName", "preemptionPolicy", "schedulerName")
"""Fields that must be equal in all pods of a PodGroup."""


def gang_errors(cluster: Cluster) -> Iterator[FieldError]:
    """Yield fields with which the scheduler refuses the pods of a PodGroup."""
    if cluster.spec.scheduling.gang is not Switch.ENABLED:
        return
    specs = {role: pod_spec(cluster.spec.role(role).pod_template) for role in Role}
    for role, spec in specs.items():
        if spec.get("schedulingGroup") is not None:
            yield FieldError(
                f"spec.{role}.podTemplate.spec.schedulingGroup",
                shown(spec["schedulingGroup"]),
                Rule.CONFLICTING_SETTINGS,
                f"contradicts {GANG}, with which the operator writes this field",
                f"Remove it, or set {GANG} to Disabled.",
            )
    for field in FIELDS:
        prefill, decode = (specs[role].get(field) or "" for role in Role)
        if prefill != decode:
            yield FieldError(
                f"spec.decode.podTemplate.spec.{field}",
                shown(decode),
                Rule.GANG_MIXED,
                f"differs from prefill's, which is {shown(prefill)}. The scheduler refuses a "
                "PodGroup of such pods",
                f"Write the same {field} in both roles, or set {GANG} to Disabled.",
            )


def pod_group_errors(cluster: Cluster) -> Iterator[FieldError]:
    """Yield an error if engines are to start together, for an API server without PodGroups."""
    if cluster.spec.scheduling.gang is Switch.ENABLED:
        yield FieldError(
            GANG,
            Switch.ENABLED.value,
            Rule.POD_GROUPS_NOT_SERVED,
            "this API server serves no podgroups of scheduling.k8s.io/v1beta1",
            "Set it to Disabled. Or use Kubernetes 1.37 or newer with the feature gate "
            "GenericWorkload in the API server, the scheduler and the controller manager, and with "
            "--runtime-config=scheduling.k8s.io/v1beta1=true in the API server.",
        )


def pod_group_warnings(cluster: Cluster) -> Iterator[FieldError]:
    """Yield the same as a warning, for ``pdcluster lint``, which does not see the API server."""
    for error in pod_group_errors(cluster):
        yield replace(error, message="an API server serves no PodGroups by default")
