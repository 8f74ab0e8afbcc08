"""docs/design.md: the files and functions that its walks name exist."""

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
