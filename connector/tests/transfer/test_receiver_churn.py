"""Thousands of requests through every fault at once, with blocks recycled as an engine does.

The blocks of a request that was reported are overwritten by the test and watched: a byte
that lands in them afterwards is the fault that all of this exists to prevent.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter, deque

import numpy as np
import pytest
from hypothesis import settings
from left_open import open_dlists, open_handles
from transfer_rig import Decode, FakePeers, Prefill

from pdcluster_connector.compat.reasons import Reason
from pdcluster_connector.nixl_io.interface import NixlErrorKind
from pdcluster_connector.protocol.failure import Failure
from pdcluster_connector.protocol.ticket import Ticket
from pdcluster_connector.testing.nixl import Behaviour, Fabric, Transfer
from pdcluster_connector.transfer.options import ReceiverOptions
from pdcluster_connector.transfer.planned_reads import FENCE_WORDS

UNDER_WAY = 96
CACHE = {"kv_heads": 2, "layers": 2, "num_blocks": 600, "block_tokens": 4, "token_bytes": 2}
TOKENS = 10
OVERWRITTEN = 0xEE
WATCH_SECONDS = 0.03


class Engine:
    """A decode engine's bookkeeping: free blocks, requests under way, blocks watched."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.fabric = Fabric()
        self.fabric.behave = self.behave
        self.peers = FakePeers()
        self.incarnation = self.moved = 0
        self.tickets: list[Ticket] = []
        self.prefills: list[Prefill] = []
        self.new_prefill()
        options = ReceiverOptions(
            drain_deadline_seconds=0.15, probe_seconds=0.5, descriptors_per_transfer=5
        )
        self.decode = Decode(self.fabric, self.peers, options=options, **CACHE)
        self.free = deque(range(1, CACHE["num_blocks"]))
        self.under_way: dict[str, tuple[int, list[int]]] = {}
        self.watched: deque[tuple[float, list[int]]] = deque()
        self.outcomes: Counter[str] = Counter()

    def new_prefill(self) -> None:
        """Kill the prefill engine and start its next incarnation."""
        old = f"prefill/{self.incarnation}"
        self.incarnation += 1
        prefill = Prefill(self.fabric, f"prefill/{self.incarnation}", **CACHE)
        self.peers.table = {prefill.engine_id: prefill.metadata}
        self.tickets = [
            prefill.ticket(n, [3 * n + 1, 3 * n + 2, 3 * n + 3], TOKENS) for n in range(20)
        ]
        self.prefills.append(prefill)  # a dead engine's memory is not reused within the test
        if self.incarnation > 1:
            self.fabric.kill(old + "-")
            assert self.peers.on_gone is not None
            self.peers.on_gone(old, Failure(Reason.PEER_RESTARTED, "killed"))

    def behave(self, transfer: Transfer) -> Behaviour:
        dice = self.random.random()
        if len(transfer.copies) == 1 and dice > 0.01:
            return Behaviour()  # most warm-ups go well
        self.moved += 1
        if self.moved % 500 == 0:  # whatever the dice say, some reads fail
            return Behaviour(polls=2, poll_error=NixlErrorKind.TRANSPORT)
        faults = [
            (0.01, Behaviour(hang=True)),
            (0.01, Behaviour(hang=True, refuse_release=True)),
            (0.01, Behaviour(post_error=NixlErrorKind.INVALID)),
            (0.0005, Behaviour(post_error=NixlErrorKind.DISCONNECTED)),
            (0.0005, Behaviour(post_error=NixlErrorKind.TRANSPORT, hang=True)),
            (0.002, Behaviour(polls=2, poll_error=NixlErrorKind.TRANSPORT)),
            (0.0005, Behaviour(polls=1, poll_error=NixlErrorKind.DISCONNECTED)),
            (0.0005, Behaviour(polls=2, poll_error=NixlErrorKind.LOST)),
            (0.0005, Behaviour(poll_raises=RuntimeError("broken port"))),
        ]
        for share, fault in faults:
            if dice < share:
                return fault
            dice -= share
        return Behaviour(polls=self.random.randrange(4))

    def send(self, number: int) -> None:
        ticket = self.random.choice(self.tickets)
        blocks = [self.free.popleft() for _ in range(3)]
        request_id = f"r{number}"
        lease = self.random.choice([0.004, 0.02]) if self.random.random() < 0.03 else 30.0
        self.under_way[request_id] = (ticket.token, blocks)
        self.decode.receive(self.decode.request(request_id, ticket, blocks, lease=lease))
        if self.random.random() < 0.05:
            self.decode.abandon(self.random.choice(list(self.under_way)))

    def step(self) -> None:
        """Take results, check arrivals, overwrite and watch blocks, recycle what is quiet."""
        results = self.decode.take()
        for request_id in results.finished:
            seed, blocks = self.under_way.pop(request_id)
            if request_id in results.received:
                assert self.decode.cache.wrong_tokens(seed, blocks, 0, TOKENS) == []
                self.outcomes["received"] += 1
            else:
                self.outcomes[results.failed[request_id].reason] += 1
            self.decode.cache.bytes[:, blocks] = OVERWRITTEN
            self.watched.append((time.monotonic() + WATCH_SECONDS, blocks))
        while self.watched and (self.watched[0][0] <= time.monotonic() or not self.under_way):
            _, blocks = self.watched.popleft()
            landed = self.decode.cache.bytes[:, blocks] != OVERWRITTEN
            assert not landed.any(), f"{np.count_nonzero(landed)} bytes landed after the report"
            self.free.extend(blocks)


DRAWN = 25 * settings().max_examples  # `make fast` draws a quarter, as of hypothesis' examples


@pytest.mark.parametrize("requests", [DRAWN, pytest.param(10_000, marks=pytest.mark.soak)])
def test_requests_through_every_fault(requests: int) -> None:
    before = set(threading.enumerate())  # those of other tests may end meanwhile
    engine = Engine(seed=20261121)
    own = set(threading.enumerate()) - before
    stop = threading.Event()

    def dma() -> None:
        """What hangs lands some day, bit by bit, released or not."""
        while not stop.wait(0.002):
            engine.fabric.land(copies=1)

    background = threading.Thread(target=dma)
    background.start()
    try:
        for number in range(requests):
            while len(engine.under_way) >= UNDER_WAY or len(engine.free) < 3:
                engine.step()
                time.sleep(0.0002)
            engine.send(number)
            if (number + 1) % max(250, requests // 10) == 0:
                engine.new_prefill()
        until = time.monotonic() + 120
        while engine.under_way:
            assert time.monotonic() < until, f"never reported: {sorted(engine.under_way)[:5]}"
            engine.step()
            time.sleep(0.001)
        engine.step()
    finally:
        stop.set()
        background.join()

    assert len(engine.decode.reported) == requests
    # How many depends on the machine's load: what is slow meets more of the deadlines.
    assert engine.outcomes["received"] > requests / 4, dict(engine.outcomes)
    assert {Reason.BACKEND_ERROR, Reason.TRANSFER_STALLED} <= set(engine.outcomes), engine.outcomes
    assert len(engine.free) == CACHE["num_blocks"] - 1

    executor = engine.decode.receiver._executor
    assert executor.jobs == {}
    assert open_handles(engine.fabric) == 0
    assert open_dlists(engine.fabric) <= 4  # the live incarnation's link, and the agent's own
    words = engine.decode.receiver._connections.fence_words
    assert len(words.free) == FENCE_WORDS, "places of lease words were lost"
    assert [t for t in engine.fabric.flying if t.agent.startswith("decode")] == []
    assert set(threading.enumerate()) - before == own
    assert engine.decode.receiver.close()
    assert not own & set(threading.enumerate())
