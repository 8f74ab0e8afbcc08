"""What the operator's image installs is what the operator imports."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pdcluster_operator

ROOT = Path(__file__).resolve().parents[3]
PINNED = {
    line.partition("==")[0] for line in (ROOT / "requirements/operator.txt").read_text().split()
}


def imported(folder: Path) -> Iterator[tuple[str, str]]:
    """Top-level names that are imported anywhere in a package, and by which file."""
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names = [node.module]
            else:
                continue
            for name in names:
                yield name.partition(".")[0], str(path.relative_to(folder))


def test_every_import_of_the_operator_is_pinned_for_its_image() -> None:
    distributions = importlib.metadata.packages_distributions()
    # `pdcluster bench` runs only where vLLM is, which brings Pillow.
    own = {"pdcluster_operator", "pdcluster_connector", "__future__", "PIL"}
    missing = set()
    for name, path in imported(Path(pdcluster_operator.__file__).parent):
        if name in own or name in sys.stdlib_module_names:
            continue
        wanted = {re.sub(r"[-_.]+", "-", d).lower() for d in distributions[name]}
        if not wanted & PINNED:
            missing.add((name, path))
    assert missing == set()
