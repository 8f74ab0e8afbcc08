"""`pdcluster doctor` on a real API server, as an administrator and as somebody without rights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from real_api import TOKEN, RealApi

from conftest import new_namespace

pytestmark = pytest.mark.cluster
MANIFEST = Path(__file__).parents[3] / "examples" / "infiniband.yaml"


def doctor(kubeconfig: Path, *words: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-m", "pdcluster_operator", "doctor", *words],
        env={
            **os.environ,
            "KUBECONFIG": str(kubeconfig),
            "PYTHONPATH": os.pathsep.join(one for one in sys.path if one.endswith("/src")),
        },
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def rows(kubeconfig: Path, *words: str) -> dict[str, dict[str, Any]]:
    _, out, errors = doctor(kubeconfig, "-o", "json", *words)
    assert out, errors
    found = json.loads(out)
    assert (found["apiVersion"], found["kind"]) == ("cli.pdcluster.dev/v1", "Doctor")
    return {row["check"]: row for row in found["rows"]}


def add_node(real: RealApi, name: str, devices: dict[str, str]) -> None:
    node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}}
    assert real.call("POST", "/api/v1/nodes", node)[0] == 201
    ready = [{"type": "Ready", "status": "True"}]
    status = {"allocatable": devices, "capacity": devices, "conditions": ready}
    path = f"/api/v1/nodes/{name}/status"
    assert real.call("PATCH", path, {"status": status}, "application/merge-patch+json")[0] == 200


def test_what_is_there_and_what_a_manifest_lacks(real: RealApi) -> None:
    admin, space = real.kubeconfig("admin", TOKEN), new_namespace(real)
    names = [f"{space}-{n}" for n in range(2)]
    code, out, _ = doctor(admin, "-n", space, "-f", str(MANIFEST))
    assert code == 6, out
    assert "no rdma/ib" in out
    for name in names:
        add_node(real, name, {"nvidia.com/gpu": "8", "rdma/ib": "8"})
    try:
        found = rows(admin, "-n", space, "-f", str(MANIFEST))
        said = {check: row["verdict"] for check, row in found.items()}
        assert found["GPUs"]["found"] == "nvidia.com/gpu: 16 on 2 nodes"
        assert found["nvidia.com/gpu"]["verdict"] == found["rdma/ib"]["verdict"] == "ok"
        assert said["Kubernetes"] == said["CRD"] == said["your rights"] == "ok"
        # Nobody has installed the chart here.
        assert said["operator"] == "missing"
        assert found["webhook"]["found"] == "no webhook reviews this namespace"
        label = {"metadata": {"labels": {"pod-security.kubernetes.io/enforce": "baseline"}}}
        path = f"/api/v1/namespaces/{space}"
        assert real.call("PATCH", path, label, "application/merge-patch+json")[0] == 200
        found = rows(admin, "-n", space, "-f", str(MANIFEST))
        assert "IPC_LOCK" in found["Pod Security"]["found"]
    finally:
        for name in names:
            real.call("DELETE", f"/api/v1/nodes/{name}")


def test_the_level_refuses_what_the_row_says(real: RealApi) -> None:
    """The API server itself is asked about pods like ours, with the capability and without."""
    space = new_namespace(real)
    label = {"metadata": {"labels": {"pod-security.kubernetes.io/enforce": "baseline"}}}
    path = f"/api/v1/namespaces/{space}"
    assert real.call("PATCH", path, label, "application/merge-patch+json")[0] == 200
    answers = []
    for added in ([], ["IPC_LOCK"]):
        security = {"capabilities": {"drop": ["ALL"], "add": added}}
        container = {"name": "engine", "image": "x", "securityContext": security}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"},
               "spec": {"containers": [container]}}  # fmt: skip
        answers.append(real.call("POST", f"{path}/pods?dryRun=All", pod)[0])
    assert answers == [201, 403]


def test_without_rights_it_says_what_it_does_not_know(real: RealApi) -> None:
    nobody = real.kubeconfig("operator", "operator-token")
    found = rows(nobody, "-n", new_namespace(real))
    assert found["devices"]["verdict"] == "unknown"
    assert 'cannot list resource "nodes"' in found["devices"]["found"]
    assert found["operator"]["verdict"] == found["network policies"]["verdict"] == "unknown"
    assert found["your rights"]["verdict"] == "warning"
    assert "create pods/portforward" in found["your rights"]["found"]


def test_what_is_not_there_is_one_sentence(real: RealApi, tmp_path: Path) -> None:
    code, out, errors = doctor(tmp_path / "none")
    assert (code, out, errors.count("\n")) == (6, "", 1)
    assert "set KUBECONFIG" in errors
    broken = tmp_path / "broken.yaml"
    broken.write_text("kind: PDCluster\n")
    code, out, errors = doctor(real.kubeconfig("admin", TOKEN), "-f", str(broken))
    assert code == 1
    assert "correct them first" in errors
    found = rows(real.kubeconfig("admin", TOKEN), "-n", "no-such", "-f", str(MANIFEST))
    assert found["Pod Security"]["remedy"] == "kubectl create namespace no-such"
