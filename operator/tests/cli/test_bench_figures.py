"""Figures and pictures of ``pdcluster bench``, and what its client is asked to do."""

from __future__ import annotations

import io
import os
import statistics
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given, strategies as st
from rich.console import Console
from served_pair import serving

from pdcluster_operator.cli import bench, bench_client
from pdcluster_operator.cli.bench import (
    Load,
    carry_out,
    exit_of,
    make_plan,
    not_moved,
    shares,
    show,
)
from pdcluster_operator.cli.bench_figures import (
    AGGREGATED,
    ARMS,
    HEIGHT,
    PD,
    WIDTH,
    Arm,
    Bench,
    Label,
    arm,
    number_text,
    percentile,
    picture,
    png,
    svg,
)
from pdcluster_operator.cli.exits import Exit, UserError
from pdcluster_operator.cli.reach import Reach, find_serving
from pdcluster_operator.runtime.interfaces import Key

LOAD = Load(9, 2, 4, 6.0, 300, 16, 60.0)


def told(ttfts: list[float], itls: list[float], failed: int = 0) -> dict[str, Any]:
    return {"ttfts": ttfts, "itls": itls, "tokens": 10 * len(ttfts), "seconds": 2.0,
            "failed": failed}  # fmt: skip


def test_an_arm_has_the_median_of_its_rounds_and_the_range() -> None:
    runs = [told([0.1, 0.3, 0.2], [0.01]), told([0.5], [0.03, 0.05], 2), told([0.4, 0.4], [0.02])]
    found = arm(PD, 3, runs)
    assert found is not None
    assert found.ttft.rounds == pytest.approx([200, 500, 400])
    assert (found.ttft.median, found.ttft.low, found.ttft.high) == pytest.approx((400, 200, 500))
    assert found.itl.rounds == pytest.approx([10, 40, 20])
    assert found.throughput.rounds == [15, 5, 10]
    assert (found.requests, found.failed, found.engines) == (8, 2, 3)
    assert found.ttft_p99 == pytest.approx(500)
    assert found.itl_p99 == pytest.approx(50)


def test_a_round_in_which_all_requests_failed_is_left_out() -> None:
    found = arm(PD, 1, [told([], [], 3), told([0.1], [])])
    assert found is not None
    assert found.ttft.rounds == [100]
    assert found.itl.median == 0, "one token each has no gap"
    assert arm(PD, 1, [told([], [], 3)]) is None


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50), st.floats(0.01, 1))
def test_a_percentile_is_a_value_that_enough_values_do_not_exceed(
    values: list[float], share: float
) -> None:
    found = percentile(values, share)
    assert found in values
    assert sum(value <= found for value in values) >= share * len(values) - 1e-6
    assert percentile(values, 1) == max(values)


@given(st.integers(0, 10_000), st.integers(1, 300))
def test_shares_differ_by_one_and_lose_nothing(whole: int, parts: int) -> None:
    found = shares(whole, parts)
    assert (len(found), sum(found)) == (parts, whole)
    assert max(found) - min(found) <= 1


@pytest.mark.parametrize(
    ("value", "text"), [(0.1234, "0.12"), (12.34, "12.3"), (123.4, "123"), (12345.6, "12,346")]
)
def test_figures_have_three_digits(value: float, text: str) -> None:
    assert number_text(value) == text


def some(prompts: dict[str, int] | None, failed: int = 0) -> Bench:
    pd, aggregated = (
        arm(PD, 2, [told([0.1], [0.02], failed)] * 2),
        arm(AGGREGATED, 2, [told([0.2], [0.04])]),
    )
    assert pd is not None
    assert aggregated is not None
    return Bench(
        name="a<b>&", namespace="ns", way="direct", vllm="0.32.0", rounds=2, requests=1,
        concurrency=4, rate=None, input_tokens=300, output_tokens=16, arms=[pd, aggregated],
        prompts=prompts,
    )  # fmt: skip


def test_the_picture_is_well_formed_and_has_the_figures() -> None:
    shapes = picture(some({}))
    root = ET.fromstring(svg(shapes))
    texts = [one.text for one in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "ns/a<b>&: P/D and the same engines aggregated" in texts
    for figure in ("100", "200", "20.0", "40.0", "5.00"):
        assert figure in texts
    assert (texts.count(PD), texts.count(AGGREGATED)) == (3, 3)
    bars = [
        one for one in root.iter("{http://www.w3.org/2000/svg}rect") if one.get("width") == "74.0"
    ]
    heights = [float(one.get("height", "")) for one in bars]
    assert heights[1] == pytest.approx(2 * heights[0], abs=0.2), "twice the time, twice the height"
    for one in root.iter("{http://www.w3.org/2000/svg}rect"):
        x, y, width, height = (float(one.get(name, "")) for name in ("x", "y", "width", "height"))
        assert min(x, y, width, height) >= 0
        assert x + width <= WIDTH
        assert y + height <= HEIGHT


def test_nothing_that_is_written_overlaps() -> None:
    rows = [one for one in picture(some({})) if isinstance(one, Label)]
    for number, one in enumerate(rows):
        for other in rows[number + 1 :]:
            if abs(one.y - other.y) < one.size:
                reach = 0.31 * (one.size * len(one.text) + other.size * len(other.text))
                assert abs(one.x - other.x) > reach, (one, other)


def test_the_picture_is_a_png_too() -> None:
    image = pytest.importorskip("PIL.Image")
    found = image.open(io.BytesIO(png(picture(some({})))))
    assert found.size == (2 * WIDTH, 2 * HEIGHT)
    assert len(found.getcolors(1 << 20)) > 4


def printed(found: Bench, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    show(console, found)
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def test_the_table_has_both_arms() -> None:
    said = printed(some({"transferred": 4, "local/Requested": 2}))
    assert "TTFT, ms         100 (100-100)     200 (200-200)" in said
    assert "prompts on decode engines: 2 local/Requested, 4 transferred" in said
    assert "error" not in said


@pytest.mark.parametrize(
    ("prompts", "failed", "code"),
    [
        ({"transferred": 4, "local/Requested": 2, "local/PrefixHit": 1}, 0, Exit.DONE),
        ({"transferred": 4, "local/NoTicket": 2}, 0, Exit.KV_DID_NOT_MOVE),
        ({"transferred": 4, "recomputed/LeaseLost": 1}, 0, Exit.KV_DID_NOT_MOVE),
        ({"local/Requested": 2}, 0, Exit.KV_DID_NOT_MOVE),
        ({}, 0, Exit.KV_DID_NOT_MOVE),
        (None, 0, Exit.REQUEST_FAILED),
        ({"transferred": 4}, 1, Exit.REQUEST_FAILED),
    ],
)
def test_a_benchmark_of_p_d_that_is_none_says_so(
    prompts: dict[str, int] | None, failed: int, code: Exit
) -> None:
    found = some(prompts, failed)
    assert exit_of(found) is code
    assert ("engines: not known, because" in printed(found)) is (prompts is None)
    assert ("KV did not move" in printed(found)) is (not_moved(found) > 0)


async def test_prompts_are_counted_to_the_end_of_a_page_that_comes_in_pieces() -> None:
    line = 'pdcluster_kv_prompts_total{outcome="transferred",reason=""}'
    async with serving() as pair, Reach(pair.client, "default", local=False) as reach:
        found = await find_serving(pair.client, Key("default", "tiny"))
        pair.page = lambda _: "# HELP x\n" * 100_000 + f"{line} 7\n"  # type: ignore[method-assign]
        assert await bench._outcomes(found, reach) == {"transferred": 7}
        pair.page = lambda _: f"{line} NaN\n"  # type: ignore[method-assign]
        assert await bench._outcomes(found, reach) == {}
        pair.pods["tiny-decode-0"]["status"]["podIP"] = "127.77.255.1"  # nothing listens there
        assert await bench._outcomes(found, reach) is None, "not read is not none"


async def plan_of(load: Load) -> dict[str, Any]:
    async with serving() as pair, Reach(pair.client, "default", local=True) as reach:
        plan, engines = await make_plan(
            await find_serving(pair.client, Key("default", "tiny")), reach, load
        )
    assert engines == 2
    return plan


async def test_the_arms_take_turns_and_get_the_same_load() -> None:
    plan = await plan_of(LOAD)
    assert [(run["arm"], run["round"]) for run in plan["runs"]] == [
        (AGGREGATED, 0), (PD, 0), (PD, 1), (AGGREGATED, 1), (AGGREGATED, 2), (PD, 2),
    ]  # fmt: skip
    for name in ARMS:
        targets = next(
            run["targets"] for run in plan["runs"] if run["arm"] == name and run["round"]
        )
        assert sum(one["requests"] for one in targets) == 9
        assert sum(one["concurrency"] for one in targets) == 4
        assert sum(one["rate"] for one in targets) == pytest.approx(6)
    [router], (prefill, decode) = ([*run["targets"]] for run in plan["runs"][2:4])
    assert router["body"] == prefill["body"] == {}
    assert decode["body"] == {"kv_transfer_params": {"local_prefill": True}}


async def test_one_request_at_once_is_one_for_each_engine_in_both_arms() -> None:
    plan = await plan_of(Load(1, 1, 1, None, 300, 16, 60.0))
    aggregated = plan["runs"][3]
    assert [one["requests"] for one in aggregated["targets"]] == [1]
    assert aggregated["concurrency"] == plan["runs"][2]["concurrency"] == 2
    assert aggregated["targets"][0]["rate"] is None


def a_client(**parameters: Any) -> Any:
    """vLLM's module, as far as the arguments need it."""
    return SimpleNamespace(
        SampleRequest=SimpleNamespace,
        TaskType=SimpleNamespace(GENERATION="generation"),
        **parameters,
    )


def test_prompts_are_random_and_of_the_length_that_was_asked_for() -> None:
    def benchmark(**_: Any) -> None: ...

    plan = {"model": "m", "inputTokens": 50, "outputTokens": 7}
    target = {"url": "http://x", "requests": 3, "concurrency": 2, "rate": None, "body": {"a": 1}}
    given = bench_client.arguments(a_client(benchmark=benchmark), plan, target)
    prompts = [one.prompt for one in given["input_requests"]]
    assert [len(one) for one in prompts] == [50] * 3
    assert len(set(map(tuple, prompts))) == 3
    assert all(10 <= token < 256 for one in prompts for token in one)
    assert given["extra_body"] == {"temperature": 0, "a": 1}
    assert given["request_rate"] == float("inf")


def test_a_vllm_with_other_parameters_is_noticed() -> None:
    def benchmark(*, new: int) -> None: ...

    plan = {"model": "m", "inputTokens": 1, "outputTokens": 1}
    target = {"url": "http://x", "requests": 1, "concurrency": 1, "rate": 2.0, "body": {}}
    with pytest.raises(TypeError):
        bench_client.arguments(a_client(benchmark=benchmark), plan, target)


def test_results_of_targets_are_joined_without_what_failed() -> None:
    one = {"duration": 2.0, "ttfts": [0.1, 0.0], "itls": [[0.01], []], "output_lens": [2, 0],
           "errors": ["", "Traceback\nConnectionError: gone\n"]}  # fmt: skip
    other = {"duration": 3.0, "ttfts": [0.3], "itls": [[0.02, 0.03]], "output_lens": [3],
             "errors": [""]}  # fmt: skip
    assert bench_client.joined([one, other]) == {
        "seconds": 3.0, "ttfts": [0.1, 0.3], "itls": [0.01, 0.02, 0.03], "tokens": 5, "failed": 1,
        "error": "ConnectionError: gone",
    }  # fmt: skip


SLEEPER = """\
import os, sys, pathlib
pathlib.Path(os.environ["PIDS"]).write_text(str(os.getpid()))
sys.stdin.readline()
print(os.environ["SAYS"], flush=True)
if os.environ.get("ENDS"):
    sys.exit("ValueError: said at the end")
sys.stdin.read()
"""


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A client that gives one result and then waits. Returns the file with its number."""
    (tmp_path / "sleeper.py").write_text(SLEEPER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PIDS", str(tmp_path / "pid"))
    monkeypatch.setenv("SAYS", '{"arm": "P/D", "round": 1}')
    monkeypatch.setattr(bench, "CLIENT", "sleeper")
    return tmp_path / "pid"


@pytest.mark.process
async def test_after_its_time_the_load_ends_and_what_is_known_is_kept(client: Path) -> None:
    found, problem = await carry_out({"runs": [1, 2]}, None, 1.5)
    assert found == [{"arm": "P/D", "round": 1}]
    assert problem == "stopped after 2 s (--max-time)"
    assert not os.path.exists(f"/proc/{client.read_text()}")  # noqa: ASYNC240


@pytest.mark.process
async def test_a_client_that_ends_is_quoted(client: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENDS", "1")
    found, problem = await carry_out({"runs": [1, 2]}, None, 60.0)
    assert len(found) == 1
    assert problem == "vLLM's client ended: ValueError: said at the end"


@pytest.mark.process
def test_the_client_ends_when_the_command_is_killed(tmp_path: Path) -> None:
    """The real client; it imports no vLLM before its plan has come."""
    source = os.pathsep.join(one for one in sys.path if one.endswith("/src"))
    process = subprocess.Popen(
        [sys.executable, "-c", WAITS],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": source},
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("{}\n")
    process.stdin.flush()
    assert process.stdout.readline() == "works\n"
    process.stdin.close()
    assert process.wait(120) == 1
    process.stdout.close()


WAITS = """\
import time
from pdcluster_operator.cli import bench_client
def module(name):
    import sys
    sys.__stdout__.write("works\\n"); sys.__stdout__.flush()
    time.sleep(600)
bench_client.importlib.import_module = module
bench_client.main()
"""


def test_without_vllm_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(UserError, match="vLLM is missing: install it in this Python") as said:
        bench.bench.main(["tiny"], standalone_mode=False)
    assert said.value.exit is Exit.MACHINE


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--requests", "10001"], "--requests may be at most 10,000"),
        (["--rounds", "51"], "--rounds may be at most 50"),
        (["--rate", "-1"], "--rate -1.0 is not a number above 0"),
        (["--rate", "nan"], "--rate nan is not a number above 0"),
    ],
)
def test_a_load_without_bounds_is_refused(words: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said) as error:
        bench.bench.main(["tiny", *words], standalone_mode=False)
    assert error.value.exit is Exit.USAGE


def test_the_median_of_rounds_is_no_mean() -> None:
    assert statistics.median([1, 2, 9]) == 2
    found = arm(PD, 1, [told([one], [one]) for one in (1.0, 2.0, 9.0)])
    assert isinstance(found, Arm)
    assert found.ttft.median == 2000
