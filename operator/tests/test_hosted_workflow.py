"""The hosted workflow runs what the Makefile has, and all that a submission must pass."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
MAKEFILE = (ROOT / "Makefile").read_text()
TARGET = re.compile(r"\bmake (?:-s )?([a-z0-9-]+)")


def targets() -> dict[str, list[str]]:
    """Each target of the Makefile, with the targets that it needs first."""
    found: dict[str, list[str]] = {}
    for name, needs in re.findall(r"^([a-z0-9-]+):(?!=)([^#=\n]*)", MAKEFILE, re.MULTILINE):
        found.setdefault(name, []).extend(re.findall(r"\b[a-z0-9-]+\b", needs))
    return found


def without_parts(name: str) -> set[str]:
    """The targets that a target stands for, if it does nothing of its own."""
    parts = {"test": targets()["test"], "e2e": targets()["e2e"]}.get(name, [])
    return set(parts) or {name}


def jobs_of_the_workflow() -> dict[str, list[str]]:
    """The targets of each job."""
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    return {
        name: [target for step in job["steps"] for target in TARGET.findall(step.get("run", ""))]
        for name, job in workflow["jobs"].items()
    }


def test_each_job_runs_targets_that_exist() -> None:
    jobs = jobs_of_the_workflow()
    assert set(jobs) == {"lint", "pure", "engines", "cluster"}
    for name, named in jobs.items():
        assert named, name
        assert set(named) <= set(targets()), name


def test_the_jobs_together_run_what_a_submission_must_pass() -> None:
    submission = set(TARGET.findall((ROOT / ".ci/run").read_text()))
    assert {"test", "e2e"} <= submission
    needed = set[str]().union(*(without_parts(name) for name in submission))
    assert needed == {
        "env",
        "cluster-images",
        "check",
        "pure",
        "engines",
        "local-e2e",
        "cluster-e2e",
    }
    run = {target for named in jobs_of_the_workflow().values() for target in named}
    # A cluster's programs and images are built by the target that needs them.
    assert needed - run == {"cluster-images"}
