"""Which reasons a test provokes, read from its source.

A test provokes a reason if it compares what it got with the reason's name, or expects an error of
that name, and does not hand the name in itself.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping

from pdcluster_connector.compat.reasons import Reason
from pdcluster_operator.api.conditions import StatusReason
from pdcluster_operator.api.findings import Rule

LEVELS = ("pure", "nixl", "vllm", "engine", "local", "cluster")
ENUMS = {"Reason": Reason, "StatusReason": StatusReason, "Rule": Rule}
# What a comparison must be about: "Ready" is also a condition, and "Draining" a state.
ABOUT = re.compile(r"reason|rule|failure|without_transfer|finding|warning")
NEGATIONS = (ast.NotEq, ast.NotIn, ast.IsNot)

Test = ast.FunctionDef | ast.AsyncFunctionDef
Tables = Mapping[str, list[ast.expr]]


def provoked(test: Test, module: ast.Module) -> set[str]:
    """Return the words that a test compares with what it got, less those that it hands in."""
    helpers = {made.name: made for made in module.body if isinstance(made, ast.FunctionDef)}
    tables = _tables(test, module)
    compared, given = set[str](), set[str]()
    ahead: list[ast.AST] = [*test.body]
    while ahead:
        node = ahead.pop()
        match node:
            case ast.UnaryOp(ast.Not()) | ast.Lambda(body=ast.Call()):
                continue
            case ast.Call(func=ast.Attribute(attr="raises")):
                compared |= set(re.findall(r"\w+", ast.unparse(node)))
                continue
            case ast.Compare(left, operators, right) if ABOUT.search(ast.unparse(node)):
                if not isinstance(operators[0], NEGATIONS):
                    compared |= _words([left, *right], tables)
            case ast.Call(func, values, keywords):
                helper = helpers.get(func.id) if isinstance(func, ast.Name) else None
                if helper and (place := _judged(helper)) is not None:
                    compared |= _words(values[place : place + 1], tables)
                else:  # a launcher's state is no reason, though some have the same name
                    ahead += helpers.pop(helper.name).body if helper else []
                    values = values + [k.value for k in keywords if k.arg != "state"]
                    given |= _words(values, tables)
        ahead += ast.iter_child_nodes(node)
    return compared - given


def level_of(test: Test, module: ast.Module) -> str:
    """Return what a test runs on; nothing if only `make soak` runs it."""
    own = [node for node in module.body if isinstance(node, ast.Assign) and _is_marks(node)]
    marks = [re.findall(r"mark\.(\w+)", ast.unparse(node)) for node in (*own, *test.decorator_list)]
    found = {mark for some in marks for mark in some}
    return "" if "soak" in found else next((on for on in LEVELS[::-1] if on in found), LEVELS[0])


def _is_marks(node: ast.Assign) -> bool:
    return any(isinstance(t, ast.Name) and t.id == "pytestmark" for t in node.targets)


def _judged(helper: ast.FunctionDef) -> int | None:
    """Return which argument of a helper is a reason that it asserts."""
    names = [argument.arg for argument in helper.args.args]
    if "reason" in names and any(isinstance(part, ast.Assert) for part in ast.walk(helper)):
        return names.index("reason")
    return None


def _words(values: Iterable[ast.expr | None], tables: Tables) -> set[str]:
    """Return texts and enum members, also in tuples and the like, and what names stand for."""
    words: set[str] = set()
    for value in values:
        match value:
            case ast.Constant(str(text)):
                words.add(text)
            case ast.Attribute(ast.Name(enum), name) if enum in ENUMS:
                words.add(str(ENUMS[enum][name]))
            case ast.Attribute(ast.Attribute() as member, "value"):
                words |= _words([member], tables)
            case ast.Tuple() | ast.List() | ast.Set() | ast.Dict() | ast.IfExp():
                words |= _words((n for n in ast.iter_child_nodes(value)), tables)
            case ast.Name(name):
                inside = (part for table in tables.get(name, ()) for part in ast.walk(table))
                words |= _words((n for n in inside if not isinstance(n, ast.Name)), {})
    return words


def _tables(test: ast.AST, module: ast.Module) -> dict[str, list[ast.expr]]:
    """Return what constants, parameters and loops of a test stand for, as far as it is written."""
    constants: dict[str, ast.expr] = {}
    columns: dict[str, list[ast.expr]] = {}
    parts = list(ast.walk(test))
    for node in (*module.body, *parts):
        match node:
            case ast.Assign([ast.Name(name)], value) | ast.AnnAssign(ast.Name(name), value=value):
                constants |= {name: value} if value else {}
    for node in parts:
        match node:
            case ast.Call(func=ast.Attribute(attr="parametrize"), args=[header, table, *_]):
                names = re.findall(r"\w+", ast.unparse(header))
            case ast.For(target, table) | ast.comprehension(target, table):
                names = re.findall(r"\w+", ast.unparse(target))
            case _:
                continue
        while isinstance(table, ast.Name) and table.id in constants:
            table = constants.pop(table.id)
        for row in table.elts if isinstance(table, ast.List | ast.Tuple) else [table]:
            wide = isinstance(row, ast.Tuple) and len(row.elts) == len(names) > 1
            for number, name in enumerate(names):
                columns.setdefault(name, []).append(row.elts[number] if wide else row)
    return {name: [value] for name, value in constants.items()} | columns
