"""Two prefill and two decode engines with a network between them, for tests that hurt them."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from left_open import open_dlists, open_handles
from relay import Relay

from pdcluster_connector.testing.engines import PROBE_BYTES, DecodeEngine, PrefillEngine, Size
from pdcluster_connector.testing.nixl import Behaviour, Fabric, Transfer
from pdcluster_connector.transfer.options import ReceiverOptions
from pdcluster_connector.transfer.receive_machine import State

WORD_BYTES = 8
TOKENS = 10
LEASE_SECONDS = 1.0
LONG_LEASE_SECONDS = 60.0  # where a test waits for no lease to end: a busy machine may be slow
OPTIONS = ReceiverOptions(drain_deadline_seconds=0.5, probe_seconds=5.0)


class Hold:
    """Holds the reads of one kind between two engines until :meth:`release`."""

    def __init__(self, fabric: Fabric, prefill: str, decode: str, state: State) -> None:
        self.fabric, self.prefill, self.decode, self.state = fabric, prefill, decode, state

    def __call__(self, transfer: Transfer) -> Behaviour:
        between = transfer.peer.startswith(self.prefill) and transfer.agent.startswith(self.decode)
        kind = {WORD_BYTES: State.FENCE, PROBE_BYTES: State.HANDSHAKE}
        mine = kind.get(transfer.nbytes, State.POSTED) is self.state
        return Behaviour(hang=between and mine)

    def release(self) -> None:
        self.fabric.behave = lambda _: Behaviour()
        with self.fabric.lock:
            for transfer in self.fabric.flying:
                transfer.behaviour = Behaviour()


class World:
    """Engines P1, P2, D1, D2; every pair has a relay of its own between its side channels.

    P1 is the engine whose leases end soon: ``lease_seconds``.
    """

    def __init__(self, size: Size | None = None, lease_seconds: float = LEASE_SECONDS) -> None:
        self.lease_seconds = lease_seconds
        self.fabric = Fabric()
        self.size = size or Size(tensor=2)
        self.incarnations = itertools.count(1)
        self.seeds = itertools.count(1)
        self.stopped: set[str] = set()
        self.params: dict[str, tuple[dict[str, Any], int]] = {}
        self.prefills = {name: self.start_prefill(name) for name in ("P1", "P2")}
        self.decodes = {name: self.start_decode(name) for name in ("D1", "D2")}
        self.dead: list[DecodeEngine] = []
        self.relays = {
            (p, d): Relay(engine.server.port)
            for p, engine in self.prefills.items()
            for d in self.decodes
        }

    def start_prefill(self, name: str, port: int = 0) -> PrefillEngine:
        engine_id = f"ns.test.prefill.{name}/{next(self.incarnations):016x}"
        seconds = self.lease_seconds if name == "P1" else LONG_LEASE_SECONDS
        return PrefillEngine(self.fabric, engine_id, self.size, lease_seconds=seconds, port=port)

    def start_decode(self, name: str) -> DecodeEngine:
        engine_id = f"ns.test.decode.{name}/{next(self.incarnations):016x}"
        return DecodeEngine(
            self.fabric, engine_id, self.size, lease_seconds=LONG_LEASE_SECONDS, options=OPTIONS
        )

    def hold(self, state: State, prefill: str = "P1", decode: str = "D1") -> Hold:
        """Have requests between two engines come as far as ``state``."""
        hold = Hold(
            self.fabric, self.prefills[prefill].engine_id, self.decodes[decode].engine_id, state
        )
        self.fabric.behave = hold
        return hold

    def send(self, prefill: str, decode: str) -> str:
        """A prompt of its own, computed by one engine and fetched by the other."""
        seed = next(self.seeds)
        params = self.prefills[prefill].compute(
            seed, TOKENS, port=self.relays[prefill, decode].port
        )
        self.params[f"r{seed}"] = params, seed
        self.fetch(f"r{seed}", decode)
        return f"r{seed}"

    def fetch(self, request_id: str, decode: str) -> None:
        """Give a request's ticket to an engine, as a router's retry does, too."""
        params, seed = self.params[request_id]
        self.decodes[decode].fetch(request_id, params, seed, TOKENS)

    def busy(self, decode: str) -> threading.Event:
        """Have the transfer threads of an engine take nothing in until the event is set."""
        event = threading.Event()
        for receiver in self.decodes[decode].receivers.values():
            receiver._inbox.put(event.wait)
        return event

    def stands(self, decode: str, request_id: str, state: State) -> bool:
        """Whether a request has come to ``state`` on every rank."""
        for receiver in self.decodes[decode].receivers.values():
            executor = receiver._executor
            job = executor.jobs.get(request_id)
            if job is None or job.machine.state is not state:
                return False
        return True

    def run(self, until: Callable[[], bool], seconds: float = 120.0) -> bool:
        """Step all engines that are not stopped; returns whether it happened."""
        deadline = time.monotonic() + seconds
        while not until():
            if time.monotonic() > deadline:
                return False
            for name, engine in (*self.prefills.items(), *self.decodes.items()):
                if name not in self.stopped:
                    engine.step()
            time.sleep(0.005)
        return True

    def run_for(self, seconds: float) -> None:
        self.run(lambda: False, seconds)

    def cut(self, name: str) -> None:
        """Nothing passes between ``name`` and all others."""
        for pair, relay in self.relays.items():
            if name in pair:
                relay.cut()
        engine = self.prefills.get(name) or self.decodes[name]
        self.fabric.cut(engine.engine_id)

    def mend(self, name: str) -> None:
        for pair, relay in self.relays.items():
            if name in pair:
                relay.mend()
        self.fabric.mend()

    def kill(self, name: str) -> None:
        """The process ends, and another one takes its place."""
        if name in self.prefills:
            old = self.prefills[name]
            old.kill()
            self.prefills[name] = self.start_prefill(name, old.server.port)
        else:
            self.dead.append(self.decodes[name])
            self.decodes[name].kill()
            self.decodes[name] = self.start_decode(name)

    def stop(self, name: str) -> None:
        """As SIGSTOP does: the process says nothing, and forgets nothing."""
        self.stopped.add(name)
        if name in self.prefills:
            self.cut(name)
        else:
            self.fabric.freeze(self.decodes[name].engine_id)

    def go_on(self, name: str) -> None:
        self.stopped.discard(name)
        if name in self.prefills:
            self.mend(name)
        else:
            self.fabric.thaw(self.decodes[name].engine_id)

    def holdings(self) -> dict[str, int]:
        """What engines hold of the machine, and of each other."""
        receivers = [r for d in self.decodes.values() for r in d.receivers.values()]
        books = [book for d in self.decodes.values() for book in d._peers]
        return {
            "agents": len(self.fabric.agents),
            "registered ranges": sum(len(agent.ranges) for agent in self.fabric.agents.values()),
            "descriptor lists": open_dlists(self.fabric),
            "handles": open_handles(self.fabric),
            "loaded peers": sum(len(agent.peers) for agent in self.fabric.agents.values()),
            "connections": sum(len(r._connections.by_engine) for r in receivers),
            "receives": sum(len(r._executor.jobs) for r in receivers),
            "known peers": sum(len(book._peers) for book in books),
            "outboxes": sum(len(d._leases._outboxes) for d in self.decodes.values()),
            "tickets in use": sum(len(d.tickets.held) for d in self.decodes.values()),
            "leases": sum(p.leases.held + len(p.leases._armed) for p in self.prefills.values()),
            "prefill blocks in use": sum(
                self.size.num_blocks - 1 - len(p.free) for p in self.prefills.values()
            ),
            "threads": threading.active_count(),
            "file descriptors": len(os.listdir("/proc/self/fd")),
        }

    def close(self) -> None:
        for relay in self.relays.values():
            relay.close()
        for engine in (*self.decodes.values(), *self.prefills.values()):
            engine.close()
