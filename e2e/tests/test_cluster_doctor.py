"""`pdcluster doctor` beside a real operator, and its probe between two real pods over TCP."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from cluster_install import Installation
from cluster_run import manifest

from cluster.session import Cluster
from images.for_cluster import load_engine_image
from waiting import until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]
NAMESPACE = "doctor"
KINDS = "jobs,pods,configmaps"


@pytest.fixture(scope="module")
def space(cluster: Cluster) -> Iterator[str]:
    load_engine_image(cluster)
    cluster.make_namespace(NAMESPACE)
    yield NAMESPACE
    cluster.kubectl("delete", "namespace", NAMESPACE, "--wait=false")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("doctor") / "cluster.yaml"
    path.write_text(yaml.safe_dump(manifest("probed")))
    return path


def start(cluster: Cluster, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "pdcluster_operator", "doctor", "-n", NAMESPACE, *words],
        env={
            **os.environ,
            "KUBECONFIG": str(cluster.kubeconfig),
            "PYTHONPATH": os.pathsep.join(one for one in sys.path if one.endswith("/src")),
        },
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def left(cluster: Cluster) -> str:
    return cluster.kubectl(
        "-n", NAMESPACE, "get", KINDS, "-l", "app.kubernetes.io/name=pdcluster-probe", "-o", "name"
    ) + cluster.kubectl(
        "-n", NAMESPACE, "get", "configmaps", "-o", "name"
    ).replace("configmap/kube-root-ca.crt\n", "")  # fmt: skip


def test_an_installed_operator_and_a_probe(
    cluster: Cluster, operator: Installation, space: str, file: Path
) -> None:
    process = start(cluster, "-f", str(file), "--probe", "-o", "json")
    out, errors = process.communicate(timeout=400)
    found: dict[str, Any] = json.loads(out)
    rows = {row["check"]: row for row in found["rows"]}
    print(json.dumps(found, indent=1), errors)
    assert (process.returncode, found["missing"]) == (0, 0), errors
    assert rows["operator"]["verdict"] == rows["the operator's rights"]["verdict"] == "ok"
    assert rows["webhook"]["found"] == "refuses what it must, in a dry run"
    probe = found["probe"]
    assert probe["gigabytesPerSecond"] > 0
    assert probe["bytes"] >= 1 << 20
    assert all(one.startswith("tcp/") for one in probe["transports"])
    assert probe["transports"]
    assert len(probe["nodes"]) == 1
    assert "on one node" in rows["probe"]["found"]
    until("nothing is left", lambda: not left(cluster), 60, lambda: left(cluster))


def test_ctrl_c_leaves_nothing(
    cluster: Cluster, operator: Installation, space: str, file: Path
) -> None:
    process = start(cluster, "-f", str(file), "--probe")
    until("a probe's pod", lambda: "pod/" in left(cluster), 120, lambda: left(cluster))
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    until("nothing is left", lambda: not left(cluster), 60, lambda: left(cluster))


def test_an_image_that_cannot_be_had_is_named(
    cluster: Cluster, operator: Installation, space: str
) -> None:
    nowhere = "localhost:1/no/image:1"
    process = start(cluster, "--probe", "--image", nowhere, "--timeout", "20s")
    out, errors = process.communicate(timeout=120)
    assert process.returncode == 6, out + errors
    assert "not done in 20 s: serving pod: " in out
    assert nowhere in out
    until("nothing is left", lambda: not left(cluster), 60, lambda: left(cluster))
