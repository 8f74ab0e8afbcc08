"""The parts that need no cluster and no buildah."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
import sys
import tarfile
import tempfile
from pathlib import Path

import pytest
import yaml

from images import base, built, engine_image, pip_settings, standalone_engine
from images.operator_image import RECIPE
from pdcluster_operator.api.rules.validate import check_manifest


@pytest.fixture
def recipe(tmp_path) -> built.Recipe:
    """The operator's, with sources that a test may change."""
    root = tmp_path / "root"
    for source in RECIPE.sources:
        target = root / source
        target.parent.mkdir(parents=True, exist_ok=True)
        if (RECIPE.root / source).is_dir():
            target.mkdir()
            (target / "module.py").write_text("one = 1\n")
        else:
            target.write_text(source)
    dockerfile = root / "Dockerfile"
    dockerfile.write_text("FROM scratch\n")
    return dataclasses.replace(RECIPE, root=root, dockerfile=dockerfile)


def tag(recipe: built.Recipe, tmp_path: Path) -> str:
    with tempfile.TemporaryDirectory(dir=tmp_path) as folder:
        built.copied(recipe, Path(folder))
        return built.digest(recipe, Path(folder))


@pytest.mark.parametrize("source", [*RECIPE.sources, "Dockerfile"])
def test_tag_changes_with_every_source(recipe, source, tmp_path):
    before = tag(recipe, tmp_path)
    path = recipe.root / source
    file = path / "module.py" if path.is_dir() else path
    file.write_text("changed")
    assert tag(recipe, tmp_path) != before


def test_tag_leaves_bytecode_out_and_sees_renames_and_the_base(recipe, tmp_path):
    before = tag(recipe, tmp_path)
    folder = recipe.root / "operator/src"
    (folder / "__pycache__").mkdir()
    (folder / "__pycache__" / "module.cpython-311.pyc").write_text("compiled")
    assert tag(recipe, tmp_path) == before
    assert tag(dataclasses.replace(recipe, included=("python3",)), tmp_path) != before
    (folder / "module.py").rename(folder / "renamed.py")
    assert tag(recipe, tmp_path) != before


def test_an_image_holds_what_its_tag_says_although_somebody_edits(recipe, tmp_path, monkeypatch):
    """An image with the tag of new sources was once built from old ones, put back for a moment."""
    seen = []

    class Edits:
        """In place of buildah: somebody saves a file when the build has begun."""

        def __init__(self, _: Path) -> None: ...

        def build(self, _: str, __: Path, context: Path, **___: object) -> None:
            (recipe.root / "operator/src/module.py").write_text("two = 2\n")
            seen.append((context / "operator/src/module.py").read_text())

        def export(self, _: str, __: str, archive: Path) -> None:
            archive.write_text(seen[-1])

        def prune(self) -> None: ...

    monkeypatch.setenv("PDCLUSTER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(built, "Buildah", Edits)
    monkeypatch.setattr(built, "ensure_packages", lambda: None)
    monkeypatch.setattr(built, "pip_options", lambda _: contextlib.nullcontext([]))
    monkeypatch.setattr(base, "ensure_base", lambda *_: "base")
    of_one = tag(recipe, tmp_path)
    first = built.build_once(recipe)
    assert (first.tag, first.archive.read_text()) == (of_one, "one = 1\n")
    second = built.build_once(recipe)
    assert second.archive.read_text() == "two = 2\n"
    assert second.tag != first.tag
    assert not first.archive.exists(), "archives of old sources go"
    built.build_once(recipe)
    assert len(seen) == 2, "built once for the same sources"


@pytest.mark.parametrize("recipe", [RECIPE, standalone_engine.RECIPE], ids=["operator", "engine"])
def test_sources_are_what_the_dockerfile_copies(recipe):
    copied = []
    for line in recipe.dockerfile.read_text().splitlines():
        if line.startswith("COPY ") and "--from" not in line:
            copied += line.split()[1:-1]
    assert set(copied) == set(recipe.sources)


def test_sources_are_what_a_build_by_hand_sees():
    ignored = RECIPE.dockerfile.with_name("Dockerfile.dockerignore").read_text().splitlines()
    assert {line[1:] for line in ignored if line.startswith("!")} == set(RECIPE.sources)


def test_base_is_made_anew_for_another_recipe(monkeypatch):
    before = base.base_name()
    assert base.base_name((*base.INCLUDED, "libnuma1")) != before
    monkeypatch.setattr(base, "SUITE", "trixie")
    assert base.base_name() != before


def test_pip_settings_say_where_packages_come_from(monkeypatch):
    listed = (
        ":env:.index-url='https://variable.example/%20simple'\n"
        "global.cert='/ca.pem'\n"
        "global.index-url='https://file.example/simple'\n"
        "global.disable-pip-version-check='1'\n"
    )
    monkeypatch.setattr(pip_settings, "output", lambda *_: listed)
    settings = pip_settings.pip_settings()
    assert settings == {"cert": "/ca.pem", "index-url": "https://variable.example/%20simple"}
    assert "index-url = https://variable.example/%20simple" in pip_settings.written(settings)


def test_engine_image_holds_links_alone(tmp_path):
    image = engine_image.engine_image(tmp_path)
    with tarfile.open(image.archive) as archive:
        manifest = json.load(archive.extractfile("manifest.json"))[0]
        configuration = json.load(archive.extractfile(manifest["Config"]))
        with tarfile.open(fileobj=archive.extractfile(manifest["Layers"][0])) as layer:
            files = {entry.name for entry in layer if entry.isfile()}
    assert manifest["RepoTags"] == [image.name]
    assert files == {"etc/passwd", "etc/group"}
    assert f"PATH={sys.prefix}/bin:/usr/local/bin:/usr/bin:/bin" in configuration["config"]["Env"]


def test_machine_folders_hold_this_python_and_do_not_overlap():
    folders = engine_image.machine_folders()
    for program in (Path(sys.executable).resolve(), Path(shutil.which("gcc") or "/usr").resolve()):
        assert any(program.is_relative_to(folder) for folder in folders), program
    for one in folders:
        assert one.is_dir()
        assert not any(one.is_relative_to(other) for other in folders if other != one)


def test_example_stays_valid_on_this_machine(tmp_path, monkeypatch):
    monkeypatch.setenv("PDCLUSTER_CACHE", str(tmp_path))
    example = yaml.safe_load((built.REPOSITORY / "examples" / "tiny-cpu.yaml").read_text())
    changed = engine_image.for_this_machine(example, Path("/models/tiny"))
    cluster, findings = check_manifest(changed)
    assert not findings.errors
    assert cluster.spec.model.source.host_path.path == "/models/tiny"
    # Only images, mounts and the model differ: the engines are the example's.
    assert changed["spec"]["transfer"] == example["spec"]["transfer"]
    assert changed["spec"]["engine"]["extraArgs"] == example["spec"]["engine"]["extraArgs"]
    assert "podTemplate" not in example["spec"]["router"]
