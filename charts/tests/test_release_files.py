"""`make release`: the files of a release, made by the real programs."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.helm

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("operator/src/pdcluster_operator", "connector/src/pdcluster_connector")


def test_a_dry_run_makes_every_file(tmp_path: Path, version: str) -> None:
    uv = subprocess.check_output(
        [sys.executable, "dev/environment.py", "--print-uv"], cwd=ROOT, text=True
    ).strip()
    made = tmp_path / "dist"
    done = subprocess.run(
        [sys.executable, "dev/release.py", "--uv", uv, "--folder", made],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("Nothing was published.\n")
    names = {path.name for path in made.iterdir()}
    wheel = f"pdcluster-{version}-py3-none-any.whl"
    assert names == {
        wheel,
        f"pdcluster-{version}.tar.gz",
        f"pdcluster-{version}.tgz",
        f"kubectl-pdcluster-{version}.tar.gz",
        "pdcluster.yaml",
        "operator.cdx.json",
        "notes.md",
        "SHA256SUMS",
    }
    for line in (made / "SHA256SUMS").read_text().splitlines():
        digest, name = line.split()
        assert hashlib.sha256((made / name).read_bytes()).hexdigest() == digest
        names.discard(name)
    assert names == {"SHA256SUMS"}
    # A file that git tracks and the wheel lacks would be missing only at a user's.
    tracked = subprocess.check_output(["git", "ls-files", *PACKAGES], cwd=ROOT, text=True)
    held = set(zipfile.ZipFile(made / wheel).namelist())
    assert {path.partition("/src/")[2] for path in tracked.split()} <= held
    parts = json.loads((made / "operator.cdx.json").read_text())["components"]
    pinned = (ROOT / "requirements/operator.txt").read_text().split()
    assert {f"{part['name']}=={part['version']}" for part in parts} == set(pinned)


@pytest.fixture
def version() -> str:
    chart = (ROOT / "charts/pdcluster/Chart.yaml").read_text()
    return chart.partition("appVersion: ")[2].partition("\n")[0]
