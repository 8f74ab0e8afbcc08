"""What pages tell a contributor to open exists: the walks of docs/design.md, CONTRIBUTING.md."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "design.md").read_text()
HOMES = {
    "7. A request, file by file": "connector/src/pdcluster_connector",
    "8. A manifest, file by file": "operator/src/pdcluster_operator",
}
NAMED = re.compile(r"`([\w/]+\.py)`(?: `([\w.]+)`)?")


def named(title: str) -> list[tuple[str, str]]:
    section = PAGE.split(f"## {title}\n")[1].split("\n## ")[0]
    return NAMED.findall(section)


def defined(path: Path) -> set[str]:
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{item.name}" for item in node.body if hasattr(item, "name")}
    return names


@pytest.mark.parametrize("title", HOMES)
def test_a_walk_names_what_exists(title: str) -> None:
    found = named(title)
    assert len(found) > 10
    for file, name in found:
        path = ROOT / HOMES[title] / file
        assert path.exists(), file
        assert not name or name in defined(path), f"{file} has no {name}"


def test_the_checklists_name_files_that_exist() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text()
    steps = page.partition("## Common changes, step by step")[2].partition("\n## ")[0]
    homes = {"C": "connector/src/pdcluster_connector", "O": "operator/src/pdcluster_operator"}
    found = re.findall(r"`([\w.-]+/[\w./-]*)`", steps)
    assert len(found) > 30
    for file in found:
        first, _, rest = file.partition("/")
        assert (ROOT / homes.get(first, first) / rest).exists(), file
