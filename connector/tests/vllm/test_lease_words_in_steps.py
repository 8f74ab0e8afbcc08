"""When lease words change, against the order of calls of vLLM's own scheduler.

Before each step the test looks at which blocks the step will write. No lease word that stands on
any rank by then may be of a ticket that names one of them.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

pytest.importorskip("vllm")

from contract import BLOCK, ContractEngine, closing_engines, prompt
from v2_runner import drive
from vllm.v1.request import RequestStatus

from pdcluster_connector.protocol.messages import LeaseRequest
from pdcluster_connector.protocol.ticket import Ticket, decode
from ticket_key import KEYS

pytestmark = pytest.mark.vllm

PREFILL = {"do_remote_decode": True}


@pytest.fixture
def engines() -> Iterator[Any]:
    yield from closing_engines()


@dataclass
class Watched:
    """A prefill engine, and what the tickets that it gave out name."""

    engine: ContractEngine
    tickets: dict[str, tuple[Ticket, set[int]]] = field(default_factory=dict)
    rewritten: int = 0

    def step(self) -> None:
        before = [dict(worker.words) for worker in self.engine.workers]
        written: set[int] = set()
        schedule = self.engine.scheduler.schedule

        def looked_at(*args: Any, **kwargs: Any) -> Any:
            scheduled = schedule(*args, **kwargs)
            written.update(self.written(scheduled))
            return scheduled

        self.engine.scheduler.schedule = looked_at
        self.engine.step()
        self.engine.scheduler.schedule = schedule
        for ticket, blocks in self.tickets.values():
            if blocks & written:
                self.rewritten += 1
                words = [rank.get(ticket.fence_slot) for rank in before]
                assert ticket.token not in words, "a block is written while its lease stands"
        self.take_tickets()

    def written(self, scheduled: Any) -> set[int]:
        """The blocks that a step's new tokens lie in."""
        starts = {new.req_id: new.num_computed_tokens for new in scheduled.scheduled_new_reqs}
        cached = scheduled.scheduled_cached_reqs
        starts |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        blocks: set[int] = set()
        for request_id, count in scheduled.num_scheduled_tokens.items():
            (ids,) = self.engine.scheduler.kv_cache_manager.get_block_ids(request_id)
            start = starts[request_id]
            blocks.update(ids[start // BLOCK : -(-(start + count) // BLOCK)])
        return blocks

    def take_tickets(self) -> None:
        for request_id, params in self.engine.params.items():
            if params and "ticket" in params and request_id not in self.tickets:
                ticket = decode(params["ticket"], KEYS)
                assert isinstance(ticket, Ticket)
                self.tickets[request_id] = ticket, {block for ids in ticket.blocks for block in ids}
                for worker in self.engine.workers:
                    assert worker.words[ticket.fence_slot] == ticket.token, "it came too late"

    def release(self, request_id: str) -> None:
        ticket, _ = self.tickets[request_id]
        request = LeaseRequest(self.engine.engine_id, "d/1", ((request_id, ticket.token),))
        self.engine.connector._scheduler._leases.answer(request)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("runner", ["invented", "V2"])
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("lease", [0.05, 60.0])
def test_words_end_before_blocks_are_written_again(
    engines: Any, monkeypatch: pytest.MonkeyPatch, runner: str, asynchronous: bool, lease: float
) -> None:
    """Releases, expiries, aborts, preemptions and resets, in random order, in a tight pool.

    vLLM's V2 model runner writes words after a step's forward pass, so they are compared as they
    stood before the step.
    """
    rng = random.Random(7)
    watched = Watched(
        engines(
            "producer", blocks=24, max_tokens_per_step=64, asynchronous=asynchronous, prefixes=True,
            lease_seconds=max(1.0, lease),
        )
    )  # fmt: skip
    scheduler = watched.engine.scheduler
    if runner == "V2":
        drive(watched.engine, monkeypatch)
    if lease < 1:  # shorter than the options allow
        watched.engine.connector._scheduler._leases._seconds = lease
    preempted = aborted = resets = 0
    for number in range(500):
        if len(scheduler.requests) < 6:
            tokens = prompt(rng.randrange(20, 150), first=number)
            watched.engine.add(f"p{number}", tokens, PREFILL, max_tokens=rng.choice([1, 1, 40]))
        watched.step()
        chance = rng.random()
        open_tickets = [key for key in watched.tickets if key in scheduler.requests]
        if chance < 0.4 and open_tickets:
            watched.release(rng.choice(open_tickets))
        elif chance < 0.5 and scheduler.running:
            aborted += 1
            victim = rng.choice(scheduler.running).request_id
            scheduler.finish_requests(victim, RequestStatus.FINISHED_ABORTED)
        elif chance < 0.52:
            resets += 1
            with contextlib.suppress(RuntimeError):  # it is refused while leases are held
                scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        elif lease < 1:
            time.sleep(0.002)
        preempted += sum(request.num_preemptions for request in scheduler.requests.values())
    assert watched.rewritten > 50, "no block of a ticket was written again: nothing is shown"
    assert min(preempted, aborted, resets) > 0


def test_a_request_without_a_word_gets_no_ticket(engines: Any) -> None:
    """More leases than words: decode could not tell whether they stand, so it computes itself."""
    engine = engines("producer")
    leases = engine.connector._scheduler._leases
    leases._free[:] = [5]
    watched = Watched(engine)
    for name in ("a", "b"):
        engine.add(name, prompt(40, first=ord(name)), PREFILL)
    engine.run(lambda: len(engine.finished) == 2)
    watched.take_tickets()
    assert list(watched.tickets) == ["a"]
    assert "ticket" not in engine.params["b"]
    assert engine.total("step_faults") == {"finished:NoLeaseWord": 1}
    assert leases.held == 1
    watched.release("a")
    engine.run(lambda: not engine.scheduler.requests)
    assert engine.free_blocks() == 63
    assert watched.engine.prefill("c", prompt(40, first=99)) is not None, "its word is free again"


def test_a_request_that_starts_anew_has_another_word(engines: Any) -> None:
    """After a preemption its blocks are others: what was read with the old word is void."""
    engine = engines("producer", max_tokens_per_step=32)
    engine.add("p", prompt(200), PREFILL)
    engine.step()
    first = dict(engine.workers[0].words)
    engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    engine.step()
    second = dict(engine.workers[0].words)
    assert first.keys() == second.keys()
    assert first != second
    assert 0 not in second.values()
