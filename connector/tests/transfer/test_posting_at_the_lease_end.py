"""Reads that are not posted after all: the lease ends in that moment, or memory does."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from turn_by_turn import LEASE, Bench

from pdcluster_connector.plan.block_pairs import GroupBlocks
from pdcluster_connector.protocol.receive_order import ReceiveOrder
from pdcluster_connector.testing.nixl import Behaviour, Transfer
from pdcluster_connector.transfer.options import ReceiverOptions
from pdcluster_connector.transfer.planned_reads import FENCE_WORDS, FenceWords, Job, Read
from pdcluster_connector.transfer.posting import Transfers
from pdcluster_connector.transfer.receive_executor import ReceiveExecutor
from pdcluster_connector.transfer.receive_machine import Receive, Signal, State


class Posting:
    """One read of a lease word, which is about to be posted."""

    def __init__(self, now: float, indices: Callable[[], Any]) -> None:
        self.machine = Receive("r", deadline=10.0, drain_seconds=5.0, stall_seconds=300.0)
        for event in (Signal.STARTED, Signal.CONNECTED, Signal.POSTED):
            self.machine.on(event, 1.0)
        assert self.machine.state is State.FENCE
        self.words = FenceWords()
        # Counted when planned.
        self.connection: Any = SimpleNamespace(broken=None, transfers=1, sources=[])
        request: Any = SimpleNamespace(request_id="r")
        job = Job(request=request, machine=self.machine)
        job.connection = self.connection
        job.reads.append(Read(0, indices, self.words.take()))
        executor: Any = SimpleNamespace(
            connections=SimpleNamespace(fence_words=self.words, settle=lambda _: None),
            dispatch=lambda job, event: job.machine.on(event, now) and None,
            clock=lambda: now,
        )
        executor.guarded = partial(ReceiveExecutor.guarded, executor)
        self.transfers = Transfers(executor)
        self.transfers.add(job)
        while self.transfers.post_some():
            continue

    def nothing_is_held(self) -> bool:
        """Whether nothing counts as able to write, and all words are free."""
        held = self.connection.transfers, self.transfers.unseen, len(self.machine.open)
        return held == (0, 0, 0) and len(self.words.free) == FENCE_WORDS


def test_the_slot_and_the_connection_are_given_back() -> None:
    one = np.zeros(1, np.int32)
    posting = Posting(10.0, lambda: (one, one))
    assert posting.machine.state is State.FAILED
    assert posting.nothing_is_held()


def test_what_fails_before_it_is_posted_holds_nothing() -> None:
    def fails() -> Any:
        raise MemoryError("numpy")

    posting = Posting(1.0, fails)
    assert posting.machine.state is State.FAILED
    assert posting.nothing_is_held()


@pytest.mark.parametrize("renewed", [True, False])
def test_posting_may_last_longer_than_a_lease_that_is_renewed(renewed: bool) -> None:
    """Why no request is refused for the time that its posting will take: leases are renewed."""
    bench = Bench(ReceiverOptions(descriptors_per_transfer=1))
    prefill = bench.prefill("p")
    bench.send(prefill)  # makes the connection
    began, behave = bench.now, bench.fabric.behave

    def slowly(transfer: Transfer) -> Behaviour:
        bench.now += LEASE / 4
        return behave(transfer)

    bench.fabric.behave = slowly
    ticket = prefill.ticket(2, range(2, 10), 32)
    blocks = (GroupBlocks(list(range(22, 30))),)
    bench.receive(ReceiveOrder("long", ticket, blocks, 0, 32, LEASE, claimed=True))
    while "long" in bench.executor.jobs:
        bench.executor.turn()
        if renewed:
            bench.acknowledge(["long"], bench.now + LEASE)
    assert ("long" in bench.take().received) == renewed
    assert (bench.now - began > 4 * LEASE) == renewed
