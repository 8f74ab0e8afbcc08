"""No field but extraArgs puts a flag of its own on a command line."""

from __future__ import annotations

import copy

import pytest

from pdcluster_operator.api.object_names import EngineName
from pdcluster_operator.api.rules.validate import check_manifest
from pdcluster_operator.api.schema.crd import crd
from pdcluster_operator.api.spec.resolve import resolve_engine
from pdcluster_operator.api.spec.types import Role
from pdcluster_operator.plan.builders.engine_objects import build_engine_pod
from pdcluster_operator.plan.builders.router import bound, build_router_template

SPEC = crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
EVIL = "--trust-remote-code"
SOURCES = {
    "huggingFace": {"repo": "a/b", "tokenSecretRef": {"name": "t"}},
    "persistentVolumeClaim": {"claimName": "c"},
    "hostPath": {"path": "/m"},
    "oci": {"image": "r/m:1", "pullSecretRef": {"name": "t"}},
    "objectStorage": {"uri": "s3://b/m", "credentialsSecretRef": {"name": "t"}},
}


def texts(schema, path=()):
    """Every text of the spec, as a path; lists and free objects are the user's own words."""
    for name, part in schema.get("properties", {}).items():
        if part["type"] == "string":
            yield (*path, name)
        yield from texts(part, (*path, name))


def manifest(path):
    source = path[2] if path[:2] == ("model", "source") else "huggingFace"
    spec = {"model": {"source": {source: copy.deepcopy(SOURCES[source])}}}
    if path[:2] == ("model", "cache"):
        spec["model"]["cache"] = {"persistentVolumeClaim": {"claimName": "c"}}
    if path[:2] == ("model", "configMapRef"):
        spec["model"]["configMapRef"] = {"name": "c"}
    if path[:2] == ("router", "apiKeySecretRef"):
        spec["router"] = {"apiKeySecretRef": {"name": "k"}}
    if path[0] == "autoscaling":
        spec["autoscaling"] = {"itlMs": 40, "prefill": {"max": 2}, "decode": {"max": 2}}
    *parents, last = path
    target = spec
    for parent in parents:
        target = target.setdefault(parent, {})
    target[last] = EVIL
    return {"apiVersion": "pdcluster.dev/v1alpha1", "kind": "PDCluster",
            "metadata": {"name": "x"}, "spec": spec}  # fmt: skip


def words(cluster):
    names = {role: EngineName("default", "x", role, "12345", 0) for role in Role}
    for role, name in names.items():
        engine = resolve_engine(cluster, role)
        pod = build_engine_pod(cluster, engine, name, "key", "digest")
        container = pod["spec"]["containers"][0]
        yield from (*container["command"], *container["args"])
    router = bound(build_router_template(cluster, "key", "digest"), names.values())
    container = router["spec"]["containers"][0]
    yield from (*container["command"], *container["args"])


PATHS = list(texts(SPEC))


@pytest.mark.parametrize("path", PATHS, ids=".".join)
def test_a_text_that_looks_like_a_flag_never_becomes_one(path):
    cluster, findings = check_manifest(manifest(path))
    if findings.ok:
        assert EVIL not in list(words(cluster))
    else:
        assert {error.path for error in findings.errors} == {"spec." + ".".join(path)}


def test_the_fields_that_stand_there_are_refused():
    for path in (
        "model.name",
        "model.source.huggingFace.revision",
        "model.source.huggingFace.repo",
    ):
        assert tuple(path.split(".")) in PATHS
        assert not check_manifest(manifest(tuple(path.split("."))))[1].ok
