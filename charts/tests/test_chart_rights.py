"""Least privilege: every right of the rendered roles, against what the operator does."""

from __future__ import annotations

from pathlib import Path

import pytest
from chart_helm import NAMESPACE, Manifest, of_kind

pytestmark = pytest.mark.helm

READ = {"get", "list", "watch"}
APPLY = READ | {"create", "patch", "delete"}
NAMESPACED = Path(__file__).parent / "values" / "namespaced.yaml"
# What the planner's builders make, and what the loop reads.
WATCHED = {
    "pdcluster.dev/pdclusters": READ,
    "pdcluster.dev/pdclusters/status": {"get", "update", "patch"},
    "pdcluster.dev/pdclusters/scale": {"patch"},  # spec.autoscaling with the mode Apply
    "pdcluster.dev/prefillscalers/scale": {"patch"},
    "pdcluster.dev/prefillscalers": READ,
    "pdcluster.dev/prefillscalers/status": {"get", "update", "patch"},
    "pdcluster.dev/pdclusters/finalizers": {"update"},
    "apps/statefulsets": APPLY,
    "apps/deployments": APPLY,
    "apps/controllerrevisions": APPLY,
    "apps/replicasets": {"get"},
    "/services": APPLY,
    "/configmaps": APPLY,
    "/serviceaccounts": APPLY,
    "policy/poddisruptionbudgets": APPLY,
    "batch/jobs": APPLY,
    "networking.k8s.io/networkpolicies": APPLY,
    "scheduling.k8s.io/podgroups": APPLY,
    "/secrets": {"get", "create", "patch"},
    "/pods": READ | {"create"},
    "coordination.k8s.io/leases": {"create"},
    "coordination.k8s.io/leases pdcluster-operator": {"get", "update"},
    "events.k8s.io/events": {"create", "patch"},
}
DISCOVERY = {"/namespaces": READ, "apiextensions.k8s.io/customresourcedefinitions": READ}
REVIEW = {"/configmaps": {"get"}}  # spec.model.configMapRef
AUTHORITY = {"/secrets pdcluster-engine-ca": {"get", "patch"}}
CERTIFICATE = {"/secrets pdcluster-webhook-tls": {"get", "update", "patch"}}
CONFIGURATION = {
    "admissionregistration.k8s.io/validatingwebhookconfigurations pdcluster": {
        "get",
        "update",
        "patch",
    }
}


def rights(objects: list[Manifest], account: str, namespace: str | None = None) -> dict:
    """Rights of an account by "group/resource names": cluster-wide, or those in a namespace."""
    kinds = ("ClusterRoleBinding", "ClusterRole") if namespace is None else ("RoleBinding", "Role")
    roles = {
        (role["metadata"].get("namespace"), role["metadata"]["name"]): role
        for role in of_kind(objects, kinds[1])
    }
    subject = {"kind": "ServiceAccount", "name": account, "namespace": NAMESPACE}
    found: dict[str, set[str]] = {}
    for binding in of_kind(objects, kinds[0]):
        if binding["metadata"].get("namespace") != namespace or subject not in binding["subjects"]:
            continue
        assert binding["roleRef"]["kind"] == kinds[1]
        for rule in roles[namespace, binding["roleRef"]["name"]]["rules"]:
            for group in rule["apiGroups"]:
                for resource in rule["resources"]:
                    names = "".join(f" {name}" for name in rule.get("resourceNames", ()))
                    found[f"{group}/{resource}{names}"] = set(rule["verbs"])
    return found


def test_cluster_mode(helm):
    objects = helm.objects()
    assert rights(objects, "pdcluster-operator") == WATCHED | DISCOVERY | CONFIGURATION
    assert rights(objects, "pdcluster-operator", NAMESPACE) == AUTHORITY | CERTIFICATE
    assert rights(objects, "pdcluster-webhook") == DISCOVERY | REVIEW
    assert rights(objects, "pdcluster-webhook", NAMESPACE) == {}


def test_namespaced_mode_has_no_right_outside_but_the_webhooks_configuration(helm):
    objects = helm.objects(values=NAMESPACED)
    assert rights(objects, "pdcluster-operator") == CONFIGURATION
    assert rights(objects, "pdcluster-operator", NAMESPACE) == AUTHORITY | CERTIFICATE
    for namespace in ("team-a", "team-b"):
        assert rights(objects, "pdcluster-operator", namespace) == WATCHED
        assert rights(objects, "pdcluster-webhook", namespace) == REVIEW
    assert rights(objects, "pdcluster-webhook") == {}


def test_own_certificate_needs_no_right_to_its_secret(helm):
    objects = helm.objects("--set", "webhook.certificate.existingSecret=own")
    assert rights(objects, "pdcluster-operator") == WATCHED | DISCOVERY
    assert rights(objects, "pdcluster-operator", NAMESPACE) == AUTHORITY
    [secret] = of_kind(objects, "Secret")
    assert secret["metadata"]["name"] == "pdcluster-engine-ca"


@pytest.mark.parametrize("account", ["pdcluster-test", "pdcluster-startup-check"])
def test_who_tries_admission_may_only_create_pdclusters(helm, account):
    objects = helm.objects(values=NAMESPACED)
    assert rights(objects, account, "team-a") == {"pdcluster.dev/pdclusters": {"create"}}
    assert rights(objects, account, "team-b") == {}
    assert rights(objects, account, NAMESPACE) == {}
    assert rights(objects, account) == {}


def test_users_get_pdclusters_through_the_built_in_roles(helm):
    roles = {role["metadata"]["name"]: role for role in of_kind(helm.objects(), "ClusterRole")}
    aggregate = "rbac.authorization.k8s.io/aggregate-to-"
    view, edit = roles["pdcluster-view"], roles["pdcluster-edit"]
    assert view["metadata"]["labels"][f"{aggregate}view"] == "true"
    assert edit["metadata"]["labels"][f"{aggregate}edit"] == "true"
    assert {verb for rule in view["rules"] for verb in rule["verbs"]} == READ
    # The status is the operator's alone.
    assert not any("pdclusters/status" in rule["resources"] for rule in edit["rules"])


def test_only_the_leases_of_its_own_class_may_be_read_and_renewed(helm):
    """Not those of kube-system, by which the scheduler and the controllers elect a leader."""
    account = rights(helm.objects("--set", "operator.class=blue"), "pdcluster-operator")
    leases = {name: verbs for name, verbs in account.items() if "leases" in name}
    assert leases == {
        "coordination.k8s.io/leases": {"create"},
        "coordination.k8s.io/leases pdcluster-operator-blue": {"get", "update"},
    }
