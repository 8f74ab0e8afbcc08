"""A user's pod template, held against Kubernetes' own types."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st
from pod_values import CHOICES, VALUES, words_of, wrong_word
from said_findings import check_manifest

from pdcluster_operator.api.spec import pod_templates

ROOT = Path(__file__).parents[3]


def findings(template, role="prefill", **spec):
    claim = {"source": {"persistentVolumeClaim": {"claimName": "weights"}}}
    return check_manifest(
        {
            "apiVersion": "pdcluster.dev/v1alpha1",
            "kind": "PDCluster",
            "metadata": {"name": "x"},
            "spec": {"model": claim, role: {"podTemplate": template}, **spec},
        }
    )[1]


def errors(template, role="prefill", **spec):
    prefix = f"spec.{role}.podTemplate."
    return {e.path.removeprefix(prefix): e for e in findings(template, role, **spec).errors}


def engine(**fields):
    return {"spec": {"containers": [{"name": "engine", **fields}]}}


def test_the_table_of_fields_is_the_one_of_the_kubernetes_client():
    made = subprocess.run(
        [sys.executable, "-m", "dev.pod_fields"], cwd=ROOT, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    assert Path(pod_templates.__file__).with_name("pod_fields.txt").read_text() == made.stdout, (
        "run `make generate`"
    )


FULL = {
    "metadata": {"labels": {"kueue.x-k8s.io/queue-name": "a"}, "annotations": {"a": "b"}},
    "spec": {
        "nodeSelector": {"gpu": "h100"},
        "tolerations": [{"key": "gpu", "operator": "Exists", "effect": "NoExecute",
                         "tolerationSeconds": 30}],
        "imagePullSecrets": [{"name": "registry"}],
        "priorityClassName": None,
        "hostIPC": True,
        "restartPolicy": "Always",
        "affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [
            {"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": {"a": "b"}}},
        ]}},
        "initContainers": [{"name": "fetch", "image": "busybox", "restartPolicy": "Always"}],
        "containers": [
            {"name": "engine", "env": [{"name": "A", "value": "1"}, {"name": "B", "valueFrom": {
                "resourceFieldRef": {"resource": "limits.cpu", "divisor": 1}}}],
             "startupProbe": {"httpGet": {"path": "/health", "port": "http"}, "periodSeconds": 5},
             "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
             "resources": {"requests": {"cpu": 0.5}, "claims": [{"name": "gpu"}]}},
            {"name": "sidecar", "image": "x", "ports": [{"containerPort": 1}]},
        ],
        "volumes": [
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "16Gi"}},
            {"name": "b", "emptyDir": {"sizeLimit": 1024}},
            {"name": "c", "csi": {"driver": "d", "volumeAttributes": {"a": "b"}}},
            {"name": "d", "projected": {"sources": [{"serviceAccountToken": {"path": "t"}}]}},
        ],
        "resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "one"}],
        "overhead": {"cpu": 0.25},
        "terminationGracePeriodSeconds": 3600,
    },
}  # fmt: skip


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_what_kubernetes_takes_passes(role):
    found = findings(FULL, role)
    assert [str(e) for e in found.errors] == []
    assert "GraceTooShort" not in {w.rule for w in found.warnings}


@pytest.mark.parametrize(
    ("template", "path", "rule", "remedy"),
    [
        ({"spec": {"nodeSelectors": {}}}, "spec.nodeSelectors", "UnknownField",
         "Did you mean nodeSelector?"),
        ({"nodeSelector": {}}, "nodeSelector", "UnknownField",
         "Write it as spec.prefill.podTemplate.spec.nodeSelector."),
        ({"spec": {"volumeMounts": []}}, "spec.volumeMounts", "UnknownField",
         "Write it in an entry of spec.prefill.podTemplate.spec.containers."),
        ({"volumeMounts": []}, "volumeMounts", "UnknownField", "Known are: metadata, spec."),
        ({"spec": {"xyzzy": 1}}, "spec.xyzzy", "UnknownField", "Known are: "),
        (engine(ressources={}), "spec.containers[0].ressources", "UnknownField",
         "Did you mean resources?"),
        ({"spec": {"containers": {"engine": {}}}}, "spec.containers", "WrongType",
         "Write a list"),
        ({"spec": {"tolerations": [{"key": "a", "efect": "x"}]}}, "spec.tolerations[0].efect",
         "UnknownField", "Did you mean effect?"),
        (engine(env=[{"name": "A", "value": 1}]), "spec.containers[0].env[0].value", "WrongType",
         "Put it in quotes."),
        (engine(env={"A": "1"}), "spec.containers[0].env", "WrongType", "Write a list"),
        (engine(tty="yes"), "spec.containers[0].tty", "WrongType", "Leave out any quotes."),
        ({"spec": {"nodeSelector": {"a": True}}}, "spec.nodeSelector.a", "WrongType",
         "Put it in quotes."),
        ({"spec": {"nodeSelector": {"b": None, "a": 1}}}, "spec.nodeSelector.a", "WrongType",
         "Put it in quotes."),
        ({"spec": {"nodeSelector": ["a"]}}, "spec.nodeSelector", "WrongType", "Write a mapping."),
        ({"spec": {"priority": "1"}}, "spec.priority", "WrongType", "Write a number"),
        ({"spec": {"volumes": [{"emptyDir": {}}]}}, "spec.volumes[0].name", "Required",
         "Give the name."),
        ({"spec": {"containers": [{"env": []}]}}, "spec.containers[0].name", "Required",
         "Give the name."),
        ({"spec": {"containers": [None]}}, "spec.containers[0]", "WrongType", "Write the item"),
        ({"spec": {"containers": [{"name": "vllm", "env": []}]}}, "spec.containers[0].name",
         "Required", "Give it an image, or did you mean engine?"),
        ({"spec": {"initContainers": [{"name": "engine"}]}}, "spec.initContainers[0].name",
         "Required", "Give it an image."),
        (engine(resources={"limits": {"cpu": "-1"}}), "spec.containers[0].resources.limits.cpu",
         "BadFormat", "Write for example"),
        ({"spec": {"volumes": [{"name": "a", "emptyDir": {"sizeLimit": "8 GB"}}]}},
         "spec.volumes[0].emptyDir.sizeLimit", "BadFormat", "Write for example"),
        ({"spec": {"restartPolicy": "Never"}}, "spec.restartPolicy", "NotAllowed", "Remove"),
        ({"spec": {"activeDeadlineSeconds": 60}}, "spec.activeDeadlineSeconds", "NotAllowed",
         "Remove"),
        ({"spec": {"ephemeralContainers": [{"name": "a", "image": "b"}]}},
         "spec.ephemeralContainers", "NotAllowed", "Remove"),
        ({"spec": {"terminationGracePeriodSeconds": 0}}, "spec.terminationGracePeriodSeconds",
         "GraceTooShort", "Leave it out"),
        ({"spec": {"terminationGracePeriodSeconds": "60"}}, "spec.terminationGracePeriodSeconds",
         "WrongType", "Write a number"),
        ({"spec": {"terminationGracePeriodSeconds": -5}}, "spec.terminationGracePeriodSeconds",
         "GraceTooShort", "Leave it out"),
        ({"spec": {"priority": True}}, "spec.priority", "WrongType", "Write a number"),
        ({"spec": {"terminationGracePeriodSeconds": False}}, "spec.terminationGracePeriodSeconds",
         "WrongType", "Write a number"),
        ({"spec": {"containers": "engine"}}, "spec.containers", "WrongType", "Write a list"),
        ({"spec": {"containers": [{"name": None, "env": []}]}}, "spec.containers[0].name",
         "Required", "Give the name."),
        ({"spec": {"initContainers": [{"image": "x"}]}}, "spec.initContainers[0].name",
         "Required", "Give the name."),
        (engine(env=[{"value": "x"}]), "spec.containers[0].env[0].name", "Required",
         "Give the name."),
        (engine(volumeMounts=[{"name": "shm"}]), "spec.containers[0].volumeMounts[0].mountPath",
         "Required", "Give the mountPath."),
        (engine(ports=[{"name": "a"}]), "spec.containers[0].ports[0].containerPort", "Required",
         "Give the containerPort."),
        (engine(resources={"limits": ["cpu"]}), "spec.containers[0].resources.limits",
         "WrongType", "Write a mapping."),
        ({"spec": None}, "spec", "Required", "Leave spec out"),
        ({"spec": {"containers": None}}, "spec.containers", "Required", "Leave containers out"),
        ({"spec": {"overhead": {"cpu": "1 core"}}}, "spec.overhead.cpu", "BadFormat",
         "Write for example"),
    ],
)  # fmt: skip
def test_what_kubernetes_would_refuse_is_refused_with_its_path(template, path, rule, remedy):
    found = errors(template)
    assert set(found) == {path}
    assert found[path].rule == rule
    if rule == "WrongType":
        words = ("a string", "a whole number", "true or false", "an object", "a list", "given")
        assert found[path].message in {f"must be {word}" for word in words}
    assert rule not in {warning.rule for warning in findings(template).warnings}, "said once"
    assert found[path].remedy.startswith(remedy)
    assert found[path].remedy.endswith((".", "?"))
    assert not found[path].message.endswith((".", "?"))


@pytest.mark.parametrize(("kind", "field"), CHOICES)
def test_a_word_is_one_of_those_that_kubernetes_knows(kind, field):
    """A real API server is given the same, in ``test_pod_faults_of_the_api``."""
    build = CHOICES[kind, field]
    for word in words_of(kind, field):
        assert not errors(build(word)), word
    [(path, found)] = errors(build(wrong_word(kind, field))).items()
    assert path.rpartition(".")[2].partition("[")[0] == field
    assert found.rule == "NotAllowed"
    assert found.remedy == f"Did you mean {words_of(kind, field)[0]}?"


def test_every_list_of_words_is_tried():
    listed = {place for place, limit in pod_templates.LIMITS.items() if "|" in limit}
    assert listed == CHOICES.keys()


@pytest.mark.parametrize("name", VALUES)
def test_a_value_that_kubernetes_refuses_is_refused(name):
    wrong, path, rule, right = VALUES[name]
    assert {place: one.rule for place, one in errors(wrong).items()} == {path: rule}
    assert not errors(right)


def test_the_routers_template_is_judged_by_the_routers_container():
    assert not errors({"spec": {"containers": [{"name": "router", "env": []}]}}, "router")
    found = errors({"spec": {"containers": [{"name": "engine"}]}}, "router")
    assert "router" in found["spec.containers[0].name"].remedy
    assert errors({"spec": {"terminationGracePeriodSeconds": 0}}, "router")


@pytest.mark.parametrize("place", ["engine", "prefill.engine", "decode.engine"])
def test_the_source_of_a_variable_is_held_against_kubernetes_types(place):
    """A wrong one would be stored, and the API server would refuse the engines."""

    def found(source):
        at = {"env": [{"name": "TOKEN", "valueFrom": source}]}
        for word in reversed(place.split(".")):
            at = {word: at}
        path = f"spec.{place}.env[0].valueFrom."
        return {
            one.path.removeprefix(path): one.rule for one in findings({}, "router", **at).errors
        }

    key = {"name": "hub", "key": "token"}
    for optional in (None, True, False):
        assert found({"secretKeyRef": {**key, "optional": optional}}) == {}
    assert found({"secretKeyRef": {**key, "optional": 1}}) == {"secretKeyRef.optional": "WrongType"}
    assert found({"configMapKeyRef": {**key, "optional": "yes"}}) == {
        "configMapKeyRef.optional": "WrongType"
    }
    assert found({"fieldRef": {"path": "spec.nodeName"}}) == {"fieldRef.path": "UnknownField"}
    assert found({"resourceFieldRef": {"resource": "limits.cpu", "divisor": 1}}) == {}


def test_a_grace_period_shorter_than_a_drain_is_warned_of():
    def warned(seconds, lease, timeout=100, part="prefill"):
        template = {"spec": {"terminationGracePeriodSeconds": seconds}}
        longest = {"transfer": {"leaseSeconds": lease}, "requestTimeoutSeconds": timeout}
        found = findings(template, part, **longest)
        assert found.ok
        return [w.message for w in found.warnings if w.rule == "GraceTooShort"]

    assert warned(189, 60) == ["the engine may need 190 seconds to finish its requests and stop"]
    assert warned(190, 60) == []
    assert warned(190, 61)
    assert warned(1, 60), "the shortest that Kubernetes does not take for a kill"
    assert warned(159, 5), "receives may be in quarantine for 30 seconds, however short the lease"
    assert warned(160, 5) == []
    assert warned(160, 5, timeout=101)
    assert warned(129, 60, part="router")
    assert warned(130, 60, part="router") == []
    no_number = findings({"spec": {"terminationGracePeriodSeconds": True}})
    assert [error.rule for error in no_number.errors] == ["WrongType"]
    assert "GraceTooShort" not in {warning.rule for warning in no_number.warnings}


def test_all_mistakes_at_once_and_not_without_end():
    template = {"spec": {"hostNetwrk": True, "containers": [{"name": "engine", "agrs": []}]}}
    assert set(errors(template)) == {"spec.hostNetwrk", "spec.containers[0].agrs"}
    assert len(errors({"spec": {f"x{n}": 1 for n in range(1000)}})) == 16


KEYS = st.sampled_from(
    ["metadata", "spec", "containers", "initContainers", "volumes", "name", "env", "resources",
     "limits", "cpu", "image", "nodeSelector", "terminationGracePeriodSeconds", "emptyDir", "x"]
)  # fmt: skip
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=20,
)


@settings(max_examples=2 * settings().max_examples)
@given(st.dictionaries(KEYS, JSON, max_size=4), st.sampled_from(["prefill", "decode", "router"]))
def test_any_template_gets_an_answer(template, role):
    for error in findings(template, role).errors:
        assert error.path
        assert error.message
        assert error.remedy
