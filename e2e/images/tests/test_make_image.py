"""`make image` and `make router-image`: what they run, and what they refuse before they run it."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys

import pytest
import yaml

from images.built import REPOSITORY

PROGRAM = REPOSITORY / "dev" / "image.py"
OPERATOR, ROUTER = "operator", "router"


@pytest.fixture(scope="module")
def module():
    spec = importlib.util.spec_from_file_location("make_image", PROGRAM)
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = loaded  # dataclasses look there
    spec.loader.exec_module(loaded)
    yield loaded
    del sys.modules[spec.name]


def has(*names: str):
    """`shutil.which` on a machine with these programs."""
    return lambda name: f"/usr/bin/{name}" if name in names else None


def test_the_first_program_that_is_there_builds(module):
    assert module.builder("", has("buildah", "podman")) == ["podman"]
    assert module.builder("", has("buildah")) == ["buildah"]
    assert module.builder("buildah --root /x", has("buildah", "docker"))[1:] == ["--root", "/x"]
    with pytest.raises(module.RefusedError, match="docker, podman or buildah was not found"):
        module.builder("", has())
    with pytest.raises(module.RefusedError, match="nerdctl was not found"):
        module.builder("nerdctl", has("docker"))


def test_default_tag_is_what_the_chart_asks_for(module):
    """Without image.tag the chart takes its appVersion."""
    chart = yaml.safe_load((REPOSITORY / "charts" / "pdcluster" / "Chart.yaml").read_text())
    _, tag, _ = module.commands(module.kinds()[OPERATOR], ["docker"], {})
    assert tag == chart["appVersion"]


def test_router_is_the_release_that_the_tests_run(module):
    from importlib.metadata import version

    assert module.kinds()[ROUTER].version == version("vllm-router")


@pytest.mark.parametrize("kind", [OPERATOR, ROUTER])
def test_build_names_files_that_exist_and_copies_what_is_let_in(module, kind):
    built = module.kinds()[kind]
    dockerfile = REPOSITORY / built.dockerfile
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", dockerfile.read_text(), re.MULTILINE)
    ignore = dockerfile.with_name(f"{dockerfile.name}.dockerignore").read_text().splitlines()
    let_in = {line[1:] for line in ignore if line.startswith("!")}
    assert {path for words in copied for path in words.split()} == let_in
    assert all((REPOSITORY / path).exists() for path in let_in)


def test_variables_reach_the_build(module):
    variables = {
        "REPOSITORY": "registry.example:5000/team/op",
        "TAG": "1",
        "PUSH": "1",
        "BASE": "mine",
        "PIP_CONFIG": "/pip.conf",
        "OPTIONS": "--platform linux/arm64",
    }
    repository, tag, (build, push) = module.commands(
        module.kinds()[OPERATOR], ["podman"], variables
    )
    reference = f"{repository}:{tag}"
    assert reference == "registry.example:5000/team/op:1"
    assert build[:2] == ["podman", "build"]
    for words in (
        ["--tag", reference],
        ["--build-arg", "BASE=mine"],
        ["--secret", "id=pip,src=/pip.conf"],
        ["--platform", "linux/arm64"],
    ):
        start = build.index(words[0])
        assert build[start : start + 2] == words
    assert build[-1] == "."
    assert push == ["podman", "push", reference]


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"PUSH": "1"}, "name the registry"),
        ({"PUSH": "1", "REPOSITORY": "team/op"}, "registry.example/team/op"),
        ({"REPOSITORY": "registry.example/op:v1"}, "TAG"),
    ],
)
def test_contradictions_are_refused_before_anything_is_built(module, variables, said):
    with pytest.raises(module.RefusedError, match=said):
        module.commands(module.kinds()[OPERATOR], ["docker"], variables)


def test_a_push_of_zero_and_a_registry_here_are_no_mistakes(module):
    kind = module.kinds()[OPERATOR]
    assert len(module.commands(kind, ["docker"], {"PUSH": "0"})[2]) == 1
    local = {"PUSH": "1", "REPOSITORY": "localhost/op"}
    assert len(module.commands(kind, ["docker"], local)[2]) == 2


def test_make_hands_variables_on_and_ends_with_the_builds_failure(tmp_path):
    """A stand-in for docker that fails at pushing shows what it was asked for."""
    program = tmp_path / "docker"
    program.write_text('#!/bin/sh\necho "asked: $*"\n[ "$1" != push ]\n')
    program.chmod(0o755)
    words = ["image", f"BUILDER={program}", "REPOSITORY=registry.example/op", "TAG=2"]

    def make(*more: str) -> subprocess.CompletedProcess[str]:
        command = ["make", "--no-print-directory", *words, f"PYTHON={sys.executable}", *more]
        return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)

    done = make()
    assert done.returncode == 0, done.stderr
    assert "--tag registry.example/op:2" in done.stdout
    assert "image.repository=registry.example/op,image.tag=2" in done.stdout
    done = make("PUSH=1")
    assert done.returncode
    assert "asked: push registry.example/op:2" in done.stdout
    assert "helm upgrade" not in done.stdout
