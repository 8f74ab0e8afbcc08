"""Our scheduler side under vLLM's own scheduler: windows and Mamba states beside full attention."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from contract import BLOCK, FULL, STATE, ContractEngine, closing_engines, prompt
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.kv_cache_interface import SlidingWindowSpec

from pdcluster_connector.protocol.ticket import Ticket, ticket_of
from ticket_key import KEYS

pytestmark = pytest.mark.vllm

WINDOW = SlidingWindowSpec(
    block_size=BLOCK, num_kv_heads=1, head_size=32, dtype=torch.float32, sliding_window=32
)


@pytest.fixture
def engines() -> Iterator[Any]:
    yield from closing_engines(ranks=1)


def ticket(params: dict[str, Any]) -> Ticket:
    found = ticket_of(params, KEYS)
    assert isinstance(found, Ticket)
    return found


def received(decode: ContractEngine, request_id: str) -> Any:
    """Let a parked request's receive end; returns its order."""
    decode.run(lambda: request_id in decode.parked())
    order = decode.workers[0].parked[request_id]
    decode.land(request_id)
    decode.run(lambda: request_id in decode.finished)
    return order


# 95 - 32 is a block's last token: after the whole prompt vLLM would let go of that block.
@pytest.mark.parametrize(("length", "first"), [(80, 3), (95, 3), (96, 4), (97, 4)])
def test_a_window_is_held_for_the_last_token_on_both_sides(
    engines: Any, length: int, first: int
) -> None:
    prefill = engines("producer", specs=(WINDOW, FULL))
    decode = engines("consumer", specs=(WINDOW, FULL))
    params = prefill.prefill("p0", prompt(length))
    given = ticket(params)
    blocks = -(-(length - 1) // BLOCK)
    assert given.tokens == length - 1, "decode computes the last token"
    assert [len(group) for group in given.blocks] == [blocks, blocks]
    # The last token's query reads from token length - 32 on.
    needed = (length - 32) // BLOCK
    assert needed == first
    assert [block > 0 for block in given.blocks[0]] == [i >= needed for i in range(blocks)]
    assert all(block > 0 for block in given.blocks[1])

    decode.add("d0", prompt(length), params, max_tokens=2)
    order = received(decode, "d0")
    assert (order.start, order.stop) == (0, length - 1)
    assert [block > 0 for block in order.blocks[0].blocks] == [i >= needed for i in range(blocks)]
    assert all(block > 0 for block in order.blocks[1].blocks)
    assert decode.tokens["d0"] == 2
    assert decode.params["d0"]["kv_path"]["tokens"] == length - 1
    assert decode.params["d0"]["kv_path"]["blocks"] == 2 * blocks - needed


@pytest.mark.parametrize(("length", "hit"), [(49, True), (65, True), (50, False), (64, False)])
def test_a_whole_local_prefix_hit_releases_without_a_transfer(
    engines: Any, length: int, hit: bool
) -> None:
    """The ticket ends before the last token; so may the blocks that decode still has."""
    prefill = engines("producer", specs=(WINDOW, FULL))
    decode = engines("consumer", specs=(WINDOW, FULL))
    before = prefill.free_blocks()
    decode.add("warm", prompt(length), None)
    decode.run(lambda: "warm" in decode.finished)
    params = prefill.prefill("p0", prompt(length))
    decode.add("d0", prompt(length), params, max_tokens=2)
    if hit:
        decode.run(lambda: "d0" in decode.finished)
        path = decode.params["d0"]["kv_path"]
        assert (path["outcome"], path["reason"]) == ("local", "PrefixHit")
        assert decode.total("decodes_without_transfer") == {"NoTicket": 1, "PrefixHit": 1}
    else:
        assert received(decode, "d0").start == (length - 1) // BLOCK * BLOCK
        assert decode.params["d0"]["kv_path"]["outcome"] == "transferred"
    assert decode.tokens["d0"] == 2
    prefill.run(lambda: not prefill.scheduler.requests)
    assert prefill.free_blocks() == before


def test_a_state_is_one_slot(engines: Any) -> None:
    prefill = engines("producer", specs=(STATE, FULL), prefixes=False)
    decode = engines("consumer", specs=(STATE, FULL), prefixes=False)
    before = prefill.free_blocks()
    params = prefill.prefill("p0", prompt(40))
    given = ticket(params)
    assert given.tokens == 39
    assert [len(group) for group in given.blocks] == [1, 3]
    decode.add("d0", prompt(40), params, max_tokens=2)
    order = received(decode, "d0")
    assert [len(group.blocks) for group in order.blocks] == [1, 3]
    assert (order.start, order.stop) == (0, 39)
    prefill.run(lambda: not prefill.scheduler.requests)
    assert prefill.free_blocks() == before


@pytest.mark.parametrize("specs", [(WINDOW, FULL), (STATE, FULL)], ids=["window", "state"])
def test_a_ticket_that_holds_the_last_token_is_not_used(engines: Any, specs: Any) -> None:
    """The state after the last token would count it twice."""
    options = {"specs": specs, "prefixes": False}
    prefill, decode = engines("producer", **options), engines("consumer", **options)
    params = prefill.prefill("p0", prompt(40))
    decode.add("d0", prompt(39), params)
    decode.run(lambda: "d0" in decode.finished)
    path = decode.params["d0"]["kv_path"]
    assert (path["outcome"], path["reason"]) == ("local", "TicketTooLong")
    prefill.run(lambda: not prefill.scheduler.requests)


def test_one_token_is_not_handed_over(engines: Any) -> None:
    prefill = engines("producer", specs=(WINDOW, FULL))
    before = prefill.free_blocks()
    assert "ticket" not in prefill.prefill("p0", prompt(1))
    prefill.step()
    assert prefill.free_blocks() == before
    assert ticket(prefill.prefill("p1", prompt(2))).tokens == 1


def test_full_attention_alone_hands_over_every_token(engines: Any) -> None:
    assert ticket(engines("producer").prefill("p0", prompt(40))).tokens == 40


@pytest.mark.parametrize(("offset", "tokens"), [(29, 39), (30, 40)])
def test_a_prompt_that_ends_within_an_image_is_not_cut_there(
    engines: Any, offset: int, tokens: int
) -> None:
    """The tokens of an image may read each other. It then gets no ticket: decode computes it."""
    prefill = engines("producer", specs=(WINDOW, FULL))
    image = MultiModalFeatureSpec(
        data=None, modality="image", identifier="i", mm_position=PlaceholderRange(offset, 10)
    )
    asks = {"do_remote_decode": True}
    request = prefill.add("p0", prompt(40), asks, mm_features=[image])
    assert request.num_prompt_tokens == request.num_tokens == tokens
    request.mm_features = []  # there is no encoder
    prefill.run(lambda: "p0" in prefill.finished)
    assert ("ticket" in prefill.params["p0"]) == (tokens != 40)
