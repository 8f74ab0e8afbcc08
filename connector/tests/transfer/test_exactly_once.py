"""Every rank reports every receive once, and a block is free again only when all ranks have.

A decode engine of TP2 x PP2 reads from prefill engines of TP2 x PP2. Every tenth request fails on
one rank, and others are aborted wherever they stand. A block goes to the next request at once:
a byte that lands late would be found in that request.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import settings
from left_open import open_dlists, open_handles
from transfer_rig import Decode, FakePeers, Prefill

from pdcluster_connector.compat.reasons import Reason
from pdcluster_connector.nixl_io.interface import NixlErrorKind
from pdcluster_connector.protocol.failure import Failure
from pdcluster_connector.testing.nixl import Behaviour, Fabric, Transfer
from pdcluster_connector.transfer.options import ReceiverOptions
from pdcluster_connector.transfer.receive_machine import State

TENSOR = PIPELINE = 2
RANKS = TENSOR * PIPELINE
LAYERS, BLOCK_TOKENS = 4, 4
CACHE = {"kv_heads": 2, "layers": LAYERS, "block_tokens": BLOCK_TOKENS, "token_bytes": 2}
TOKENS, BLOCKS = 6, 2  # of each request; the second block is half full
TICKETS = 16
HELD = 20  # requests that wait for one handshake
WORD = 8  # bytes that the fence reads


class Engine:
    """A decode engine's scheduler: free blocks, parked requests, and who has reported what."""

    def __init__(self, requests: int, parked: int, seed: int) -> None:
        self.dice = random.Random(seed)
        self.requests, self.most_parked = requests, parked
        self.cache = CACHE | {"num_blocks": parked * BLOCKS + 1}
        self.fabric = Fabric()
        self.fabric.behave = self.behave
        self.prefills: list[Prefill] = []
        self.peers = [FakePeers() for _ in range(RANKS)]
        self.ranks = [
            Decode(
                self.fabric,
                self.peers[stage * TENSOR + rank],
                rank=rank,
                tensor=TENSOR,
                stage=stage,
                pipeline=PIPELINE,
                options=ReceiverOptions(drain_deadline_seconds=10.0, probe_seconds=10.0),
                **self.cache,
            )
            for stage in range(PIPELINE)
            for rank in range(TENSOR)
        ]
        self.start_prefill()
        self.free = list(range(1, self.cache["num_blocks"]))
        self.parked: dict[str, tuple[int, list[int]]] = {}
        self.waited_for: dict[str, set[int]] = {}
        self.lost: set[str] = set()
        self.fails_on: dict[int, int] = {}  # first block of a request -> the rank it fails on
        self.outcomes: Counter[str] = Counter()
        self.reports: Counter[tuple[int, str]] = Counter()
        self.aborted_in: Counter[str] = Counter()

    def start_prefill(self) -> None:
        """The prefill engine is replaced by its next incarnation."""
        engine_id = f"prefill/{len(self.prefills) + 1}"
        prefill = Prefill(self.fabric, engine_id, TENSOR, PIPELINE, **CACHE | {"num_blocks": 64})
        self.tickets = [
            prefill.ticket(n, [3 * n + 2, 3 * n + 1], TOKENS) for n in range(1, TICKETS + 1)
        ]
        for peers in self.peers:
            peers.table = {engine_id: prefill.metadata}
        for old in self.prefills[-1:]:
            self.fabric.kill(f"{old.engine_id}-")
            for peers in self.peers:
                assert peers.on_gone is not None
                peers.on_gone(old.engine_id, Failure(Reason.PEER_RESTARTED, "killed"))
        self.prefills.append(prefill)

    def behave(self, transfer: Transfer) -> Behaviour:
        rank = next((r for r in range(RANKS) if self.is_kv_of(r, transfer)), None)
        if rank is None:
            fence = transfer.nbytes == WORD
            return Behaviour(polls=self.dice.randrange(30) if fence else 0)
        if self.fails_on.get(self.first_block(rank, transfer)) == rank:
            return Behaviour(post_error=NixlErrorKind.INVALID)
        if self.dice.random() < 0.02:
            return Behaviour(hang=True)  # until the thread below lands it
        return Behaviour(polls=self.dice.randrange(30))

    def is_kv_of(self, rank: int, transfer: Transfer) -> bool:
        cache = self.ranks[rank].cache.bytes
        offset = transfer.copies[0][0] - cache.ctypes.data
        return 0 <= offset < cache.nbytes

    def first_block(self, rank: int, transfer: Transfer) -> int:
        """The first of the request's two blocks; the reads may come in any order."""
        cache = self.ranks[rank].cache
        of_layer = cache.bytes[0].nbytes
        offsets = [copy[0] - cache.bytes.ctypes.data for copy in transfer.copies]
        return min(offset % of_layer // (of_layer // len(cache.bytes[0])) for offset in offsets)

    def park(self, number: int) -> None:
        request_id = f"r{number}"
        blocks = [self.free.pop(), self.free.pop()]  # the ones that were freed last
        ticket = self.dice.choice(self.tickets)
        self.fails_on.pop(min(blocks), None)
        fails_on = number // 10 % RANKS if number % 10 == 0 else None
        if fails_on is not None and number % min(200, self.requests // 4) == 0:
            self.fails_on[min(blocks)] = fails_on  # and costs that rank its agent
        self.parked[request_id] = (ticket.token, blocks)
        self.waited_for[request_id] = set(range(RANKS))
        for at, rank in enumerate(self.ranks):
            mine = ticket
            if at == fails_on:  # the lease word that it reads is another one
                mine = msgspec.structs.replace(ticket, token=ticket.token + 1000)
            rank.receive(rank.request(request_id, mine, blocks, lease=120.0))

    def abort(self, request_id: str) -> None:
        """As vLLM does: all ranks are told, each wherever it stands."""
        for rank in self.ranks:
            executor = rank.receiver._executor

            def note(executor=executor) -> None:
                job = executor.jobs.get(request_id)
                state = "ended" if job is None else job.machine.state
                self.aborted_in[state] += 1

            rank.receiver._inbox.put(note)
            rank.abandon(request_id)

    def step(self) -> None:
        for number, rank in enumerate(self.ranks):
            results = rank.take()
            for request_id in results.finished:
                self.reports[number, request_id] += 1
                self.waited_for[request_id].remove(number)
                if request_id in results.failed:
                    self.lost.add(request_id)
                    self.outcomes[results.failed[request_id].reason] += 1
                if not self.waited_for[request_id]:
                    self.all_have_reported(request_id)

    def all_have_reported(self, request_id: str) -> None:
        del self.waited_for[request_id]
        seed, blocks = self.parked.pop(request_id)
        if request_id not in self.lost:
            for rank in self.ranks:
                assert rank.cache.wrong_tokens(seed, blocks, 0, TOKENS) == []
            self.outcomes["believed"] += 1
        for rank in self.ranks:
            rank.cache.bytes[:, blocks] = 0xEE
        self.free.extend(blocks)

    def run(self) -> None:
        restarts = 3 * self.most_parked
        held = 0
        for number in range(self.requests):
            if len(self.parked) >= self.most_parked:
                held = 0
                self.release()
                self.wait(lambda: len(self.parked) < self.most_parked)
            if number % restarts == self.most_parked:
                self.start_prefill()
                held = HELD
                for peers in self.peers:
                    peers.hold = True  # what is parked now waits for its handshake
            held -= 1
            if held == 0:
                self.release()
            self.park(number)
            if self.dice.random() < 0.2:
                self.abort(self.dice.choice(list(self.parked)))
        self.release()
        self.wait(lambda: not self.parked)

    def release(self) -> None:
        for peers in self.peers:
            peers.release()

    def wait(self, condition: Callable[[], bool]) -> None:
        until = time.monotonic() + 120
        while not condition():
            assert time.monotonic() < until, f"not reported by all: {list(self.waited_for)[:5]}"
            self.step()
            time.sleep(0.0002)


DRAWN = settings().max_examples  # `make fast` draws a quarter, as of hypothesis' examples


@pytest.mark.parametrize(
    ("requests", "parked"),
    [(8 * DRAWN, 64 * DRAWN // 100), pytest.param(10_000, 2_000, marks=pytest.mark.soak)],
)
def test_every_rank_reports_every_receive_once(requests: int, parked: int) -> None:
    before = set(threading.enumerate())  # those of other tests may end meanwhile
    wanted: set[str] = {State.HANDSHAKE, State.POSTED, State.FENCE, "ended"}
    if requests >= 800:  # one request in a hundred is there when it is aborted
        wanted.add(State.QUARANTINE)
    aborted_in: set[str] = set()
    outcomes: Counter[str] = Counter()
    for seed in range(20261122, 20261127):  # where each request stands, threads and load decide
        engine = course(requests, parked, seed)
        aborted_in |= set(engine.aborted_in)
        outcomes += engine.outcomes
        if wanted <= aborted_in and outcomes[Reason.BACKEND_ERROR]:
            break
    assert wanted <= aborted_in
    assert outcomes[Reason.BACKEND_ERROR] > 0, outcomes
    assert not set(threading.enumerate()) - before


def course(requests: int, parked: int, seed: int) -> Engine:
    """Run so many requests, and judge what becomes of them."""
    engine = Engine(requests, parked, seed)
    stop = threading.Event()

    def dma() -> None:
        """What hangs lands some day, one descriptor at a time."""
        while not stop.wait(0.002):
            for transfer in list(engine.fabric.flying):
                if transfer.behaviour.hang:
                    engine.fabric.land(transfer, copies=1)

    background = threading.Thread(target=dma)
    background.start()
    try:
        engine.run()
        engine.step()
    finally:
        stop.set()
        background.join()
        for rank in engine.ranks:
            assert rank.receiver.close()

    assert sum(engine.reports.values()) == RANKS * requests
    assert set(engine.reports.values()) == {1}
    assert engine.outcomes["believed"] > requests / 3, engine.outcomes
    assert engine.outcomes[Reason.LEASE_LOST] >= requests / 40, engine.outcomes

    assert sorted(engine.free) == list(range(1, engine.cache["num_blocks"]))
    assert not engine.parked
    assert not engine.waited_for
    for rank in engine.ranks:
        executor = rank.receiver._executor
        assert executor.jobs == {}
        assert not executor._agent_rebuild.held
        assert not executor.transfers
        assert executor.transfers.unseen == 0
        assert rank.fatal == []
    assert open_handles(engine.fabric) == open_dlists(engine.fabric) == 0
    assert not [t for t in engine.fabric.flying if t.agent.startswith("decode")]
    return engine
