"""Many prompts that decode computes itself do not stop decode. vLLM's own scheduler runs here.

vLLM gives each request that generates a token in every step. The connector sees to it that most of
these steps are short: it lets prompts wait their turn.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("vllm")

import contract
from contract import ContractEngine, closing_engines, prompt
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request, RequestStatus

from pdcluster_connector.vllm.scheduler_side import local_prompts

pytestmark = pytest.mark.vllm

STEP_TOKENS = 128
PROMPT_TOKENS = 400
STORM = 60


@pytest.fixture
def engines() -> Iterator[Any]:
    yield from closing_engines()


def received(prefill: ContractEngine, decode: ContractEngine, number: int, tokens: int) -> None:
    """A request whose KV has come, and which generates."""
    name, text = f"good{number}", prompt(40, first=100 + number)
    decode.add(name, text, prefill.prefill(f"p{number}", text), max_tokens=tokens)
    decode.run(lambda: name in decode.parked())
    decode.land(name)
    decode.run(lambda: decode.tokens.get(name, 0) > 0)


@pytest.mark.parametrize("cause", ["no ticket", "spent ticket"])
def test_a_storm_of_local_prompts_takes_no_step_from_requests_that_run(
    engines: Any, cause: str
) -> None:
    prefill = engines("producer", blocks=128)
    decode = engines(
        "consumer", blocks=256, max_tokens_per_step=STEP_TOKENS, prefixes=False,
        local_tokens_per_step=0,
    )  # fmt: skip
    running = [f"good{number}" for number in range(4)]
    for number in range(4):
        received(prefill, decode, number, tokens=60)
    ticket = None
    if cause == "spent ticket":
        text = prompt(PROMPT_TOKENS)
        ticket = prefill.prefill("p", text)
        decode.add("first", text, ticket)
        decode.run(lambda: "first" in decode.parked())
        decode.land("first")
        decode.run(lambda: "first" in decode.finished)
    for number in range(STORM):
        decode.add(f"local{number}", prompt(PROMPT_TOKENS), ticket)

    for _ in range(20):
        before = {name: decode.tokens[name] for name in running}
        decode.step()
        assert {name: decode.tokens[name] - before[name] for name in running} == dict.fromkeys(
            running, 1
        ), "each request that runs gets its token in every step"
        begun = [
            request
            for name, request in decode.scheduler.requests.items()
            if name.startswith("local") and 0 < request.num_computed_tokens < PROMPT_TOKENS
        ]
        assert len(begun) <= 1, "the next prompt begins where a step has room left"
        left = sum(PROMPT_TOKENS - request.num_computed_tokens for request in begun)
        assert left < PROMPT_TOKENS

    decode.run(lambda: len(decode.finished) == 4 + STORM + (ticket is not None))
    decode.step()
    reason = "NoTicket" if ticket is None else "TicketSpent"
    assert decode.prompts()["local", reason] == STORM
    assert decode.total("local_prompt_tokens") == {reason: STORM * PROMPT_TOKENS}


def test_a_request_whose_kv_has_come_goes_before_prompts_that_wait(engines: Any) -> None:
    prefill = engines("producer")
    decode = engines("consumer", blocks=256, max_tokens_per_step=STEP_TOKENS, prefixes=False)
    decode.add("good", prompt(40), prefill.prefill("p", prompt(40)), max_tokens=2)
    decode.run(lambda: "good" in decode.parked())
    for number in range(STORM):
        decode.add(f"local{number}", prompt(PROMPT_TOKENS, first=number), None)
    for _ in range(3):
        decode.step()
    decode.land("good")
    for _ in range(8):
        decode.step()
    assert "good" in decode.finished
    assert len(decode.finished) <= 4, "nearly all of the others still wait"


# The pace: with 40 tokens a step, a prompt of 400 tokens begins in every tenth step.

PACE = 40
GAP = PROMPT_TOKENS // PACE


def under_way(
    engines: Any, pace: int = PACE, **options: Any
) -> tuple[ContractEngine, ContractEngine]:
    """A pair whose decode engine generates for two requests, with room for all that comes."""
    options = {"blocks": 512, "prefixes": False, "local_tokens_per_step": pace, **options}
    prefill, decode = engines("producer", blocks=512), engines("consumer", **options)
    for number in range(2):
        received(prefill, decode, number, tokens=600)
    return prefill, decode


def storm(decode: ContractEngine, count: int, ticket: Any = None) -> list[str]:
    """Prompts that decode has to compute."""
    names = [f"local{number}" for number in range(count)]
    for number, name in enumerate(names):
        decode.add(name, prompt(PROMPT_TOKENS, first=number), ticket)
    return names


def first_steps(decode: ContractEngine, names: list[str]) -> dict[str, int]:
    """Step until these requests have ended; returns in which step each was first computed."""
    first: dict[str, int] = {}
    steps = itertools.count()
    while not set(names) <= set(decode.finished):
        step = next(steps)
        assert step < 2000, "nothing waits for ever"
        for name in decode.step():
            if name in names:
                first.setdefault(name, step)
    return first


def keep_to_the_pace(first: dict[str, int]) -> bool:
    """A prompt's last token is not counted: it brings the first token that is generated."""
    gaps = [later - earlier for earlier, later in itertools.pairwise(first.values())]
    return set(gaps) <= {GAP - 1, GAP}


def waiting(decode: ContractEngine) -> int:
    """How many prompts wait, as the metric says."""
    return decode.total("local_prompts_waiting")


@pytest.mark.parametrize("asynchronous", [False, True])
def test_requests_that_generate_go_on_between_the_prompts_of_a_storm(
    engines: Any, asynchronous: bool
) -> None:
    generated = {}
    for pace in (0, PACE):
        _, decode = under_way(engines, pace, asynchronous=asynchronous)
        names = storm(decode, 12)
        before = decode.tokens["good0"]
        first = first_steps(decode, names)
        generated[pace] = decode.tokens["good0"] - before
        assert list(first) == names, "first come, first served"
        assert not pace or keep_to_the_pace(first), first
        waits = decode.total("local_prompt_wait_seconds") if pace else []
        assert len(waits) == (11 if pace else 0)
        assert decode.prompts()["local", "NoTicket"] == 12
    assert generated[0] < 10, "without the pace, each step is full of prompts"
    assert generated[PACE] > 11 * (GAP - 1)
    assert waiting(decode) == 0


def test_a_request_whose_kv_comes_waits_for_no_prompt(engines: Any) -> None:
    prefill, decode = under_way(engines)
    storm(decode, 12)
    for _ in range(2):
        decode.step()
    decode.add("good", prompt(40, first=200), prefill.prefill("p", prompt(40, first=200)))
    decode.step()
    assert "good" in decode.parked(), "it is behind eleven prompts in the queue"
    decode.land("good")
    decode.run(lambda: "good" in decode.finished)
    assert len(decode.finished) < 5, "most of them still wait"


def test_what_waits_looks_again_for_its_kv_and_short_rests_do_not_wait(engines: Any) -> None:
    _, decode = under_way(engines, prefixes=True)
    names = storm(decode, 3)
    decode.step()
    decode.add("again", prompt(PROMPT_TOKENS, first=0), None)  # as the first one
    decode.add("short", prompt(10), None)
    decode.step()
    decode.step()
    assert {"again", "short"} <= set(decode.finished)
    assert "local1" not in decode.finished
    first_steps(decode, names[1:])


def test_prompts_whose_transfers_failed_wait_their_turn_too(engines: Any) -> None:
    prefill, decode = under_way(engines, policy="recompute")
    names = [f"lost{number}" for number in range(5)]
    texts = {name: prompt(PROMPT_TOKENS, first=n) for n, name in enumerate(names)}
    for name, text in texts.items():
        decode.add(name, text, prefill.prefill(f"p{name}", text))
    decode.run(lambda: set(names) <= decode.parked())
    free = decode.free_blocks()
    for name in names:
        decode.land(name, reason="SideChannelUnreachable")
    decode.step()
    first = first_steps(decode, names)
    assert keep_to_the_pace(first), first
    assert decode.prompts()["recomputed", "SideChannelUnreachable"] == 5
    assert decode.free_blocks() > free


def test_prompts_whose_transfers_failed_and_requests_of_higher_priority_do_not_block_each_other(
    engines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_priority = functools.partial(contract.SchedulerConfig, policy="priority")
    monkeypatch.setattr(contract, "SchedulerConfig", by_priority)
    prefill, decode = under_way(engines, blocks=110, policy="recompute")
    failed, later = ["failed0", "failed1", "failed2"], ["later0", "later1"]
    for number, name in enumerate(failed):
        text = prompt(PROMPT_TOKENS, first=number)
        ticket = prefill.prefill(f"p{name}", text)
        decode.add(name, text, ticket, max_tokens=5, priority=1)
    decode.run(lambda: set(failed) <= decode.parked())
    for number, name in enumerate(later):
        text = prompt(1000, first=10 + number)
        decode.add(name, text, prefill.prefill(f"p{name}", text))
    decode.step()
    for name in failed:
        decode.land(name, reason="BackendError")
    decode.step()
    decode.step()
    assert waiting(decode) == 2, "the first one makes a debt"
    decode.scheduler.finish_requests(["good0", "good1"], RequestStatus.FINISHED_ABORTED)
    for _ in range(100):
        for name in decode.parked():
            decode.land(name)
        decode.step()
    assert set(failed + later) <= set(decode.finished)


def add_with_logprobs(decode: ContractEngine, name: str, text: list[int]) -> None:
    """A request that asks for logprobs of its prompt: vLLM computes all of it, and asks nobody."""
    sampling = SamplingParams(max_tokens=1, ignore_eos=True, prompt_logprobs=1)
    decode.scheduler.add_request(
        Request(name, text, sampling, pooling_params=None, block_hasher=decode._hasher)
    )


def test_prompts_that_never_wait_keep_nobody_waiting(engines: Any) -> None:
    _, decode = under_way(engines)
    decode.add("honest", prompt(PROMPT_TOKENS), None)
    for number in range(GAP):
        add_with_logprobs(decode, f"logprobs{number}", prompt(PROMPT_TOKENS, first=number))
        if number == 2:
            decode.add("second", prompt(60, first=77), None)
        decode.step()
    assert waiting(decode) == 1
    assert len(decode.total("local_prompt_wait_seconds")) == 0, (
        "who asks for logprobs does not wait"
    )
    for _ in range(2 * GAP):
        decode.step()
    assert {"honest", "second"} <= set(decode.finished)


def test_prompts_that_their_sender_wants_computed_here_do_not_wait(engines: Any) -> None:
    _, decode = under_way(engines)
    names = [f"asked{number}" for number in range(6)]
    for number, name in enumerate(names):
        decode.add(name, prompt(PROMPT_TOKENS, first=number), {"local_prefill": True})
    decode.step()
    assert not waiting(decode)
    for _ in range(2 * GAP):
        decode.step()
    assert set(names) <= set(decode.finished)
    assert len(decode.total("local_prompt_wait_seconds")) == 0
    decode.add("honest", prompt(PROMPT_TOKENS, first=90), None)
    decode.step()
    assert not waiting(decode), "they make no debt"


def test_a_ticket_of_no_use_is_released_before_its_prompt_has_its_turn(engines: Any) -> None:
    prefill, decode = under_way(engines)
    names = [f"stale{number}" for number in range(12)]
    for number, name in enumerate(names):
        text = prompt(PROMPT_TOKENS, first=number)
        decode.add(name, text, prefill.prefill(f"p{name}", text))
    decode.connector.reset_cache()
    decode.step()
    decode.step()
    assert len(decode.connector._scheduler.decode._tickets.held) == 0
    assert waiting(decode) > 5
    first_steps(decode, names)
    assert decode.prompts()["local", "CacheReset"] == 12


def test_prompts_that_leave_while_they_wait_are_forgotten(engines: Any) -> None:
    _, decode = under_way(engines)
    names = storm(decode, 6)
    for _ in range(3):
        decode.step()
    assert waiting(decode) == 5
    decode.scheduler.finish_requests(names[1:], RequestStatus.FINISHED_ABORTED)
    decode.step()
    decode.step()
    assert waiting(decode) == 0
    assert decode.connector._scheduler.decode.local._requests.keys() == {"good0", "good1"}
    decode.add("next", prompt(PROMPT_TOKENS), None)
    first_steps(decode, ["next"])


def test_a_preempted_request_that_generates_does_not_wait(engines: Any) -> None:
    _, decode = under_way(engines)
    [name] = storm(decode, 1)
    decode.run(lambda: name in decode.finished)
    decode.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert decode.scheduler.requests["good0"].status is RequestStatus.PREEMPTED
    assert {"good0", "good1"} <= set(decode.step()), "although a prompt would have to wait"


def test_a_prompt_whose_kv_came_waits_and_counts_like_others_after_a_preemption(
    engines: Any,
) -> None:
    prefill, decode = under_way(engines, asynchronous=True)
    text = prompt(PROMPT_TOKENS, first=11)
    decode.add("came", text, prefill.prefill("p", text), max_tokens=30)
    decode.run(lambda: "came" in decode.parked())
    names = storm(decode, 3)
    decode.step()
    decode.step()
    decode.land("came")
    while "came" not in decode.step():
        pass
    with contextlib.suppress(RuntimeError):  # it does so, and raises while KV is under way
        decode.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert decode.scheduler.requests["came"].num_output_tokens == 0, "its client has read nothing"
    first = first_steps(decode, ["came", *names[1:]])
    assert waiting(decode) == 0
    assert len(decode.total("local_prompt_wait_seconds")) == 3
    assert keep_to_the_pace(first), first


@pytest.mark.parametrize(("asynchronous", "seed"), [(False, 1), (False, 2), (True, 3), (True, 4)])
def test_whatever_becomes_of_requests_nothing_is_left_of_them(
    engines: Any, asynchronous: bool, seed: int
) -> None:
    dice = random.Random(seed)
    prefill, decode = under_way(engines, policy="recompute", asynchronous=asynchronous)
    before = decode.free_blocks()
    alive: set[str] = {"good0", "good1"}
    sent: set[str] = set(alive)
    ended: set[str] = set()
    for number in range(100):
        name, text = f"r{number}", prompt(dice.randrange(10, 500), first=number)
        event = dice.choice(["local", "local", "ticket", "land", "abort", "preempt", *["step"] * 6])
        parked = sorted(decode.parked() & alive)
        if event in ("local", "ticket"):
            ticket = prefill.prefill(f"p{name}", text) if event == "ticket" else None
            decode.add(name, text, ticket, max_tokens=dice.randrange(1, 30))
            sent.add(name)
        elif event == "land" and parked:
            decode.land(dice.choice(parked), reason=dice.choice(["", "BackendError"]))
        elif event == "abort":
            name = dice.choice(sorted(sent))
            decode.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
            ended.add(name)
        elif event == "preempt" and dice.random() < 0.3:
            with contextlib.suppress(RuntimeError):  # it does so, and raises while KV is under way
                decode.scheduler.reset_prefix_cache(reset_running_requests=True)
        decode.step()
        ended |= decode.finished.keys()
        alive = sent - ended

    def land_all() -> bool:
        for name in decode.parked():
            decode.land(name, reason="BackendError")
        return not decode.scheduler.requests

    decode.run(land_all)
    decode.step()
    decode.step()
    assert sent <= ended | decode.finished.keys()
    local = decode.connector._scheduler.decode.local
    assert (local._requests, local._waiting) == ({}, {})
    assert waiting(decode) == 0
    assert decode.free_blocks() > before
    assert decode.total("step_faults") == {}


def test_more_prompts_than_vllm_can_look_at_in_each_step_do_not_wait(
    engines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_prompts, "MOST_LOOKUPS", 8 * local_prompts.LOOKUPS_OF_A_PROMPT)
    _, decode = under_way(engines)
    names = storm(decode, 20)
    first = first_steps(decode, names)
    assert list(first) == names, "first come, first served"
    steps = list(first.values())
    assert steps[10] < GAP, "at first, each step is full of prompts"
    assert keep_to_the_pace(dict(list(first.items())[-6:])), "the last ones wait their turn"


@pytest.mark.parametrize("pace", [0, PACE])
def test_nothing_waits_where_nothing_generates(engines: Any, pace: int) -> None:
    decode = engines("consumer", blocks=512, prefixes=False, local_tokens_per_step=pace)
    names = storm(decode, 12)
    first = first_steps(decode, names)
    assert max(first.values()) == 4, "1,024 tokens in each of five steps"


def test_a_prompt_that_waits_begins_when_nothing_generates_any_more(engines: Any) -> None:
    _, decode = under_way(engines, pace=1)
    names = storm(decode, 2)
    decode.step()
    decode.step()
    assert waiting(decode) == 1
    decode.scheduler.finish_requests(["good0", "good1"], RequestStatus.FINISHED_ABORTED)
    for _ in range(3):
        decode.step()
    assert set(names) <= set(decode.finished), "at one token a step, it would wait for 400 steps"
