"""How large the source is, and through how many files two behaviours pass.

    PYTHONPATH=operator/src:connector/src python dev/house.py [--list]

``--list`` also names the files of both, and the modules that only one other module imports.
"""

from __future__ import annotations

import ast
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import yaml

from pdcluster_connector.launcher.links.link_table import LinkTable
from pdcluster_connector.protocol.launcher_documents import (
    ChangesReport,
    LinksReport,
    LinkState,
    PeerEntry,
    PeersDocument,
    RankLink,
    RankReport,
    decode_changes,
    encode_json,
)
from pdcluster_operator.api.conditions import ConditionType, StatusReason, set_conditions
from pdcluster_operator.api.object_names import EngineName
from pdcluster_operator.api.spec.types import Role
from pdcluster_operator.plan.observed.engines import EngineView
from pdcluster_operator.plan.observed.links import observe_pairs
from pdcluster_operator.plan.planner import make_plan
from pdcluster_operator.plan.status.conditions import links_established
from pdcluster_operator.plan.types import ConnectorBundle, Observed

ROOT = Path(__file__).parents[1]
SOURCES = {part: ROOT / part / "src" for part in ("operator", "connector")}
# What runs in a cluster is bounded apart from what people run on their own machine: commands, their
# words and a page. Of the first, whole pod templates and their values, KV tiers, sources of
# weights, shapes of models and configs in ConfigMaps were the last to be given lines.
MOST_LINES = {"operator": 25_750, "command line": 10_700, "connector": 19_525}
COMMAND_LINE = "pdcluster_operator.cli"
SPEC = ROOT / "operator/tests/plan/scenarios/tiny-cpu.yaml"


def first_plan() -> None:
    """Plan a small PDCluster that has no children yet."""
    connector = ConnectorBundle("c0ffee" + "0" * 58, b"no zip")
    make_plan(Observed(yaml.safe_load(SPEC.read_text()), (), (), {}, {}, connector), 1.8e9)


def report_to_condition() -> None:
    """Take a worker's report to the launcher's answer, and that answer to a condition."""
    prefill, decode = (EngineName("ns", "one", role, "abcde", 0) for role in Role)
    table = LinkTable((1, 1))
    table.set_peers(PeersDocument(1, (PeerEntry(prefill.logical, "192.0.2.1:5600"),)))
    link = RankLink(prefill.logical, "id", LinkState.ESTABLISHED, establishment=1)
    table.add(RankReport((0, 0), (1, 1), (link,)), 0.0)
    links = tuple(row.report for row in table.rows(1.0))
    answer = ChangesReport("1", links=LinksReport(decode.logical, "id", links))
    report = decode_changes(encode_json(answer))
    assert isinstance(report, ChangesReport)
    assert report.links is not None
    one, other = (
        EngineView(name, True, StatusReason.ENGINES_READY, "", "id", "192.0.2.1", 1)
        for name in (prefill, decode)
    )
    pairs = observe_pairs((one,), (other,), {decode.logical: report.links})
    verdict = links_established(pairs, {})
    set_conditions({}, [(ConditionType.KV_LINKS_ESTABLISHED, verdict)], 1, 0.0)


def files_of(work: Callable[[], object]) -> tuple[list[str], int]:
    """Return the files of ours that the work calls, and how often a call is in another file."""
    called: list[str] = []

    def trace(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            called.append(frame.f_code.co_filename)

    work()  # fills what is cached for the whole process
    sys.setprofile(trace)
    work()
    sys.setprofile(None)
    sources = tuple(map(str, SOURCES.values()))
    ours = [str(Path(one).relative_to(ROOT)) for one in called if one.startswith(sources)]
    return sorted(set(ours)), sum(a != b for a, b in pairwise(ours))


def main() -> None:
    """Print the table."""
    lines: dict[str, int] = {}
    importers: dict[str, set[str]] = defaultdict(set)
    imports = 0
    for source in SOURCES.values():
        for path in source.rglob("*.py"):
            name = ".".join(path.relative_to(source).with_suffix("").parts)
            text = path.read_text()
            lines[name] = text.count("\n")
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.Import | ast.ImportFrom):
                    imports += (node.end_lineno or node.lineno) - node.lineno + 1
                    base = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
                    for found in (base[:-1], *(f"{base}{alias.name}" for alias in node.names)):
                        importers[found].add(name)
    totals = dict.fromkeys(MOST_LINES, 0)
    for name, n in lines.items():
        part = name.removeprefix("pdcluster_").partition(".")[0]
        totals["command line" if name.startswith(COMMAND_LINE) else part] += n
    for part, most in MOST_LINES.items():
        print(f"{part}, lines".ljust(34), totals[part], f"(at most {most})")
    single = sorted(name for name in lines if len(importers[name]) == 1)
    print("modules".ljust(34), len(lines), "(at most 300)")
    print("median module".ljust(34), int(statistics.median(lines.values())))
    print("modules over 400 lines".ljust(34), sum(n > 400 for n in lines.values()))
    print("lines of imports".ljust(34), f"{imports / sum(lines.values()):.1%} (at most 6 %)")
    print("modules with one importer".ljust(34), len(single))
    for work, most in ((first_plan, 62), (report_to_condition, 12)):
        files, steps = files_of(work)
        title = f"files of {work.__name__}".replace("_", " ")
        print(title.ljust(34), len(files), f"(at most {most}), {steps} moves between them")
        print("\n".join(files) if "--list" in sys.argv else "", end="")
    for name in single if "--list" in sys.argv else ():
        print(f"{lines[name]:>4} {name} <- {min(importers[name])}")


if __name__ == "__main__":
    main()
