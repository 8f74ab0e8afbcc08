"""Block ids read over the steps of a chunked prefill: always vLLM's own list, and cheaper."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

from contract import BLOCK, closing_engines, prompt
from hypothesis import given
from hypothesis import strategies as st

from pdcluster_connector.protocol.ticket import BlockIds, Ticket
from pdcluster_connector.protocol.transfer_params import ticket_of
from pdcluster_connector.vllm.scheduler_side.block_lists import BlockLists
from ticket_key import KEYS

pytestmark = pytest.mark.vllm

GROUPS, BLOCKS, STEPS = 4, 62_500, 125  # a million tokens of 16 a block, 8,000 in a step


def step(new: Any = None, more: Any = None, resumed: bool = False) -> Any:
    """One step's output for the request ``r``: its first blocks, or those that it gets later."""
    return SimpleNamespace(
        scheduled_new_reqs=[] if new is None else [SimpleNamespace(req_id="r", block_ids=new)],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[] if new is not None else ["r"],
            new_block_ids=[] if new is not None else [more],
            resumed_req_ids={"r"} if resumed else set(),
        ),
    )


def lists() -> BlockLists:
    made = BlockLists(tuple)  # type: ignore[arg-type]
    made.begin("r")
    return made


def spread(groups: list[list[int]], steps: int) -> BlockLists:
    made = lists()
    for at in range(steps):
        part = tuple(ids[len(ids) * at // steps : len(ids) * (at + 1) // steps] for ids in groups)
        made.read(step(new=part) if at == 0 else step(more=part))
    return made


ids = st.lists(st.integers(0, 2**31 - 1), max_size=12)


@given(st.lists(st.tuples(st.booleans(), st.none() | ids), max_size=6), ids, st.booleans())
def test_what_is_returned_is_always_what_vllm_holds(
    steps: list[tuple[bool, list[int] | None]], other: list[int], as_read: bool
) -> None:
    made, listed = lists(), []
    for number, (resumed, more) in enumerate(steps):
        given = None if more is None else (more,)
        made.read(step(new=given) if number == 0 and given else step(more=given, resumed=resumed))
        if more is not None:
            listed = more if resumed or number == 0 else listed + more
    held = listed + other if as_read else other
    assert list(made.ids("r", 0, held)) == held
    assert list(made.ids("another", 0, held)) == held


def test_a_block_that_a_window_has_left_is_not_named() -> None:
    made = spread([[5, 6, 7, 8]], 2)
    assert list(made.ids("r", 0, [0, 0, 7, 8])) == [0, 0, 7, 8]


def test_an_odd_step_costs_nothing_but_what_was_read() -> None:
    made = spread([[5, 6]], 1)
    made.read(SimpleNamespace())  # type: ignore[arg-type]
    assert made.ids("r", 0, [5, 6]) == [5, 6]
    made = spread([[5, 6]], 1)
    made.read(step(more=([2**40],)))
    assert made.ids("r", 0, [5, 6, 2**40]) == [5, 6, 2**40]


def cost(work: Callable[[], object]) -> float:
    """The least CPU seconds of this thread in a few runs."""
    taken = []
    for _ in range(7):
        start = time.thread_time()
        work()
        taken.append(time.thread_time() - start)
    return min(taken)


@pytest.mark.parametrize("scattered", [False, True], ids=["runs", "scattered"])
def test_a_million_tokens_cost_less_when_they_were_read_over_steps(
    scattered: bool, record_property: Callable[[str, object], None]
) -> None:
    numbers = list(range(1, GROUPS * BLOCKS + 1))
    if scattered:
        random.Random(7).shuffle(numbers)
    groups = [numbers[n * BLOCKS : (n + 1) * BLOCKS] for n in range(GROUPS)]
    made = spread(groups, STEPS)
    held = [list(group) for group in groups]  # vLLM's lists: new ones of the same numbers

    def whole() -> list[BlockIds]:
        return [BlockIds(ids) for ids in held]

    def read() -> list[BlockIds]:
        return [BlockIds(made.ids("r", n, ids)) for n, ids in enumerate(held)]

    assert read() == whole()
    taken = {"at_once": cost(whole), "over_steps": cost(read)}
    for name, seconds in taken.items():
        record_property(
            f"{name}_{'scattered' if scattered else 'runs'}_ms", round(1e3 * seconds, 2)
        )
    assert taken["over_steps"] < 0.6 * taken["at_once"], taken


@pytest.fixture
def engines() -> Iterator[Any]:
    yield from closing_engines()


def test_the_steps_of_a_chunked_prefill_are_read(
    engines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill = engines("producer", max_tokens_per_step=4 * BLOCK)
    seen: list[Any] = []
    ids = BlockLists.ids

    def spy(self: BlockLists, *args: Any) -> Any:
        seen.append(ids(self, *args))
        return seen[-1]

    monkeypatch.setattr(BlockLists, "ids", spy)
    params = prefill.prefill("p0", prompt(15 * BLOCK + 3))
    ticket = ticket_of(params, KEYS)
    assert isinstance(ticket, Ticket)
    assert len(ticket.blocks[0]) == 16
    assert [type(found) for found in seen] == [np.ndarray], "read at once, at the end"
    assert ticket.blocks[0] == BlockIds(seen[0])
    assert prefill.connector._scheduler.prefill._block_lists._read == {}, "not forgotten"
