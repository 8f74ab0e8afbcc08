"""The examples before a default install's own webhook: a dry run on a real API server."""

from __future__ import annotations

import json
import re
import secrets
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster.report import ClusterError
from cluster.session import Cluster
from images.for_cluster import operator_values

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "charts" / "pdcluster"
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))
CRD = "pdclusters.pdcluster.dev"
SCALER_CRD = "prefillscalers.pdcluster.dev"


@pytest.fixture(scope="module")
def installed(cluster: Cluster) -> Iterator[None]:
    """A default install that is ready: nothing is set but its image."""
    name = f"chart-examples-{secrets.token_hex(3)}"
    helm = [cluster.helm(4), "--kubeconfig", cluster.kubeconfig, "--namespace", name]
    # A CRD that exists already belongs to somebody. Removing it would remove every PDCluster.
    brings_crd = not cluster.kubectl("get", "crd", CRD, "-o", "name", "--ignore-not-found")
    values: dict[str, Any] = {"image": operator_values(cluster), "crds": {"enabled": brings_crd}}
    words = ("install", "examples", CHART, "--create-namespace", "--values=-", "--wait")
    done = subprocess.run(
        [*helm, *words, "--timeout=180s"],
        input=json.dumps(values),
        capture_output=True,
        text=True,
        check=False,
    )
    try:
        assert done.returncode == 0, done.stdout + done.stderr
        yield
    finally:
        subprocess.run([*helm, "uninstall", "examples"], capture_output=True, check=False)
        cluster.kubectl("delete", "namespace", name, "--wait=false", "--ignore-not-found")
        if brings_crd:
            cluster.kubectl("delete", "crd", CRD, SCALER_CRD, "--ignore-not-found")


def review(cluster: Cluster, file: Path, folder: Path) -> str:
    """Return what kubectl says about a dry run. Tries again while no webhook listens yet.

    It uses the namespace `default`, because a webhook does not review its release's own namespace.
    """
    deadline = time.monotonic() + 60
    # KEDA and NVIDIA's DRA driver are not installed here.
    kept = [
        part
        for part in re.split(r"^---$", file.read_text(), flags=re.MULTILINE)
        if not re.search(r"^apiVersion: (keda\.sh|resource\.nvidia\.com)/", part, re.MULTILINE)
    ]
    known = folder / file.name
    known.write_text("---".join(kept))
    while True:
        words = ("apply", "--dry-run=server", "-n", "default", "-f", str(known))
        try:
            return cluster.kubectl(*words)
        except ClusterError as error:
            if "failed calling webhook" not in str(error) or time.monotonic() > deadline:
                return f"refused: {error}"
            time.sleep(1)


@pytest.mark.usefixtures("installed")
def test_every_example_is_admitted_where_it_does_not_say_otherwise(
    cluster: Cluster, tmp_path: Path
) -> None:
    for file in EXAMPLES:
        said = review(cluster, file, tmp_path)
        if "operator.allowHostPathModels=true" in file.read_text():
            # Only our webhook refuses this, so it was asked.
            assert "HostPathNotAdmitted" in said, said
        else:
            assert not said.startswith("refused"), f"{file.name}: {said}"
            assert "(server dry run)" in said
    assert any("allowHostPathModels" in file.read_text() for file in EXAMPLES)
