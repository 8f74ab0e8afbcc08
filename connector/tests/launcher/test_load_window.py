"""What a launcher makes of its engine's metrics: the load of the last minute."""

from __future__ import annotations

import time

import pytest
from aiohttp.test_utils import TestClient, TestServer
from hypothesis import given, strategies as st
from test_recorded_documents import readiness

from pdcluster_connector.launcher.engine.load_window import (
    COUNTERS,
    GAUGES,
    SILENCE_SECONDS,
    LoadWindow,
)
from pdcluster_connector.launcher.interface import LauncherServer
from pdcluster_connector.launcher.links.link_table import LinkTable
from pdcluster_connector.protocol.launcher_documents import (
    ChangesReport,
    decode_changes,
    encode_json,
)
from pdcluster_connector.protocol.load_report import WARM_SECONDS, WINDOW_SECONDS, LoadReport


def page(n: float, *, waiting: float = 2, kv: float = 0.25, ranks: int = 1) -> str:
    """The metrics of an engine that serves one request a second, after n seconds."""
    lines = ["# HELP pdcluster_kv_busy_seconds_total x"]
    for rank in range(ranks):
        own = f'engine="{rank}",model_name="m"'
        lines += [
            f"pdcluster_kv_busy_seconds_total{{{own}}} {n / 2}",
            f"pdcluster_kv_busy_seconds_created{{{own}}} 1.7e9",
            f"vllm:prompt_tokens_total{{{own}}} {n * 100}",
            f"vllm:generation_tokens_total{{{own}}} {n * 10}",
            f'vllm:time_to_first_token_seconds_bucket{{{own},le="0.5"}} {n}',
            f"vllm:time_to_first_token_seconds_sum{{{own}}} {n * 0.3}",
            f"vllm:time_to_first_token_seconds_count{{{own}}} {n}",
            f"vllm:inter_token_latency_seconds_sum{{{own}}} {n * 9 * 0.02}",
            f"vllm:inter_token_latency_seconds_count{{{own}}} {n * 9}",
            f"vllm:num_requests_running{{{own}}} 3",
            f'vllm:num_requests_waiting_by_reason{{{own},reason="capacity"}} {waiting}',
            f'vllm:num_requests_waiting_by_reason{{{own},reason="deferred"}} 50',
            f"vllm:kv_cache_usage_perc{{{own}}} {kv}",
            f"pdcluster_kv_received_bytes_total{{{own}}} {n * 4096}",
            f'pdcluster_kv_prompts_total{{{own},outcome="transferred",reason=""}} {n}',
            f'pdcluster_kv_prompts_total{{{own},outcome="local",reason="PrefixHit"}} {n * 7}',
            # Two ranks receive each prompt, in 0.1 and 0.3 seconds.
            f'pdcluster_kv_receive_seconds_sum{{{own},phase="total"}} {n * 0.4}',
            f'pdcluster_kv_receive_seconds_count{{{own},phase="total"}} {n * 2}',
            f'pdcluster_kv_receive_seconds_sum{{{own},phase="fence"}} {n * 9}',
        ]
    return "\n".join(lines)


def warm(role: str = "decode", ranks: int = 1, end: int = 300, **more: float) -> LoadWindow:
    window = LoadWindow(role, ranks)
    for now in range(0, end + 1, 10):
        window.add(page(now, ranks=ranks, **more), now)  # type: ignore[arg-type]
    return window


def close(report: LoadReport | None, **fields: float) -> None:
    assert report is not None
    assert {name: getattr(report, name) for name in fields} == pytest.approx(fields)


def test_what_was_added_in_a_minute() -> None:
    close(
        warm().report(300),
        seconds=60,
        busy_seconds=30,
        tokens=600,
        requests=60,
        first_token_seconds=18,
        gaps=540,
        gap_seconds=10.8,
        running=3,
        waiting=2,
        kv=0.25,
        receives=60,
        receive_seconds=12,
        received_bytes=60 * 4096,
    )
    close(warm("prefill").report(300), tokens=6000)


def test_data_parallel_ranks_are_one_engine() -> None:
    close(
        warm(ranks=4).report(300), busy_seconds=30, tokens=2400, running=12, kv=0.25, receives=240
    )


def test_an_engine_that_has_just_begun_to_serve_is_not_measured() -> None:
    window = LoadWindow("prefill")
    for now in range(0, 90, 10):
        window.add(page(now, waiting=500 if now <= WARM_SECONDS else 1), now)
        assert window.report(now) is None
    window.add(page(90), 90)
    close(window.report(90), seconds=30, waiting=(1 + 1 + 2) / 3)


def test_an_engine_that_has_restarted_begins_again() -> None:
    window = warm()
    window.add(page(1), 310)
    assert window.report(310) is None
    for now in range(320, 410, 10):
        window.add(page(now - 309), now)
    close(window.report(400), requests=30, seconds=30)


def test_numbers_that_have_stopped_are_no_load() -> None:
    window = warm()
    assert window.report(300 + SILENCE_SECONDS) is not None
    assert window.report(301 + SILENCE_SECONDS) is None
    window.add(page(9000), 9000)
    assert window.report(9000) is None, "what was in between is not known"


@given(st.text(max_size=80), st.sampled_from([*COUNTERS, *GAUGES]))
def test_any_text_is_read(text: str, name: str) -> None:
    window = warm()
    window.add(text, 310)
    window.add(f"{name}{{{text}", 320)
    window.add(f"{name} {text}", 330)
    window.report(330)


@given(st.lists(st.floats(0, 1e12), min_size=13, max_size=20))
def test_whatever_is_counted_can_be_read_by_the_operator(counts: list[float]) -> None:
    window = LoadWindow("decode")
    for step, count in enumerate(sorted(counts)):
        window.add(page(count, kv=count, waiting=-count), step * 10)
    report = window.report(len(counts) * 10 - 10)
    told = ChangesReport("ab", load=report)
    assert decode_changes(encode_json(told)) == told
    assert report is not None
    assert report.seconds <= WINDOW_SECONDS


def test_a_launcher_that_tells_no_load_and_one_whose_load_cannot_be_read() -> None:
    older = decode_changes(b'{"revision": "ab"}')
    assert isinstance(older, ChangesReport)
    assert older.load is None
    for load in (b"7", b'"x"', b"{}", b'{"seconds": 0}', b'{"seconds": -1, "tokens": 3}'):
        read = decode_changes(b'{"revision": "ab", "load": ' + load + b"}")
        assert isinstance(read, ChangesReport), load
        assert read.load is None, load
    partly = decode_changes(
        b'{"revision": "ab", "load": {"seconds": 60, "kv": 7, "tokens": 5, "new": 1}}'
    )
    assert isinstance(partly, ChangesReport)
    assert partly.load == LoadReport(60, tokens=5)


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_the_operator_is_told_with_what_else_is_new_and_nobody_is_woken_for_it(
    role: str,
) -> None:
    window = LoadWindow(role)
    server = LauncherServer(readiness(role), LinkTable((1, 1)), "secret", lambda: None, load=window)
    async with TestClient(TestServer(server.application())) as client:
        first = await (await client.get("/v1/changes")).json()
        assert "load" not in first
        now = time.monotonic()
        for step in range(20):
            window.add(page(step * 10), now - 190 + step * 10)
        told = await (await client.get("/v1/changes")).json()
        assert told["load"]["requests"] == 60
        assert told["revision"] == first["revision"], "it is no reason to wake the operator"
        again = await (await client.get(f"/v1/changes?seen={told['revision']}")).json()
        assert again == {"revision": told["revision"]}
        assert "load" not in await (await client.get("/readyz")).json(), "strangers read that"
