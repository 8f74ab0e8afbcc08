"""NIXL in memory: agents in one process that really copy bytes, and that fail on request.

It has NIXL's unpleasant properties. Releasing a handle or removing a peer does not stop a transfer
that is under way; only destroying the agent does. Indices and addresses are checked. A transfer may
land long after everybody has stopped waiting for it.

What one transfer does is a :class:`Behaviour`, and ``Fabric.behave`` chooses it. What happens to
a whole process is a method of :class:`Fabric`: ``kill``, ``cut`` and ``mend``, ``freeze`` and
``thaw``. The page docs/testing.md has an example.
"""

import ctypes
import itertools
import threading
from collections.abc import Callable

from pdcluster_connector.nixl_io.interface import NixlErrorKind
from pdcluster_connector.testing.in_memory_agent import Behaviour, InMemoryAgent, Transfer

__all__ = ["Behaviour", "Fabric", "InMemoryAgent", "Transfer"]


class Fabric:
    """What connects the agents of one test. Thread-safe.

    ``behave`` decides what each transfer does; set it at any time.

    A list in ``on_a_device`` makes transfers like those of cuda_ipc: the end of their agent does
    not stop them. They go into the list, and :meth:`finish` makes their copies.
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
        self.on_a_device: list[Transfer] | None = None
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
            for transfer in self.flying:
                if transfer.peer in killed or transfer.agent in killed:
                    transfer.copies.clear()
                    transfer.error = NixlErrorKind.DISCONNECTED
            self.flying = [item for item in self.flying if item.error is None]

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
            for transfer in self.flying:
                if (transfer.agent, transfer.peer) == (agent.name, peer):
                    transfer.copies.clear()
                    transfer.error = NixlErrorKind.DISCONNECTED
            self.flying = [item for item in self.flying if item.error is None]
            agent.peers.discard(peer)

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

    def finish(self) -> None:
        """Make the copies that a device was still to make when their agents were closed."""
        with self.lock:
            transfers, self.on_a_device = self.on_a_device or [], []
            self.flying.extend(transfers)
            for transfer in transfers:
                self.land(transfer)

    def open_handles(self) -> int:
        """Count handles that nobody released, over all agents."""
        with self.lock:
            return sum(len(agent.handles) for agent in self.agents.values())

    def open_dlists(self) -> int:
        """Count descriptor lists that nobody released, over all agents."""
        with self.lock:
            return sum(len(agent.dlists) for agent in self.agents.values())

    def registered_ranges(self) -> int:
        """Count the memory ranges that are registered, over all agents."""
        with self.lock:
            return sum(len(agent.ranges) for agent in self.agents.values())
