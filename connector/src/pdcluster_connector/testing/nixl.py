"""NIXL in memory: agents in one process that really copy bytes, and that fail on request.

It has NIXL's unpleasant properties. Releasing a handle or removing a peer does not stop a transfer
that is under way; only destroying the agent does. Indices and addresses are checked. A transfer may
land long after everybody has stopped waiting for it.

What one transfer does is a :class:`Behaviour`, and ``Fabric.behave`` chooses it. What happens to
a whole process is a method of :class:`Fabric`: ``kill``, ``cut`` and ``mend``, ``freeze`` and
``thaw``. The page docs/testing.md has an example.
"""

# ruff: noqa: D102 - the methods of an agent are documented in AgentInterface

from __future__ import annotations

import ctypes
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from pdcluster_connector.compat.shape import Memory
from pdcluster_connector.nixl_io.interface import (
    AgentSurvivedError,
    Dlist,
    Handle,
    Indices,
    NixlError,
    NixlErrorKind,
)
from pdcluster_connector.plan.descriptors import Rows
from pdcluster_connector.plan.geometry import MemoryRange

_MAGIC = b"in-memory-nixl:"
_GONE = NixlErrorKind.DISCONNECTED
_ENDED = (NixlErrorKind.DISCONNECTED, NixlErrorKind.TRANSPORT)


@dataclass(frozen=True, slots=True)
class Behaviour:
    """What one transfer does.

    Attributes:
        polls: this many polls answer PROC before the transfer lands (or ``poll_error`` comes).
        delay: seconds during which polls are answered PROC.
        reorder: the bytes land from the last descriptor to the first.
        drop: the last descriptor's bytes never come, and the transfer is DONE all the same.
        corrupt: the first byte that lands is a wrong one.
        late: DONE is answered while the bytes are still under way; :meth:`.nixl.Fabric.land` brings
            them.
        hang: every poll answers PROC; bytes move only by :meth:`.nixl.Fabric.land`.
        post_error: posting raises this. With ``hang``, the bytes are under way nevertheless
            (not for DISCONNECTED).
        poll_error: polling raises this. DISCONNECTED and TRANSPORT end the transfer. After the
            other errors, its bytes may still land.
        poll_raises: polling raises exactly this exception (a broken agent).
        refuse_release: releasing the handle raises while the transfer is under way.
    """

    polls: int = 0
    delay: float = 0.0
    reorder: bool = False
    drop: bool = False
    corrupt: bool = False
    late: bool = False
    hang: bool = False
    post_error: NixlErrorKind | None = None
    poll_error: NixlErrorKind | None = None
    poll_raises: BaseException | None = None
    refuse_release: bool = False


@dataclass(eq=False, slots=True)
class Transfer:
    """One READ: (destination, source, length) copies that are still to be made."""

    agent: str
    peer: str
    copies: list[tuple[int, int, int]]
    behaviour: Behaviour = Behaviour()
    polls: int = 0
    error: NixlErrorKind | None = None
    due: float = 0.0
    spoiled: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes not moved yet."""
        return sum(length for _, _, length in self.copies)


def elements(rows: Rows) -> Rows:
    """Return (address, length) of every element of strided rows, row after row."""
    counts = rows[:, 4].astype(np.int64)
    first = np.repeat(np.cumsum(counts) - counts, counts)
    steps = (np.arange(counts.sum()) - first).astype(np.uint64)
    address, length, stride = (np.repeat(rows[:, column], counts) for column in (0, 1, 3))
    return np.stack([address + steps * stride, length], axis=1)


def check_inside(whole: Rows, ranges: Sequence[MemoryRange], memory: Memory) -> None:
    """Raise NixlError unless each (address, length) lies in one registered range."""
    start = whole[:, 0]
    stop = start + whole[:, 1]
    covered = np.zeros(len(whole), bool)
    for item in ranges:
        if item.memory is memory:
            covered |= (start >= item.address) & (stop <= item.address + item.length)
    if not covered.all():
        raise NixlError(NixlErrorKind.INVALID, "memory that is not registered")


class Fabric:
    """What connects the agents of one test. Thread-safe.

    ``behave`` decides what each transfer does; set it at any time.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.agents: dict[str, InMemoryAgent] = {}
        self.flying: list[Transfer] = []
        self.dead: set[str] = set()
        self.cuts: set[tuple[str, str]] = set()
        self.frozen: dict[str, threading.Event] = {}
        self.behave: Callable[[Transfer], Behaviour] = lambda _: Behaviour()
        self.survive_close = False
        self.posted = 0
        self._serial = itertools.count()

    def agent(self, name: str) -> InMemoryAgent:
        """Make an agent: a :class:`~pdcluster_connector.nixl_io.interface.AgentInterface`."""
        with self.lock:
            agent = InMemoryAgent(self, f"{name}#{next(self._serial)}")
            self.agents[agent.name] = agent
            return agent

    def kill(self, name: str) -> None:
        """End a process, given how its agents' names begin.

        What was to be read from it, or by it, never lands; its readers see errors.
        """
        with self.lock:
            killed = {agent for agent in self.agents if agent.startswith(name)}
            self.dead |= killed
            for agent in killed:
                del self.agents[agent]
            self._fail(t for t in self.flying if t.peer in killed or t.agent in killed)

    def cut(self, one: str, other: str = "") -> None:
        """Let nothing through between two processes, given how their agents' names begin.

        Without ``other``: between ``one`` and all others. Reads stay under way, without an error.
        """
        with self.lock:
            self.cuts.add((one, other))

    def mend(self) -> None:
        """End all cuts: what was under way goes on."""
        with self.lock:
            self.cuts.clear()

    def freeze(self, name: str) -> None:
        """Stop a process, given how its agents' names begin: their calls wait for :meth:`thaw`.

        Its transfers land without it, as those of a network card do.
        """
        self.frozen.setdefault(name, threading.Event())

    def thaw(self, name: str) -> None:
        """Let a stopped process go on."""
        self.frozen.pop(name).set()

    def reaches(self, transfer: Transfer) -> bool:
        """Whether no cut lies between the two ends."""
        ends = (transfer.agent, transfer.peer), (transfer.peer, transfer.agent)
        return not any(
            a.startswith(one) and b.startswith(other) for one, other in self.cuts for a, b in ends
        )

    def disconnect(self, agent: InMemoryAgent, peer: str) -> None:
        """Break one agent's connection to one peer. NIXL then forgets the peer by itself."""
        with self.lock:
            self._fail(t for t in self.flying if (t.agent, t.peer) == (agent.name, peer))
            agent.peers.discard(peer)

    def _fail(self, transfers: Iterable[Transfer]) -> None:
        for transfer in transfers:
            transfer.copies.clear()
            transfer.error = NixlErrorKind.DISCONNECTED
        self.flying = [item for item in self.flying if item.error is None]

    def land(self, transfer: Transfer | None = None, copies: int | None = None) -> int:
        """Make the copies (at most ``copies``) of one or all flying transfers; returns how many."""
        with self.lock:
            made = 0
            for item in [transfer] if transfer else list(self.flying):
                if item not in self.flying or not self.reaches(item):
                    continue
                count = len(item.copies) if copies is None else min(copies, len(item.copies))
                for destination, source, length in item.copies[:count]:
                    ctypes.memmove(destination, source, length)
                    if item.behaviour.corrupt and not item.spoiled:
                        item.spoiled = True
                        ctypes.memset(destination, ctypes.c_ubyte.from_address(source).value ^ 1, 1)
                del item.copies[:count]
                made += count
                if not item.copies:
                    self.flying.remove(item)
            return made


@dataclass(eq=False)
class InMemoryAgent:
    """One agent of a :class:`~pdcluster_connector.testing.nixl.Fabric`."""

    fabric: Fabric
    name: str
    ranges: list[MemoryRange] = field(default_factory=list)
    peers: set[str] = field(default_factory=set)
    handles: set[Handle] = field(default_factory=set)
    dlists: set[Dlist] = field(default_factory=set)
    owner: int | None = None
    closed: bool = False

    def register(self, ranges: Sequence[MemoryRange]) -> None:
        self._check()
        self.ranges.extend(ranges)

    def metadata(self) -> bytes:
        self._check()
        return _MAGIC + self.name.encode()

    def add_peer(self, metadata: bytes) -> str:
        self._check()
        name = metadata.removeprefix(_MAGIC).decode(errors="replace")
        with self.fabric.lock:
            if not metadata.startswith(_MAGIC) or name not in self.fabric.agents:
                raise NixlError(NixlErrorKind.INVALID, "this is no agent's metadata")
            self.peers.add(name)
        return name

    def remove_peer(self, name: str) -> None:
        self._check()
        if name not in self.peers:
            raise NixlError(NixlErrorKind.LOST, f"no peer {name}")
        self.peers.remove(name)

    def prepare(self, peer: str | None, rows: Rows, memory: Memory) -> Dlist:
        self._check()
        dense = elements(rows)
        whole = np.stack([rows[:, 0], (rows[:, 4] - 1) * rows[:, 3] + rows[:, 1]], axis=1)
        with self.fabric.lock:
            if peer is not None and peer not in self.peers:
                raise NixlError(NixlErrorKind.LOST, f"no peer {peer}")
            if peer is not None and peer not in self.fabric.agents:
                raise NixlError(NixlErrorKind.DISCONNECTED, f"{peer} is gone")
            ranges = self.ranges if peer is None else self.fabric.agents[peer].ranges
            check_inside(whole, ranges, memory)  # NIXL looks a strided row up as a whole
            dlist = Dlist(dense, peer)
            self.dlists.add(dlist)
        return dlist

    def read(
        self, local: Dlist, local_indices: Indices, remote: Dlist, remote_indices: Indices
    ) -> Handle:
        self._check()
        if local not in self.dlists or remote not in self.dlists or remote.peer is None:
            raise NixlError(NixlErrorKind.INVALID, "a descriptor list that is not prepared")
        to = self._pick(local, local_indices)
        source = self._pick(remote, remote_indices)
        if to.shape != source.shape or (to[:, 1] != source[:, 1]).any():
            raise NixlError(NixlErrorKind.INVALID, "the two sides differ in count or length")
        copies = [
            (int(a), int(b), int(n))
            for a, b, n in zip(to[:, 0], source[:, 0], to[:, 1], strict=True)
        ]
        with self.fabric.lock:
            if remote.peer not in self.peers or remote.peer in self.fabric.dead:
                raise NixlError(NixlErrorKind.DISCONNECTED, f"{remote.peer} is gone")
            transfer = Transfer(self.name, remote.peer, copies)
            transfer.behaviour = self.fabric.behave(transfer)
            transfer.due = time.monotonic() + transfer.behaviour.delay
            if transfer.behaviour.drop:
                del copies[-1:]
            if transfer.behaviour.reorder:
                copies.reverse()
            self.fabric.posted += 1
            error = transfer.behaviour.post_error
            if error is None or transfer.behaviour.hang:
                self.fabric.flying.append(transfer)
            if error is not None:
                if error is _GONE:
                    self.fabric.disconnect(self, remote.peer)
                raise NixlError(error, "posting failed, as asked", flying=error is not _GONE)
            handle = Handle(transfer)
            self.handles.add(handle)
        return handle

    def state(self, handle: Handle) -> Literal["DONE", "PROC"]:
        self._check()
        with self.fabric.lock:
            transfer = self._transfer(handle)
            if transfer.error is not None:
                raise NixlError(transfer.error, f"{transfer.peer} is dead")
            if transfer not in self.fabric.flying:
                return "DONE"
            if transfer.peer not in self.peers:
                raise NixlError(NixlErrorKind.LOST, f"no peer {transfer.peer}", flying=True)
            if self._waits(transfer):
                return "PROC"
            self._fail(transfer)
            if transfer.behaviour.hang:
                return "PROC"
            if not transfer.behaviour.late:
                self.fabric.land(transfer)
            return "DONE"

    def _waits(self, transfer: Transfer) -> bool:
        transfer.polls += 1
        behaviour = transfer.behaviour
        early = transfer.polls <= behaviour.polls or time.monotonic() < transfer.due
        return early or not self.fabric.reaches(transfer)

    def _fail(self, transfer: Transfer) -> None:
        """Raise what polling this transfer is to raise."""
        behaviour = transfer.behaviour
        if behaviour.poll_raises is not None:
            raise behaviour.poll_raises
        if behaviour.poll_error is None:
            return
        flying = behaviour.poll_error not in _ENDED
        if behaviour.poll_error is _GONE:
            self.fabric.disconnect(self, transfer.peer)
        elif not flying:
            self.fabric.flying.remove(transfer)
        raise NixlError(behaviour.poll_error, "polling failed, as asked", flying=flying)

    def release(self, handle: Handle) -> None:
        self._check()
        with self.fabric.lock:
            transfer = self._transfer(handle)
            if transfer.behaviour.refuse_release and transfer in self.fabric.flying:
                raise NixlError(NixlErrorKind.INTERNAL, "cannot be cancelled", flying=True)
            self.handles.remove(handle)

    def release_dlist(self, dlist: Dlist) -> None:
        self._check()
        if dlist not in self.dlists:
            raise NixlError(NixlErrorKind.INVALID, "released twice")
        self.dlists.remove(dlist)

    def close(self) -> None:
        with self.fabric.lock:
            if self.fabric.survive_close:
                raise AgentSurvivedError(NixlErrorKind.INTERNAL, "survives, as asked", flying=True)
            self.closed = True
            self.fabric.flying = [t for t in self.fabric.flying if t.agent != self.name]
            self.fabric.agents.pop(self.name, None)
            self.handles.clear()
            self.dlists.clear()

    def _check(self) -> None:
        """Enforce the rule that one thread owns an agent."""
        for name, thawed in list(self.fabric.frozen.items()):
            if self.name.startswith(name):
                thawed.wait()
        thread = threading.get_ident()
        self.owner = self.owner or thread
        if thread != self.owner:
            raise AssertionError(f"agent {self.name} called from two threads")
        if self.closed:
            raise NixlError(NixlErrorKind.INVALID, f"agent {self.name} is closed")

    def _transfer(self, handle: Handle) -> Transfer:
        if handle not in self.handles or not isinstance(handle.native, Transfer):
            raise NixlError(NixlErrorKind.INVALID, "a handle that is not open")
        return handle.native

    def _pick(self, dlist: Dlist, indices: Indices) -> NDArray[np.uint64]:
        rows: Rows = dlist.native
        if len(indices) == 0 or indices.min() < 0 or indices.max() >= len(rows):
            raise NixlError(NixlErrorKind.INVALID, "an index outside the descriptor list")
        return rows[indices]
