"""On a real API server: what others write into our StatefulSets ends no engine."""

from __future__ import annotations

from typing import Any

import pytest
from operator_runs import CHILDREN, Operator, at_rest, cluster, condition, create, until
from played_nodes import PlayedNodes
from real_api import RealApi
from test_rollout_command import Command
from watched_rollout import done, found, serves

pytestmark = pytest.mark.cluster

POLICIES = "/apis/admissionregistration.k8s.io/v1"
TEMPLATE = {
    "metadata": {"labels": {"a": "b"}},
    "spec": {"containers": [{"name": "engine", "image": "as-it-was"}]},
}
PROBE = {
    "apiVersion": "apps/v1",
    "kind": "StatefulSet",
    "metadata": {"name": "probe"},
    "spec": {"selector": {"matchLabels": {"a": "b"}}, "serviceName": "a", "template": TEMPLATE},
}


def mirrored(real: RealApi, namespace: str, image: str) -> None:
    """Let a policy write this image into every StatefulSet; returns when it does."""
    patch = f'[JSONPatch{{op: "replace", path: "/spec/template/spec/containers/0/image", \
value: "{image}"}}]'
    rule = {
        "apiGroups": ["apps"],
        "apiVersions": ["v1"],
        "operations": ["CREATE", "UPDATE"],
        "resources": ["statefulsets"],
    }
    here = {"matchLabels": {"kubernetes.io/metadata.name": namespace}}
    kind = {"apiVersion": "admissionregistration.k8s.io/v1", "kind": "MutatingAdmissionPolicy"}
    spec: dict[str, Any] = {
        "matchConstraints": {"namespaceSelector": here, "resourceRules": [rule]},
        "mutations": [{"patchType": "JSONPatch", "jsonPatch": {"expression": patch}}],
        "reinvocationPolicy": "Never",
    }
    policy = {**kind, "metadata": {"name": namespace}, "spec": spec}
    real.apply(policy, f"{POLICIES}/mutatingadmissionpolicies")
    binding = {**kind, "kind": f"{kind['kind']}Binding", "metadata": {"name": namespace}}
    binding["spec"] = {"policyName": namespace}
    real.apply(binding, f"{POLICIES}/mutatingadmissionpolicybindings")

    def works() -> bool:
        path = CHILDREN["StatefulSet"].format(namespace) + "?dryRun=All"
        answer = real.call("POST", path, PROBE)[1]
        return bool(answer["spec"]["template"]["spec"]["containers"][0]["image"] == image)

    until(works, 60, lambda: real.call("GET", f"{POLICIES}/mutatingadmissionpolicies"))


def engine_pods(real: RealApi, namespace: str) -> dict[str, str]:
    """Return the UID of each engine's pod, by its name."""
    pods = (one["metadata"] for one in found(real, namespace, "Pod"))
    return {one["name"]: one["uid"] for one in pods if "pdcluster.dev/engine" in one["labels"]}


def outdated(real: RealApi, namespace: str) -> int:
    """Count the StatefulSets whose pods are of an older template, as Kubernetes sees it."""
    return sum(
        one["status"].get("observedGeneration") == one["metadata"]["generation"]
        and one["status"]["updateRevision"] != one["status"]["currentRevision"]
        for one in found(real, namespace, "StatefulSet")
    )


@pytest.mark.timeout(600)
def test_a_policy_that_changes_and_a_restart_by_kubectl_end_no_engine(
    real: RealApi, operator: Operator, namespace: str
) -> None:
    mirrored(real, namespace, "mirror-one/engine")
    operator.start()
    with PlayedNodes(real, namespace):
        two = {"replicas": 2}
        create(real, namespace, cluster(prefill=two, decode=two))
        until(lambda: done(real, namespace), 120, operator.said)
        pods = engine_pods(real, namespace)
        assert len(pods) == 4
        at_rest(real, operator)

        mirrored(real, namespace, "mirror-two/engine")
        operator.stop()
        operator.start()
        until(lambda: outdated(real, namespace) == 4, 60, operator.said)
        at_rest(real, operator)
        assert engine_pods(real, namespace) == pods

        rollout = Command(real, namespace)
        assert rollout("pause")[0] == 0
        moment = {"kubectl.kubernetes.io/restartedAt": "2026-11-26T10:00:00Z"}
        patch = {"spec": {"template": {"metadata": {"annotations": moment}}}}
        sets = [one["metadata"]["name"] for one in found(real, namespace, "StatefulSet")]
        for name in sets:
            path = f"{CHILDREN['StatefulSet'].format(namespace)}/{name}"
            assert real.call("PATCH", path, patch, "application/merge-patch+json")[0] == 200
        until(lambda: outdated(real, namespace) == 4, 60, operator.said)
        at_rest(real, operator)
        assert engine_pods(real, namespace) == pods
        assert condition(real, namespace, "Ready")["status"] == "True"

        # Ours is a rollout: it waits while it is paused, and then it goes step by step.
        assert rollout("restart")[0] == 0
        at_rest(real, operator)
        assert engine_pods(real, namespace) == pods
        assert rollout("resume")[0] == 0
        until(lambda: serves(real, namespace) and done(real, namespace), 240, operator.said)
        after = engine_pods(real, namespace)
        assert len(after) == 4
        assert not after.keys() & pods.keys()
