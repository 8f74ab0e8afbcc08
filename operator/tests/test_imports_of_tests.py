"""Whatever tests, benchmarks and tools import from the product and from each other exists.

mypy reads the product's cores only, and the pure tests don't collect the tests that need engines or
a cluster: a module that is renamed would be missed there until those tests are collected.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from module_names import bound

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
# Behind a colon or a semicolon, too; names in brackets may stand on several lines.
IMPORT = re.compile(
    r"(?:^|[:;])[ \t]*(import [^\n;]+|from [\w.]+ import (?:\([^)]*\)|[^\n;]+))", re.MULTILINE
)
BESIDE: dict[str, list[Path]] = {}
for path in ASKING:
    if not (ROOT / "e2e" / path.stem).is_dir():  # a package has the name
        BESIDE.setdefault(path.stem, []).append(path)


def module_file(dotted: str, asking: Path = ROOT) -> Path | None:
    """The file of a module; of a conftest, the nearest one above the file that asks."""
    first, *rest = dotted.split(".")
    if first not in SOURCES:
        above = [path for path in BESIDE[first] if path.parent in asking.parents]
        return max(above or BESIDE[first], key=lambda path: len(path.parts))
    place = SOURCES[first].joinpath(*rest)
    package, module = place / "__init__.py", place.with_name(place.name + ".py")
    return next((path for path in (package, module) if path.is_file()), None)


def submodules(file: Path) -> frozenset[str]:
    """The modules of a package."""
    if file.name != "__init__.py":
        return frozenset()
    modules = {path.stem for path in file.parent.glob("*.py")}
    return frozenset(modules | {path.parent.name for path in file.parent.glob("*/__init__.py")})


def known(module: str) -> bool:
    """Whether a module is the product's, or one of the tests' that is no part of a package."""
    first, *rest = module.split(".")
    return first in SOURCES or (not rest and first in BESIDE)


def statements(source: str) -> Iterator[ast.AST]:
    """The imports of a module. To parse only them takes a tenth of what all of it takes."""
    for found in IMPORT.finditer(source):
        try:
            yield from ast.parse(found[1]).body
        except SyntaxError:  # a sentence of a docstring
            continue


def exists(file: Path, name: str) -> bool:
    """Whether a module or package has a name. Most are found where they are defined."""
    defined = rf"^(?:(?:async )?def|class) {name}\b|^{name}\b(?:: [^=\n]+)? ="
    here = re.search(defined, text_of(file), re.MULTILINE)
    return here is not None or name in bound(file) | submodules(file)


@cache
def text_of(file: Path) -> str:
    return file.read_text()


def missing(source: str, asking: Path = ROOT) -> list[str]:
    """What a file imports from the product or from other tests, and is not there."""
    found = []
    for node in statements(source):
        if isinstance(node, ast.Import):
            wanted = [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            wanted = [(node.module, alias.name) for alias in node.names]
        else:
            continue
        for module, name in wanted:
            if not known(module):
                continue
            file = module_file(module, asking)
            if file is None:
                found.append(module)
            elif name and not exists(file, name):
                found.append(f"{module}.{name}")
    return found


def test_what_is_imported_exists() -> None:
    wrong = {str(path.relative_to(ROOT)): missing(path.read_text(), path) for path in ASKING}
    assert {path: names for path, names in wrong.items() if names} == {}


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from pdcluster_connector.transfer import reads", ["pdcluster_connector.transfer.reads"]),
        ("import pdcluster_operator.nothing", ["pdcluster_operator.nothing"]),
        ("from pdcluster_operator.plan.gone import it", ["pdcluster_operator.plan.gone"]),
        ("from pdcluster_operator.cli import main, x", ["pdcluster_operator.cli.x"]),
        ("from pdcluster_connector.transfer import probing", []),
        ("from numpy import nothing", []),
        ("from operator_runs import Operator, nothing", ["operator_runs.nothing"]),
        ("try:\n  import pdcluster_operator.a\nexcept OSError:\n  import pdcluster_operator.b",
         ["pdcluster_operator.a", "pdcluster_operator.b"]),
        ("for _ in x:\n  pass\nelse:\n  import pdcluster_operator.a", ["pdcluster_operator.a"]),
        ("try:\n  pass\nfinally:\n  import pdcluster_operator.a", ["pdcluster_operator.a"]),
        ("async def f():\n  match 1:\n    case 1:\n      import pdcluster_operator.a",
         ["pdcluster_operator.a"]),
    ],
)  # fmt: skip
def test_what_does_not_exist_is_found(source: str, found: list[str]) -> None:
    assert sorted(missing(source)) == found
