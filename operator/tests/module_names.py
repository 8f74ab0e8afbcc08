"""Which names a module has, read from its source without importing it."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path


@cache
def bound(path: Path) -> frozenset[str]:
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


@cache
def declared(path: Path) -> frozenset[str]:
    """The functions and classes at the top of a module, and those in classes: ``Class.name``."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{item.name}" for item in node.body if hasattr(item, "name")}
    return frozenset(names)


@cache
def attributes(path: Path) -> frozenset[str]:
    """The attributes that the code of a module sets, such as ``x`` by ``self.x = 1``."""
    return frozenset(
        node.attr
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    )
