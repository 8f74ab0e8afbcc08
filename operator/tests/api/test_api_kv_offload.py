"""KV in host memory: which engines may have it, its memory, and what their pods are made of."""

from __future__ import annotations

import json

import pytest
from said_findings import check_manifest

from pdcluster_operator.api.object_names import EngineName
from pdcluster_operator.api.spec.resolve import resolve_engine
from pdcluster_operator.api.spec.types import Role
from pdcluster_operator.plan.builders.engine_objects import build_engine_pod

KEPT = {"kvOffload": {"cpuMemory": "64Gi"}}


def checked(prefill=None, **spec):
    return check_manifest(
        {
            "apiVersion": "pdcluster.dev/v1alpha1",
            "kind": "PDCluster",
            "metadata": {"name": "x"},
            "spec": {
                "model": {"source": {"persistentVolumeClaim": {"claimName": "weights"}}},
                "prefill": {"engine": KEPT, **(prefill or {})},
                **spec,
            },
        }
    )


def errors(prefill=None, **spec):
    return checked(prefill, **spec)[1].errors


def offloading(role=Role.PREFILL, prefill=None, **spec):
    """(the pod, the JSON of its connectors)."""
    cluster, findings = checked(prefill, **spec)
    assert findings.ok, [str(error) for error in findings.errors]
    name = EngineName("default", "x", role, "12345", 0)
    pod = build_engine_pod(cluster, resolve_engine(cluster, role), name, "key", "digest")
    words = pod["spec"]["containers"][0]["args"]
    return pod, json.loads(words[words.index("--kv-transfer-config") + 1])


def shared_memory(pod):
    (shm,) = (volume for volume in pod["spec"]["volumes"] if volume["name"] == "shm")
    return shm["emptyDir"]["sizeLimit"]


def test_prefill_alone_gets_vllms_offloading_connector_beside_ours():
    pod, config = offloading(transfer={"loadFailurePolicy": "Recompute"})
    ours, theirs = config["kv_connector_extra_config"].pop("connectors")
    assert config == {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_buffer_device": "cuda",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {},
    }
    assert theirs == {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"cpu_bytes_to_use": 64 << 30},
    }
    assert (ours["kv_connector"], ours["kv_role"]) == ("PDClusterConnector", "kv_producer")
    assert shared_memory(pod) == f"{72 << 10}Mi", "the operator's own 8Gi, and the KV"

    pod, config = offloading(Role.DECODE)
    assert (config["kv_connector"], config["kv_role"]) == ("PDClusterConnector", "kv_consumer")
    assert shared_memory(pod) == "8Gi"


@pytest.mark.parametrize(("data", "nodes", "share"), [(4, 1, 16), (4, 2, 32), (2, 2, 64)])
def test_data_parallel_ranks_of_a_pod_share_its_memory(data, nodes, share):
    parallel = {"data": data, "nodes": nodes}
    _, config = offloading(
        prefill={"parallelism": parallel}, transfer={"rdma": {"resource": "rdma/ib"}}
    )
    _, theirs = config["kv_connector_extra_config"]["connectors"]
    assert theirs["kv_connector_extra_config"]["cpu_bytes_to_use"] == share << 30


@pytest.mark.parametrize(
    ("spec", "path", "said"),
    [
        ({"decode": {"engine": KEPT}}, "spec.decode.engine.kvOffload", "issue 46951"),
        (
            {"prefill": {"engine": {}}, "engine": KEPT},
            "spec.engine.kvOffload",
            "decode engines cannot have it",
        ),
        (
            {"transfer": {"device": "CPU"}},
            "spec.prefill.engine.kvOffload",
            "KV is in host memory anyway",
        ),
        (
            {"prefill": {"parallelism": {"tensor": 16, "nodes": 2}}},
            "spec.prefill.engine.kvOffload",
            "the engine spans 2 pods",
        ),
    ],
)
def test_engines_that_cannot_have_it(spec, path, said):
    (error,) = errors(**spec)
    assert (error.path, error.rule) == (path, "KvOffloadUnsupported")
    assert said in error.message


LEAST = 64 + 4 + 2 * 8  # of eight GPUs


@pytest.mark.parametrize("kind", ["limits", "requests"])
@pytest.mark.parametrize("overlaid", [False, True])
def test_the_pods_memory_holds_it(kind, overlaid):
    def found(memory):
        given = {kind: {"memory": memory}}
        role = {"parallelism": {"tensor": 8}, "resources": {} if overlaid else given}
        if overlaid:
            role["podTemplate"] = {"spec": {"containers": [{"name": "engine", "resources": given}]}}
        return errors(role)

    assert found(f"{LEAST}Gi") == ()
    (error,) = found(f"{(LEAST << 10) - 1}Mi")
    assert (error.path, error.rule) == (
        "spec.prefill.engine.kvOffload.cpuMemory", "KvOffloadTooLarge",
    )  # fmt: skip
    assert "64Gi for KV + 4Gi for the pod + 2Gi for each of 8 GPUs is more" in error.message
    assert f"resources.{kind}.memory = {(LEAST << 10) - 1}Mi" in error.message
    assert error.remedy == f"Write at least {LEAST << 10}Mi there, or a smaller cpuMemory."


def test_the_limit_counts_where_both_are_given():
    both = {"requests": {"memory": "8Gi"}, "limits": {"memory": "128Gi"}}
    assert errors({"resources": both}) == ()
    assert errors({"resources": {"limits": {"cpu": "8"}}}) == ()


def test_a_shm_of_the_users_own_holds_it():
    def found(**size):
        volume = {"name": "shm", "emptyDir": {"medium": "Memory", **size}}
        return errors({"podTemplate": {"spec": {"volumes": [volume]}}})

    assert found(sizeLimit="65Gi") == found() == found(sizeLimit=str(65 << 30)) == ()
    (error,) = found(sizeLimit="64Gi")
    assert error.rule == "KvOffloadTooLarge"
    assert "spec.volumes[0].emptyDir.sizeLimit = 64Gi is less" in error.message


@pytest.mark.parametrize(
    ("size", "rule"),
    [
        *((size, "BadFormat") for size in ("0Gi", "1.5Gi", "64GB", "-1Gi", "1e3")),
        *(
            (size, "OutOfRange")
            for size in ("64", "68719476736", "1023Mi", "65Ti", "9" * 18 + "Ti")
        ),
    ],
)
def test_a_size_is_a_whole_number_with_a_unit(size, rule):
    (error,) = errors({"engine": {"kvOffload": {"cpuMemory": size}}})
    assert (error.path, error.rule) == ("spec.prefill.engine.kvOffload.cpuMemory", rule)


@pytest.mark.parametrize("size", ["1Gi", "64Ti", "1024Mi"])
def test_the_bounds_of_a_size(size):
    assert errors({"engine": {"kvOffload": {"cpuMemory": size}}}) == ()
