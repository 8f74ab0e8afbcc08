"""The benchmark's arithmetic, its table and its gate; nothing is measured here."""

from __future__ import annotations

import copy
import itertools
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from bench_kv import figures, moves, phases, report
from bench_kv.thresholds import BOUNDS, Bound, missed

ROOT = Path(__file__).parents[3]


def compared(ours: float, stock: float, **more: float) -> dict[str, Any]:
    return figures.compared(
        {"ours": [ours] * 20, "stock": [stock] * 20, **{k: [v] * 20 for k, v in more.items()}}
    )


def at_its_bounds() -> dict[str, Any]:
    """Return numbers of which each is as bad as the gate allows."""
    both = compared(0.002, 0.004)
    way = dict.fromkeys((phase.name for phase in phases.OURS), 1.0)
    shorter = {phase.name: 1.0 for phase in phases.STOCK}
    found: dict[str, Any] = {
        "commit": "abc", "date": "2026-11-27", "cores": 2, "load": [0.1, 0.2],
        "blocks": {**compared(0.002, 0.004, raw=0.001), "descriptors": 2048},
        "neighbours": {**compared(0.002, 0.004, raw=0.001), "descriptors": 2048},
        "outermost": {**compared(0.002, 0.004, raw=0.001), "descriptors": 64},
        "side_by_side": {
            str(count): {"all": copy.deepcopy(both), "p99": copy.deepcopy(both),
                         "megabytes_per_second": {"ours": 3, "stock": 2}}
            for count in (1, 8, 32, 256)
        },
        "fragmented": {"descriptors": 40992, "step": copy.deepcopy(both),
                       "whole": copy.deepcopy(both)},
        "long": {"prefill": copy.deepcopy(both), "decode": copy.deepcopy(both)},
        "handshake": {
            "descriptors": 96000, "all": copy.deepcopy(both),
            "on_engine_thread": compared(0.0, 0.004),
        },
        "lists": {"descriptors": 640000, "milliseconds": {"ours": 1.0}},
        "in_process": {
            "ttft": {str(length): copy.deepcopy(both) for length in (64, 512, 900)},
            "phases": {str(length): {"ours": way, "stock": shorter} for length in (64, 512, 900)},
        },
        "ttft": {str(length): compared(0.002, 0.004, calm=0.004) for length in (64, 512, 900)},
        "phases": {str(length): {"ours": way, "stock": shorter} for length in (64, 512, 900)},
        "velocity": {"tokens_per_second": {"ours": 3.0, "stock": 2.0},
                     "alone": {"ours": 4.0, "stock": 4.0},
                     "of_alone": {"ours": 0.75, "stock": 0.5}, "rounds": 20},
        "idle": {"ours": 0.001, "stock": 0.002},
    }  # fmt: skip
    for bound in BOUNDS:
        put(found, bound, bound.limit)
    return found


def put(found: dict[str, Any], bound: Bound, value: float) -> None:
    place: Any = found
    *way, last = bound.what.split("/")
    for name in way:
        place = place[name]
    assert last in place, bound.what
    place[last] = value


def test_each_arm_is_first_equally_often() -> None:
    rounds = [figures.turn(["a", "b", "c"], number) for number in range(6)]
    assert rounds[:3] == [["a", "b", "c"], ["b", "c", "a"], ["c", "a", "b"]]
    for place in range(3):
        assert sorted(order[place] for order in rounds) == ["a", "a", "b", "b", "c", "c"]


def test_a_ratio_is_of_what_was_measured_side_by_side() -> None:
    """A busy moment doubles both, so it does not change the ratio, although it changes medians."""
    ours, stock = [1.0, 2.0, 10.0, 1.0], [2.0, 4.0, 20.0, 2.0]
    assert figures.ratio(ours, stock) == 0.5
    assert figures.interval(ours, stock) == [0.5, 0.5]
    found = figures.compared({"stock": stock, "ours": ours, "raw": ours})
    assert found["of"] == {"stock": 0.5, "raw": 1.0}
    assert found["milliseconds"] == {"stock": 3000.0, "ours": 1500.0, "raw": 1500.0}
    assert found["rounds"] == 4


def test_the_interval_holds_the_ratio_and_grows_with_the_spread() -> None:
    stock = [1.0] * 21
    calm = [1 + number / 1000 for number in range(21)]
    wild = [1 + number / 10 for number in range(21)]
    for ours in (calm, wild):
        low, high = figures.interval(ours, stock)
        assert low < figures.ratio(ours, stock) < high
    assert figures.interval(wild, stock)[1] > figures.interval(calm, stock)[1]


def test_rounds_of_one_turn_are_resampled_together() -> None:
    """One odd turn of four: if rounds counted by themselves, the interval would hide it."""
    ours = [2.0] * 6 + [1.0] * 18
    stock = [1.0] * 24
    assert figures.interval(ours, stock) == [1.0, 1.0]
    assert figures.interval(ours, stock, [6] * 4) == [1.0, 2.0]
    assert figures.compared({"ours": ours, "stock": stock}, [6] * 4)["interval"] == {
        "stock": [1.0, 2.0]
    }


def test_turns_share_the_rounds_and_none_is_idle() -> None:
    assert figures.shares(24, 6) == [4] * 6
    assert figures.shares(8, 6) == [2, 2, 1, 1, 1, 1]
    assert figures.shares(2, 6) == [1, 1]


def test_another_arm_has_rows_of_its_own() -> None:
    found = at_its_bounds()
    for of in found["ttft"].values():
        del of["of"]["calm"]
    assert report.OTHERS["calm"] not in report.table(found)
    found["ttft"]["64"] = compared(0.002, 0.004, calm=0.008)
    found["idle"]["calm"] = 0.03
    for name in ("tokens_per_second", "alone", "of_alone"):
        found["velocity"][name]["calm"] = 0.9
    table = report.table(found)
    row = f"| TTFT, 64 tokens: {report.OTHERS['calm']}, and ours ÷ its | – | 8 | – | 0.25 "
    assert row in table
    assert "velocity, % of a core | – | 0.90, 3.00 |" in table


def test_a_percentile_is_a_value_that_was_measured() -> None:
    values = [float(number) for number in range(1, 257)]
    assert figures.percentile(values, 0.99) == 254.0
    assert figures.percentile([3.0], 0.99) == 3.0
    assert figures.percentile(values, 1.0) == 256.0


def test_phases_add_up_to_the_whole_way() -> None:
    lines = ["1.0 prefilled", "1.3 arrived", "1.4 ordered", "1.45 connected", "1.5 posted",
             "1.7 landed", "1.8 fenced", "1.9 done", "2.0 reported", "2.4 decoded",
             "9.0 prefilled"]  # fmt: skip
    moments = phases.read(lines, 0.5, 3.0) | {"ticket": 1.1, "sent": 1.1, "answered": 2.5}
    parts = phases.split(moments, 0.5, phases.OURS)
    assert sum(parts.values()) == pytest.approx(2.0)
    assert parts["prefill"] == pytest.approx(0.5), "not the later request's"
    assert (parts["fence"], parts["claim"]) == (pytest.approx(0.1), pytest.approx(0.1))
    assert phases.of_the_hand_over(parts) == pytest.approx(2.0 - 0.5 - 0.4 - 0.05 - 0.2)


def test_a_claim_that_came_in_time_took_nothing() -> None:
    moments = {"prefilled": 1.0, "ticket": 1.0, "sent": 1.0, "arrived": 1.0, "ordered": 1.0,
               "connected": 1.0, "posted": 1.0, "landed": 1.2, "done": 1.5, "reported": 1.5,
               "decoded": 1.5, "answered": 1.5}  # fmt: skip
    parts = phases.split(moments, 0.0, phases.OURS)
    assert parts["fence"] == pytest.approx(0.3)
    assert parts["claim"] == 0.0


def test_stock_has_no_phases_of_ours() -> None:
    moments = {"prefilled": 1.0, "ticket": 1.1, "sent": 1.1, "arrived": 1.2, "ordered": 1.3,
               "posted": 1.4, "reported": 1.8, "decoded": 1.9, "answered": 2.0}  # fmt: skip
    parts = phases.split(moments, 0.0, phases.STOCK)
    assert not {"connect", "wire and polls", "fence", "claim"} & set(parts)
    assert parts["post"] == pytest.approx(0.1)
    assert sum(parts.values()) == pytest.approx(2.0)


def test_numbers_at_their_bounds_pass_and_a_run_of_one_part_too() -> None:
    found = at_its_bounds()
    assert missed(found) == []
    assert missed({name: found[name] for name in ("ttft", "velocity", "idle")}) == []
    assert missed({"in_process": found["in_process"]}) == []


@pytest.mark.parametrize("bound", BOUNDS, ids=lambda bound: bound.what)
def test_a_number_outside_its_bound_is_named(bound: Bound) -> None:
    found = at_its_bounds()
    worse = bound.limit * (0.9 if bound.more_is_better else 1.1) + (
        -0.001 if bound.more_is_better else 0.001
    )
    put(found, bound, worse)
    [line] = missed(found)
    assert line.startswith(f"{bound.what} is ")
    assert f"{bound.limit:g}" in line


def test_each_bound_says_how_many_runs_it_comes_from() -> None:
    text = (ROOT / "e2e/bench_kv/thresholds.py").read_text()
    [body] = re.findall(r"^BOUNDS.*?^\)", text, re.MULTILINE | re.DOTALL)
    comments = re.findall(r"# (\d+) runs?: ", body)
    assert len(comments) == len(BOUNDS)


def test_rows_of_all_turns_are_one_row() -> None:
    size = moves.Size(rounds=3, turns=2, side_by_side=(8,), blocks=100)
    row = [0.001, 0.002, 0.002]
    names = ("blocks", "neighbours", "outermost", "side_by_side/8/all", "fragmented/step",
             "long/prefill")  # fmt: skip
    ours = dict.fromkeys(names, row) | {"handshake/all": [0.01, 0.03]}
    stock = {name: [2 * one for one in of] for name, of in ours.items()}
    raw = {"blocks": row, "neighbours": row, "outermost": row}
    found = moves.found({"ours": ours, "stock": stock, "raw": raw}, size, [2, 1])
    assert found["blocks"]["of"] == {"stock": 0.5, "raw": 1.0}
    assert found["fragmented"]["step"]["milliseconds"] == {"ours": 2.0, "stock": 4.0}
    assert found["handshake"]["all"]["milliseconds"]["ours"] == 20.0
    # 8 requests of 512 KiB in 2 ms
    assert found["side_by_side"]["8"]["megabytes_per_second"]["ours"] == 2097
    assert found["blocks"]["descriptors"] == 49 * 32
    assert found["outermost"]["descriptors"] == 49, "one for all layers"


def test_neighbours_are_neighbours_and_the_others_are_not() -> None:
    places = moves.Places(moves.SMALL, 1).all
    for side in places["neighbours"]:
        assert {b - a for a, b in itertools.pairwise(side)} == {1}
    for side in places["blocks"]:
        assert not {b - a for a, b in itertools.pairwise(sorted(side))} & {1}
    for theirs, ours in places.values():
        assert len(theirs) == len(ours) == 64
        assert max(*theirs, *ours) < moves.SMALL.blocks
    assert moves.Places(moves.SMALL, 1).all == places != moves.Places(moves.SMALL, 2).all


def test_the_table_has_a_row_for_each_number_and_one_for_each_phase() -> None:
    table = report.table(at_its_bounds())
    for words in ("16 MiB, 2048 descriptors", "16 MiB, the same blocks as neighbours",
                  "16 MiB, blocks outermost: 64 descriptors",
                  "TTFT, one process each, 512 tokens", "256 at once: p99", "40992 descriptors",
                  "1M tokens, decode", "TTFT, 900 tokens", "prefill velocity",
                  "idle decode engine"):  # fmt: skip
        assert words in table
    for phase in phases.OURS:
        assert table.count(f"| {phase.name} | 1.00 | ") == 2
    widths = {line.count("|") for line in table.splitlines() if line.startswith("| what")}
    assert widths == {6}


def test_the_picture_is_xml_and_its_bars_are_as_long_as_the_phases() -> None:
    found = at_its_bounds()["phases"]
    found["64"] = {"ours": {"prefill": 10.0, "wire and polls": 5.0}}
    picture = ET.fromstring(report.svg({"64": found["64"]}))
    bars = [one for one in picture.iter() if one.tag.endswith("rect") and len(one)]
    wide, narrow = (float(bar.attrib["width"]) for bar in bars)
    assert wide == pytest.approx(2 * narrow, abs=0.2)
    assert set(report.COLORS) == {phase.name for phase in phases.OURS}
