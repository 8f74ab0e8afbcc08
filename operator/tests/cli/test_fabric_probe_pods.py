"""The pods of `doctor --probe`: what they get from a manifest, and what their last words become."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from pdcluster_operator.api.rules.validate import check_manifest
from pdcluster_operator.api.spec.types import Cluster, Role
from pdcluster_operator.cli import fabric_probe
from pdcluster_operator.cli.cluster_checks import Verdict
from pdcluster_operator.cli.fabric_probe import Probe, ProbeError, job, order, row_of
from pdcluster_operator.plan.types import ConnectorBundle
from pdcluster_operator.runtime.interfaces import ApiError

EXAMPLES = Path(__file__).parents[3] / "examples"
RC, TCP = ("rc_mlx5/mlx5_0:1",), ("tcp/eth0",)


def cluster(name: str = "roce.yaml", **decode: Any) -> Cluster:
    document = yaml.safe_load((EXAMPLES / name).read_text())
    document["spec"]["decode"] |= decode
    found, findings = check_manifest(document)
    assert findings.ok, findings.errors
    return found


def pod_of(wanted: Cluster | None, *, gpus: bool = False) -> dict[str, Any]:
    made = order("team", wanted, None, gpus, 300)
    template: dict[str, Any] = job(made, Role.DECODE, ["read"], "uid")["spec"]["template"]
    return template


def test_pods_get_the_devices_and_networks_of_the_manifest_and_one_gpu() -> None:
    template = pod_of(cluster())
    (container,) = template["spec"]["containers"]
    limits = container["resources"]["limits"]
    assert (limits["nvidia.com/gpu"], limits["openshift.io/roce"]) == ("1", "1")
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
    assert template["metadata"]["annotations"] == {"k8s.v1.cni.cncf.io/networks": "roce"}
    assert container["image"] == "docker.io/vllm/vllm-openai:v0.32.0"
    assert container["args"][:3] == ["read", "--device", "cuda"]


def test_pods_use_the_backend_of_the_engines_and_its_provider() -> None:
    (container,) = pod_of(cluster("eks-efa.yaml"))["spec"]["containers"]
    assert container["args"][-2:] == ["--backend", "LIBFABRIC"]
    assert {"name": "FI_PROVIDER", "value": "efa"} in container["env"]
    assert container["resources"]["limits"]["vpc.amazonaws.com/efa"]
    (other,) = pod_of(cluster())["spec"]["containers"]
    assert other["args"][-2:] == ["--backend", "UCX"]
    assert "--backend" not in pod_of(None)["spec"]["containers"][0]["args"]
    slow = row_of(Probe(1.0, 1, TCP, "cuda", ("a", "b")), cluster("eks-efa.yaml"))
    assert "FI_PROVIDER" in slow.remedy
    assert "UCX" not in slow.remedy


def test_pods_go_where_engines_go_and_run_nothing_else() -> None:
    overlay = {
        "metadata": {"labels": {"team": "a"}},
        "spec": {
            "nodeSelector": {"pool": "gpus"},
            "tolerations": [{"key": "dedicated", "operator": "Exists"}],
            "volumes": [{"name": "lib", "emptyDir": {}}],
            "initContainers": [{"name": "wait", "image": "x"}],
            "containers": [
                {"name": "engine", "volumeMounts": [{"name": "lib", "mountPath": "/lib2"}],
                 "resources": {"limits": {"nvidia.com/gpu": 4}}},
                {"name": "sidecar", "image": "x"},
            ],
        },
    }  # fmt: skip
    engine = {"env": [{"name": "UCX_NET_DEVICES", "value": "mlx5_1:1"}]}
    template = pod_of(cluster(podTemplate=overlay, engine=engine))
    spec = template["spec"]
    assert spec["nodeSelector"] == {"pool": "gpus"}
    assert "dedicated" in [one["key"] for one in spec["tolerations"]]
    assert {"connector", "shm", "lib"} == {one["name"] for one in spec["volumes"]}
    (container,) = spec["containers"]
    assert {"lib", "shm"} <= {one["name"] for one in container["volumeMounts"]}
    assert {"name": "UCX_NET_DEVICES", "value": "mlx5_1:1"} in container["env"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert "initContainers" not in spec
    assert template["metadata"]["labels"]["team"] == "a"


@pytest.mark.parametrize(("gpus", "device"), [(False, "cpu"), (True, "cuda")])
def test_without_a_manifest_the_nodes_decide_where_bytes_lie(gpus: bool, device: str) -> None:
    template = pod_of(None, gpus=gpus)
    (container,) = template["spec"]["containers"]
    assert container["args"][2] == device
    assert ("nvidia.com/gpu" in container["resources"]["limits"]) is gpus
    assert "add" not in container["securityContext"]["capabilities"]
    assert template["spec"]["automountServiceAccountToken"] is False


def test_one_job_owns_the_other_and_both_end_by_themselves() -> None:
    made = order("team", None, "image:1", False, 300)
    first, second = (
        job(made, role, [], owner) for role, owner in zip(Role, (None, "uid"), strict=True)
    )
    assert "ownerReferences" not in first["metadata"]
    (reference,) = second["metadata"]["ownerReferences"]
    assert (reference["name"], reference["uid"]) == (first["metadata"]["name"], "uid")
    for one in (first, second):
        assert one["spec"]["activeDeadlineSeconds"] == 360
        assert one["spec"]["ttlSecondsAfterFinished"] == 60
        assert one["spec"]["template"]["spec"]["containers"][0]["image"] == "image:1"


@pytest.mark.parametrize(
    ("rate", "transports", "name", "verdict", "words"),
    [
        (20.0, RC, "roce.yaml", Verdict.OK, "20 GB/s over rc_mlx5/mlx5_0:1, GPU memory, between a"),
        (20.0, TCP, "roce.yaml", Verdict.MISSING, "tcp/eth0"),
        (1.0, RC, "roce.yaml", Verdict.MISSING, "1 GB/s"),
        (0.1, TCP, "small-gpu.yaml", Verdict.OK, "0.1 GB/s"),
        (1.0, (), "small-gpu.yaml", Verdict.OK, "UCX did not name"),
    ],
)
def test_a_rate_is_held_against_the_manifest(
    rate: float, transports: tuple[str, ...], name: str, verdict: Verdict, words: str
) -> None:
    probe = Probe(rate, 1 << 28, transports, "cuda", ("a", "b"))
    row = row_of(probe, cluster(name))
    assert row.verdict is verdict
    assert words in row.found
    assert bool(row.remedy) is (verdict is Verdict.MISSING)
    assert "on one node, a" in row_of(Probe(1, 1, TCP, "cpu", ("a",)), None).found


class Scripted:
    """An API server whose pods end with given last words."""

    def __init__(self, words: dict[Role, dict[str, Any] | None]) -> None:
        self._words, self.deleted = words, 0

    async def call(self, method: str, path: str, **given: Any) -> dict[str, Any]:
        if method == "DELETE":
            self.deleted += 1
            raise ApiError("Gone", "not there")
        if method == "POST":
            return {"metadata": {"uid": "uid"}}
        role = Role(given["query"]["labelSelector"].rpartition("-")[2])
        status: dict[str, Any] = {"phase": "Running", "podIP": "192.0.2.1"}
        if (ended := self._words[role]) is not None:
            status = {"phase": "Failed", "containerStatuses": [
                {"name": "engine", "state": {"terminated": {"exitCode": 1, **ended}}}]}  # fmt: skip
        return {"items": [{"metadata": {}, "spec": {"nodeName": "n"}, "status": status}]}


GOOD = {"gigabytesPerSecond": 2.5, "bytes": 8, "rounds": 3, "transports": ["tcp/eth0"]}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"message": json.dumps(GOOD)}, ""),
        ({"message": json.dumps({"error": "NixlError: no"})}, "NixlError: no"),
        ({"message": "Traceback\n  no module"}, "Traceback no module"),
        ({"message": "[1]"}, "[1]"),
        ({"message": "{}"}, "said something else"),
        ({"reason": "OOMKilled"}, "out of memory"),
    ],
)
def test_last_words_become_a_result_or_the_reason(words: dict[str, Any], said: str) -> None:
    server = Scripted({Role.PREFILL: None, Role.DECODE: words})
    made = order("team", None, None, False, 60)
    going = fabric_probe.run(server, made, ConnectorBundle("", b"x"), lambda _: None)  # type: ignore[arg-type]
    if said:
        with pytest.raises(ProbeError, match=said.replace("[", r"\[")):
            asyncio.run(going)
    else:
        assert asyncio.run(going) == Probe(2.5, 8, TCP, "cpu", ("n",))
    assert server.deleted == 3


def test_a_serving_pod_that_ends_is_no_pod_that_serves() -> None:
    ended = {"message": json.dumps({"error": "ImportError: nixl"})}
    server = Scripted({Role.PREFILL: ended, Role.DECODE: None})
    made = order("team", None, None, False, 60)
    with pytest.raises(ProbeError, match="the serving pod ended: ImportError: nixl"):
        asyncio.run(fabric_probe.run(server, made, ConnectorBundle("", b""), lambda _: None))  # type: ignore[arg-type]
