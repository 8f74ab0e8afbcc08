"""The sentences that say what to do, as they stand in the source."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "pdcluster_operator"
ENDS = (".", "?")


def sentences(files: list[str]) -> dict[str, re.Pattern[str]]:
    """Return each text that reads as a remedy, ``file: text``, and a pattern of what it becomes.

    Messages end without a full stop (``assert_said``), so a text of whole sentences that is no
    docstring is a remedy. A value that is put into a text fits anything.
    """
    found = {}
    for pattern in files:
        for file in sorted(SOURCE.glob(pattern)):
            for text in _texts(ast.parse(file.read_text())):
                literal = "".join(part if isinstance(part, str) else "{}" for part in text)
                if literal.endswith(ENDS) and (literal[0].isupper() or literal.startswith("{}")):
                    words = "".join(re.escape(p) if isinstance(p, str) else ".*" for p in text)
                    found[f"{file.name}: {literal}"] = re.compile(words, re.DOTALL)
    return found


def _texts(tree: ast.AST) -> Iterator[list[str | None]]:
    """Yield the texts of a module but its docstrings; None stands for a value in a text."""
    inner = {id(part) for one in ast.walk(tree) if isinstance(one, ast.JoinedStr)
             for part in ast.walk(one) if part is not one}  # fmt: skip
    said = {id(one.value) for one in ast.walk(tree) if isinstance(one, ast.Expr)}
    for one in ast.walk(tree):
        if id(one) in inner | said:
            continue
        if isinstance(one, ast.Constant) and isinstance(one.value, str) and one.value:
            yield [one.value]
        elif isinstance(one, ast.JoinedStr):
            yield [
                str(part.value) if isinstance(part, ast.Constant) else None for part in one.values
            ]
