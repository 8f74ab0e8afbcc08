"""What `pdcluster doctor` makes of facts, without a cluster; and of this machine."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from played_server import kubeconfig, serving, status

from pdcluster_operator.api.rules.validate import check_manifest
from pdcluster_operator.api.schema.crd import crd
from pdcluster_operator.api.spec.types import Cluster
from pdcluster_operator.cli import cluster_facts, machine_checks, output
from pdcluster_operator.cli.cluster_checks import (
    LEAST_KUBERNETES,
    ClusterFacts,
    Node,
    Row,
    Verdict,
    check_cluster,
    claims_of,
    device_needs,
)
from pdcluster_operator.cli.doctor import Doctor
from pdcluster_operator.cli.exits import Exit
from pdcluster_operator.cli.main import main
from pdcluster_operator.local.preflight import Host
from pdcluster_operator.runtime.interfaces import ApiError

ROOT = Path(__file__).parents[3]
DENIED = (
    'admission webhook "validate.pdcluster.dev" denied the request: '
    "spec.engine.extraArgs[0] = --port: [OwnedFlag]"
)
OK, WARNING, MISSING, UNKNOWN = Verdict


def example(name: str) -> Cluster:
    document = next(yaml.safe_load_all((ROOT / "examples" / name).read_text()))
    return check_manifest(document)[0]


def labelled(name: str, **labels: str) -> dict[str, Any]:
    named = {f"app.kubernetes.io/{key}": value for key, value in labels.items()}
    return {"metadata": {"name": name, "namespace": "pd", "labels": named}}


def facts(**changed: Any) -> ClusterFacts:
    """A cluster that has everything."""
    operator = {
        **labelled("pdcluster-operator", component="operator", version="1"),
        "status": {"readyReplicas": 1},
    }
    answers: dict[str, Any] = {
        "version": {"major": "1", "minor": "33+", "gitVersion": "v1.33.2"},
        "namespace": labelled("team"),
        "crd": crd(),
        "deployments": {"items": [operator]},
        "daemonsets": {"items": [labelled("cilium")]},
        "groups": {"groups": [{"name": "k8s.cni.cncf.io"}]},
        "podgroups": None,
        "deviceclasses": None,
    }
    fields: dict[str, Any] = {
        "namespace": "team",
        "nodes": tuple(
            Node(f"n{n}", {"nvidia.com/gpu": 8, "rdma/ib": 8, "openshift.io/roce": 8})
            for n in range(2)
        ),
        "answers": answers | changed.pop("answers", {}),
        "own": {"create pods": True},
        "operator": {"create pods": True},
        "review": DENIED,
        "version": "1",
    }
    return ClusterFacts(**(fields | changed))


def found(check: str, cluster: Cluster | None = None, **changed: Any) -> Row:
    rows = [row for row in check_cluster(facts(**changed), cluster) if row.check == check]
    assert len(rows) == 1, rows
    return rows[0]


@pytest.mark.parametrize("name", ["infiniband.yaml", "roce.yaml", "small-gpu.yaml"])
def test_a_cluster_that_has_everything_lacks_nothing(name: str) -> None:
    rows = check_cluster(facts(), example(name))
    assert {row.verdict for row in rows} <= {OK, UNKNOWN}
    assert [row.check for row in rows if row.verdict is UNKNOWN] == (
        [] if name == "small-gpu.yaml" else ["locked memory"]
    )


@pytest.mark.parametrize(
    ("check", "answers", "verdict", "words"),
    [
        ("Kubernetes", {"version": {"major": "1", "minor": "29"}}, MISSING, "1.29"),
        ("Kubernetes", {"version": "no answer in 15 s"}, UNKNOWN, "no answer"),
        ("CRD", {"crd": None}, MISSING, "none"),
        ("CRD", {"crd": "forbidden"}, UNKNOWN, "forbidden"),
        ("operator", {"deployments": {"items": []}}, MISSING, "none"),
        ("operator", {"deployments": "forbidden"}, UNKNOWN, "forbidden"),
        ("network policies", {"daemonsets": {"items": [labelled("kube-flannel-ds")]}}, WARNING,
         "kube-flannel-ds does not"),
        ("network policies", {"daemonsets": {"items": []}}, UNKNOWN, "no network"),
        ("network policies", {"daemonsets": "forbidden"}, UNKNOWN, "forbidden"),
        ("Pod Security", {"namespace": None}, UNKNOWN, "there is no namespace team"),
    ],
)  # fmt: skip
def test_what_the_api_server_told_decides(
    check: str, answers: Mapping[str, Any], verdict: Verdict, words: str
) -> None:
    row = found(check, answers=answers)
    assert (row.verdict, words in row.found) == (verdict, True), row
    assert row.remedy or verdict is UNKNOWN


def test_an_older_crd_is_told_by_the_fields_that_it_lacks() -> None:
    old = crd()
    spec = old["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    del spec["properties"]["transfer"]["properties"]["minBandwidthMBps"]
    row = found("CRD", answers={"crd": old})
    assert (row.verdict, row.found) == (WARNING, "lacks spec.transfer.minBandwidthMBps")


@pytest.mark.parametrize(
    ("version", "ready", "verdict"), [("1", 1, OK), ("1", 0, MISSING), ("2", 1, WARNING)]
)
def test_an_operator_is_alive_and_of_this_version(
    version: str, ready: int, verdict: Verdict
) -> None:
    one = labelled("pdcluster-operator", component="operator", version=version)
    answers = {"deployments": {"items": [{**one, "status": {"readyReplicas": ready}}]}}
    assert found("operator", answers=answers).verdict is verdict


@pytest.mark.parametrize(
    ("said", "verdict"),
    [
        (DENIED, OK),
        ("", WARNING),
        ('failed calling webhook "validate.pdcluster.dev": connection refused', MISSING),
        ("Forbidden: User cannot create", UNKNOWN),
    ],
)
def test_the_webhook_is_judged_by_what_it_does(said: str, verdict: Verdict) -> None:
    assert found("webhook", review=said).verdict is verdict


def test_what_the_webhook_is_asked_is_refused_by_its_rules_alone() -> None:
    asked = cluster_facts.refused_manifest("blue")
    _, findings = check_manifest(asked)
    assert [error.rule for error in findings.errors] == ["OwnedFlag"]
    schema = crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    jsonschema.validate(asked["spec"], schema["properties"]["spec"])
    assert asked["spec"]["operatorClass"] == "blue"
    assert "operatorClass" not in cluster_facts.refused_manifest(None)["spec"]


def test_devices_are_counted_on_nodes_that_take_pods() -> None:
    cluster = example("infiniband.yaml")
    needs = {"nvidia.com/gpu": [(8, 1), (8, 1)], "rdma/ib": [(8, 1), (8, 1)]}
    assert device_needs(cluster) == needs
    assert found("GPUs").found == "nvidia.com/gpu: 16 on 2 nodes"
    assert found("rdma/ib", cluster).verdict is OK
    whole, cordoned = facts().nodes
    assert isinstance(cordoned, Node)
    row = found("rdma/ib", cluster, nodes=(whole, replace(cordoned, usable=False)))
    assert (row.verdict, row.found) == (MISSING, "rdma/ib: 8 on 1 node")
    # Enough in all, but no node has 8.
    four = tuple(Node(f"n{n}", {"nvidia.com/gpu": 4, "rdma/ib": 8}) for n in range(4))
    assert found("nvidia.com/gpu", cluster, nodes=four).verdict is MISSING
    # Without a manifest nothing is missing, only told.
    row = found("RDMA devices", nodes=(Node("n", {"amd.com/gpu": 8, "habana.ai/gaudi": 8}),))
    assert (row.verdict, row.found) == (WARNING, "no node offers one")
    assert found("devices", nodes="forbidden").verdict is UNKNOWN


@pytest.mark.parametrize("name", ["amd.com/gpu", "habana.ai/gaudi", "nvidia.com/mig-1g.10gb"])
def test_other_accelerators_are_gpus_too(name: str) -> None:
    assert found("GPUs", nodes=(Node("n", {name: 7}),)).found == f"{name}: 7 on 1 node"


@pytest.mark.parametrize(
    ("level", "name", "refused"),
    [
        (None, "infiniband.yaml", ""),
        ("privileged", "infiniband.yaml", ""),
        ("baseline", "infiniband.yaml", "IPC_LOCK"),
        ("baseline", "small-gpu.yaml", ""),
        ("baseline", "tiny-cpu.yaml", "hostPath"),
        ("restricted", "small-gpu.yaml", "pods of root"),
    ],
)
def test_a_pod_security_level_is_held_against_the_manifest(
    level: str | None, name: str, refused: str
) -> None:
    labels = {"pod-security.kubernetes.io/enforce": level} if level else {}
    namespace = {"metadata": {"name": "team", "labels": labels}}
    row = found("Pod Security", example(name), answers={"namespace": namespace})
    assert row.verdict is (MISSING if refused else OK)
    assert refused in row.found


def test_what_only_some_manifests_need_is_asked_for_them_alone() -> None:
    assert not [row for row in check_cluster(facts(), None) if row.check in ("Multus", "Kueue")]
    none = {"groups": {"groups": []}}
    assert found("Multus", example("roce.yaml")).verdict is OK
    assert found("Multus", example("roce.yaml"), answers=none).verdict is MISSING
    assert found("Multus", example("roce.yaml"), answers={"groups": "forbidden"}).verdict is UNKNOWN
    gang = example("small-gpu.yaml")
    document = yaml.safe_load((ROOT / "examples/small-gpu.yaml").read_text())
    document["spec"]["scheduling"] = {"gang": "Enabled", "queueName": "team"}
    gang = check_manifest(document)[0]
    served = {"groups": {"groups": [{"name": "scheduling.k8s.io"}]}}
    assert found("Kueue", gang, answers=served).verdict is MISSING
    assert found("PodGroups", gang, answers=served).verdict is MISSING
    assert found("PodGroups", gang, answers={**served, "podgroups": {}}).verdict is OK


def test_claims_of_a_manifest_have_to_be_there() -> None:
    cluster = example("volume.yaml")
    assert claims_of(cluster) == ["weights"]
    for answer, verdict in ((None, MISSING), ({"status": {"phase": "Bound"}}, OK), ("x", UNKNOWN)):
        assert found("claim weights", cluster, answers={"claim weights": answer}).verdict is verdict


@pytest.mark.parametrize(
    ("rights", "yours", "operators"),
    [
        ({"a": True}, OK, OK),
        ({"a": False, "b": None}, WARNING, MISSING),
        ({"a": None}, UNKNOWN, UNKNOWN),
        ({}, UNKNOWN, UNKNOWN),
    ],
)
def test_rights_that_nobody_holds_are_named(
    rights: dict[str, bool | None], yours: Verdict, operators: Verdict
) -> None:
    assert found("your rights", own=rights).verdict is yours
    assert found("the operator's rights", operator=rights).verdict is operators


def test_the_bounds_are_those_of_the_chart() -> None:
    chart = yaml.safe_load((ROOT / "charts/pdcluster/Chart.yaml").read_text())
    assert chart["kubeVersion"] == f">={'.'.join(map(str, LEAST_KUBERNETES))}.0-0"
    rules = (ROOT / "charts/pdcluster/templates/_rules.tpl").read_text()
    for right in cluster_facts.OPERATOR:
        verb, _, what = right.partition(" ")
        group, resource = what.split("/", 1)
        blocks = re.findall(r"apiGroups: \[(.*?)\]\n  resources: \[(.*?)\](.*?)(?=\n-|\n\{)",
                            rules, re.DOTALL)  # fmt: skip
        given = [
            rest
            for groups, resources, rest in blocks
            if groups.strip('"') == ("" if group == "core" else group)
            and resource in resources.split(", ")
        ]
        assert any(re.search(rf"\b{verb}\b", rest) for rest in given), right


class SilentServer:
    """An API server that refuses each call."""

    async def call(self, *_: Any, **__: Any) -> dict[str, Any]:
        raise ApiError("Forbidden", "no")


def test_a_server_that_refuses_everything_leaves_unknown_rows() -> None:
    told = asyncio.run(cluster_facts.gather(SilentServer(), "team", example("volume.yaml"), None))  # type: ignore[arg-type]
    rows = check_cluster(told, example("volume.yaml"))
    assert {row.verdict for row in rows if row.check != "shared memory"} == {UNKNOWN}
    asks = {row.check: row.remedy for row in rows if "rights" in row.check}
    ask = "See what you may ask: kubectl auth can-i --list -n"
    assert asks == {
        "your rights": f"{ask} team", "the operator's rights": f"{ask} pdcluster-system",
    }  # fmt: skip


def test_who_is_told_nothing_does_not_hear_that_all_is_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(lambda *_: status(403, "Forbidden", "no")) as server:
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig(tmp_path, server.url)))
        assert main(["doctor"]) == Exit.REQUEST_FAILED


def test_the_models_folder_is_that_of_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest, empty = str(ROOT / "examples/tiny-cpu.yaml"), str(tmp_path)
    code = main(["doctor", "--machine", "-f", manifest, "--model-dir", empty, "-o", "json"])
    told = {row["check"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    assert code == Exit.MACHINE
    assert empty in told["--model-dir"]["why"]
    assert main(["doctor", "-f", manifest, "--model-dir", empty]) == Exit.USAGE


class TestMachine:
    """This machine, and others by their files."""

    def look(self, root: Path, **changed: Any) -> dict[str, Row]:
        silent = {"PATH": "/nowhere"}
        seen = replace(machine_checks.look(silent, root), **changed)
        return {row.check: row for row in machine_checks.judged(seen)}

    def test_files_of_the_kernel_become_rows(self, tmp_path: Path) -> None:
        for name, text in {
            "sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE\n",
            "sys/class/infiniband/mlx5_0/ports/1/rate": "400 Gb/sec (4X NDR)\n",
            "sys/class/infiniband/mlx5_0/ports/1/link_layer": "InfiniBand\n",
            "proc/driver/nvidia/gpus/0000:01/information": "Model: \t\t NVIDIA H100\nIRQ: 1\n",
            "proc/sys/kernel/yama/ptrace_scope": "1\n",
            "sys/class/kfd/kfd/topology/nodes/0/gpu_id": "0\n",
            "sys/class/kfd/kfd/topology/nodes/1/gpu_id": "4098\n",
        }.items():
            file = tmp_path / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        rows = self.look(tmp_path, locked=1 << 20)
        nic = "mlx5_0 port 1: ACTIVE, 400 Gb/sec (4X NDR) (InfiniBand)"
        assert (rows["RDMA"].verdict, rows["RDMA"].found) == (OK, nic)
        assert rows["GPUDirect"].verdict is UNKNOWN
        assert rows["locked memory"].verdict is WARNING
        assert rows["shared memory"].verdict is WARNING  # there is none below this folder
        assert rows["process isolation"].found == "one PID namespace, ptrace_scope 1"
        assert rows["GPUs"].found == "1 AMD GPU"
        cuda = self.look(tmp_path, host=Host(gpus=8), silence="")
        assert cuda["GPUs"].found == "8 NVIDIA GPUs: NVIDIA H100"

    def test_nics_that_are_down_and_a_python_without_vllm(self, tmp_path: Path) -> None:
        port = tmp_path / "sys/class/infiniband/mlx5_0/ports/1"
        port.mkdir(parents=True)
        (port / "state").write_text("1: DOWN\n")
        host = Host(versions={"vllm": "0.20.0"}, supported={"vllm": ">=1", "nixl": ">=2"},
                    unsupported=("vllm",))  # fmt: skip
        rows = self.look(tmp_path, host=host, silence="", python="/opt/python3")
        assert rows["RDMA"].verdict is WARNING
        assert (rows["vllm"].verdict, rows["vllm"].found) == (MISSING, "0.20.0")
        assert rows["nixl"].remedy == "/opt/python3 -m pip install 'nixl>=2'"

    def test_a_python_that_is_silent_is_missing(self, tmp_path: Path) -> None:
        rows = self.look(tmp_path)
        assert rows["Python"].verdict is MISSING
        assert "No such file" in rows["Python"].found


def test_the_command_looks_at_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["doctor", "--machine", "-o", "json"])
    told = json.loads(capsys.readouterr().out)
    jsonschema.validate(told, output.schema(Doctor))
    assert code == (6 if told["missing"] else 0)
    assert {"Python", "GPUs", "RDMA", "shared memory"} <= {row["check"] for row in told["rows"]}
    code = main(["doctor", "--machine", "-f", str(ROOT / "examples/deepseek-two-nodes.yaml")])
    told = capsys.readouterr().out
    assert code == 6
    assert re.search(r"^spec\.\S+ +missing", told, re.MULTILINE), told
    assert main(["doctor", "--machine", "-n", "x"]) == 2
    assert "leave -n, --context and --probe out" in capsys.readouterr().err
