"""Variables are judged alike wherever a user gives them: in engine.env, or in a pod template."""

from __future__ import annotations

from typing import Any

import pytest
from said_findings import check_manifest

HUB = {
    "source": {"huggingFace": {"repo": "a/b", "revision": "v1", "tokenSecretRef": {"name": "t"}}}
}
KEY = {"router": {"apiKeySecretRef": {"name": "api"}}}
WRONG = [
    ("HF_HOME", "/x", "OwnedVariable", {"model": HUB}),
    ("HF_TOKEN", "x", "OwnedVariable", {"model": HUB}),
    ("VLLM_HOST_IP", "10.0.0.1", "OwnedVariable", {}),
    ("POD_IP", "10.0.0.1", "OwnedVariable", {}),
    ("PDCLUSTER_NODE_RANK", "0", "OwnedVariable", {}),
    ("VLLM_API_KEY", "x", "OwnedVariable", {}),
    ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True", "ExpandableSegments", {}),
    ("PYTORCH_ALLOC_CONF", "a:1,expandable_segments: true", "ExpandableSegments", {}),
    ("UCX_TLS", "rc,tcp", "TransportWithoutCuda", {}),
    ("VLLM_NIXL_SIDE_CHANNEL_PORT", "1", "ConflictingSettings", {}),
    ("VLLM_GPU_NIC_PCIE_MAPPING", "1b:00.0=1c:00.0", "ConflictingSettings", {}),
    ("VLLM_NIC_SELECTION_VARS", "UCX_NET_DEVICES:1", "ConflictingSettings", {}),
]
RIGHT = [
    ("HF_HOME", "/x", {}),
    ("HF_TOKEN", "x", {}),
    ("VLLM_LOGGING_LEVEL", "DEBUG", {}),
    ("PDCLUSTER_ANY_VERSION", "1", {}),
    ("MY_PDCLUSTER_NODE_RANK", "0", {}),
    ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:False", {}),
    ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True", {"transfer": {"device": "CPU"}}),
    ("UCX_TLS", "rc,cuda_copy", {}),
    ("UCX_TLS", "tcp", {"transfer": {"device": "CPU"}}),
    ("PYTHONPATH", "/more", KEY),
    ("VLLM_NIC_SELECTION_VARS", "", {}),
    ("UCX_NET_DEVICES", "mlx5_0:1", {}),
]


def container(name: str, *env: dict[str, Any]) -> dict[str, Any]:
    image = {} if name in ("engine", "router") else {"image": "docker.io/library/busybox:1.36"}
    return {"podTemplate": {"spec": {"containers": [{"name": name, "env": list(env), **image}]}}}


def rules(**spec: Any) -> dict[str, str]:
    """Path -> rule of all findings that are about variables."""
    spec.setdefault("model", {"source": {"persistentVolumeClaim": {"claimName": "weights"}}})
    head = {"apiVersion": "pdcluster.dev/v1alpha1", "kind": "PDCluster", "metadata": {"name": "x"}}
    found = check_manifest({**head, "spec": spec})[1]
    return {
        one.path.partition(".env[0]")[2]: str(one.rule)
        for one in (*found.errors, *found.warnings)
        if ".env[0]" in one.path
    }


def places(name: str, value: str) -> dict[str, dict[str, Any]]:
    var = {"name": name, "value": value}
    return {
        "engine": {"engine": {"env": [var]}},
        "prefill.engine": {"prefill": {"engine": {"env": [var]}}},
        "decode.podTemplate": {"decode": container("engine", var)},
    }


@pytest.mark.parametrize(("name", "value", "rule", "spec"), WRONG)
def test_a_variable_is_judged_alike_in_each_place(
    name: str, value: str, rule: str, spec: dict[str, Any]
) -> None:
    for place, given in places(name, value).items():
        assert list(rules(**given, **spec).values()) == [rule], place
    assert rules(decode=container("sidecar", {"name": name, "value": value}), **spec) == {}


@pytest.mark.parametrize(("name", "value", "spec"), RIGHT)
def test_what_is_the_users_own_is_accepted_in_each_place(
    name: str, value: str, spec: dict[str, Any]
) -> None:
    for place, given in places(name, value).items():
        assert rules(**given, **spec) == {}, place


NICS = {
    "VLLM_GPU_NIC_PCIE_MAPPING": "0000:1b:00.0=0000:1c:00.0,0000:3b:00.0=0000:3c:00.0",
    "VLLM_NIC_SELECTION_VARS": "UCX_NET_DEVICES:1, NCCL_IB_HCA",
}


@pytest.mark.parametrize(
    ("more", "decode", "found"),
    [
        ({}, {}, []),
        ({"UCX_NET_DEVICES": "mlx5_0:1"}, {}, [("spec.engine.env[2].value", "UCX_NET_DEVICES")]),
        ({"NCCL_IB_HCA": "mlx5_0"}, {}, [("spec.engine.env[2].value", "NCCL_IB_HCA")]),
        ({"UCX_TLS": "all"}, {}, []),
        ({}, {"UCX_NET_DEVICES": "a"}, [("spec.decode.engine.env[0].value", "UCX_NET_DEVICES")]),
        ({}, {"VLLM_NIC_SELECTION_VARS": ""}, [("spec.engine.env[0].name", "")]),
    ],
)
def test_each_rank_has_a_nic_of_its_own(
    more: dict[str, str], decode: dict[str, str], found: list[tuple[str, str]]
) -> None:
    def env(given: dict[str, str]) -> dict[str, Any]:
        return {"engine": {"env": [{"name": name, "value": of} for name, of in given.items()]}}

    head = {"apiVersion": "pdcluster.dev/v1alpha1", "kind": "PDCluster", "metadata": {"name": "x"}}
    model = {"source": {"persistentVolumeClaim": {"claimName": "weights"}}}
    spec = {"model": model, **env(NICS | more), "decode": env(decode)}
    said = check_manifest({**head, "spec": spec})[1]
    ours = [one for one in (*said.errors, *said.warnings) if ".env[" in one.path]
    assert [one.path for one in ours] == [path for path, _ in found]
    for one, (_, name) in zip(ours, found, strict=True):
        assert one.rule == "ConflictingSettings"
        assert f"Remove {name}" in one.remedy or not name
        assert (one in said.errors) == (not name), "alone it ends the engine"


OF_A_SECRET = {"secretKeyRef": {"name": "nics", "key": "vars"}}


@pytest.mark.parametrize(
    ("other", "refused"),
    [
        ({"env": [{"name": "VLLM_NIC_SELECTION_VARS"}]}, True),
        ({"env": [{"name": "VLLM_NIC_SELECTION_VARS", "valueFrom": OF_A_SECRET}]}, False),
        ({"envFrom": [{"configMapRef": {"name": "nics"}}]}, False),
        ({}, True),
    ],
)  # fmt: skip
def test_a_nic_variable_may_have_its_pair_elsewhere(other: dict[str, Any], refused: bool) -> None:
    """Without value and source it is empty. A ConfigMap of envFrom may have it."""
    own = {"name": "engine", **other}
    env = [{"name": "VLLM_GPU_NIC_PCIE_MAPPING", "value": "a=b"}]
    head = {"apiVersion": "pdcluster.dev/v1alpha1", "kind": "PDCluster", "metadata": {"name": "x"}}
    model = {"source": {"persistentVolumeClaim": {"claimName": "weights"}}}
    template = {"podTemplate": {"spec": {"containers": [own]}}}
    spec = {
        "model": model,
        "engine": {"env": env},
        **dict.fromkeys(("prefill", "decode"), template),
    }
    errors = check_manifest({**head, "spec": spec})[1].errors
    assert {one.path for one in errors if one.rule == "ConflictingSettings"} == (
        {"spec.engine.env[0].name"} if refused else set()
    )


def test_the_routers_variables() -> None:
    def of(name: str, **more: Any) -> dict[str, str]:
        return rules(router={**container("router", {"name": name, "value": "x"}), **more})

    assert of("VLLM_API_KEY") == {".name": "OwnedVariable"}
    assert of("PYTHONPATH", **KEY["router"]) == {".name": "OwnedVariable"}, (
        "the gate is found by it"
    )
    assert of("PYTHONPATH") == {}
    for name in ("UCX_TLS", "HF_HOME", "VLLM_HOST_IP", "RUST_LOG"):
        assert of(name) == {}, "the router does not read it"


def test_a_template_may_let_any_version_of_vllm_start() -> None:
    """Its variable wins over the one of engine.env, in the role that it is for."""

    def refused(decode: dict[str, Any], **engine: Any) -> set[str]:
        head = {"apiVersion": "pdcluster.dev/v1alpha1", "kind": "PDCluster"}
        model = {"source": {"persistentVolumeClaim": {"claimName": "weights"}}}
        engine["image"] = "docker.io/vllm/vllm-openai:v0.10.0"
        spec = {"model": model, "engine": engine, "prefill": {"engine": good}, "decode": decode}
        found = check_manifest({**head, "metadata": {"name": "x"}, "spec": spec})[1]
        return {one.path for one in found.errors}

    good = {"image": "docker.io/vllm/vllm-openai:v0.32.0"}

    def said(value: str) -> dict[str, str]:
        return {"name": "PDCLUSTER_ANY_VERSION", "value": value}

    assert refused(container("engine", said("1"))) == set()
    assert refused(container("engine", said("0"))) == {"spec.engine.image"}
    assert refused(container("engine", said("0")), env=[said("1")]) == {"spec.engine.image"}
    assert refused(container("sidecar", said("1"))) == {"spec.engine.image"}
