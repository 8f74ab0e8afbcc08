"""What is legal and costs an hour later: images, weights, flags, one-sided settings."""

from __future__ import annotations

import pytest
from said_findings import check_manifest

from pdcluster_connector.compat.supported import REFUSED_FLAGS, SUPPORTED, text_of
from pdcluster_operator.api.rules.images_and_weights import Image, parse_image
from pdcluster_operator.api.spec.router_types import Router

CLAIM = {"source": {"persistentVolumeClaim": {"claimName": "weights"}}}


def check(*, host_paths=True, **spec):
    memory = {"resources": {"requests": {"memory": "1Gi"}}}
    roles = {role: memory | spec.pop(role, {}) for role in ("prefill", "decode")}
    return check_manifest(
        {
            "apiVersion": "pdcluster.dev/v1alpha1",
            "kind": "PDCluster",
            "metadata": {"name": "x"},
            "spec": {"model": CLAIM, **roles, **spec},
        },
        host_paths=host_paths,
    )


def errors(**spec):
    return {error.path: error for error in check(**spec)[1].errors}


def warnings(**spec):
    found = check(**spec)[1]
    assert found.ok, [str(error) for error in found.errors]
    return {warning.path: warning for warning in found.warnings}


def test_a_plain_spec_has_no_warning():
    assert warnings() == {}


@pytest.mark.parametrize(
    ("reference", "image", "release"),
    [
        ("vllm/vllm-openai:v0.32.0", Image("vllm/vllm-openai", "v0.32.0", ""), (0, 32)),
        ("localhost:5000/vllm", Image("localhost:5000/vllm", "latest", ""), None),
        ("a/b@sha256:0f", Image("a/b", "", "sha256:0f"), None),
        ("a:5/b:0.33.1rc2@sha256:0f", Image("a:5/b", "0.33.1rc2", "sha256:0f"), (0, 33)),
        ("b:v0.32-cu13", Image("b", "v0.32-cu13", ""), (0, 32)),
        ("b:12", Image("b", "12", ""), None),
        ("b:0.32.", Image("b", "0.32.", ""), None),
        ("b:0.32.x", Image("b", "0.32.x", ""), None),
        ("b:0.12345", Image("b", "0.12345", ""), None),
        ("b:20261.1", Image("b", "20261.1", ""), None),
        ("b:nightly-0.32", Image("b", "nightly-0.32", ""), None),
    ],
)
def test_image_references_are_taken_apart(reference, image, release):
    assert parse_image(reference) == image
    assert parse_image(reference).release == release


@pytest.mark.parametrize(
    ("image", "error", "warned"),
    [
        ("docker.io/vllm/vllm-openai:v0.32.0", False, None),
        ("docker.io/vllm/vllm-openai:v0.33.1", False, None),
        ("docker.io/vllm/vllm-openai:v0.10.0", True, None),
        ("mirror:5000/vllm/vllm-openai:v0.34.0", True, None),
        (f"vllm/vllm-openai-cpu:v0.31.2@sha256:{'0' * 64}", True, None),
        ("vllm/vllm-openai:latest", False, "ImageNotPinned"),
        ("vllm/vllm-openai", False, "ImageNotPinned"),
        ("mirror:5000/engine:nightly", False, "ImageNotPinned"),
        ("mirror:5000/vllm-cpu:v0.10.0", False, "VersionUnsupported"),
        ("mirror:5000/engine:v0.10.0", False, None),
        ("mirror:5000/vllm:12.6-cuda", False, None),
        (f"mirror:5000/vllm@sha256:{'0' * 64}", False, None),
        (f"mirror:5000/vllm:latest@sha256:{'0' * 64}", False, None),
    ],
)
def test_what_an_images_tag_says(image, error, warned):
    found = errors(engine={"image": image})
    assert set(found) == ({"spec.engine.image"} if error else set())
    if error:
        assert found["spec.engine.image"].rule == "VersionUnsupported"
        low, high = map(text_of, SUPPORTED["vllm"])
        assert f">= {low}, < {high}" in found["spec.engine.image"].message
        return
    said = {path: str(w.rule) for path, w in warnings(engine={"image": image}).items()}
    assert said == ({"spec.engine.image": warned} if warned else {})


@pytest.mark.parametrize("tag", ["latest", "nightly", "main", "master", "edge", "dev", "stable"])
def test_a_tag_that_moves_is_warned_of_whatever_it_is_called(tag):
    (found,) = warnings(engine={"image": f"a/b:{tag}"}).values()
    assert found.rule == "ImageNotPinned"
    assert f"the tag {tag} moves" in found.message


def test_any_version_may_be_tried_by_who_says_so():
    """The launcher's own way out, which admission must not close."""
    env = [{"name": "PDCLUSTER_ANY_VERSION", "value": "1"}]
    image = "docker.io/vllm/vllm-openai:v0.10.0"
    found = warnings(engine={"image": image, "env": env})
    assert found["spec.engine.image"].rule == "VersionUnsupported"
    env[0]["value"] = "0"
    assert "spec.engine.image" in errors(engine={"image": image, "env": env})
    env[0]["value"] = "1"
    assert "spec.engine.image" in errors(engine={"image": image}, prefill={"engine": {"env": env}})


def test_different_images_of_the_roles():
    engine = {"image": "docker.io/vllm/vllm-openai:v0.33.0"}
    found = warnings(decode={"engine": engine})
    assert found["spec.decode.engine.image"].rule == "ImagesDiffer"
    assert "v0.32.0" in found["spec.decode.engine.image"].value
    assert "v0.33.0" in found["spec.decode.engine.image"].value
    assert not warnings(prefill={"engine": engine}, decode={"engine": engine})
    assert "spec.prefill.engine.image" in warnings(prefill={"engine": engine})


def test_an_image_of_a_pod_template_is_judged_instead():
    template = {"spec": {"containers": [{"name": "engine", "image": "vllm/vllm-openai:v0.10.0"}]}}
    (found,) = errors(decode={"podTemplate": template}).values()
    assert found.path == "spec.decode.podTemplate.spec.containers[0].image"
    assert found.rule == "VersionUnsupported"
    template["spec"]["containers"][0]["image"] = "vllm/vllm-openai:v0.33.0"
    (warned,) = warnings(decode={"podTemplate": template}).values()
    assert (warned.path, warned.rule) == (found.path, "ImagesDiffer")
    template["spec"]["containers"][0]["image"] = 7
    assert [one.rule for one in errors(decode={"podTemplate": template}).values()] == ["WrongType"]


def test_a_routers_moving_image():
    found = warnings(router={"image": "a/b:latest"}, engine={"image": "a/vllm:latest"})
    assert found["spec.router.image"].rule == "ImageNotPinned"
    assert found["spec.router.image"].remedy == "Name a release or a digest."
    assert "such as v0." in found["spec.engine.image"].remedy, "of vLLM, not of the router"
    assert not warnings(router={"image": "a/b:latest", "replicas": 0})


def test_nobody_is_warned_of_the_routers_default_image():
    default = Router().image
    assert not warnings(router={"image": default})
    other = default.replace("nightly", "latest")
    assert [one.rule for one in warnings(router={"image": other}).values()] == ["ImageNotPinned"]


@pytest.mark.parametrize("flag", REFUSED_FLAGS)
def test_flags_that_the_connector_refuses_at_start_are_refused_before(flag):
    for word in (flag, flag.replace("-", "_").replace("__", "--", 1), flag[:-3]):
        found = errors(decode={"engine": {"extraArgs": ["--seed", "1", word]}})
        (refused,) = found.values()
        assert (refused.path, refused.rule) == (
            "spec.decode.engine.extraArgs[2]", "FlagUnsupported",
        )  # fmt: skip
        assert flag in refused.message
        assert word.replace("_", "-") in refused.remedy
    assert not errors(engine={"extraArgs": [f"--no-{flag[2:]}"]})


NO_IMAGES = ["--mm-processor-cache-gb", "0"]


@pytest.mark.parametrize("words", [NO_IMAGES, ["--mm_processor_cache_gb=0.0"]])
@pytest.mark.parametrize("off", [{"prefixCaching": "Disabled"}, {}])
def test_images_that_vllm_would_only_number_are_refused(words, off):
    words = words if off else [*words, "--no-enable-prefix-caching"]
    found = errors(decode={"engine": {"extraArgs": words, **off}})
    (refused,) = found.values()
    assert (refused.path, refused.rule) == ("spec.decode.engine.extraArgs", "FlagUnsupported")
    assert "in the decode engines prefix caching is off too" in refused.message
    assert "numbers images instead of hashing them" in refused.message
    other = "set engine.prefixCaching: Enabled" if off else "--no-enable-prefix-caching"
    assert refused.remedy == f"Remove --mm-processor-cache-gb, or {other}."
    one = errors(prefill={"engine": {"extraArgs": NO_IMAGES}}, engine={"prefixCaching": "Disabled"})
    assert list(one) == ["spec.prefill.engine.extraArgs"], "a role may have it from both places"


def test_images_that_one_of_both_caches_hashes_are_not_refused():
    assert not errors(engine={"extraArgs": NO_IMAGES})
    for words in ([], ["--mm-processor-cache-gb", "0.5"], [*NO_IMAGES, "--enable-prefix-caching"]):
        assert not errors(engine={"extraArgs": words, "prefixCaching": "Disabled"}), words
    text = {"extraArgs": [*NO_IMAGES, "--language-model-only"], "prefixCaching": "Disabled"}
    assert not errors(engine=text)
    (abbreviated,) = errors(engine={"extraArgs": ["--mm-processor-cache-g", "0"]}).values()
    assert abbreviated.rule == "UnreadableFlag"


@pytest.mark.parametrize("word", ["--enable-prefix-caching", "--enable-chunked-prefill", "-ep"])
def test_other_flags_that_enable_something_pass(word):
    assert not errors(engine={"extraArgs": [word]})


@pytest.mark.parametrize(
    ("revision", "args", "moving"),
    [
        (None, [], ""),
        ("main", [], "main"),
        ("9213176726f574b556790deb65791e0c5aa438b6", [], None),
        ("v1.0", [], None),
        (None, ["--revision", "9213176726f574b556790deb65791e0c5aa438b6"], None),
        ("v1.0", ["--revision", "main"], "main"),
    ],
)
def test_weights_that_may_change_between_two_starts(revision, args, moving):
    hub = {"repo": "a/b"} | ({"revision": revision} if revision else {})
    found = warnings(model={"source": {"huggingFace": hub}}, engine={"extraArgs": args})
    rules = {path: (str(w.rule), w.value) for path, w in found.items()}
    path = "spec.model.source.huggingFace.revision"
    assert rules == ({path: ("WeightsNotPinned", moving)} if moving is not None else {})


def test_a_cache_that_nothing_is_downloaded_to():
    cache = {"persistentVolumeClaim": {"claimName": "cache"}}
    assert warnings(model={**CLAIM, "cache": cache})["spec.model.cache"].rule == "CacheUnused"
    host = {"source": {"hostPath": {"path": "/models"}}, "cache": cache}
    assert "spec.model.cache" in warnings(model=host)
    hub = {"source": {"huggingFace": {"repo": "a/b", "revision": "v1"}}, "cache": cache}
    assert not warnings(model=hub)


@pytest.mark.parametrize(
    ("engine", "field", "value"),
    [
        ({"blockSize": 32}, "blockSize", "32"),
        ({"kvCacheDtype": "fp8"}, "kvCacheDtype", "fp8_e4m3"),
        ({"extraArgs": ["--block-size=64"]}, "extraArgs", "64"),
        ({"extraArgs": ["--dtype", "float32"]}, "extraArgs", "float32"),
    ],
)
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_what_one_role_alone_says(engine, field, value, role):
    found = warnings(**{role: {"engine": engine}})
    (warning,) = found.values()
    assert (warning.path, warning.rule) == (f"spec.{role}.engine.{field}", "SetOnOneRole")
    assert warning.value == value
    assert f"only the {role} engines" in warning.message
    other = "decode" if role == "prefill" else "prefill"
    assert not warnings(**{role: {"engine": engine}, other: {"engine": engine}})
    assert not warnings(engine=engine)


def on_one_node(how="nodeSelector", **more):
    """Both roles with pod templates that put decode beside prefill."""
    labels = {"pdcluster.dev/cluster": "x", "pdcluster.dev/role": "prefill"}
    term = {"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": labels}}
    name = {"nodeName": "gpu-1", "nodeSelector": {"kubernetes.io/hostname": "gpu-1"}}
    beside = {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}
    decode = {"affinity": beside} if how == "affinity" else {how: name[how]}
    prefill = {} if how == "affinity" else {how: name[how]}
    return {
        "prefill": {"podTemplate": {"spec": {**prefill, **more}}},
        "decode": {"podTemplate": {"spec": {**decode, **more}}},
    }


@pytest.mark.parametrize("how", ["nodeName", "nodeSelector", "affinity"])
def test_roles_of_one_node_share_no_nvlink_unless_something_is_done(how):
    def said(spec=None, **more):
        found = check(**(spec or on_one_node(how)), **more)[1]
        assert found.ok, found.errors
        return [(one.rule, one.path) for one in found.warnings if one.rule == "NoRdma"]

    field = "affinity.podAffinity" if how == "affinity" else how
    assert said() == [("NoRdma", f"spec.decode.podTemplate.spec.{field}")]
    # Each way out that the remedy names, and where there is no NVLink to be lost.
    assert said(transfer={"rdma": {"resource": "rdma/ib"}}) == []
    assert said(on_one_node(how, hostPID=True)) == []
    assert said(engine={"env": [{"name": "UCX_TLS", "value": "tcp,cuda_copy"}]}) == []
    assert said(transfer={"device": "CPU"}) == []
    engine = {"name": "engine", "resources": {"limits": {"amd.com/gpu": 1}}}
    assert said(on_one_node(how, containers=[engine])) == []


def test_roles_that_only_may_be_on_one_node_are_not_warned_of():
    for spec in (
        on_one_node("nodeSelector") | {"decode": {}},
        {"prefill": {"podTemplate": {"spec": {"nodeSelector": {"gpu": "h100"}}}},
         "decode": {"podTemplate": {"spec": {"nodeSelector": {"gpu": "h100"}}}}},
    ):  # fmt: skip
        assert "NoRdma" not in {one.rule for one in check(**spec)[1].warnings}


def test_engines_over_several_machines_without_rdma():
    role = {"parallelism": {"tensor": 16, "nodes": 2}}
    found = warnings(decode=role)
    assert found["spec.transfer.rdma"].rule == "NoRdma"
    assert "2 pods" in found["spec.transfer.rdma"].message
    assert not warnings(decode=role, transfer={"rdma": {"resource": "rdma/ib"}})
    assert not warnings(decode=role, transfer={"device": "CPU"})
    assert not warnings(decode={"parallelism": {"tensor": 8}})
    own = {"requests": {"memory": "1Gi"}, "limits": {"nvidia.com/gpu": 8, "cpu": 8}}
    assert "spec.transfer.rdma" in warnings(decode=role | {"resources": own})
    own["limits"]["vpc.amazonaws.com/efa"] = 4
    assert not warnings(decode=role | {"resources": own})
    found = check(prefill=role, decode=role)[1].warnings
    assert [w.rule for w in found] == ["NoRdma"], "said once"
    assert "the prefill engines" in found[0].message


def test_folders_of_nodes_are_told_to_whoever_does_not_know_the_operator():
    template = {"spec": {"volumes": [{"name": "x", "hostPath": {"path": "/etc"}}]}}
    spec = {"model": {"source": {"hostPath": {"path": "/m"}}}, "decode": {"podTemplate": template}}
    told = [w for w in warnings(host_paths=None, **spec).values() if "folder of" in w.message]
    assert {w.path for w in told} == {
        "spec.model.source.hostPath.path", "spec.decode.podTemplate.spec.volumes[0].hostPath",
    }  # fmt: skip
    assert all("a default install refuses" in w.message for w in told)
    assert {w.path for w in told} == set(errors(host_paths=False, **spec))
    assert "HostPathNotAdmitted" not in {w.rule for w in warnings(host_paths=True, **spec).values()}
