"""What `operator/Dockerfile` leaves out is not needed by what runs in the operator's image."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

ROOT = Path(__file__).resolve().parents[3]
MANIFEST = ROOT / "examples" / "tiny-cpu.yaml"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sources as the Dockerfile installs them: copied, then without what it removes."""
    source = tmp_path_factory.mktemp("source")
    dockerfile = (ROOT / "operator" / "Dockerfile").read_text()
    for part in re.findall(r"^COPY (\S+/src) /source/\1$", dockerfile, re.MULTILINE):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / part, source / part, ignore=ignored)
    removed = re.findall(r"^RUN rm -r /source/(\S+)$", dockerfile, re.MULTILINE)
    assert removed
    for part in removed:
        shutil.rmtree(source / part)
    return source


def run(source: Path, *words: str) -> subprocess.CompletedProcess[str]:
    path = f"{source}/operator/src:{source}/connector/src"
    return subprocess.run(
        [sys.executable, *words],
        env={**os.environ, "PYTHONPATH": path},
        cwd=source,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )


def test_local_mode_is_left_out(installed: Path) -> None:
    package = installed / "operator/src/pdcluster_operator"
    assert (package / "cli").is_dir()
    assert not (package / "local").exists()


def test_operator_and_webhook_need_no_local_mode(installed: Path) -> None:
    """One Python imports all of them: no import before makes a missing module appear."""
    modules = ["adapters.operator_process", "adapters.webhook_process", "handlers", "cli.operator"]
    imports = "\n".join(f"import pdcluster_operator.{module}" for module in modules)
    done = run(installed, "-c", imports)
    assert done.returncode == 0, done.stderr


def test_manifests_are_still_checked_there(installed: Path) -> None:
    assert run(installed, "-m", "pdcluster_operator", "lint", str(MANIFEST)).returncode == 0
    done = run(installed, "-m", "pdcluster_operator", "plan", str(MANIFEST))
    assert done.returncode == 0, done.stderr
    assert "StatefulSet" in done.stdout


def test_up_says_what_to_install_instead(installed: Path) -> None:
    done = run(installed, "-m", "pdcluster_operator", "up", str(MANIFEST))
    assert done.returncode == 6
    assert done.stderr.startswith("error: this installation has no local mode")
    assert "pip install '.[operator]'" in done.stderr
    assert "Traceback" not in done.stderr
