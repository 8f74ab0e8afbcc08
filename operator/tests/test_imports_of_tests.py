"""Whatever tests, benchmarks and tools import from the product exists.

mypy reads the product's cores only, and the pure tests don't collect the tests that need engines:
a module that is renamed would be missed there until the engines' tests are collected.
"""

import ast
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = {
    "pdcluster_connector": ROOT / "connector/src/pdcluster_connector",
    "pdcluster_operator": ROOT / "operator/src/pdcluster_operator",
}
ASKING = sorted(
    path
    for folder in ("connector/tests", "operator/tests", "charts", "e2e", "dev")
    for path in (ROOT / folder).rglob("*.py")
)


def module_file(dotted: str) -> Path | None:
    first, *rest = dotted.split(".")
    place = SOURCES[first].joinpath(*rest)
    package, module = place / "__init__.py", place.with_name(place.name + ".py")
    return next((path for path in (package, module) if path.is_file()), None)


@cache
def defined(path: Path) -> frozenset[str]:
    """The names that a module binds anywhere outside of its functions and classes."""
    names: set[str] = set()
    waiting: list[ast.AST] = [ast.parse(path.read_text())]
    while waiting:
        for node in ast.iter_child_nodes(waiting.pop()):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                names.add(node.name)
                continue
            if isinstance(node, ast.Import | ast.ImportFrom):
                names |= {alias.asname or alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            waiting.append(node)
    return frozenset(names)


def missing(source: str) -> list[str]:
    """What a file imports from the product and the product does not have."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            wanted = [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            wanted = [(node.module, alias.name) for alias in node.names]
        else:
            continue
        for module, name in wanted:
            if module.split(".")[0] not in SOURCES:
                continue
            file = module_file(module)
            if file is None:
                found.append(module)
            elif name and name not in defined(file) and not module_file(f"{module}.{name}"):
                found.append(f"{module}.{name}")
    return found


def test_what_is_imported_exists() -> None:
    wrong = {str(path.relative_to(ROOT)): missing(path.read_text()) for path in ASKING}
    assert {path: names for path, names in wrong.items() if names} == {}


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from pdcluster_connector.transfer import reads", ["pdcluster_connector.transfer.reads"]),
        ("import pdcluster_operator.nothing", ["pdcluster_operator.nothing"]),
        ("from pdcluster_operator.plan.gone import it", ["pdcluster_operator.plan.gone"]),
        ("from pdcluster_operator.cli import main, x", ["pdcluster_operator.cli.x"]),
        ("from pdcluster_connector.transfer import job", []),
        ("from numpy import nothing", []),
    ],
)  # fmt: skip
def test_what_does_not_exist_is_found(source: str, found: list[str]) -> None:
    assert missing(source) == found
