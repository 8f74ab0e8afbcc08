"""The parts that need no cluster and no buildah."""

from __future__ import annotations

import json
import shutil
import sys
import tarfile
from pathlib import Path

import pytest
import yaml

from images import base, engine_image, operator_image, pip_settings
from images.operator_image import DOCKERFILE, REPOSITORY, SOURCES
from pdcluster_operator.api.validate import check_manifest


@pytest.fixture
def sources(tmp_path) -> Path:
    for source in SOURCES:
        target = tmp_path / source
        target.parent.mkdir(parents=True, exist_ok=True)
        if (REPOSITORY / source).is_dir():
            target.mkdir()
            (target / "module.py").write_text("one = 1\n")
        else:
            target.write_text(source)
    return tmp_path


@pytest.mark.parametrize("source", SOURCES)
def test_digest_changes_with_every_source(sources, source):
    before = operator_image.source_digest(sources)
    path = sources / source
    file = path / "module.py" if path.is_dir() else path
    file.write_text("changed")
    assert operator_image.source_digest(sources) != before


def test_digest_leaves_bytecode_out_and_sees_renames(sources):
    before = operator_image.source_digest(sources)
    folder = sources / "operator/src"
    (folder / "__pycache__").mkdir()
    (folder / "__pycache__" / "module.cpython-311.pyc").write_text("compiled")
    assert operator_image.source_digest(sources) == before
    (folder / "module.py").rename(folder / "renamed.py")
    assert operator_image.source_digest(sources) != before


def test_digest_covers_what_the_dockerfile_copies():
    copied = []
    for line in DOCKERFILE.read_text().splitlines():
        if line.startswith("COPY ") and "--from" not in line:
            copied += line.split()[1:-1]
    assert set(copied) | {"operator/Dockerfile"} == set(SOURCES)
    ignored = DOCKERFILE.with_name("Dockerfile.dockerignore").read_text().splitlines()
    assert {line[1:] for line in ignored if line.startswith("!")} == set(copied)


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
    example = yaml.safe_load((REPOSITORY / "examples" / "tiny-cpu.yaml").read_text())
    changed = engine_image.for_this_machine(example, Path("/models/tiny"))
    cluster, findings = check_manifest(changed)
    assert not findings.errors
    assert cluster.spec.model.source.host_path.path == "/models/tiny"
    # Only images, mounts and the model differ: the engines are the example's.
    assert changed["spec"]["transfer"] == example["spec"]["transfer"]
    assert changed["spec"]["engine"]["extraArgs"] == example["spec"]["engine"]["extraArgs"]
    assert "podTemplate" not in example["spec"]["router"]
