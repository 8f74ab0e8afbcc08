"""Settings for every test of the repository."""

from __future__ import annotations

import gc
import os
import re
import sys
import traceback
import zlib
from collections.abc import Callable, Generator
from itertools import chain, combinations
from pathlib import Path

import pytest
from _pytest.mark.expression import Expression
from hypothesis import HealthCheck, settings
from hypothesis.database import DirectoryBasedExampleDatabase

import machine

# What failed here is tried again here, and not in other checkouts.
EXAMPLES = DirectoryBasedExampleDatabase(Path(__file__).with_name(".hypothesis") / "examples")
# `make test` draws as many as hypothesis does by default, `make fast` a quarter, `make soak` ten
# times. `make test` draws the same ones each time, so a failure is the change's. The others look
# for new ones. Time limits, on an example or on how fast they are drawn, fail on a busy machine and
# say nothing about the code.
for name, examples in (("pdcluster", 100), ("fast", 25), ("soak", 1000)):
    settings.register_profile(
        name,
        deadline=None,
        derandomize=name == "pdcluster",
        database=None if name == "pdcluster" else EXAMPLES,
        max_examples=examples,
        suppress_health_check=[HealthCheck.too_slow],
    )
PROFILE = os.environ.get("PDCLUSTER_EXAMPLES", "pdcluster")
settings.load_profile(PROFILE)

# A traceback that Python 3.11 formats parses the source line, to mark a part of it. If that happens
# while the garbage collector interrupts another ast.parse, that one raises a SystemError:
# https://github.com/python/cpython/issues/106905
if sys.version_info < (3, 12):
    vars(traceback)["_extract_caret_anchors_from_line_segment"] = lambda _: None

NOT_RUN = "pdcluster/not_run"  # in pytest's cache: by make's process, the lines of its runs
# A pure test imports none of these: each takes seconds, and a machine may lack it.
SLOW = frozenset({"nixl", "torch", "transformers", "vllm"})
REAL = frozenset({"nixl", "vllm", "engine", "local", "helm", "cluster"})
_IMPORTED: set[str] = set()  # of the slow ones
FILES_MARKS = re.compile(r"^pytestmark = (\[.*?^\]|.*?$)", re.MULTILINE | re.DOTALL)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import a file all of whose tests `-m` leaves out: vLLM's import takes seconds."""
    if not config.option.markexpr or not collection_path.match("test_*.py"):
        return None
    found = FILES_MARKS.search(collection_path.read_text())
    marks = set(re.findall(r"pytest\.mark\.(\w+)", found[1])) if found else set()
    ours = [line.partition(":")[0] for line in config.getini("markers")]
    return True if marks and not _may_be_selected(config.option.markexpr, marks, ours) else None


def pytest_configure(config: pytest.Config) -> None:
    """Imports and the collection make objects that stay: looking through them finds no garbage."""
    try:
        machine.without()
    except ValueError as error:
        raise pytest.UsageError(f"PDCLUSTER_WITHOUT: {error}") from None
    gc.disable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave a quarter of the cases of tests that are marked so to `make fast`, always the same."""
    if PROFILE != "fast":
        return
    left_out = [
        item
        for item in items
        if item.get_closest_marker("sampled") and zlib.crc32(item.nodeid.encode()) % 4
    ]
    config.hook.pytest_deselected(items=left_out)
    gone = set(left_out)
    items[:] = [item for item in items if item not in gone]


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Refuse the very file that imports what no pure test may."""
    report = yield
    if isinstance(collector, pytest.Module):
        found = _newly_imported()
        if found and any(map(_pure, report.result)):
            report.outcome, report.result = "failed", []
            report.longrepr = f"a file with pure tests imports {found}: mark them nixl or vllm"
    return report


def pytest_collection_finish() -> None:
    """Let no garbage collection walk through what was imported and collected again.

    It is not searched for garbage before: that costs a quarter of a second. Workers that are forked
    later share its memory.
    """
    gc.freeze()
    gc.enable()


def pytest_itemcollected(item: pytest.Item) -> None:
    """Refuse a feature of the machine that is not known: it would never be asked for."""
    try:
        machine.known(needs(item))
    except ValueError as error:
        raise pytest.UsageError(f"{item.nodeid}: {error}") from None


@pytest.hookimpl(tryfirst=True)  # before any fixture starts an engine
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test that needs what this machine lacks."""
    if why := machine.reason(needs(item)):
        pytest.skip(why)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, object, object]:
    """Fail the very test that imports what no pure test may, in whatever order they run."""
    try:
        return (yield)
    finally:
        if (found := _newly_imported()) and _pure(item):
            pytest.fail(f"a pure test imports {found}: mark it nixl or vllm", pytrace=False)


@pytest.hookimpl(wrapper=True, tryfirst=True)  # around all fixtures
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """End the run if a test leaves UCX or NIXL a path that goes with it.

    UCX ends a process that inherits a path of a log which it cannot open.
    """
    before = _transport_paths()
    result = yield
    if left := _transport_paths() - before:
        pytest.exit(f"{item.nodeid} leaves in the environment: {dict(left)}")
    return result


@pytest.hookimpl(wrapper=True, tryfirst=True)  # around all others: it prints last
def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> Generator[None, object, object]:
    """List what was skipped and why. `make test` runs pytest twice: the second run lists both."""
    result = yield
    if hasattr(config, "workerinput"):
        return result
    skipped = [
        (report.nodeid, report.longrepr[2].removeprefix("Skipped: "))
        for report in terminalreporter.stats.get("skipped", ())
    ]
    make, cache = os.environ.get("PDCLUSTER_RUN", ""), getattr(config, "cache", None)
    before = cache.get(NOT_RUN, {}).get(make, ()) if cache and make else ()
    lines = machine.not_run(skipped, before)
    if lines:
        terminalreporter.write_sep("=", "not run on this machine")
        terminalreporter.write_line("\n".join(lines))
    if cache and make:
        cache.set(NOT_RUN, {make: lines})
    return result


def needs(item: pytest.Item) -> list[str]:
    """Return the features that a test needs. An engine of local mode has several processes."""
    named = [feature for mark in item.iter_markers("needs") for feature in mark.args]
    return [*named, "rings"] if item.get_closest_marker("local") else named


def _newly_imported() -> list[str]:
    """Return those of ``SLOW`` that have been imported since the last call."""
    found = SLOW & sys.modules.keys() - _IMPORTED
    _IMPORTED.update(found)
    return sorted(found)


def _pure(node: pytest.Item | pytest.Collector) -> bool:
    return not REAL & {mark.name for mark in node.iter_markers()}


def _transport_paths() -> set[tuple[str, str]]:
    ours = (one for one in os.environ.items() if one[0].startswith(("UCX_", "NIXL_")))
    return {(name, value) for name, value in ours if value.startswith("/")}


def _may_be_selected(expression: str, marks: set[str], ours: list[str]) -> bool:
    """Return whether a test with these marks, and perhaps more of its own, may be selected."""
    compiled = Expression.compile(expression)
    others = [mark for mark in ours if mark in expression and mark not in marks]
    more = chain.from_iterable(combinations(others, n) for n in range(len(others) + 1))
    return any(compiled.evaluate(_has(marks.union(extra))) for extra in more)


def _has(marks: set[str]) -> Callable[..., bool]:
    return lambda name, **_: name in marks
