"""The choices of a request with ``n`` > 1 on the data-parallel ranks of a real decode engine.

vLLM spreads them over the ranks. They come with one ticket, and the lease has to outlive the last
of them. Which rank gets which choice is decided here, and not by vLLM's balancer; the test with
that one is e2e/tests/test_local_data_parallel.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from fork_host import Engine

pytest.importorskip("vllm")

from engine_pair import Pair, connector_config, leases_expired, nothing_held, prompt

from loopback import free_port
from models.tiny import model_path
from pdcluster_connector.compat.reasons import Reason
from pdcluster_connector.protocol.engine_id import parse_engine_id
from pdcluster_connector.transfer.receive_machine import State

pytestmark = pytest.mark.engine

PROMPT = prompt(200, 3)
TOKENS = 12
RANKS = 2


@dataclass
class Ranks:
    """A prefill engine, and the ranks of one decode engine whose policy is ``fail``."""

    prefill: Engine
    decode: list[Engine]

    def works(self, expected: list[int]) -> None:
        """Each rank has a connection: what is held in POSTED has made one before."""
        for number, rank in enumerate(self.decode):
            answer = Pair(self.prefill, rank).generate(PROMPT, TOKENS, f"warm {number}")
            assert (answer.tokens, answer.path["outcome"]) == (expected, "transferred")

    def submit(self, request: str, numbers: range, rank: int, ticket: dict[str, Any]) -> list[str]:
        """Send choices of one request to a rank, under the ids that vLLM gives them."""
        engine, sent = self.decode[rank], [f"{number}_{request}" for number in numbers]
        engine.ask("pause", True)  # so that they come in one step
        for request_id in sent:
            engine.ask("submit", request_id, PROMPT, TOKENS, ticket, request, {}, None)
        engine.ask("pause", False)
        return sent


@pytest.fixture(scope="module")
def ranks(engines: Callable[..., Engine]) -> Ranks:
    model = str(model_path("llama"))
    prefill = engines("p", connector_config("kv_producer"), model=model)
    config = connector_config("kv_consumer")
    decode = []
    for rank in range(RANKS):
        # A rank listens on the port of its engine plus its number.
        port = {"side_channel_port": free_port() - rank}
        extra = {**config["kv_connector_extra_config"], **port}
        own = {**config, "kv_connector_extra_config": extra}
        decode.append(engines("d", own, model=model, data_rank=rank))
    return Ranks(prefill.wait_ready(), [rank.wait_ready() for rank in decode])


@pytest.fixture(scope="module")
def expected(engines: Callable[..., Engine]) -> list[int]:
    """A single engine's greedy tokens for PROMPT."""
    single = engines("single", model=str(model_path("llama")), enable_prefix_caching=False)
    tokens = single.wait_ready().generate(PROMPT, TOKENS).tokens
    single.stop()
    return tokens


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_the_lease_outlives_the_rank_that_has_read_first(ranks: Ranks, expected: list[int]) -> None:
    ranks.works(expected)
    ended = leases_expired(ranks.prefill)
    ticket = Pair(ranks.prefill, ranks.decode[0]).ticket(PROMPT, "spread")
    slow = ranks.decode[1]
    slow.ask("hold", State.POSTED.name)
    late = ranks.submit("spread", range(1, 4, 2), 1, ticket)
    until(lambda: slow.ask("stands", len(late), State.POSTED.name))
    early = ranks.submit("spread", range(0, 4, 2), 0, ticket)
    for request_id in early:
        answer = ranks.decode[0].answer(request_id)
        assert (answer.tokens, answer.path["outcome"]) == (expected, "transferred")
        assert parse_engine_id(answer.path["decode"]).data_rank == 0
    until(lambda: ranks.prefill.ask("readers") == 1)
    assert ranks.prefill.held() == 1, "the other rank still reads"
    slow.ask("release")
    for request_id in late:
        answer = slow.answer(request_id)
        assert (answer.tokens, answer.path["outcome"]) == (expected, "transferred")
        assert parse_engine_id(answer.path["decode"]).data_rank == 1
    nothing_held(ranks.prefill, *ranks.decode)
    assert leases_expired(ranks.prefill) == ended, "given back by the last rank"


def test_a_choice_that_comes_after_the_lease_is_computed_and_does_not_fail(
    ranks: Ranks, expected: list[int]
) -> None:
    """The policy is ``fail``: a receive without a lease would end the request with an error."""
    ticket = Pair(ranks.prefill, ranks.decode[0]).ticket(PROMPT, "late")
    [first] = ranks.submit("late", range(1), 0, ticket)
    answer = ranks.decode[0].answer(first)
    assert (answer.tokens, answer.path["outcome"]) == (expected, "transferred")
    nothing_held(ranks.prefill)
    [second] = ranks.submit("late", range(1, 2), 1, ticket)
    answer = ranks.decode[1].answer(second)
    assert answer.tokens == expected
    assert (answer.path["outcome"], answer.path["reason"]) == ("local", Reason.LEASE_LOST)
    nothing_held(*ranks.decode)


def test_no_rank_of_another_engine_may_use_the_ticket_meanwhile(
    ranks: Ranks, engines: Callable[..., Engine], expected: list[int]
) -> None:
    """The claim is the engine's, and not anybody's who has the ticket."""
    ranks.works(expected)
    config = connector_config("kv_consumer")
    other = engines("o", config, model=str(model_path("llama")), data_rank=0).wait_ready()
    ticket = Pair(ranks.prefill, other).ticket(PROMPT, "claimed")
    held = ranks.decode[1]
    held.ask("hold", State.POSTED.name)
    [mine] = ranks.submit("claimed", range(1), 1, ticket)
    until(lambda: held.ask("stands", 1, State.POSTED.name))
    other.ask("submit", "1_claimed", PROMPT, TOKENS, ticket, "claimed", {}, None)
    answer = other.answer("1_claimed")
    assert answer.tokens == expected
    assert (answer.path["outcome"], answer.path["reason"]) == ("local", Reason.LEASE_CLAIMED)
    held.ask("release")
    answer = held.answer(mine)
    assert (answer.tokens, answer.path["outcome"]) == (expected, "transferred")
    nothing_held(ranks.prefill, *ranks.decode)
    other.stop()
