"""One rank of an engine in a process of its own: real memory, a real NIXL agent, no vLLM.

Its memory is laid out, and what must come of it is said, by ``modelled_engine``, which knows no
planner. A process plays one rank after another; the test's process plays the scheduler side.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any
from unittest import mock

import numpy as np
from labelled_engine import bytes_of, descriptors
from layout_cases import Case, wanted
from modelled_engine import Layout, Model, Modelled
from wrong_plans import SPOILERS

from pdcluster_connector.compat import check
from pdcluster_connector.compat.shape import Memory
from pdcluster_connector.nixl_io.interface import Dlist, Handle, Indices
from pdcluster_connector.nixl_io.nixl_agent import NixlAgent
from pdcluster_connector.nixl_io.serving_agent import ServingAgent
from pdcluster_connector.plan import request_descriptors
from pdcluster_connector.plan.descriptors import Rows
from pdcluster_connector.plan.geometry import MemoryRange
from pdcluster_connector.protocol import ticket
from pdcluster_connector.protocol.receive_order import ReceiveOrder
from pdcluster_connector.sidechannel.peers import PeerBook
from pdcluster_connector.transfer.options import ReceiverOptions
from pdcluster_connector.transfer.receiver import Receiver
from ticket_key import KEYS

Rank = tuple[int, int]
SECONDS = 150.0
SLOT, TOKEN = 3, 2**63 + 1  # of the request's lease word


@dataclass(frozen=True)
class Received:
    """What became of one decode rank's receive, and of every byte of its memory.

    Attributes:
        failure: reason and message; empty if the KV was received.
        nbytes: bytes that the receiver says it got.
        posted: bytes of KV that NIXL was asked to read.
        wrong: needed bytes that do not hold what they should.
        changed: other bytes that are not as they were; the rest of a last block is not counted.
        uneven: needed bytes that were not written exactly once, and any that were written
            twice or lie outside of the request's blocks.
    """

    failure: str
    nbytes: int
    posted: int
    wrong: int
    changed: int
    uneven: int


class Watched(NixlAgent):
    """The real agent; counts how often each byte of this rank's memory is asked to be written."""

    def __init__(self, name: str, address: int, size: int) -> None:
        super().__init__(name)
        self.writes = np.zeros(size, np.int64)
        self._address = address
        self._rows: dict[Dlist, Rows] = {}

    def prepare(self, peer: str | None, rows: Rows, memory: Memory) -> Dlist:
        dlist = super().prepare(peer, rows, memory)
        if peer is None:
            self._rows[dlist] = rows
        return dlist

    def read(
        self, local: Dlist, local_indices: Indices, remote: Dlist, remote_indices: Indices
    ) -> Handle:
        at = bytes_of(*descriptors(self._rows[local], local_indices)) - self._address
        if 0 <= at.min() < self.writes.size:  # a probe lands elsewhere
            self.writes += np.bincount(at, minlength=self.writes.size)
        return super().read(local, local_indices, remote, remote_indices)


@contextmanager
def without_rules(ids: Collection[str]) -> Iterator[None]:
    """Shake hands as if the layouts that these rules refuse were carried."""
    assert set(ids) <= {rule.id for rule in check.RULES}
    kept = tuple(rule for rule in check.RULES if rule.id not in ids)
    with mock.patch.object(check, "RULES", kept):
        yield


def bytes_for(labels: np.ndarray) -> np.ndarray:
    """One byte for each label of the model: neighbours, layers and heads differ."""
    mixed = labels.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(29)
    return ((mixed * np.uint64(0xBF58476D1CE4E5B9)) >> np.uint64(56)).astype(np.uint8)


def laid_out(model: Model, layout: Layout, seed: int) -> tuple[Modelled, np.ndarray]:
    """Return an engine whose addresses are those of a real array of bytes."""
    memory = np.zeros(Modelled(model, layout, seed).memory.size, np.uint8)
    return Modelled(model, replace(layout, address=memory.ctypes.data), seed), memory


class PrefillRank:
    """Has computed a request's KV, and serves it."""

    def __init__(self, case: Case, rank: Rank, engine_id: str) -> None:
        engine, self.memory = laid_out(case.model, case.prefill, 0)
        engine.store(case.prefill_blocks, case.tokens, rank)
        self.memory[:] = bytes_for(engine.memory)
        ranges = [MemoryRange(self.memory.ctypes.data, self.memory.nbytes)]
        self.agent = ServingAgent(lambda: NixlAgent(f"{engine_id}/{rank}"), ranges)
        self.agent.write_lease_words({SLOT: TOKEN})
        (shard,) = [shard for shard in engine.shards if shard.rank == rank]
        self.metadata = self.agent.metadata(engine_id, rank, shard.regions)

    def close(self) -> None:
        self.agent.close()


def receive(case: Case, rank: Rank, handed_over: str, spoil: str, without: set[str]) -> Received:
    """Shake hands, receive what the ticket stands for, and look at every byte afterwards."""
    engine, memory = laid_out(case.model, case.decode, 1)
    memory[:] = bytes_for(engine.memory)
    before = memory.copy()
    made: list[Watched] = []

    def agent() -> Watched:
        made.append(Watched(f"decode/{rank}", memory.ctypes.data, memory.size))
        return made[-1]

    (shard,) = [shard for shard in engine.shards if shard.rank == rank]
    peers = PeerBook("grid.c.decode.r.0/00000000000000dd", engine.shape(), rank)
    held = engine.blocks(case.decode_blocks, case.shown)
    receiver = Receiver(
        shard=shard,
        groups=held.groups,
        memory=[MemoryRange(memory.ctypes.data, memory.nbytes)],
        make_agent=agent,
        peers=peers,
        options=ReceiverOptions(descriptors_per_transfer=256, probe_seconds=60.0),
    )
    promise = ticket.decode(handed_over, KEYS)
    assert isinstance(promise, ticket.Ticket), promise
    with without_rules(without), spoiled(spoil):
        peers.start()
        receiver.start()
        order = ReceiveOrder(
            request_id="r",
            ticket=promise,
            blocks=tuple(held.blocks),
            start=case.start,
            stop=case.stop,
            seconds=SECONDS,
            claimed=True,
        )
        receiver.receive([order], time.monotonic())
        while not (results := receiver.results()).finished:
            time.sleep(0.001)
        assert receiver.close()
        peers.close()
    failure = results.failed.get("r")
    needed, spare, labels = wanted(case, engine, rank)
    if failure is not None:
        needed[:] = spare[:] = False
    writes = sum(port.writes for port in made)
    outside = ~needed & ~spare
    return Received(
        failure=str(failure or ""),
        nbytes=0 if failure else results.received["r"].nbytes,
        posted=int(writes.sum()),
        wrong=int((memory != bytes_for(labels))[needed].sum()),
        changed=int((memory != before)[outside].sum()),
        uneven=int((writes != 1)[needed].sum() + (writes > 1)[spare].sum() + writes[outside].sum()),
    )


@contextmanager
def spoiled(name: str) -> Iterator[None]:
    """Let the receiver carry out a wrong plan; an empty name is the right one."""
    plan = request_descriptors.plan_request

    def wrong(*args: Any, **kwargs: Any) -> list[Any]:
        return [SPOILERS[name](part) for part in plan(*args, **kwargs)]

    with mock.patch.object(request_descriptors, "plan_request", wrong if name else plan):
        yield


def play(pipe: Connection) -> None:
    """Answer the test's commands until the pipe closes."""
    serving: list[PrefillRank] = []

    def serve(*args: Any) -> bytes:
        serving.append(PrefillRank(*args))
        return serving[-1].metadata

    def stop() -> None:
        serving.pop().close()

    commands: dict[str, Callable[..., Any]] = {"serve": serve, "stop": stop, "receive": receive}
    while True:
        try:
            name, arguments = pipe.recv()
        except EOFError:
            return
        try:
            answer = commands[name](*arguments)
        except Exception:  # noqa: BLE001  whatever it is, the test shows it
            answer = RuntimeError(traceback.format_exc())
        pipe.send(answer)
