"""Requests and limits, with what the operator and a pod template add."""

from __future__ import annotations

import pytest
from said_findings import check_manifest

from pdcluster_operator.api.object_names import EngineName
from pdcluster_operator.api.spec.resolve import resolve_engine
from pdcluster_operator.api.spec.resources import is_accelerator
from pdcluster_operator.api.spec.types import Role
from pdcluster_operator.plan.builders.engine_objects import build_engine_pod


def manifest(resources=None, overlay=None, tensor=1, device="CUDA", **transfer):
    role = {"parallelism": {"tensor": tensor}, "resources": resources or {}}
    if overlay is not None:
        container = {"name": "engine", "resources": overlay}
        role["podTemplate"] = {"spec": {"containers": [container]}}
    return {
        "apiVersion": "pdcluster.dev/v1alpha1",
        "kind": "PDCluster",
        "metadata": {"name": "x"},
        "spec": {
            "model": {"source": {"persistentVolumeClaim": {"claimName": "weights"}}},
            "transfer": {"device": device, **transfer},
            "prefill": role,
        },
    }


def test_a_role_has_no_gpus_only_if_all_kinds_of_them_are_0():
    none = {"limits": {"nvidia.com/gpu": 0, "amd.com/gpu": "0"}}
    assert errors(overlay=none, tensor=2) == {}
    for name in none["limits"]:
        one = {"limits": {**none["limits"], name: 1}}
        assert "GpuCountMismatch" in {
            found.rule for found in errors(overlay=one, tensor=2).values()
        }


def errors(*args, **kwargs):
    found = check_manifest(manifest(*args, **kwargs))[1].errors
    return {error.path.removeprefix("spec.prefill."): error for error in found}


def given(*args, **kwargs):
    """The resources of the container that the operator makes."""
    cluster, findings = check_manifest(manifest(*args, **kwargs))
    assert findings.ok, [str(error) for error in findings.errors]
    name = EngineName("default", "x", Role.PREFILL, "12345", 0)
    pod = build_engine_pod(cluster, resolve_engine(cluster, Role.PREFILL), name, "key", "digest")
    return pod["spec"]["containers"][0]["resources"]


def test_gpus_are_added_where_none_are_named():
    assert given(tensor=4)["limits"] == {"nvidia.com/gpu": "4"}
    assert given(device="CPU") == {}
    assert given({"limits": {"amd.com/gpu": 2}}, tensor=2)["limits"] == {"amd.com/gpu": "2"}


@pytest.mark.parametrize("none", [0, "0", None])
def test_a_pod_template_takes_the_gpus_away(none):
    # kubectl apply drops a null before the API server sees it; 0 comes through.
    limits = given(overlay={"limits": {"nvidia.com/gpu": none}}, tensor=4).get("limits", {})
    assert limits.get("nvidia.com/gpu") in (None, 0, "0")
    assert "limits.nvidia.com/gpu" in "".join(errors({"limits": {"nvidia.com/gpu": 0}}))


def test_what_is_handed_out_in_pieces_is_a_whole_number():
    assert errors({"limits": {"rdma/ib": "1500m"}})["resources.limits.rdma/ib"].rule == "BadFormat"
    assert not errors({"limits": {"rdma/ib": "1000m", "cpu": "500m"}})


def test_a_resource_whose_name_is_no_text_gets_an_answer():
    assert errors({"limits": {8: 1}}, overlay={"limits": {None: 1, 8: 1}})


@pytest.mark.parametrize(
    "name",
    ["nvidia.com/mig-1g.10gb", "nvidia.com/gpu.shared", "nvidia.com/GB200", "google.com/tpu"],
)
def test_parts_of_gpus_are_gpus_and_get_no_others_beside_them(name):
    assert given({"limits": {name: 1}})["limits"] == {name: "1"}
    assert given(overlay={"limits": {name: 1}})["limits"] == {name: 1}
    found = errors({"limits": {name: 1}}, tensor=2)
    assert found[f"resources.limits.{name}"].rule == "GpuCountMismatch"
    assert "2 GPUs" in found[f"resources.limits.{name}"].message


def test_slices_of_several_sizes_are_added_up():
    slices = {"nvidia.com/mig-1g.10gb": 1, "nvidia.com/mig-2g.20gb": 1}
    assert not errors({"limits": slices}, tensor=2)
    (found,) = errors({"limits": slices}, tensor=4).values()
    assert found.value == "1 + 1"


@pytest.mark.parametrize(
    ("name", "is_one"),
    [("nvidia.com/gpu", True), ("amd.com/gpu", True), ("gpu.intel.com/i915", True),
     ("rdma/ib", False), ("cpu", False), ("nvidia.com/hostdev", False), ("gpu", False),
     *((name, True) for name in (
         "nvidia.com/gpu.shared", "nvidia.com/pgpu", "nvidia.com/GB200", "nvidia.com/mig-7g.80gb",
         "nvidia.com/TU104GL_TESLA_T4", "nvidia.com/GRID_T4-1Q", "nvidia.com/H100",
         "amd.com/cpx_nps4",
         "gpu.intel.com/xe", "gpu.intel.com/tiles", "habana.ai/gaudi", "google.com/tpu",
         "huawei.com/Ascend910", "aws.amazon.com/neuron", "aws.amazon.com/neuroncore",
         "volcano.sh/vgpu-number", "volcano.sh/vgpu-memory", "aliyun.com/gpu-mem", "hygon.com/dcu",
         "deviceclass.resource.kubernetes.io/gpu.nvidia.com",
     )),
     *((name, False) for name in (
         "nvidia.com/MT2892_FAMILY", "nvidia.com/CX7", "nvidia.com/BF3", "nvidia.com/rdma_shared",
         "nvidia.com/roce_gdr", "amd.com/nic", "amd.com/xilinx-u280", "vpc.amazonaws.com/efa",
         "openshift.io/mlx5", "intel.com/sriov_rdma", "habana.ai/nic", "google.com/nic",
         # HAMi's shares stand beside nvidia.com/gpu.
         "nvidia.com/gpumem", "nvidia.com/gpucores", "memory", "hugepages-2Mi",
         "deviceclass.resource.kubernetes.io/rdma.dranet",
     ))],
)  # fmt: skip
def test_which_resources_are_gpus(name, is_one):
    assert is_accelerator(name) is is_one
    added = given({"limits": {name: 1}} if "/" in name else {})["limits"]
    assert ("nvidia.com/gpu" in added) is (not is_one or name == "nvidia.com/gpu")


@pytest.mark.parametrize(
    "share", ["volcano.sh/vgpu-memory", "gpu.intel.com/millicores", "aliyun.com/gpu-mem",
              "aws.amazon.com/neuron", "koordinator.sh/gpu-core"],
)  # fmt: skip
def test_a_share_of_a_gpu_is_not_counted_against_the_parallelism(share):
    assert not errors({"limits": {share: 40}}, tensor=4)
    assert given({"limits": {share: 40}}, tensor=4)["limits"] == {share: "40"}


CLAIMED = {"name": "engine", "resources": {"claims": [{"name": "devices"}]}}


@pytest.mark.parametrize(
    ("containers", "path"),
    [
        ([CLAIMED], "spec.containers[0].resources.claims"),
        ([{"name": "sidecar", "image": "x"}, CLAIMED], "spec.containers[1].resources.claims"),
        ([{"name": "engine"}], "spec.resourceClaims"),
        ([{**CLAIMED, "name": "sidecar", "image": "x"}], None),  # the claim is the sidecar's
    ],
)
def test_gpus_that_are_added_beside_a_claim_are_named(containers, path):
    claim = [{"name": "devices", "resourceClaimName": "gpus"}]
    made = manifest(tensor=2)
    made["spec"]["prefill"]["podTemplate"] = {
        "spec": {"resourceClaims": claim, "containers": containers}
    }

    def found():
        _, findings = check_manifest(made)
        assert findings.ok, findings.errors
        return [one for one in findings.warnings if one.rule == "GpuBesideClaim"]

    wanted = [] if path is None else [f"spec.prefill.podTemplate.{path}"]
    assert [one.path for one in found()] == wanted
    for one in found():
        assert "adds nvidia.com/gpu: 2" in one.message
    # Each way out that the remedy names, and each other accelerator.
    for limits in ({"nvidia.com/gpu": 2}, {"amd.com/gpu": 2}):
        made["spec"]["prefill"]["resources"] = {"limits": limits}
        assert found() == []
    made["spec"]["prefill"]["resources"] = {}
    ours = next((one for one in containers if one["name"] == "engine"), None)
    if ours is not None:
        none = {**ours.get("resources", {}), "limits": {"nvidia.com/gpu": 0}}
        containers[containers.index(ours)] = {**ours, "resources": none}
        assert found() == []
    made["spec"]["transfer"]["device"] = "CPU"
    assert found() == []


@pytest.mark.parametrize(
    ("resources", "path", "said"),
    [
        ({"requests": {"cpu": 4}, "limits": {"cpu": "2"}}, "resources.requests.cpu", "limit 2"),
        ({"requests": {"memory": "2Gi"}, "limits": {"memory": "2G"}},
         "resources.requests.memory", "limit 2G"),
        ({"requests": {"ephemeral-storage": "1Ti"}, "limits": {"ephemeral-storage": "1Gi"}},
         "resources.requests.ephemeral-storage", "limit 1Gi"),
        ({"requests": {"nvidia.com/gpu": 8}, "limits": {"nvidia.com/gpu": 2}},
         "resources.requests.nvidia.com/gpu", "limit is 2"),
        ({"requests": {"nvidia.com/gpu": 1}, "limits": {"nvidia.com/gpu": 2}},
         "resources.requests.nvidia.com/gpu", "must be equal"),
        # The operator writes the limit itself.
        ({"requests": {"nvidia.com/gpu": 8}}, "resources.requests.nvidia.com/gpu", "limit is 2"),
        ({"requests": {"rdma/ib": 1}}, "resources.requests.rdma/ib", "without a limit"),
        ({"requests": {"hugepages-2Mi": "4Mi"}, "limits": {"hugepages-2Mi": "8Mi"}},
         "resources.requests.hugepages-2Mi", "must be equal"),
    ],
)  # fmt: skip
def test_a_request_that_does_not_fit_its_limit(resources, path, said):
    found = errors(resources, tensor=2)
    assert set(found) == {path}
    assert found[path].rule == "RequestLimitMismatch"
    assert said in found[path].message


@pytest.mark.parametrize(
    ("resources", "remedy"),
    [
        ({"requests": {"cpu": 4}, "limits": {"cpu": 2}}, "Write 2 in both"),
        ({"requests": {"nvidia.com/gpu": 8}, "limits": {"nvidia.com/gpu": 2}}, "Write 2 in both"),
        ({"requests": {"rdma/ib": 3}}, "Write 3 in both"),
    ],
)
def test_the_remedy_of_a_request_names_the_limit(resources, remedy):
    (found,) = errors(resources, tensor=2).values()
    assert found.remedy == f"{remedy}, or change the limit."


def test_a_part_of_what_is_handed_out_whole_is_refused_in_a_request_too():
    found = check_manifest(manifest({"requests": {"rdma/ib": "1500m"}}))[1].errors
    assert [error.rule for error in found] == ["BadFormat", "RequestLimitMismatch"]


@pytest.mark.parametrize(
    "resources",
    [
        {"requests": {"cpu": "2000m", "memory": "1024Mi"}, "limits": {"cpu": 2, "memory": "1Gi"}},
        {"requests": {"nvidia.com/gpu": "2"}, "limits": {"nvidia.com/gpu": 2}},
        {"requests": {"nvidia.com/gpu": 2}},
        {"requests": {"memory": "1Gi"}},
        {"limits": {"memory": "1Gi", "hugepages-2Mi": "8Mi", "rdma/ib": 1}},
    ],
)
def test_requests_that_fit_pass(resources):
    assert not errors(resources, tensor=2)


def test_a_pod_template_has_the_last_word_about_a_limit():
    resources = {"requests": {"cpu": 4}, "limits": {"cpu": 8}}
    found = errors(resources, overlay={"limits": {"cpu": 2}})
    assert set(found) == {"resources.requests.cpu"}
    assert found["resources.requests.cpu"].related == (
        "spec.prefill.podTemplate.spec.containers[0].resources.limits.cpu",
    )
    assert not errors(resources, overlay={"limits": {"cpu": 4}})


def test_the_routers_resources_are_judged_too():
    made = manifest()
    # The default limit of memory is 2Gi.
    made["spec"]["router"] = {"resources": {"requests": {"memory": "3Gi", "mem": 1}}}
    found = {error.path: error.rule for error in check_manifest(made)[1].errors}
    assert found == {
        "spec.router.resources.requests.mem": "BadFormat",
        "spec.router.resources.requests.memory": "RequestLimitMismatch",
    }


@pytest.mark.parametrize("name", ["x", "router"])
def test_other_containers_are_judged_too(name):
    sidecar = {"name": name, "image": "x",
               "resources": {"requests": {"cpu": 2}, "limits": {"cpu": 1}}}  # fmt: skip
    made = manifest()
    made["spec"]["router"] = {"podTemplate": {"spec": {"containers": [sidecar]}}}
    (found,) = check_manifest(made)[1].errors
    assert found.path == "spec.router.podTemplate.spec.containers[0].resources.requests.cpu"
    assert found.rule == "RequestLimitMismatch"


@pytest.mark.parametrize("name", ["gpu", "mem", "CPU"])
def test_a_resource_that_kubernetes_does_not_know(name):
    found = errors({"limits": {name: 1}})
    assert found[f"resources.limits.{name}"].rule == "BadFormat"
    assert "domain/name" in found[f"resources.limits.{name}"].message


def test_each_resource_of_a_list_is_judged():
    container = "podTemplate.spec.containers[0].resources"
    overlay = {"requests": {"a/b": "some", "memory": "1Gi", "cpu": 4, "c/d": 1, "e/f": 1},
               "limits": {"cpu": "some", "a/b": 1, "c/d": 2}}  # fmt: skip
    assert {path: found.rule for path, found in errors(overlay=overlay).items()} == {
        f"{container}.requests.a/b": "BadFormat",
        f"{container}.limits.cpu": "BadFormat",
        f"{container}.requests.c/d": "RequestLimitMismatch",
        f"{container}.requests.e/f": "RequestLimitMismatch",
    }


@pytest.mark.parametrize("name", ["memory", "ephemeral-storage"])
@pytest.mark.parametrize(
    ("kind", "amount", "wrong"),
    [
        ("requests", 200, True),
        ("requests", "512m", True),
        ("requests", "64k", True),
        ("requests", "1M", False),
        ("requests", "64Ki", False),
        ("limits", "512m", True),
        ("limits", 0, False),
        ("limits", "4Mi", False),
        ("limits", 4294967296, False),
    ],
)
def test_bytes_without_their_unit_are_refused_in_each_container(name, kind, amount, wrong):
    resources = {kind: {name: amount}}
    sidecar = {"containers": [{"name": "x", "image": "x", "resources": resources}]}
    init = {"initContainers": [{"name": "x", "image": "x", "resources": resources}]}
    places = {
        "prefill.resources": {"prefill": {"resources": resources}},
        "router.resources": {"router": {"resources": {"requests": {}, "limits": {}, **resources}}},
        "decode.podTemplate.spec.containers[0].resources": {
            "decode": {"podTemplate": {"spec": sidecar}}
        },
        "router.podTemplate.spec.initContainers[0].resources": {
            "router": {"podTemplate": {"spec": init}}
        },
    }
    for path, spec in places.items():
        made = manifest()
        made["spec"] |= spec
        found = {one.path: one.rule for one in check_manifest(made)[1].errors}
        assert found == ({f"spec.{path}.{kind}.{name}": "OutOfRange"} if wrong else {}), path


def test_a_limit_of_memory_in_which_nothing_runs():
    made = manifest()
    made["spec"]["router"] = {"resources": {"limits": {"memory": "3Mi"}, "requests": {}}}
    [found] = check_manifest(made)[1].errors
    assert (found.rule, found.message) == ("OutOfRange", "means 3145728 bytes of memory")


def test_each_container_is_judged_and_said_once():
    made = manifest(overlay={"requests": {"cpu": 2}, "limits": {"cpu": 1}})
    sidecar = {"name": "x", "image": "x",
               "resources": {"requests": {"cpu": 2}, "limits": {"cpu": 1}}}  # fmt: skip
    made["spec"]["prefill"]["podTemplate"]["spec"]["containers"].append(sidecar)
    assert [found.path for found in check_manifest(made)[1].errors] == [
        f"spec.prefill.podTemplate.spec.containers[{number}].resources.requests.cpu"
        for number in (0, 1)
    ]


def test_the_count_of_gpus_is_no_second_error_where_another_number_is_wrong():
    made = manifest({"limits": {"nvidia.com/gpu": 4}}, tensor=4)
    made["spec"]["prefill"]["parallelism"]["nodes"] = 3
    assert [found.rule for found in check_manifest(made)[1].errors] == ["NodesDivideWorkers"]
    broken = {"limits": {"nvidia.com/gpu": 2, "amd.com/gpu": "some"}}
    assert [found.rule for found in errors(overlay=broken, tensor=2).values()] == ["BadFormat"]


def test_a_broken_rdma_resource_is_one_error():
    found = check_manifest(manifest(rdma={"resource": "ib"}))[1].errors
    assert [error.path for error in found] == ["spec.transfer.rdma.resource"]


def test_a_broken_amount_is_one_error():
    assert set(errors({"requests": {"cpu": "-1"}, "limits": {"cpu": -2}})) == {
        "resources.requests.cpu", "resources.limits.cpu",
    }  # fmt: skip
    container = "podTemplate.spec.containers[0].resources"
    for amounts in ({"cpu": "some"}, {"cpu": 1}), ({"cpu": 1}, {"cpu": "some"}):
        overlay = dict(zip(("requests", "limits"), amounts, strict=True))
        broken = next(kind for kind, amount in overlay.items() if amount == {"cpu": "some"})
        assert set(errors(overlay=overlay)) == {f"{container}.{broken}.cpu"}


@pytest.mark.parametrize(
    ("resources", "overlay", "warned"),
    [
        ({}, None, True),
        ({"requests": {"cpu": 1}}, None, True),
        ({"requests": {"memory": "1Gi"}}, None, False),
        ({"limits": {"memory": "1Gi"}}, None, False),
        ({}, {"requests": {"memory": "1Gi"}}, False),
    ],
)
def test_a_pod_without_a_memory_request_is_warned_of(resources, overlay, warned):
    made = manifest(resources, overlay)
    made["spec"]["decode"] = {"resources": {"requests": {"memory": "1Gi"}}}
    found = [w for w in check_manifest(made)[1].warnings if w.rule == "NoMemoryRequest"]
    assert [w.path for w in found] == ["spec.prefill.resources.requests.memory"] * warned
