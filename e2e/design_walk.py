"""The two walks of docs/design.md, row by row, and whether what they name happens.

A test runs the real code within :class:`Calls`, and then asks :func:`happened` about rows.
``operator/tests/test_design_page.py`` sees that some test asks about each call of each row.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import re
import sys
import threading
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

ROOT = Path(__file__).parents[1]
HOMES = {
    "request": ROOT / "connector/src/pdcluster_connector",
    "manifest": ROOT / "operator/src/pdcluster_operator",
}
NAMED = re.compile(r"`([\w/]+\.py)`(?: `([\w.]+)`)?")
_TITLES = {"request": "7. A request, file by file", "manifest": "8. A manifest, file by file"}
_ROW = re.compile(r"^\| (\d+|[A-Z_]+)[.:] .* \| (.*) \|$", re.MULTILINE)
_PAUSES = inspect.CO_COROUTINE | inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR

Call = tuple[str, str]
"""A file of a walk, and a function, a method or a class in it. No name: any function there."""


def text(walk: str) -> str:
    """The section of the page."""
    page = (ROOT / "docs/design.md").read_text()
    return page.split(f"\n## {_TITLES[walk]}\n")[1].split("\n## ")[0]


def rows(walk: str) -> dict[str, list[Call]]:
    """The calls that each row names: by its number, or by its action."""
    return {row: NAMED.findall(where) for row, where in _ROW.findall(text(walk))}


class Calls:
    """Every call into the files of a walk: on this thread, and on threads that start meanwhile."""

    def __init__(self, walk: str) -> None:
        self.seen: list[Call] = []
        self._home = str(HOMES[walk]) + "/"

    def __enter__(self) -> Self:
        threading.setprofile(self._note)
        sys.setprofile(self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call":
            return
        code = frame.f_code
        if code.co_flags & _PAUSES and code.co_code[frame.f_lasti + 1] & 3:
            return  # it goes on after a yield or an await: RESUME's argument says so
        if code.co_filename.startswith(self._home):
            self.seen.append((code.co_filename[len(self._home) :], code.co_qualname))
        elif code.co_name == "__init__" and code.co_filename == "<string>":  # of a dataclass
            made = type(frame.f_locals["self"])
            file = getattr(sys.modules[made.__module__], "__file__", None) or ""
            if file.startswith(self._home):
                self.seen.append((file[len(self._home) :], made.__qualname__))


def happened(
    seen: Sequence[Call],
    walk: str,
    *asked: str,
    but: Collection[str] = (),
    only: Collection[str] = (),
    instead: Mapping[Call, Call] | None = None,
    turn: Call | None = None,
) -> None:
    """Check that what these rows name was called, in this order.

    Args:
        but: names that another test asks about.
        only: the names to ask about, if not all.
        instead: what stands in for a call.
        turn: a call with which everything begins anew; one turn has to hold all.
    """
    page = rows(walk)
    wanted = [
        (instead or {}).get(call, call)
        for row in asked
        for call in page[row]
        if call[1] not in but and (not only or call[1] in only)
    ]
    starts = [place for place, call in enumerate(seen) if call == turn] or [0]
    turns = [seen[a:b] for a, b in itertools.pairwise([*starts, len(seen)])]
    found = min((_not_in_order(one, wanted) for one in turns), key=len)
    assert not found, f"rows {', '.join(asked)} of a {walk}: not called in this order: {found}"


def _not_in_order(seen: Sequence[Call], wanted: Sequence[Call]) -> list[Call]:
    """The wanted calls, from the first one that does not follow those before it."""
    at = 0
    for number, call in enumerate(wanted):
        places = [place for place, one in enumerate(seen) if _is_of(one, call)]
        # Nobody calls a decorator itself in the meantime.
        places = places or [place for place, one in enumerate(seen) if _is_within(one, call)]
        after = next((place for place in places if place >= at), None)
        if after is None:
            return list(wanted[number:])
        at = after
    return []


def _is_of(one: Call, wanted: Call) -> bool:
    """Whether a call is the wanted one, or one of a method of the wanted class."""
    if one[0] != wanted[0] or not wanted[1] or one[1] == wanted[1]:
        return one[0] == wanted[0]
    return _is_within(one, wanted) and not one[1].startswith(f"{wanted[1]}.<")


def _is_within(one: Call, wanted: Call) -> bool:
    return one[0] == wanted[0] and one[1].startswith(f"{wanted[1]}.")


def asked_about() -> dict[tuple[str, str], set[str]]:
    """The names that tests ask about, by walk and row. An empty name stands for a whole file."""
    found: dict[tuple[str, str], set[str]] = {}
    for path in (
        *ROOT.glob("connector/tests/*/test_*.py"),
        *ROOT.glob("operator/tests/*/test_*.py"),
    ):
        source = path.read_text()
        if "from design_walk import" not in source:
            continue
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "happened":
                walk, *asked = (ast.literal_eval(word) for word in node.args[1:])
                limits = {
                    word.arg: set(ast.literal_eval(word.value))
                    for word in node.keywords
                    if word.arg in ("but", "only")
                }
                for row in asked:
                    names = {name for _, name in rows(walk).get(row, ())}
                    names &= limits.get("only", names)
                    found.setdefault((walk, row), set()).update(names - limits.get("but", set()))
    return found
