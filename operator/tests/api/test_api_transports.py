"""UCX_TLS: which values leave UCX no way to the memory of GPUs, and how UCX itself reads them."""

from __future__ import annotations

import subprocess
import sys

import pytest
from said_findings import check_manifest

NVIDIA, AMD, INTEL = ({"limits": {name: 1}} for name in (
    "nvidia.com/gpu", "amd.com/gpu", "gpu.intel.com/i915"))  # fmt: skip


def findings(value, prefill=None, decode=None, *, place="engine", transfer=None, template=None):
    variable = {"env": [{"name": "UCX_TLS", "value": value}]}
    roles = {
        role: {"resources": resources or {}, **({"podTemplate": template} if template else {})}
        for role, resources in (("prefill", prefill), ("decode", decode))
    }
    spec = {
        "model": {"source": {"persistentVolumeClaim": {"claimName": "weights"}}},
        "transfer": transfer or {},
        **roles,
    }
    if place == "engine":
        spec["engine"] = variable
    else:
        spec[place]["engine"] = variable
    _, found = check_manifest(
        {
            "apiVersion": "pdcluster.dev/v1alpha1",
            "kind": "PDCluster",
            "metadata": {"name": "x"},
            "spec": spec,
        }
    )
    rule = "TransportWithoutCuda"
    refused, warned = (
        [one for one in some if one.rule == rule] for some in (found.errors, found.warnings)
    )
    assert len(refused) + len(warned) <= 1, "said once"
    return (refused or warned or [None])[0], bool(refused)


NO_WAY = ["rc,tcp", "rc,cuda_ipc", "gdr_copy", "rc, cuda_copy", "CUDA", "^cuda", "^cuda_copy",
          "^tcp,cuda", "rc,all", "all,tcp", "", "rocm", "ze_copy", "cuda_copying"]  # fmt: skip
A_WAY = ["all", "cuda", "cuda_copy", "rc,cuda", "rc,cuda_copy,cuda_ipc", "cuda,rocm", "^tcp",
         "^cuda_ipc", "^gdr_copy", "^gga", "^rocm", "^all", "tcp,\\cuda_copy"]  # fmt: skip


@pytest.mark.parametrize("value", NO_WAY)
@pytest.mark.parametrize(("place", "gpus"), [("engine", None), ("decode", NVIDIA)])
def test_without_cuda_copy_nvidias_gpus_are_refused(value, place, gpus):
    found, refused = findings(value, gpus, gpus, place=place)
    assert refused
    assert found.path == f"spec.{place}{'' if place == 'engine' else '.engine'}.env[0].value"
    assert "cuda_copy" in found.message


@pytest.mark.parametrize("value", A_WAY)
def test_each_way_to_nvidias_gpus_is_accepted(value):
    assert findings(value) == (None, False)


@pytest.mark.parametrize(("name", "gpus"), [("rocm", AMD), ("ze", INTEL)])
def test_the_gpus_of_others_need_their_own_transports_and_only_warn(name, gpus):
    for value in ("rc,cuda_copy", "tcp", f"rc,{name}_ipc", f"^{name}", f"^{name}_copy"):
        found, refused = findings(value, gpus, gpus)
        assert (found.rule, refused) == ("TransportWithoutCuda", False), value
        assert f"{name}_copy" in found.message
    for value in (f"rc,{name}", f"rc,{name}_copy", "all", "^cuda", "^tcp"):
        assert findings(value, gpus, gpus) == (None, False), value


def test_one_variable_of_both_roles_is_judged_by_what_both_have():
    assert findings("rc,tcp", NVIDIA, AMD) == (None, False)  # no transport is needed by both
    assert findings("rc,tcp", NVIDIA, NVIDIA)[1]
    assert findings("rc,rocm", NVIDIA, AMD, place="decode") == (None, False)
    assert findings("rc,rocm", NVIDIA, AMD, place="prefill")[1]


def test_nothing_is_said_where_ucx_does_not_reach_the_device_or_is_not_used():
    for name in ("google.com/tpu", "habana.ai/gaudi", "huawei.com/Ascend910", "aliyun.com/gpu-mem"):
        other = {"limits": {name: 1}}
        assert findings("rc,tcp", other, other) == (None, False)
    assert findings("tcp", transfer={"device": "CPU"}) == (None, False)


def test_gpus_of_a_claim_may_be_anybodys():
    containers = [{"name": "engine", "resources": {"limits": {"nvidia.com/gpu": 0}}}]
    claimed = {"spec": {"containers": containers}}
    for value in ("cuda", "rocm_copy", "ze", "^cuda"):
        assert findings(value, template=claimed) == (None, False)
    found, refused = findings("rc,tcp", template=claimed)
    assert (found.rule, refused) == ("TransportWithoutCuda", False)


CHILD = """
import ctypes, glob, os, sys
from importlib.metadata import distribution
root = distribution("nixl-cu12").locate_file("nixl_cu12.libs")
ucp = ctypes.CDLL(glob.glob(f"{root}/libucp-*")[0])
for value in sys.argv[1:]:
    os.environ["UCX_TLS"] = value
    config, context = ctypes.c_void_p(), ctypes.c_void_p()
    read = ucp.ucp_config_read(None, None, ctypes.byref(config))
    params = (ctypes.c_uint64 * 32)(1, 2)  # features: remote memory access
    made = 0 if read else ucp.ucp_init_version(
        1, 0, ctypes.byref(params), config, ctypes.byref(context))
    print(int(read == 0 and made == 0))
"""


@pytest.mark.nixl
def test_ucx_itself_reads_names_as_they_are_written():
    """A blank belongs to the name, and ``all`` stands alone: both are what the rule relies on."""
    accepted = {"tcp": 1, "all": 1, "^tcp": 1, "\\tcp": 1, "tcp, cma": 1,
                " tcp": 0, "TCP": 0, "rc,all": 0, "all,tcp": 0, "": 0}  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", CHILD, *accepted], capture_output=True, text=True, check=True,
    )  # fmt: skip
    said = [int(line) for line in done.stdout.split() if line in "01"]
    assert dict(zip(accepted, said, strict=True)) == accepted
