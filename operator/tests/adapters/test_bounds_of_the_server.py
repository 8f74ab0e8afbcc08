"""What a real API server refuses or bounds: no role is created alone, and large specs fit."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
from operator_runs import (
    CHILDREN,
    REFUSED_BY_SERVER,
    cluster,
    condition,
    create,
    edit,
    events,
    until,
)

from pdcluster_operator.api.rules.resources import MOST_BYTES

pytestmark = pytest.mark.cluster

POLICIES = "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies"
BINDINGS = "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicybindings"


def names(real, namespace, kind):
    query = "?labelSelector=pdcluster.dev/cluster"
    found = real.call("GET", CHILDREN[kind].format(namespace) + query)[1]["items"]
    return [one["metadata"]["name"] for one in found]


def refused(real, namespace, words):
    said = condition(real, namespace, "Ready")
    return said.get("reason") == "TemplateRefused" and words in said["message"]


def nothing_runs(real, namespace):
    return not any(names(real, namespace, kind) for kind in ("StatefulSet", "Deployment", "Pod"))


def warned(real, namespace):
    return [one["note"] for one in events(real, namespace) if one["reason"] == "TemplateRefused"]


def test_a_role_that_the_server_refuses_keeps_the_other_one_from_holding_gpus(
    real, operator, namespace
):
    operator.start()
    create(real, namespace, cluster(decode={"podTemplate": REFUSED_BY_SERVER}))
    until(lambda: refused(real, namespace, "Bogus"), 60, operator.said)
    progress = condition(real, namespace, "Progressing")
    assert (progress["status"], progress["reason"]) == ("False", "TemplateRefused")
    assert nothing_runs(real, namespace)
    [note] = warned(real, namespace)
    assert "no engine of either role is created" in note
    # It goes on as soon as the user has put it right.
    edit(real, namespace, {"decode": {"podTemplate": None}})
    until(lambda: len(names(real, namespace, "StatefulSet")) == 2, 60, operator.said)


@contextmanager
def denied(real, namespace, resources, only, probe):
    """Let a policy of the cluster refuse objects that break a rule, as ``probe`` does."""
    where = {"matchLabels": {"kubernetes.io/metadata.name": namespace}}
    group, version = probe["apiVersion"].rpartition("/")[::2]
    rule = {
        "apiGroups": [group],
        "apiVersions": [version],
        "operations": ["CREATE", "UPDATE"],
        "resources": [resources],
    }
    constraints = {"namespaceSelector": where, "resourceRules": [rule]}
    spec = {
        "failurePolicy": "Fail",
        "matchConstraints": constraints,
        "validations": [{"expression": only, "message": "a team is missing"}],
    }
    named = {"apiVersion": "admissionregistration.k8s.io/v1", "metadata": {"name": namespace}}
    policy = {**named, "kind": "ValidatingAdmissionPolicy", "spec": spec}
    binding = {
        **named,
        "kind": "ValidatingAdmissionPolicyBinding",
        "spec": {"policyName": namespace, "validationActions": ["Deny"]},
    }
    real.apply(policy, POLICIES)
    real.apply(binding, BINDINGS)
    dry = CHILDREN[probe["kind"]].format(namespace) + "?dryRun=All"
    try:
        # The API server obeys a policy a moment after it was written.
        until(lambda: real.call("POST", dry, probe)[0] == 422, 60, lambda: None)
        yield
    finally:
        assert real.call("DELETE", f"{BINDINGS}/{namespace}")[0] == 200
        assert real.call("DELETE", f"{POLICIES}/{namespace}")[0] == 200


ONLY = "!object.metadata.name.contains('-decode-') || has(object.metadata.labels.team)"


def test_what_a_policy_of_the_cluster_refuses_is_said_before_anything_runs(
    real, operator, namespace
):
    """It judges StatefulSets alone, so that a dry run of a pod would not show it."""
    probe = {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": {"name": "a-decode-b"},
        "spec": {
            "serviceName": "a",
            "selector": {"matchLabels": {"a": "b"}},
            "template": {
                "metadata": {"labels": {"a": "b"}},
                "spec": {"containers": [{"name": "a", "image": "a"}]},
            },
        },
    }
    with denied(real, namespace, "statefulsets", ONLY, probe):
        operator.start()
        create(real, namespace, cluster())
        until(lambda: refused(real, namespace, "a team is missing"), 60, operator.said)
        assert nothing_runs(real, namespace)
        assert len(warned(real, namespace)) == 1
    until(lambda: len(names(real, namespace, "StatefulSet")) == 2, 120, operator.said)


def test_recreate_ends_no_engine_while_a_policy_refuses_the_new_one_s_address(
    real, operator, namespace
):
    """The revision is stored, and was tried out before there was a policy."""

    def engines():
        return sorted(names(real, namespace, "StatefulSet"))

    probe = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "a-decode-b"},
        "spec": {"ports": [{"port": 80}]},
    }
    operator.start()
    create(real, namespace, cluster(rollout={"type": "Recreate"}))
    until(lambda: len(engines()) == 2, 60, operator.said)
    first = engines()
    assert edit(real, namespace, {"engine": {"blockSize": 32}})[0] == 200
    old = until(
        lambda: len(now := engines()) == 2 and not {*first} & {*now} and now, 120, operator.said
    )
    with denied(real, namespace, "services", ONLY, probe):
        assert edit(real, namespace, {"engine": {"blockSize": None}})[0] == 200
        until(
            lambda: condition(real, namespace, "Progressing").get("reason") == "TemplateRefused",
            60,
            operator.said,
        )
        said = condition(real, namespace, "Progressing")["message"]
        assert "the new Service, so the old engines serve on" in said
        assert "a team is missing" in said
        assert engines() == old
        assert len(warned(real, namespace)) == 1
    until(lambda: engines() == first, 120, operator.said)


def test_the_largest_specs_that_the_rules_accept_fit_into_the_server(real, operator, namespace):
    """Many small fields are the worst case: the server notes the name of each."""
    operator.start()
    (router, _), (whole, _) = MOST_BYTES.values()
    variables = [{"name": f"A{number}", "value": ""} for number in range((whole - router) // 32)]
    large = {"spec": {"containers": [{"name": "engine", "env": variables}]}}
    notes = {"metadata": {"annotations": {"a": "x" * (router - 1024)}}}
    spec = cluster(prefill={"podTemplate": large}, router={"podTemplate": notes})
    create(real, namespace, spec)
    until(
        lambda: (
            len(names(real, namespace, "StatefulSet")) == 2
            and len(names(real, namespace, "Deployment")) == 1
        ),
        120,
        lambda: (condition(real, namespace, "Progressing"), operator.said()),
    )
