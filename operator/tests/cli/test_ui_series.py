"""What `pdcluster ui` makes of the metrics of engines."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given, strategies as st

from pdcluster_operator.cli.ui import series
from pdcluster_operator.cli.ui.series import History, Sample, Traffic, reading_of

DECODE, PREFILL = ("decode", "d0"), ("prefill", "p0")
PAGE = """\
# HELP pdcluster_kv_received_bytes_total KV bytes received from prefill engines, all ranks.
# TYPE pdcluster_kv_received_bytes_total counter
pdcluster_kv_received_bytes_total{engine="0",model_name="tiny"} 5.24288e+06
pdcluster_kv_received_bytes_total{engine="1",model_name="tiny"} 1000.0
pdcluster_kv_prompts_total{engine="0",outcome="transferred",reason=""} 10.0
pdcluster_kv_prompts_total{engine="0",outcome="local",reason="NoTicket"} 2.0
pdcluster_kv_receive_seconds_bucket{engine="0",le="0.1",phase="post"} 10.0
pdcluster_kv_receive_seconds_sum{engine="0",phase="post"} 0.5
pdcluster_kv_receive_seconds_count{engine="0",phase="post"} 10.0
vllm:num_requests_waiting{engine="0"} 3.0
python_gc_objects_collected_total{generation="0"} 1.0
"""


def read(page: str) -> series.Reading:
    return reading_of(line for line in page.splitlines() if series.is_read(line))


def test_a_page_is_summed_over_ranks_and_nothing_else_is_kept() -> None:
    assert read(PAGE) == {
        Sample("pdcluster_kv_received_bytes_total"): 5_243_880.0,
        Sample("pdcluster_kv_prompts_total", "transferred/"): 10.0,
        Sample("pdcluster_kv_prompts_total", "local/NoTicket"): 2.0,
        Sample("pdcluster_kv_receive_seconds_sum", "post"): 0.5,
        Sample("pdcluster_kv_receive_seconds_count", "post"): 10.0,
        Sample("vllm:num_requests_waiting"): 3.0,
    }


@pytest.mark.parametrize(
    "page", ["pdcluster_kv_x{", "pdcluster_kv_x abc", 'vllm:num_requests_{a="']
)
def test_a_page_in_another_format_says_nothing(page: str) -> None:
    assert read(page) == {}


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-Inf", "1e308"])
def test_a_sample_that_is_no_count_is_left_out(value: str) -> None:
    page = f'pdcluster_kv_prompts_total{{outcome="x"}} {value}\nvllm:num_requests_waiting 3\n'
    assert read(page) == {Sample("vllm:num_requests_waiting"): 3.0}


def seen(*values: dict[str, float], step: float = 2.0) -> Traffic:
    history = History()
    for place, value in enumerate(values):
        history.add(
            place * step, {DECODE: {Sample(*name.split("|")): n for name, n in value.items()}}
        )
    found = history.traffic()
    assert found is not None
    return found


def spark(found: Traffic, title: str) -> series.Spark:
    [one] = [one for one in found.sparks if one.title == title]
    return one


def test_counters_become_rates_and_a_restart_is_no_negative_one() -> None:
    name = "pdcluster_kv_received_bytes_total"
    found = spark(seen({name: 0.0}, {name: 4e6}, {name: 0.0}, {name: 1e6}), "KV received")
    assert (found.value, found.most) == ("0.5 MB/s", "2.0 MB/s")
    heights = [float(y) for y in re.findall(r" ([0-9.]+)(?= |$)", found.path)]
    assert heights == [1.0, 27.0, 20.5]
    assert spark(seen({name: 0.0}, {name: 9e9}), "KV received").value == "4.50 GB/s"


def test_means_are_of_the_requests_in_between() -> None:
    total, count = (f"vllm:time_to_first_token_seconds{part}" for part in ("_sum", "_count"))
    found = seen(
        {total: 100.0, count: 10.0}, {total: 100.5, count: 15.0}, {total: 100.5, count: 15.0}
    )
    assert spark(found, "Time to first token").value == "100.0 ms"
    [phase] = found.phases
    assert (phase.title, phase.count, round(phase.milliseconds), phase.share) == (
        "first token of decode", 5, 100, 1.0,
    )  # fmt: skip


def test_phases_are_of_both_roles_and_the_longest_fills_its_bar() -> None:
    history = History()
    receive = "pdcluster_kv_receive_seconds"
    for moment, factor in ((0.0, 0), (2.0, 1)):
        history.add(
            moment,
            {
                PREFILL: {
                    Sample("vllm:request_prefill_time_seconds_sum"): factor * 0.8,
                    Sample("vllm:request_prefill_time_seconds_count"): factor * 4,
                },
                DECODE: {
                    Sample(f"{receive}_sum", "transfer"): factor * 0.2,
                    Sample(f"{receive}_count", "transfer"): factor * 4,
                },
            },
        )
    found = history.traffic()
    assert found is not None
    assert [(one.title, round(one.milliseconds), round(one.share, 2)) for one in found.phases] == [
        ("compute in prefill", 200, 1.0),
        ("KV: transfer", 50, 0.25),
    ]


def test_outcomes_are_counted_with_their_reasons() -> None:
    name = "pdcluster_kv_prompts_total"
    found = seen(
        {f"{name}|transferred/": 7.0, f"{name}|local/NoTicket": 2.0, f"{name}|failed/": 0.0}
    )
    assert found.outcomes == (("transferred", 7), ("local: NoTicket", 2))
    rates = seen({f"{name}|local/NoTicket": 0.0}, {f"{name}|local/NoTicket": 4.0})
    assert spark(rates, "Computed by decode").value == "2.00 /s"
    assert spark(rates, "Prompts with KV").value == "0.00 /s"


def test_without_readings_there_is_no_picture() -> None:
    history = History()
    assert history.traffic() is None
    history.add(0.0, {})
    assert history.traffic() is None
    assert seen({}).sparks[0].path == "", "one moment is no line"


def test_an_engine_that_comes_or_goes_is_no_jump() -> None:
    name = Sample("pdcluster_kv_received_bytes_total")
    history = History()
    history.add(0.0, {DECODE: {name: 5e9}})
    history.add(2.0, {DECODE: {name: 5e9}, ("decode", "d1"): {name: 7e9}})
    history.add(4.0, {("decode", "d1"): {name: 7e9}})
    found = history.traffic()
    assert found is not None
    assert spark(found, "KV received").most == "0.0 MB/s"


def test_history_is_bounded() -> None:
    name = "vllm:num_requests_waiting"
    found = seen(*({name: float(n)} for n in range(500)))
    assert spark(found, "Waiting in decode").path.count("L") == series.KEPT - 1
    assert found.seconds == (series.KEPT - 1) * 2


@given(st.lists(st.none() | st.floats(0, 1e18, allow_nan=False), max_size=series.KEPT))
def test_a_path_stays_in_its_box(numbers: list[float | None]) -> None:
    known = [n for n in numbers if n is not None]
    path = series._path(numbers, max(known, default=0.0))
    for x, y in re.findall(r"[ML]([-0-9.]+) ([-0-9.]+)", path):
        assert -0.1 <= float(x) <= series.WIDTH + 0.1
        assert 0 <= float(y) <= series.HEIGHT
        assert math.isfinite(float(y))
