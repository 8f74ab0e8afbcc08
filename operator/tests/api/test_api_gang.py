"""What engines that start together need of the pod templates and of the API server."""

from __future__ import annotations

from typing import Any

import pytest
from said_findings import check_manifest

from pdcluster_operator.api.findings import FieldError, Rule

GANG = {"gang": "Enabled"}


def found(
    prefill: dict[str, Any] | None = None,
    decode: dict[str, Any] | None = None,
    scheduling: dict[str, Any] | None = None,
    **known: Any,
) -> tuple[FieldError, ...]:
    templates = {"prefill": prefill or {}, "decode": decode or {}}
    document = {
        "apiVersion": "pdcluster.dev/v1alpha1",
        "kind": "PDCluster",
        "metadata": {"name": "llama"},
        "spec": {
            "model": {"source": {"persistentVolumeClaim": {"claimName": "models"}}},
            **{role: {"podTemplate": {"spec": one}} for role, one in templates.items()},
            "scheduling": GANG if scheduling is None else scheduling,
        },
    }
    return check_manifest(document, **known)[1].errors


@pytest.mark.parametrize("field", ["priorityClassName", "preemptionPolicy", "schedulerName"])
def test_pods_that_start_together_have_one_priority_and_one_scheduler(field: str) -> None:
    other = "PreemptLowerPriority" if field == "preemptionPolicy" else "Other"
    [error] = found(prefill={field: "Never"}, decode={field: other})
    assert error.rule == Rule.GANG_MIXED
    assert error.path == f"spec.decode.podTemplate.spec.{field}"
    assert "which is Never" in error.message
    [error] = found(prefill={field: "Never"})
    assert error.rule == Rule.GANG_MIXED, "one role alone differs, too"
    assert found(prefill={field: "Never"}, decode={field: "Never"}) == ()
    assert found(prefill={field: ""}) == (), "as if it were not there"
    assert found(prefill={field: "Never"}, scheduling={}) == ()


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_group_of_the_users_own_contradicts_a_gang(role: str) -> None:
    own = {"schedulingGroup": {"podGroupName": "mine"}}
    [error] = found(**{role: own})
    assert error.rule == Rule.CONFLICTING_SETTINGS
    assert error.path == f"spec.{role}.podTemplate.spec.schedulingGroup"
    assert found(**{role: own}, scheduling={"gang": "Disabled"}) == ()


def test_an_api_server_without_pod_groups_is_an_error_with_a_remedy() -> None:
    [error] = found(pod_groups=False)
    assert error.rule == Rule.POD_GROUPS_NOT_SERVED
    assert error.path == "spec.scheduling.gang"
    assert "GenericWorkload" in error.remedy
    assert found(pod_groups=False, scheduling={"gang": "Disabled"}) == ()
    assert found(pod_groups=False, one_node=True) == (), "local mode has no scheduler"


def test_where_the_api_server_is_not_known_it_is_a_warning() -> None:
    document = {
        "apiVersion": "pdcluster.dev/v1alpha1",
        "kind": "PDCluster",
        "metadata": {"name": "llama"},
        "spec": {
            "model": {"source": {"persistentVolumeClaim": {"claimName": "models"}}},
            "scheduling": GANG,
        },
    }
    warnings = check_manifest(document, pod_groups=None)[1].warnings
    [warning] = [one for one in warnings if one.rule == Rule.POD_GROUPS_NOT_SERVED]
    assert warning.message == "an API server serves no PodGroups by default"
    warnings = check_manifest(document)[1].warnings
    assert Rule.POD_GROUPS_NOT_SERVED not in {one.rule for one in warnings}
