"""Real engines whose leases end too early, or are wanted twice: never a wrong token."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from fork_host import Engine

pytest.importorskip("vllm")

from engine_pair import Pair, connector_config, leases_expired, nothing_held, prompt

from models.tiny import model_path
from pdcluster_connector.compat.reasons import Reason

pytestmark = pytest.mark.engine

PROMPT = prompt(200, 3)
TOKENS = 12
LEASE = 2.0


@pytest.fixture(scope="module")
def expected(engines: Callable[..., Engine]) -> list[int]:
    """A single engine's greedy tokens for PROMPT."""
    single = engines("single", model=str(model_path("llama")), enable_prefix_caching=False)
    tokens = single.wait_ready().generate(PROMPT, TOKENS).tokens
    single.stop()
    return tokens


def start(engines: Callable[..., Engine], decodes: int = 1, **extra: Any) -> list[Engine]:
    """A prefill engine and decode engines that recompute what they cannot receive."""
    model = str(model_path("llama"))
    started = [engines("p", connector_config("kv_producer", **extra), model=model)]
    for _ in range(decodes):
        config = connector_config("kv_consumer", "recompute", **extra)
        started.append(engines("d", config, model=model))
    return [engine.wait_ready() for engine in started]


def wait_until_claimed(prefill: Engine) -> None:
    """A claim travels by itself: the decode engine need not step."""
    deadline = time.monotonic() + 120
    while not prefill.ask("readers"):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def overwrite(prefill: Engine) -> None:
    """Have other prompts computed in all of prefill's 255 blocks."""
    for number in range(5):
        prefill.generate(prompt(1900, 10 + number), 1, salt=f"other {number}")


def failures(engine: Engine) -> dict[str, float]:
    return {
        name.split("reason=")[1].rstrip("}"): value
        for name, value in engine.metrics().items()
        if name.startswith("pdcluster_kv_failures_total{")
    }


def test_one_ticket_at_two_decode_engines(
    engines: Callable[..., Engine], expected: list[int]
) -> None:
    """A router's retry or a client's replay: the second engine must not read what is there now."""
    prefill, first, second = start(engines, decodes=2)
    ticket = Pair(prefill, first).ticket(PROMPT)
    answer = first.generate(PROMPT, TOKENS, ticket)
    assert (answer.path["outcome"], answer.tokens) == ("transferred", expected)
    nothing_held(prefill)
    assert leases_expired(prefill) == 0
    overwrite(prefill)
    answer = second.generate(PROMPT, TOKENS, ticket)
    assert answer.tokens == expected
    assert answer.path["reason"] == Reason.LEASE_LOST
    assert answer.path["outcome"] != "transferred"
    # Nothing of it is in the prefix cache either.
    assert second.generate(PROMPT, TOKENS).tokens == expected
    # Both go on as before.
    for decode in (first, second):
        answer = Pair(prefill, decode).generate(PROMPT, TOKENS, "next")
        assert (answer.path["outcome"], answer.tokens) == ("transferred", expected)
        decode.stop()
    prefill.stop()


def test_a_ticket_that_another_decode_engine_uses(
    engines: Callable[..., Engine], expected: list[int]
) -> None:
    """The first one holds the lease; the second one neither reads nor ends it."""
    prefill, first, second = start(engines, decodes=2)
    ticket = Pair(prefill, first).ticket(PROMPT)
    first.ask("pause", True)
    waiting = first.submit(PROMPT, TOKENS, ticket)
    wait_until_claimed(prefill)
    answer = second.generate(PROMPT, TOKENS, ticket)
    assert answer.tokens == expected
    assert answer.path["reason"] == Reason.LEASE_CLAIMED
    assert answer.path["outcome"] != "transferred"
    time.sleep(0.5)  # the second engine gives its ticket back
    first.ask("pause", False)
    answer = first.answer(waiting)
    assert (answer.path["outcome"], answer.tokens) == ("transferred", expected)
    for engine in (first, second, prefill):
        engine.stop()


def test_a_decode_engine_whose_clock_is_wrong_receives_all_the_same(
    engines: Callable[..., Engine], expected: list[int]
) -> None:
    prefill, decode = start(engines)
    for ahead in (61.0, -61.0, 3600.0, -3600.0):
        prefill.ask("set_clock", -ahead)
        answer = Pair(prefill, decode).generate(PROMPT, TOKENS, f"clock {ahead}")
        assert (answer.path["outcome"], answer.tokens) == ("transferred", expected), ahead
    assert failures(decode) == {}
    for engine in (decode, prefill):
        engine.stop()


def test_a_decode_engine_that_makes_no_step_for_longer_than_the_lease(
    engines: Callable[..., Engine], expected: list[int]
) -> None:
    prefill, decode = start(engines, lease_seconds=LEASE)
    ticket = Pair(prefill, decode).ticket(PROMPT)
    decode.ask("pause", True)
    waiting = decode.submit(PROMPT, TOKENS, ticket)
    time.sleep(LEASE)
    nothing_held(prefill)
    overwrite(prefill)
    time.sleep(LEASE / 2)
    decode.ask("pause", False)
    answer = decode.answer(waiting)
    assert answer.tokens == expected
    assert (answer.path["outcome"], answer.path["reason"]) == ("local", Reason.LEASE_EXPIRED)
    assert decode.generate(PROMPT, TOKENS).tokens == expected
    Pair(prefill, decode).moves_soon(PROMPT, expected, "next")
    for engine in (decode, prefill):
        engine.stop()


def race(prefill: Engine, decode: Engine, expected: list[int], runs: int) -> None:
    for run in range(runs):
        ticket = Pair(prefill, decode).ticket(PROMPT, f"race {run}")
        prefill.ask("nap", 1.0)
        answer = decode.generate(PROMPT, TOKENS, ticket, f"race {run}")
        assert (answer.path["outcome"], answer.tokens) == ("transferred", expected), run
    assert failures(decode) == {}


def test_decode_reads_while_prefills_next_step_lasts(
    engines: Callable[..., Engine], expected: list[int]
) -> None:
    """The word was written in the step that computed the blocks, and claims need no step."""
    prefill, decode = start(engines)
    race(prefill, decode, expected, 3)
    for engine in (decode, prefill):
        engine.stop()


@pytest.mark.soak
def test_fifty_reads_while_prefills_next_step_lasts(
    engines: Callable[..., Engine], expected: list[int]
) -> None:
    prefill, decode = start(engines)
    race(prefill, decode, expected, 50)
    for engine in (decode, prefill):
        engine.stop()
