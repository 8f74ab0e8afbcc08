"""Our scheduler side under vLLM's own scheduler, with another block size on each side.

What the two schedulers hand to their workers is carried out in simulated memory, where every
byte is compared with what the layout means (``layout_cases``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from contract import STATE, ContractEngine, closing_engines, prompt
from layout_cases import FULL, MAMBA, WINDOW, paired, run
from modelled_engine import Array, Grid, Group
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

from pdcluster_connector.protocol.ticket import Ticket, ticket_of
from ticket_key import KEYS

pytestmark = pytest.mark.vllm

SIZE = 32  # sliding window in tokens


def engine(
    make: Any, role: str, block: int, windows: bool = False, states: bool = False
) -> ContractEngine:
    plain: dict[str, Any] = {
        "block_size": block, "num_kv_heads": 1, "head_size": 32, "dtype": torch.float32,
    }  # fmt: skip
    specs = [FullAttentionSpec(**plain)]
    if windows:
        specs.append(SlidingWindowSpec(**plain, sliding_window=SIZE))
    if states:
        specs.append(STATE)
    return make(role, block=block, specs=specs, prefixes=not states)


@pytest.fixture
def engines() -> Iterator[Any]:
    yield from closing_engines(ranks=1)


def handed_over(prefill: ContractEngine, decode: ContractEngine, tokens: list[int]) -> Any:
    """Prefill and park a request; returns its order, the receive ended."""
    params = prefill.prefill(f"p{len(tokens)}", list(tokens))  # prefill may shorten it
    request_id = f"d{len(tokens)}"
    decode.add(request_id, tokens, params, max_tokens=2)
    decode.run(lambda: request_id in decode.parked())
    order = decode.workers[0].parked[request_id]
    decode.land(request_id)
    decode.run(lambda: request_id in decode.finished)
    assert decode.params[request_id]["kv_path"]["outcome"] == "transferred"
    assert order.ticket == ticket_of(params, KEYS)
    return order


def bytes_moved(
    order: Any, sizes: tuple[int, int], windows: bool = False, states: bool = False
) -> int:
    """Carry an order out on two TP sizes in simulated memory; returns the bytes, 8 a cell."""
    groups = [Group(FULL, ("full.0",), (Array("", 2, 8),))]
    grids = [(Grid(sizes[0]), Grid(sizes[1], 1, "LBNHC"))]
    if windows:
        groups.append(Group(WINDOW, ("window.0",), (Array("", 2, 8),), SIZE))
        grids *= 2
    if states:
        groups.append(Group(MAMBA, ("mamba.0",), (Array("ssm", 2, 16),)))
        grids.append((Grid(1024), Grid(1024)))
    case = paired(groups, grids, (1, 2), tokens=order.stop, start=order.start, prefixes=not states)
    ticket: Ticket = order.ticket
    assert (ticket.block_size, ticket.tokens) == (sizes[0], order.stop)
    case = replace(
        case,
        prefill=replace(case.prefill, blocks=64),
        decode=replace(case.decode, blocks=64),
        prefill_blocks=ticket.blocks,
        decode_blocks=tuple(
            (0,) * (held.first_token // sizes[1]) + tuple(held.blocks) for held in order.blocks
        ),
        shown=tuple(held.first_token // sizes[1] for held in order.blocks),
    )
    return run(case)


@pytest.mark.parametrize(
    ("sizes", "hit"), [((16, 64), 0), ((16, 64), 128), ((64, 16), 0), ((64, 16), 80)]
)
def test_an_order_is_carried_out_byte_for_byte(
    engines: Any, sizes: tuple[int, int], hit: int
) -> None:
    """Decode's prefix hit ends where its own blocks do, also inside of one of prefill's."""
    prefill = engine(engines, "producer", sizes[0])
    decode = engine(engines, "consumer", sizes[1])
    free = prefill.free_blocks(), decode.free_blocks()
    if hit:
        decode.add("warm", prompt(hit + 1))
        decode.run(lambda: "warm" in decode.finished)
    order = handed_over(prefill, decode, prompt(333))
    assert (order.start, order.stop) == (hit, 333)
    assert [len(blocks) for blocks in order.ticket.blocks] == [-(-333 // sizes[0])]
    assert [held.first_token for held in order.blocks] == [hit]
    assert bytes_moved(order, sizes) == (336 - hit) * 2 * 8
    prefill.run(lambda: not prefill.scheduler.requests)
    assert (prefill.free_blocks(), decode.free_blocks()) == free
    assert decode.params["d333"]["kv_path"]["tokens"] == 333 - hit


@pytest.mark.parametrize("sizes", [(16, 64), (64, 16)])
def test_a_window_that_begins_at_any_token(engines: Any, sizes: tuple[int, int]) -> None:
    """Of two block sizes one may have let go of a token that the other still has."""
    prefill = engine(engines, "producer", sizes[0], windows=True)
    decode = engine(engines, "consumer", sizes[1], windows=True)
    for length in (33, 64, 79, 80, 81, 95, 96, 97, 112, 128, 160):
        order = handed_over(prefill, decode, prompt(length, first=length))
        stop = length - 1
        assert (order.start, order.stop) == (0, stop), "decode computes the last token"
        least = (stop + min(stop, SIZE - 1)) * 2 * 8
        assert least <= bytes_moved(order, sizes, windows=True) <= least + 4 * 16 * 2 * 8


@pytest.mark.parametrize("sizes", [(16, 64), (64, 16)])
def test_a_state_beside_blocks_of_two_sizes(engines: Any, sizes: tuple[int, int]) -> None:
    """The state is the one after all tokens but the last, wherever that lies in a block."""
    prefill = engine(engines, "producer", sizes[0], states=True)
    decode = engine(engines, "consumer", sizes[1], states=True)
    free = prefill.free_blocks(), decode.free_blocks()
    for length in (17, 64, 65, 66, 80, 81, 129, 333):
        order = handed_over(prefill, decode, prompt(length, first=length))
        stop = length - 1
        assert (order.start, order.stop) == (0, stop)
        assert [len(held.blocks) for held in order.blocks] == [-(-stop // sizes[1]), 1]
        rounded = -(-stop // 16) * 16
        assert bytes_moved(order, sizes, states=True) == rounded * 2 * 8 + 2 * 16
    prefill.run(lambda: not prefill.scheduler.requests)
    assert (prefill.free_blocks(), decode.free_blocks()) == free
