"""A lease that ends in the moment in which a lease word's read would be posted."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from pdcluster_connector.transfer.planned_reads import FENCE_WORDS, FenceWords, Job, Read
from pdcluster_connector.transfer.posting import Transfers
from pdcluster_connector.transfer.receive_machine import Receive, Signal, State


def test_the_slot_and_the_connection_are_given_back() -> None:
    machine = Receive("r", deadline=10.0, drain_seconds=5.0, stall_seconds=300.0)
    for event in (Signal.STARTED, Signal.CONNECTED, Signal.POSTED):
        machine.on(event, 1.0)
    assert machine.state is State.FENCE
    words, one = FenceWords(), np.zeros(1, np.int32)
    connection: Any = SimpleNamespace(broken=None, transfers=1, sources=[])  # counted when planned
    job = Job(request=SimpleNamespace(request_id="r"), machine=machine)  # type: ignore[arg-type]
    job.connection = connection
    job.reads.append(Read(0, lambda: (one, one), words.take()))
    executor: Any = SimpleNamespace(
        connections=SimpleNamespace(fence_words=words, settle=lambda _: None),
        dispatch=lambda job, event: job.machine.on(event, 10.0) and None,
        clock=lambda: 10.0,
    )
    transfers = Transfers(executor)
    transfers.add(job)
    transfers.post_some()
    assert machine.state is State.FAILED
    assert connection.transfers == 0
    assert len(words.free) == FENCE_WORDS
