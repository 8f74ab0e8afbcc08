"""What docstrings and comments of the two packages refer to exists, and stands where they say."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from module_names import attributes, bound, declared

ROOT = Path(__file__).resolve().parents[2]
SOURCES = [ROOT / "operator/src", ROOT / "connector/src"]
FILES = sorted(file for source in SOURCES for file in source.rglob("*.py"))
ROLE = re.compile(r":(?:mod|class|func|data|meth|attr|exc):`~?(\.*)([\w.]+)`")
PATH = re.compile(r"``((?:\w+/)*\w+\.py)``")


def names_in(file: Path) -> frozenset[str]:
    return bound(file) | declared(file) | attributes(file)


def stands_under(folder: Path, words: list[str]) -> bool:
    """Whether ``a.b.Name`` is there, seen from a folder: a package, a module or a name in it."""
    for length in range(len(words), 0, -1):
        place = folder.joinpath(*words[:length])
        rest = ".".join(words[length:])
        for file in (place.with_suffix(".py"), place / "__init__.py"):
            if file.exists():
                return not rest or rest in names_in(file)
    return False


def refers_well(file: Path, dots: str, name: str) -> bool:
    """Whether a Sphinx role names something: of its own module, or seen from its own folder."""
    words = name.split(".")
    if dots:
        return stands_under(file.parents[len(dots) - 1], words)
    own = names_in(file)
    if name in own or any(one.endswith(f".{name}") for one in own) or words[0] in own:
        return True
    if len(words) > 1 and find_spec(words[0]) is not None:  # a library's
        return True
    return any(stands_under(folder, words) for folder in (file.parent, *SOURCES))


def points_well(file: Path, path: str) -> bool:
    """Whether a path is that of a file: one of the same folder, or one seen from further up."""
    folders = [file.parent] if "/" not in path else [*file.parents, *packages()]
    return any((folder / path).is_file() for folder in folders)


def packages() -> list[Path]:
    return [folder for source in SOURCES for folder in source.iterdir()]


def wrong_in(file: Path) -> Iterator[str]:
    text = file.read_text()
    for dots, name in ROLE.findall(text):
        if not refers_well(file, dots, name):
            yield f"{dots}{name}"
    for path in PATH.findall(text):
        if not points_well(file, path):
            yield path


def test_what_docstrings_name_exists() -> None:
    wrong = {str(file.relative_to(ROOT)): list(wrong_in(file)) for file in FILES}
    assert {file: names for file, names in wrong.items() if names} == {}


@pytest.mark.parametrize(
    "text",
    [
        ":mod:`.gone`",
        ":func:`..here.gone`",
        ":class:`Gone`",
        "``gone.py``",
        "``room/gone.py``",
        "``here.py``",
    ],
)
def test_a_name_that_is_not_there_is_found(tmp_path: Path, text: str) -> None:
    room = tmp_path / "room"
    room.mkdir()
    (tmp_path / "here.py").write_text("there = 1\n")
    file = room / "one.py"
    file.write_text(f'"""See {text}, :data:`..here.there` and ``room/one.py``."""\n')
    (wrong,) = wrong_in(file)
    assert wrong.strip(".") in text
