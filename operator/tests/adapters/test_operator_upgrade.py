"""An upgraded operator on a real API server replaces nothing; the next change brings all."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import yaml
from operator_runs import (
    CHILDREN,
    REFUSED_BY_SERVER,
    at_rest,
    cluster,
    condition,
    create,
    edit,
    get,
    until,
)

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).parents[3]
CRDS = ROOT / "crds"
CONNECTOR = ROOT / "connector" / "src" / "pdcluster_connector"
OPERATOR = ROOT / "operator" / "src" / "pdcluster_operator"
BUILDERS = {"engine_objects.py": "PROBE_PERIOD_SECONDS", "router.py": "PROBE_SECONDS"}
"""A number in each builder that a later version could change."""


def items(real, namespace, kind):
    query = "?labelSelector=pdcluster.dev/cluster"
    found = real.call("GET", CHILDREN[kind].format(namespace) + query)[1]["items"]
    return {one["metadata"]["name"]: one for one in found}


def connectors(real, namespace):
    query = "?labelSelector=pdcluster.dev/connector"
    found = real.call("GET", CHILDREN["ConfigMap"].format(namespace) + query)[1]["items"]
    return {one["metadata"]["name"] for one in found}


def revisions(real, namespace):
    own = "pdcluster.dev/cluster,app.kubernetes.io/component=revision"
    path = CHILDREN["ControllerRevision"].format(namespace)
    found = real.call("GET", f"{path}?labelSelector={own}")[1]["items"]
    return {one["metadata"]["name"]: one for one in found}


def uids(real, namespace, kind, role=""):
    found = items(real, namespace, kind)
    return {one["metadata"]["uid"] for name, one in found.items() if role in name}


def settled(real, operator, namespace):
    """Wait until two engines and the router have their pods, and no engine is replaced.

    No kubelet makes a router ready here, so an old router stays beside a new one.
    """

    def quiet():
        live = get(real, namespace)
        return (
            live["status"]["observedGeneration"] == live["metadata"]["generation"]
            and len(items(real, namespace, "StatefulSet")) == 2
            and len(items(real, namespace, "Pod")) >= 3
            and condition(real, namespace, "Ready").get("reason") == "ContainerCreating"
            and "changed" not in condition(real, namespace, "Progressing")["message"]
        )

    until(quiet, 60, lambda: (list(items(real, namespace, "StatefulSet")), operator.said()))


def later_version(folder: Path) -> Path:
    """Return a folder with another connector, and an operator whose builders make other pods."""
    for source in (CONNECTOR, OPERATOR):
        unwanted = shutil.ignore_patterns("__pycache__")
        shutil.copytree(source, folder / source.name, ignore=unwanted)
    with (folder / CONNECTOR.name / "__init__.py").open("a") as module:
        module.write("\n# A later version.\n")
    for name, number in BUILDERS.items():
        path = folder / OPERATOR.name / "plan" / "builders" / name
        text, count = re.subn(
            rf"^{number} = \d+$", f"{number} = 9", path.read_text(), flags=re.MULTILINE
        )
        assert count == 1
        path.write_text(text)
    return folder


def periods(real, namespace, kind, role):
    """Return how often the kubelet asks the pods of each workload for their readiness."""
    return {
        workload["spec"]["template"]["spec"]["containers"][0]["readinessProbe"]["periodSeconds"]
        for name, workload in items(real, namespace, kind).items()
        if role in name
    }


def variable(value):
    return {"decode": {"engine": {"env": [{"name": "A", "value": value}]}}}


def test_an_upgrade_writes_nothing_and_the_next_change_brings_all_that_is_new(
    real, operator, namespace, tmp_path
):
    operator.start()
    # No kubelet makes new engines ready here, so with another type the old ones would stay.
    create(real, namespace, cluster(rollout={"type": "Recreate"}, **variable("1")))
    settled(real, operator, namespace)
    pods, engines = uids(real, namespace, "Pod"), uids(real, namespace, "StatefulSet")
    stored = revisions(real, namespace)
    assert len(stored) == 2
    older = connectors(real, namespace)
    assert len(older) == 1
    at_rest(real, operator)  # what it still has to write, the next one would write
    operator.stop()

    operator.bring(later_version(tmp_path))
    before = real.written
    operator.start()
    until(
        lambda: operator.metric('pdcluster_reconciles_total{outcome="done"}') >= 3,
        60,
        operator.said,
    )
    assert [write["requestURI"] for write in real.writes(before)] == []
    assert uids(real, namespace, "Pod") == pods

    prefill = uids(real, namespace, "StatefulSet", "-prefill-")
    edit(real, namespace, variable("2"))
    until(lambda: len(revisions(real, namespace)) == 3, 60, operator.said)
    settled(real, operator, namespace)
    assert uids(real, namespace, "StatefulSet", "-prefill-") == prefill
    assert len(uids(real, namespace, "StatefulSet") - engines) == 1
    assert periods(real, namespace, "StatefulSet", "-prefill-") == {2}
    assert periods(real, namespace, "StatefulSet", "-decode-") == {9}
    assert periods(real, namespace, "Deployment", "router") == {1}
    assert len(connectors(real, namespace) - older) == 1
    assert older < connectors(real, namespace), "prefill mounts it still"

    edit(real, namespace, {"router": {"policy": "Random"}})
    until(lambda: periods(real, namespace, "Deployment", "router") == {9}, 60, operator.said)

    # Back again: the stored revision is used once more, and is the newest now.
    edit(real, namespace, variable("1"))
    until(
        lambda: {one["revision"] for one in revisions(real, namespace).values()} == {1, 2, 3},
        60,
        operator.said,
    )
    settled(real, operator, namespace)
    assert len(revisions(real, namespace)) == 3
    (decode,) = (n for n in items(real, namespace, "StatefulSet") if "-decode-" in n)
    assert decode.rpartition("-")[0] in stored
    assert operator.metric('pdcluster_reconciles_total{outcome="failed"}') == 0


def enforce(real, namespace, level):
    """Let Pod Security enforce a level; returns when it does, as it reads labels a moment later."""
    label = {"metadata": {"labels": {"pod-security.kubernetes.io/enforce": level}}}
    path = f"/api/v1/namespaces/{namespace}"
    assert real.call("PATCH", path, label, "application/merge-patch+json")[0] == 200
    spec = {"hostNetwork": True, "containers": [{"name": "a", "image": "a"}]}
    pod = {"metadata": {"name": "forbidden"}, "spec": spec}
    answer = 201 if level == "privileged" else 403
    dry = f"{path}/pods?dryRun=All"
    until(lambda: real.call("POST", dry, pod)[0] == answer, 60, lambda: real.call("POST", dry, pod))


def test_a_template_that_the_server_refuses_replaces_nothing(real, operator, namespace):
    operator.start()
    create(real, namespace, cluster(**variable("1")))
    settled(real, operator, namespace)
    engines, pods = uids(real, namespace, "StatefulSet"), uids(real, namespace, "Pod")

    def refused(words):
        said = condition(real, namespace, "Progressing")
        return said["reason"] == "TemplateRefused" and words in said["message"]

    edit(real, namespace, {"decode": {"podTemplate": REFUSED_BY_SERVER}})
    until(lambda: refused("Bogus"), 60, operator.said)
    edit(real, namespace, {"decode": {"podTemplate": None}})
    settled(real, operator, namespace)

    # Pod Security refuses pods and no StatefulSets.
    enforce(real, namespace, "restricted")
    edit(real, namespace, variable("2"))
    until(lambda: refused("violates PodSecurity"), 60, operator.said)
    assert condition(real, namespace, "Progressing")["status"] == "False"
    assert condition(real, namespace, "Progressing")["reason"] == "TemplateRefused"
    assert len(revisions(real, namespace)) == 2
    assert uids(real, namespace, "StatefulSet") == engines
    assert uids(real, namespace, "Pod") == pods
    # It is tried again by itself, and goes on as soon as it is taken.
    enforce(real, namespace, "privileged")
    until(lambda: uids(real, namespace, "StatefulSet") != engines, 60, operator.said)


def with_default(real, how):
    """Give the CRD another default of ``rollout.type``; returns when objects get it."""
    crd = yaml.safe_load((CRDS / "pdcluster.dev_pdclusters.yaml").read_text())
    for version in crd["spec"]["versions"]:
        spec = version["schema"]["openAPIV3Schema"]["properties"]["spec"]
        spec["properties"]["rollout"]["properties"]["type"]["default"] = how
    real.apply(crd, "/apis/apiextensions.k8s.io/v1/customresourcedefinitions")
    path = "/apis/pdcluster.dev/v1alpha1/namespaces/default/pdclusters?dryRun=All"
    until(
        lambda: real.call("POST", path, cluster("probe"))[1]["spec"]["rollout"]["type"] == how,
        60,
        lambda: real.call("POST", path, cluster("probe")),
    )


def test_an_object_with_the_default_of_an_older_crd_keeps_it_and_nothing_changes(
    real, operator, namespace
):
    with_default(real, "Recreate")
    try:
        operator.start()
        create(real, namespace, cluster())
        settled(real, operator, namespace)
        stored, pods = revisions(real, namespace), uids(real, namespace, "Pod")
        at_rest(real, operator)
        operator.stop()
    finally:
        with_default(real, "Surge")
    before = real.written
    operator.start()
    until(
        lambda: operator.metric('pdcluster_reconciles_total{outcome="done"}') >= 3,
        60,
        operator.said,
    )
    assert get(real, namespace)["spec"]["rollout"]["type"] == "Recreate"
    # Without a type, as the object would be if no default had been stored.
    assert edit(real, namespace, {"rollout": None})[0] == 200
    until(
        lambda: get(real, namespace)["status"]["observedGeneration"] == 2,
        60,
        operator.said,
    )
    at_rest(real, operator)
    assert get(real, namespace)["spec"]["rollout"]["type"] == "Surge"
    writes = {write["requestURI"].partition("?")[0].rpartition("/")[2]
              for write in real.writes(before)}  # fmt: skip
    assert writes <= {"status"}, "the generation in the status"
    assert revisions(real, namespace) == stored
    assert uids(real, namespace, "Pod") == pods
