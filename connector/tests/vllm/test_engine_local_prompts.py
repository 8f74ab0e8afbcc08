"""Prefill is killed, and all prompts come to a real decode engine that generates for others.

What is compared is counted in engine steps, so a slow machine changes nothing. Both requests that
generate get one token in each step.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

import pytest
from fork_host import Engine

pytest.importorskip("vllm")

from engine_pair import Pair, connector_config, nothing_held, prompt

from models.tiny import model_path

pytestmark = pytest.mark.engine

LENGTH = 200
PACE = 20
GENERATED = 200  # more than the storm takes steps
LEASE_SECONDS = 60.0  # a receive that hangs fails when its lease has ended
STREAMS = [prompt(90, seed) for seed in (1, 2)]
STORM = [prompt(LENGTH, seed) for seed in range(3, 15)]


@pytest.fixture(scope="module")
def expected(engines: Callable[..., Engine]) -> tuple[list[list[int]], list[list[int]]]:
    """A single engine's greedy tokens: of the streams, and of the storm's prompts."""
    single = engines("single", model=str(model_path("llama")), enable_prefix_caching=False)
    single.wait_ready()
    streams = [single.submit(each, GENERATED) for each in STREAMS]
    storm = [single.submit(each, 1) for each in STORM]
    tokens = tuple([single.answer(each).tokens for each in ids] for ids in (streams, storm))
    single.stop()
    return tokens


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def steps_of_a_storm(
    engines: Callable[..., Engine], pace: int, expected: tuple[list[list[int]], list[list[int]]]
) -> list[int]:
    """Return in which engine steps the prompts were computed, in order.

    Half of them come with tickets of the killed engine, and half without.
    """
    model = str(model_path("llama"))
    prefill = engines(
        "p", connector_config("kv_producer", lease_seconds=LEASE_SECONDS), model=model
    )
    decode = engines(
        "d", connector_config("kv_consumer", "recompute", local_tokens_per_step=pace),
        model=model, max_num_batched_tokens=1024,
    )  # fmt: skip
    pair = Pair(prefill.wait_ready(), decode.wait_ready())
    pair.generate(prompt(90, 0), 1)  # the engines are connected
    tickets = [pair.ticket(each) for each in STORM[:6]]
    decode.ask("pause", True)  # from here on, the test says when there is a step
    streams = [decode.submit(each, GENERATED) for each in STREAMS]
    for stream in streams:
        decode.ask("advance", stream, "RUNNING", len(STREAMS[0]) + 1)

    decode.ask("hold", "NEW")
    storm = [
        decode.submit(each, 1, ticket)
        for each, ticket in zip(STORM, [*tickets, *[None] * 6], strict=True)
    ]
    decode.ask("advance", storm[5], "WAITING_FOR_REMOTE_KVS", 0)
    prefill.kill()
    decode.ask("release")
    until(lambda: decode.ask("ended") == 6)
    decode.ask("pause", False)

    answers = [decode.answer(each) for each in storm]
    assert [answer.tokens for answer in answers] == expected[1]
    assert {answer.path["outcome"] for answer in answers[:6]} == {"failed"}
    assert {answer.path["reason"] for answer in answers[6:]} == {"NoTicket"}
    assert [decode.answer(each).tokens for each in streams] == expected[0]
    nothing_held(decode)
    waited = decode.metrics().get("pdcluster_kv_local_prompt_wait_seconds_count", 0.0)
    assert waited == (11 if pace else 0), "all but the first"
    assert not decode.metrics().get("pdcluster_kv_local_prompts_waiting")
    steps = [decode.ask("last_step", each) for each in storm]
    assert max(steps) < min(decode.ask("last_step", each) for each in streams)
    decode.stop()
    return sorted(steps)


@pytest.mark.parametrize("pace", [0, PACE])
def test_streams_go_on_while_decode_computes_what_prefill_should_have(
    engines: Callable[..., Engine],
    expected: tuple[list[list[int]], list[list[int]]],
    pace: int,
) -> None:
    steps = steps_of_a_storm(engines, pace, expected)
    if not pace:
        assert steps[-1] - steps[0] < 6, "each step is full of prompts"
        return
    gaps = [later - earlier for earlier, later in itertools.pairwise(steps)]
    assert min(gaps) >= LENGTH // PACE - 1, "each stream gets as many tokens between two prompts"
