"""``spec.podTemplate``: it reaches all pods, and a finding names the field that the user wrote."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import example, given, strategies as st
from said_findings import check_manifest

from pdcluster_operator.api.spec.parse import parse_cluster
from pdcluster_operator.api.spec.pod_templates import merge

ROLES = ("prefill", "decode", "router")
LIMITS = {"resources": {"requests": {"memory": "64Gi"}}}


def manifest(**spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "pdcluster.dev/v1alpha1",
        "kind": "PDCluster",
        "metadata": {"name": "llama"},
        "spec": {
            "model": {"source": {"persistentVolumeClaim": {"claimName": "weights"}}},
            **spec,
            "prefill": LIMITS | spec.get("prefill", {}),
            "decode": LIMITS | spec.get("decode", {}),
        },
    }


def templates(**spec: Any) -> dict[str, Any]:
    parsed = parse_cluster(manifest(**spec))
    assert parsed.errors == ()
    return {part: getattr(parsed.cluster.spec, part).pod_template for part in ROLES}


def test_everybody_has_the_shared_template_and_only_his_own_container_of_it() -> None:
    shared = {
        "metadata": {"labels": {"team": "a"}},
        "spec": {
            "tolerations": [{"operator": "Exists"}],
            "containers": [
                {"name": "engine", "imagePullPolicy": "Always"},
                {"name": "router", "imagePullPolicy": "Never"},
                {"name": "agent", "image": "agent:1.2"},
            ],
        },
    }
    own = {"spec": {"tolerations": None, "containers": [{"name": "agent", "image": "agent:2.0"}]}}
    before = copy.deepcopy(shared)
    found = templates(podTemplate=shared, decode={"podTemplate": own})
    assert shared == before
    names = {
        part: {one["name"]: one for one in template["spec"]["containers"]}
        for part, template in found.items()
    }
    assert {part: set(found) for part, found in names.items()} == {
        "prefill": {"engine", "agent"},
        "decode": {"engine", "agent"},
        "router": {"router", "agent"},
    }
    assert all(template["metadata"]["labels"] == {"team": "a"} for template in found.values())
    assert found["prefill"]["spec"]["tolerations"] == [{"operator": "Exists"}]
    assert names["prefill"]["agent"]["image"] == "agent:1.2"
    assert names["decode"]["agent"]["image"] == "agent:2.0"
    assert found["decode"]["spec"]["tolerations"] is None, "it removes the operator's own, too"
    assert templates() == dict.fromkeys(ROLES)
    removes = {"spec": {"securityContext": None}}
    assert templates(podTemplate=removes)["router"] == removes, "it removes the operator's own"


WORDS = st.sampled_from(["a", "b"])
TEXTS = st.none() | WORDS
LISTS = st.none() | st.lists(WORDS, max_size=2)
OBJECTS = st.none() | st.dictionaries(WORDS, TEXTS)
ENV = st.none() | st.lists(st.sampled_from([{"name": "A", "value": "a"}]), max_size=1)
CONTAINERS = st.lists(
    st.fixed_dictionaries(
        {"name": st.sampled_from(["engine", "x", "y"])},
        optional={"image": TEXTS, "args": LISTS, "resources": OBJECTS, "env": ENV},
    ),
    unique_by=lambda one: one["name"],
    max_size=3,
)
POD_SPECS = st.fixed_dictionaries(
    {},
    optional={
        "containers": st.none() | CONTAINERS,
        "nodeSelector": OBJECTS,
        "tolerations": LISTS,
    },
)
POD_TEMPLATES = st.fixed_dictionaries({}, optional={"spec": POD_SPECS, "metadata": OBJECTS})


def without_nulls(part: Any) -> Any:
    """A null of the shared template removes nothing below an object of an own template."""
    return merge({}, part) if isinstance(part, dict) else part


SHARED_TEMPLATES = POD_TEMPLATES.map(without_nulls)


@given(ours=POD_TEMPLATES, shared=SHARED_TEMPLATES, own=POD_TEMPLATES)
@example(
    ours={},
    shared={"spec": {"containers": [{"name": "x", "image": "a"}]}},
    own={"spec": {"containers": [{"name": "x", "image": None}]}},
)
@example(
    ours={},
    shared={"spec": {"containers": [{"name": "x", "image": "a"}]}},
    own={"spec": {"containers": None}},
)
def test_the_two_are_merged_as_one_after_the_other(
    ours: dict[str, Any], shared: dict[str, Any], own: dict[str, Any]
) -> None:
    ours = merge({"spec": {"containers": []}}, ours)  # as every pod has
    combined = templates(podTemplate=shared, decode={"podTemplate": own})["decode"]
    assert merge(ours, combined) == merge(merge(ours, shared), own)


BAD = {"name": "agent", "image": "a:1", "imagePullPolicy": 7}


@pytest.mark.parametrize(
    ("shared", "decode", "paths"),
    [
        ({"spec": {"nodeSelektor": {}}}, None, ["spec.podTemplate.spec.nodeSelektor"]),
        ({"nodeSelector": {}}, {}, ["spec.podTemplate.nodeSelector"]),
        (
            {"spec": {"containers": [{"name": "router"}, BAD]}},
            {"spec": {"containers": [{"name": "engine"}]}},
            ["spec.podTemplate.spec.containers[1].imagePullPolicy"],
        ),
        (
            {"spec": {"containers": [{"name": "agent", "image": "a:1"}]}},
            {"spec": {"containers": [{"name": "engine"}, {"name": "x", "image": 7}]}},
            ["spec.decode.podTemplate.spec.containers[1].image"],
        ),
        (
            {"spec": {"tolerations": [{"operator": 7}]}},
            {"spec": {"tolerations": [{"operator": "Exists"}, {"key": 8}]}},
            [
                "spec.decode.podTemplate.spec.tolerations[1].key",
                "spec.podTemplate.spec.tolerations[0].operator",
            ],
        ),
        (
            {"metadata": {"labels": {"a.b/c": 7, "a": "b"}}},
            {"metadata": {"labels": {"a": 8}}},
            [
                "spec.decode.podTemplate.metadata.labels.a",
                "spec.podTemplate.metadata.labels.a.b/c",
            ],
        ),
        (
            {"spec": {"containers": [{"name": "sidecar"}]}},
            None,
            ["spec.podTemplate.spec.containers[0].name"],
        ),
        (7, None, ["spec.podTemplate"]),
    ],
)
def test_a_finding_names_the_field_that_was_written(
    shared: Any, decode: Any, paths: list[str]
) -> None:
    part = {} if decode is None else {"podTemplate": decode}
    findings = check_manifest(manifest(podTemplate=shared, decode=part))[1]
    assert sorted({error.path for error in findings.errors}) == paths
    told = [(one.path, one.message, one.value) for one in findings.errors]
    assert len(set(told)) == len(told), "once for all pods"


def test_what_to_do_names_the_shared_template_too() -> None:
    [error] = check_manifest(manifest(podTemplate={"nodeSelector": {}}))[1].errors
    assert error.remedy == "Write it as spec.podTemplate.spec.nodeSelector."
    args = {"spec": {"containers": [{"name": "engine", "args": ["--seed", "1"]}]}}
    [warning] = check_manifest(manifest(podTemplate=args))[1].warnings
    assert warning.path == "spec.podTemplate.spec.containers[0].args"
    assert warning.remedy == "Write flags of vllm serve into spec.engine.extraArgs."


def test_a_folder_of_the_node_is_refused_once() -> None:
    volumes = {"spec": {"volumes": [{"name": "x", "hostPath": {"path": "/x"}}]}}
    [error] = check_manifest(manifest(podTemplate=volumes), host_paths=False)[1].errors
    assert error.path == "spec.podTemplate.spec.volumes[0].hostPath"


def test_a_router_that_somebody_else_runs_has_no_template() -> None:
    shared = {"spec": {"nodeSelector": {"pool": "a"}}}
    spec = manifest(podTemplate=shared, router={"type": "None"})
    assert check_manifest(spec)[1].errors == ()
    assert templates(podTemplate=shared, router={"type": "None"})["router"] is None
