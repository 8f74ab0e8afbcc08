"""Many prompts that decode computes itself do not stop decode. vLLM's own scheduler sees to it.

This is why the connector holds no such prompt back. A connector can only say "ask again later", and
vLLM then looks at every waiting request in every step.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("vllm")

from contract import ContractEngine, closing_engines, prompt

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
    decode = engines("consumer", blocks=256, max_tokens_per_step=STEP_TOKENS, prefixes=False)
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
