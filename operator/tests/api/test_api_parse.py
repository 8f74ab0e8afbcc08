"""Parsing: defaults, and every error at once."""

from __future__ import annotations

import copy
import datetime as dt

import pytest
from hypothesis import given, settings, strategies as st
from said_findings import check_manifest

from pdcluster_operator.api.spec.engine_types import Switch
from pdcluster_operator.api.spec.parse import MAX_ERRORS, parse_cluster
from pdcluster_operator.api.spec.router_types import RouterPolicy
from pdcluster_operator.api.spec.types import Device, Role

MINIMAL = {
    "apiVersion": "pdcluster.dev/v1alpha1",
    "kind": "PDCluster",
    "metadata": {"name": "llama", "namespace": "ns", "uid": "u", "generation": 4},
    "spec": {"model": {"source": {"hostPath": {"path": "/models/x"}}}},
}


def with_spec(**spec):
    return {**MINIMAL, "spec": {**MINIMAL["spec"], **spec}}


def errors(manifest):
    return {error.path: error for error in check_manifest(manifest)[1].errors}


def test_the_smallest_manifest_has_all_defaults():
    result = parse_cluster(MINIMAL)
    assert result.errors == ()
    cluster = result.cluster
    assert (cluster.name, cluster.namespace, cluster.uid, cluster.generation) == (
        "llama", "ns", "u", 4,
    )  # fmt: skip
    assert cluster.served_name == "llama"
    spec = cluster.spec
    assert spec.engine.prefix_caching is Switch.ENABLED
    assert spec.engine.image
    assert spec.prefill.engine.prefix_caching is None
    assert spec.prefill.engine.image is None
    assert spec.transfer.device is Device.CUDA
    assert spec.router.policy is RouterPolicy.ROUND_ROBIN
    for role in Role:
        assert spec.role(role).replicas == 1
        assert spec.role(role).parallelism.tensor == 1


def test_five_mistakes_are_five_errors_at_once():
    manifest = with_spec(
        prefil={},
        transfer={"device": "cuda"},
        prefill={"replicas": -1, "parallelism": {"tensor": 3, "nodes": 2}},
        decode={"engine": {"extraArgs": ["--port", "9000"], "blockSize": "16"}},
    )
    found = errors(manifest)
    assert {path: (e.value, e.rule) for path, e in found.items()} == {
        "spec.prefil": ("", "UnknownField"),
        "spec.transfer.device": ("cuda", "NotAllowed"),
        "spec.prefill.replicas": ("-1", "OutOfRange"),
        "spec.prefill.parallelism.nodes": ("2", "NodesDivideWorkers"),
        "spec.decode.engine.extraArgs[0]": ("--port 9000", "OwnedFlag"),
        "spec.decode.engine.blockSize": ('"16"', "WrongType"),
    }
    assert all(error.message and error.remedy for error in found.values())
    assert found["spec.prefil"].remedy == "Did you mean prefill?"
    assert found["spec.transfer.device"].remedy == "Did you mean CUDA?"
    text = str(found["spec.prefill.replicas"])
    assert "spec.prefill.replicas = -1" in text
    assert "[OutOfRange]" in text


def test_one_mistake_is_not_reported_twice_in_other_words():
    """What is computed from a field that could not be read is left out."""
    broken = with_spec(decode={"parallelism": {"tensor": "two", "nodes": 2}})
    assert set(errors(broken)) == {"spec.decode.parallelism.tensor"}
    broken = with_spec(decode={"engine": {"blockSize": "x"}}, engine={"blockSize": 16})
    assert set(errors(broken)) == {"spec.decode.engine.blockSize"}


def test_a_manifest_without_a_spec_is_told_what_to_write_first():
    found = errors({key: value for key, value in MINIMAL.items() if key != "spec"})
    assert found["spec"].rule == "Required"
    assert "spec.model.source" in found["spec"].remedy


FEW_SECONDS = {"podTemplate": {"spec": {"terminationGracePeriodSeconds": 100}}}
OVER_THE_FOLDER = {"podTemplate": {"spec": {
    "containers": [{"name": "engine",
                    "volumeMounts": [{"name": "own", "mountPath": "/pdcluster-tls"}]}],
    "volumes": [{"name": "own", "secret": {"secretName": "own"}}],
}}}  # fmt: skip
TWO_NODES = {"parallelism": {"tensor": 16, "nodes": 2}}
HUB = {"source": {"huggingFace": {"repo": "a/b"}}}
CACHED = {"source": MINIMAL["spec"]["model"]["source"],
          "cache": {"persistentVolumeClaim": {"claimName": "cache"}}}  # fmt: skip


def variable(name, value):
    return {"env": [{"name": name, "value": value}]}


@pytest.mark.parametrize(
    ("spec", "field", "wrong", "path"),
    [
        ({"prefill": FEW_SECONDS}, "requestTimeoutSeconds", "x",
         "prefill.podTemplate.spec.terminationGracePeriodSeconds"),
        ({}, "prefill.resources", "x", "prefill.resources.requests.memory"),
        ({}, "prefill.podTemplate", "x", "prefill.resources.requests.memory"),
        ({"prefill": {"resources": {"limits": {"nvidia.com/gpu": 2}}}},
         "prefill.parallelism.tensor", "two",
         "prefill.resources.limits.nvidia.com/gpu"),
        ({"prefill": {"resources": {"limits": {"nvidia.com/gpu": 2}}}}, "transfer.device", "cpu",
         "prefill.resources.limits.nvidia.com/gpu"),
        ({"prefill": {"resources": {"requests": {"a/b": 1}}}}, "prefill.resources.limits.a/b",
         "some", "prefill.resources.requests.a/b"),
        ({"prefill": OVER_THE_FOLDER}, "transfer.tls", "mounted",
         "prefill.podTemplate.spec.containers[0].volumeMounts[0].mountPath"),
        ({"engine": variable("PYTORCH_ALLOC_CONF", "expandable_segments:True")},
         "transfer.device", "cpu", "engine.env[0].value"),
        ({"engine": variable("UCX_TLS", "tcp")}, "transfer.device", "cpu",
         "engine.env[0].value"),
        ({"decode": TWO_NODES}, "decode.resources", "x", "transfer.rdma"),
        ({"decode": TWO_NODES}, "decode.parallelism.pipeline", "two", "transfer.rdma"),
        ({"engine": {"maxModelLen": 16},
          "prefill": {"engine": {"extraArgs": ["--max-model-len", "32"]}}},
         "prefill.engine.maxModelLen", "x", "prefill.engine.extraArgs"),
        ({"decode": {"engine": {"image": "a/b:1"}}}, "engine.image", "two words",
         "decode.engine.image"),
        ({"prefill": {"engine": {"kvCacheDtype": "fp8"}}}, "decode.engine.kvCacheDtype", "FP8",
         "prefill.engine.kvCacheDtype"),
        ({"prefill": {"engine": {"kvCacheDtype": "fp8"}}}, "engine.kvCacheDtype", "FP8",
         "prefill.engine.kvCacheDtype"),
        ({"model": HUB}, "model.source.hostPath", {"path": "/x"},
         "model.source.huggingFace.revision"),
        ({"model": CACHED}, "model.source.persistentVolumeClaim", {"claimName": "x"},
         "model.cache"),
    ],
)  # fmt: skip
def test_what_follows_from_a_field_is_not_said_while_the_field_is_wrong(spec, field, wrong, path):
    """Whoever corrects the field may find that the rest was right."""

    def said(manifest):
        found = check_manifest(manifest)[1]
        return {one.path for one in (*found.errors, *found.warnings)}

    manifest = copy.deepcopy(with_spec(**spec))
    assert f"spec.{path}" in said(manifest)
    *parents, last = field.split(".")
    target = manifest["spec"]
    for parent in parents:
        target = target.setdefault(parent, {})
    target[last] = wrong
    assert f"spec.{path}" not in said(manifest)
    assert said(manifest) & {f"spec.{field}", "spec.model.source"}


@pytest.mark.parametrize(
    ("metadata", "known"),
    [
        ({"name": "llama"}, ("llama", "default", "", 0)),
        ({"name": "llama", "namespace": 7, "uid": None, "generation": "4"},
         ("llama", "default", "", 0)),
        ({"name": ["llama"], "namespace": "ns"}, ("unnamed", "ns", "", 0)),
        ([], ("unnamed", "default", "", 0)),
        (None, ("unnamed", "default", "", 0)),
    ],
)  # fmt: skip
def test_metadata_of_any_shape_is_read(metadata, known):
    cluster = parse_cluster({**MINIMAL, "metadata": metadata}).cluster
    assert (cluster.name, cluster.namespace, cluster.uid, cluster.generation) == known


def test_a_misspelt_part_of_a_manifest_is_told_its_name():
    for wrong, right in (("sepc", "spec"), ("metdata", "metadata"), ("Kind", "kind")):
        found = errors({**MINIMAL, wrong: {}})[wrong]
        assert (found.rule, found.remedy) == ("UnknownField", f"Did you mean {right}?")
    assert "status" not in errors({**MINIMAL, "status": {"anything": 1}})


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({}, "nothing"),
        ({"hostPath": {"path": "/x"}, "huggingFace": {"repo": "a/b"}}, "huggingFace, hostPath"),
    ],
)
def test_a_model_has_exactly_one_source(source, message):
    found = errors({**MINIMAL, "spec": {"model": {"source": source}}})
    assert found["spec.model.source"].rule == "ExactlyOne"
    assert found["spec.model.source"].value == message


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("", "missing"),
        (None, "missing"),
        ("Llama", "lower-case"),
        ("7b", "letter"),
        ("a-", "letters"),
        ("a.b", "letters"),
        ("l" * 35, "35 characters"),
        (7, "must be text"),
    ],
)
def test_names_that_cannot_be_used(name, said):
    found = errors({**MINIMAL, "metadata": {"name": name}})
    assert found["metadata.name"].rule == "NameUnusable"
    assert said in found["metadata.name"].message


@pytest.mark.parametrize(
    ("path", "value", "rule"),
    [
        ("spec.model.source.hostPath.path", "models", "BadFormat"),
        ("spec.model.name", "two words", "BadFormat"),
        ("spec.engine.kvCacheDtype", "FP8", "BadFormat"),
        ("spec.engine.maxModelLen", 0, "OutOfRange"),
        ("spec.engine.prefixCaching", True, "NotAllowed"),
        ("spec.engine.extraArgs", "--seed 1", "WrongType"),
        ("spec.engine.extraArgs", ["x"] * 129, "OutOfRange"),
        ("spec.engine.env", [{"value": "x"}], "Required"),
        (
            "spec.engine.env",
            [{"name": "A", "value": "1"}, {"name": "A", "value": "2"}],
            "Duplicate",
        ),
        ("spec.engine.env", [{"name": "1A", "value": "1"}], "BadFormat"),
        ("spec.prefill.podTemplate", [], "WrongType"),
        ("spec.prefill.resources.limits", {"cpu": "4 cores"}, "BadFormat"),
        ("spec.prefill.resources.limits", {"cpu": 0.5}, "BadFormat"),
        ("spec.prefill.resources.limits", {"cpu": "-1"}, "BadFormat"),
        ("spec.prefill.resources.requests", {"cpu": -1}, "BadFormat"),
        ("spec.transfer.rdma", {"resource": "ib"}, "BadFormat"),
        ("spec.transfer.rdma", {"resource": "rdma/"}, "BadFormat"),
        ("spec.transfer.rdma", {"resource": "a/b/c"}, "BadFormat"),
        ("spec.model.name", "--api-key", "BadFormat"),
        ("spec.model.source", {"huggingFace": {"repo": "--a/b"}}, "BadFormat"),
        (
            "spec.model.source",
            {"huggingFace": {"repo": "a/b", "revision": "--trust-remote-code"}},
            "BadFormat",
        ),
        ("spec.model.source.hostPath.path", "/models/../etc", "BadFormat"),
        ("spec.engine.blockSize", 65_537, "OutOfRange"),
        ("spec.prefill.replicas", 1.5, "WrongType"),
        ("spec.prefill.replicas", True, "WrongType"),
        ("spec.transfer.backends", [], "OutOfRange"),
        ("spec.transfer.backends", ["TCP"], "NotAllowed"),
        ("spec.rollout.paused", "yes", "WrongType"),
        ("spec.rollout.type", "Rolling", "NotAllowed"),
        ("spec.router", [], "WrongType"),
        ("spec", None, "WrongType"),
        ("spec.model", {}, "Required"),
        ("kind", "PDClusters", "NotAllowed"),
        ("apiVersion", "v1", "NotAllowed"),
        ("extra", 1, "UnknownField"),
    ],
)
def test_bad_values(path, value, rule):
    manifest = copy.deepcopy(MINIMAL)
    *parents, last = path.split(".")
    target = manifest
    for parent in parents:
        target = target.setdefault(parent, {})
    target[last] = value
    found = [error for error in check_manifest(manifest)[1].errors if error.rule == rule]
    assert found, [str(e) for e in check_manifest(manifest)[1].errors]
    assert found[0].path.startswith(path)


@pytest.mark.parametrize(("length", "shown"), [(199, 199), (200, 200), (201, 200), (5000, 200)])
def test_a_finding_shows_at_most_200_characters_of_a_value(length, shown):
    path = "x" * length  # not absolute
    found = errors(with_spec(model={"source": {"hostPath": {"path": path}}}))
    value = found["spec.model.source.hostPath.path"].value
    assert len(value) == shown
    assert value == path or (value[:-1] == path[:199] and value.endswith("…"))


def test_a_finding_shows_the_value_only_if_there_is_one():
    missing = errors(with_spec(engine={"env": [{"value": "x"}]}))["spec.engine.env[0].name"]
    assert (missing.rule, missing.value) == ("Required", "")
    assert str(missing).startswith("spec.engine.env[0].name: is missing")
    nobody = errors([MINIMAL])["."]
    assert (nobody.rule, nobody.remedy) == ("WrongType", "Write a mapping.")
    no_object = errors(with_spec(engine=[]))["spec.engine"]
    assert (no_object.message, no_object.remedy) == ("must be an object", "Write a mapping.")
    nothing = errors({**MINIMAL, "spec": None})["spec"]
    assert (nothing.rule, nothing.value) == ("WrongType", "")
    empty = errors(with_spec(model={"name": "", "source": MINIMAL["spec"]["model"]["source"]}))
    assert empty["spec.model.name"].value == "''", "an empty text shows as one"


@pytest.mark.parametrize("field", ["source", "cache"])
@pytest.mark.parametrize(
    "path", ["../../etc", "/etc", "a/../../b", "a/..", "..", "a//..", "./../a", "a/" * 500 + ".."]
)
def test_a_folder_of_a_claim_does_not_lead_out_of_it(field, path):
    claim = {"persistentVolumeClaim": {"claimName": "weights", "path": path}}
    found = errors(with_spec(model={"source": {"huggingFace": {"repo": "a/b"}}, field: claim}))
    assert found[f"spec.model.{field}.persistentVolumeClaim.path"].rule == "BadFormat"


@pytest.mark.parametrize(
    "path", ["a", "a/b", "a/", "./a", "..a/b..c", ".hidden/...", "a//b", "é/ü"]
)
def test_a_folder_of_a_claim_may_have_dots(path):
    claim = {"persistentVolumeClaim": {"claimName": "weights", "path": path}}
    assert parse_cluster(with_spec(model={"source": claim})).errors == ()
    host = {"hostPath": {"path": f"/{path}"}}
    assert parse_cluster(with_spec(model={"source": host})).errors == ()


@pytest.mark.parametrize(
    ("given", "said", "remedy"),
    [
        ("16", '"16"', "Leave out the quotes."),
        (16.5, "16.5", "Write a number."),
        (True, "true", "Write a number."),
        ("x", '"x"', "Write a number."),
        ([16], "[16]", "Write a number."),
        (dt.date(2026, 11, 24), "datetime.date(2026, 11, 24)", "Write a number."),
    ],
)
def test_a_value_is_shown_as_it_was_given(given, said, remedy):
    found = errors(with_spec(engine={"blockSize": given}))["spec.engine.blockSize"]
    assert (found.value, found.remedy) == (said, remedy)
    assert f"spec.engine.blockSize = {said}:" in str(found)


@pytest.mark.parametrize(
    ("field", "value", "message", "remedy"),
    [
        ("transfer.device", "zzz", "must be one of CUDA, CPU", "Write CUDA or CPU."),
        ("transfer.device", "GPU", "must be one of CUDA, CPU", "Write CUDA or CPU."),
        ("model.name", "", "has 0 characters; 1 to 200 are allowed",
         "Give a value, or leave the field out."),
        ("model.name", "x" * 201, "has 201 characters; 1 to 200 are allowed", "Shorten it."),
        ("model.name", "a b", "is not a word without spaces; it may not begin with a hyphen",
         "Write a word without spaces; it may not begin with a hyphen."),
        ("prefill.replicas", 1001, "must be between 0 and 1000", "Write a number from 0 to 1000."),
        ("prefill.replicas", "-1", "must be a whole number", "Leave out the quotes."),
        ("prefill.replicas", "1.5", "must be a whole number", "Write a number."),
        ("rollout.paused", 1, "must be true or false", "Leave out any quotes."),
        ("model.name", 7, "must be a string", "Put it in quotes."),
        ("transfer.backends", ["UCX"] * 5, "has 5 items; 1 to 4 are allowed",
         "Remove some of them."),
        ("transfer.backends", "UCX", "must be a list", "Write a list."),
        ("prefill.podTemplate", 7, "must be an object", "Write a mapping."),
        ("prefill.resources.limits", 7, "must be an object", "Write a mapping."),
        ("prefill.resources.limits.cpu", True, "is not a Kubernetes quantity",
         "Write for example 4, 500m or 16Gi."),
        ("prefill.resources.limits.cpu", "-1m", "is negative",
         "Write for example 4, 500m or 16Gi."),
    ],
)  # fmt: skip
def test_a_finding_says_what_is_allowed_and_what_to_write(field, value, message, remedy):
    manifest = copy.deepcopy(MINIMAL)
    *parents, last = field.split(".")
    target = manifest["spec"]
    for parent in parents:
        target = target.setdefault(parent, {})
    target[last] = value
    found = errors(manifest)[f"spec.{field}"]
    assert (found.message, found.remedy) == (message, remedy)


def test_the_block_size_of_a_hybrid_is_taken():
    """66 kernel blocks of 16 tokens: vLLM chooses such sizes by itself."""
    assert parse_cluster(with_spec(engine={"blockSize": 66 * 16})).errors == ()


@pytest.mark.parametrize(
    ("place", "field", "remedy"),
    [
        ("prefill", "nodeSelector", "Write it as spec.prefill.podTemplate.spec.nodeSelector."),
        ("decode", "tolerations", "Write it as spec.decode.podTemplate.spec.tolerations."),
        ("router", "affinity", "Write it as spec.router.podTemplate.spec.affinity."),
        ("router", "livenessProbe", ("Write it as spec.router.podTemplate.spec.containers, as "
         "livenessProbe of the container router.")),
        ("decode", "labels", "Write it as spec.decode.podTemplate.metadata.labels."),
        ("", "imagePullSecrets", ("Write it as spec.podTemplate.spec.imagePullSecrets.")),
        ("engine", "volumes", ("Write it as spec.podTemplate.spec.volumes.")),
        ("decode.engine", "volumeMounts", ("Write it as spec.decode.podTemplate.spec.containers, "
         "as volumeMounts of the container engine.")),
        ("engine", "resources", "Write it as spec.prefill.resources or spec.decode.resources."),
        ("prefill", "image", "Write it as spec.prefill.engine.image."),
        ("prefill", "tensor", "Write it as spec.prefill.parallelism.tensor."),
        ("", "huggingFace", "Known are: "),
        ("prefill", "replica", "Did you mean replicas?"),
    ],
)  # fmt: skip
def test_a_field_at_a_wrong_place_is_told_its_own(place, field, remedy):
    spec: dict = {}
    target = spec
    for part in filter(None, place.split(".")):
        target = target.setdefault(part, {})
    target[field] = []
    path = ".".join(filter(None, ("spec", place, field)))
    assert errors(with_spec(**spec))[path].remedy.startswith(remedy)


KEYS = st.sampled_from(
    ["apiVersion", "kind", "metadata", "name", "spec", "model", "source", "hostPath", "path",
     "engine", "env", "extraArgs", "prefill", "decode", "parallelism", "tensor", "nodes",
     "resources", "limits", "podTemplate", "containers", "transfer", "device", "replicas",
     "backends", "router", "rdma", "valueFrom", "x"]
)  # fmt: skip
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=20,
)


@settings(max_examples=3 * settings().max_examples)
@given(JSON, JSON)
def test_any_json_gets_an_answer(whole, spec):
    for manifest in (whole, {**MINIMAL, "spec": spec}):
        _, findings = check_manifest(manifest)
        assert len(findings.errors) <= MAX_ERRORS + 64
        for error in findings.errors:
            assert len(str(error)) < 4000


def test_null_means_not_given():
    assert parse_cluster(with_spec(router=None, engine={"blockSize": None})).errors == ()


def test_errors_are_bounded():
    many = with_spec(**{f"field{n}": 1 for n in range(1000)})
    assert len(parse_cluster(many).errors) == MAX_ERRORS


def test_items_without_a_name_are_not_two_of_one_name():
    found = check_manifest(with_spec(engine={"env": [{"value": "1"}, {"value": "2"}]}))[1].errors
    assert [(error.path, error.rule) for error in found] == [
        ("spec.engine.env[0].name", "Required"),
        ("spec.engine.env[1].name", "Required"),
    ]
