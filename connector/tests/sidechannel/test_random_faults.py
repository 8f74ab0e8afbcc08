"""Random faults between two prefill and two decode engines, judged by a model. In virtual time.

A course follows from its seed. A request's KV is right, or it fails with a reason, or it is
computed anew. It may fail only if something was done to it: to its engines, to the network between
them, or to a read over their connection. Each rank reports it once, and none says that it is done
after it has failed, or without prefill's lease. Whoever has ended releases its lease: one that
prefill has to let expire was cut off. At the end, nothing is left anywhere.

``PDCLUSTER_FAULTS_SEED=N`` plays the course of one seed again.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
from left_open import open_handles
from own_loop import now
from virtual_engines import (
    Network,
    Session,
    end_decode,
    install,
    start_decode,
    start_prefill,
    turns,
)

import virtual_time
from pdcluster_connector.nixl_io.interface import NixlErrorKind
from pdcluster_connector.nixl_io.reading_agent import ProbeResult
from pdcluster_connector.protocol import launcher_documents as links, messages as m
from pdcluster_connector.sidechannel.lease_desk import LeaseChanges
from pdcluster_connector.testing.engines import (
    FREED,
    PROBE_BYTES,
    DecodeEngine,
    Fetch,
    PrefillEngine,
    Size,
)
from pdcluster_connector.testing.judge import Judge, Verdict
from pdcluster_connector.testing.nixl import Behaviour, Fabric, Transfer
from pdcluster_connector.transfer.options import ReceiverOptions
from pdcluster_connector.transfer.planned_reads import FENCE_WORDS, Job
from pdcluster_connector.transfer.receive_machine import State
from pdcluster_connector.vllm.worker_side import link_keeper

PREFILLS, DECODES = ("P1", "P2"), ("D1", "D2")
LEASE = 1.0
STEP = 0.02
TOKENS = 10
AFTER = 0.5  # so long after a fault has ended, its consequences may last
SECONDS = 60.0  # of a course
SOAK_SECONDS = 3600.0  # of real time
QUIET = 120.0  # so long everything may take to end
OPTIONS = {
    "drain_deadline_seconds": 0.5,
    "transfer_stall_seconds": 6.0,
    "probe_seconds": 2.0,
    "check_seconds": 1.0,
    "descriptors_per_transfer": 2,
}


@dataclass(eq=False)
class Asked:
    """A request at a decode engine."""

    name: str
    prefill: str
    decode: str
    engine: DecodeEngine
    fetch: Fetch
    began: float
    recompute: bool
    is_excused: bool  # it may fail whatever happens
    given_up: bool = False


@dataclass
class Excuse:
    """Something that was done between two engines, or to all pairs of one (the other is empty)."""

    what: str
    prefill: str
    decode: str
    start: float
    end: float  # who comes later is not hit any more

    def is_for(self, asked: Asked) -> bool:
        """Whether it may be why the request failed."""
        there = self.prefill in {"", asked.prefill} and self.decode in {"", asked.decode}
        return there and asked.began <= self.end and self.start <= now()


class Reports(deque[Job]):
    """What a rank reports; ``look`` is called with each report."""

    def __init__(self, look: Callable[[Job], None]) -> None:
        super().__init__()
        self.look = look

    def append(self, job: Job) -> None:
        self.look(job)
        super().append(job)


@dataclass
class Course:
    """One course of faults; everything follows from ``seed``."""

    seed: int
    monkeypatch: pytest.MonkeyPatch
    judge: Judge = field(default_factory=Judge)
    done: Counter[str] = field(default_factory=Counter)

    async def run(self, seconds: float) -> None:
        """Play it for so long, and check that nothing is left."""
        self.dice = random.Random(self.seed)
        self.fabric = Fabric()
        self.network = Network(self.fabric, random.Random(self.seed + 1))
        self.network.behave = self._behaviour
        install(self.monkeypatch, self.network, random.Random(self.seed + 2))
        self.sizes = {name: Size(tensor=self.dice.choice((1, 2))) for name in PREFILLS + DECODES}
        self.share_of_reads = self.dice.choice((0.0, 0.003, 0.03))  # to which something happens
        self.incarnations, self.seeds = itertools.count(1), itertools.count(1)
        self.prefills: dict[str, PrefillEngine] = {}
        self.decodes: dict[str, DecodeEngine] = {}
        self.keepers: dict[str, list[asyncio.Task[None]]] = {}
        self.ports: dict[str, int] = {}
        self.given: list[tuple[str, str, dict[str, Any], int]] = []
        self.asked: list[Asked] = []
        self.users: dict[tuple[str, str], DecodeEngine] = {}  # who has used which ticket
        self.shared: set[tuple[str, str]] = set()  # tickets that came more than once
        self.given_up: set[tuple[str, str]] = set()
        self.released: dict[tuple[str, str], tuple[str, float]] = {}  # by which engine, and when
        self.reported: dict[tuple[str, tuple[int, int], str], State] = {}
        self.wrong: list[str] = []  # reports; an exception would be taken for the thread's fault
        self.excuses: list[Excuse] = []
        self.fatal: list[str] = []
        self.busy: set[str] = set()
        self.ends: list[tuple[float, str, Any]] = []  # of faults
        self.ending: list[asyncio.Task[None]] = []
        self.heals = False
        for name in PREFILLS:
            self._start_prefill(name)
        for name in DECODES:
            self._start_decode(name)
        while now() < seconds:
            self._act()
            await self._step()
        await self._end()

    # Engines.

    def _start_prefill(self, name: str) -> None:
        engine_id = f"ns.c.prefill.{name}/{next(self.incarnations):016x}"
        port = self.ports.get(name, 0)
        engine = start_prefill(
            self.fabric, engine_id, self.sizes[name], lease_seconds=LEASE, port=port
        )
        self.prefills[name], self.ports[name] = engine, engine.server.port
        take = engine.leases.take

        def taken() -> LeaseChanges:
            changes = take()
            for request_id in changes.expired:
                self._expired(name, engine.engine_id, request_id)
            return changes

        engine.leases.take = taken  # type: ignore[method-assign,assignment]

    def _expired(self, prefill: str, engine_id: str, request_id: str) -> None:
        """A release arrives before the lease ends, unless the engines could not speak."""
        decode, since = self.released.get((engine_id, request_id), ("", 0.0))
        if decode and now() - since > AFTER and (engine_id, request_id) not in self.shared:
            assert any(
                one.what in {"killed", "cut", "stopped"} and one.end >= since
                for one in self.excuses
                if one.prefill in {"", prefill} and one.decode in {"", decode}
            ), f"at {now():.2f}: {request_id} of {engine_id} was released at {since:.2f}"

    def _start_decode(self, name: str) -> None:
        engine_id = f"ns.c.decode.{name}/{next(self.incarnations):016x}"
        options = ReceiverOptions(**OPTIONS, fatal=self.fatal.append)  # type: ignore[arg-type]
        engine = start_decode(
            self.fabric, engine_id, self.sizes[name], lease_seconds=LEASE, options=options
        )
        self.decodes[name] = engine
        for rank, receiver in engine.receivers.items():
            receiver._executor.ended = Reports(partial(self._look_at_report, engine, rank))
        self.keepers[name] = [
            asyncio.create_task(self._keep(engine, rank, prefill))
            for rank in engine.receivers
            for prefill in PREFILLS
        ]

    def _look_at_report(self, engine: DecodeEngine, rank: tuple[int, int], job: Job) -> None:
        machine, ticket = job.machine, job.request.ticket
        key = engine.engine_id, rank, machine.request_id
        if key in self.reported:
            self.wrong.append(f"{key} was reported twice")
        self.reported[key] = machine.state
        if machine.state is not State.DONE:
            return
        if machine.failure is not None:
            self.wrong.append(f"{key} is done, and has failed: {machine.failure}")
        used = ticket.engine_id, ticket.request_id
        for prefill in self.prefills.values():
            if prefill.engine_id == ticket.engine_id and used not in self.given_up:
                lease = prefill.leases._granted.get(ticket.request_id)
                if lease is None or lease.engine != engine.engine_id:
                    self.wrong.append(f"{key} is done without a lease: {lease}")

    async def _keep(self, engine: DecodeEngine, rank: tuple[int, int], prefill: str) -> None:
        entry = links.PeerEntry(f"ns.c.prefill.{prefill}", f"127.0.0.1:{self.ports[prefill]}")
        book = engine._peers[list(engine.receivers).index(rank)]

        def probe(metadata: m.EngineMetadata, *, check: bool = False) -> Future[ProbeResult]:
            return engine.receivers[rank].probe(metadata, check=check)

        keeper = link_keeper.LinkKeeper(entry, 0, book, probe, lambda: None)
        book.listen(keeper.gone, silence=True)
        await keeper.keep(Session(engine.engine_id))  # type: ignore[arg-type]

    async def _step(self) -> None:
        for name, prefill in self.prefills.items():
            if f"ns.c.prefill.{name}/" not in self.network.stopped:
                prefill.step()
        self.network.carry()
        for name, decode in self.decodes.items():
            turns(decode)
            if name not in self.busy:
                decode.step()
        assert not self.wrong, self.wrong
        for asked in list(self.asked):
            self._look_at(asked)
        while self.ends and self.ends[0][0] <= now():
            _, what, which = self.ends.pop(0)
            getattr(self, what)(which)
        await asyncio.sleep(STEP)

    def _look_at(self, asked: Asked) -> None:
        fetch = asked.fetch
        if fetch.failure is not None and not fetch.ended and not asked.given_up:
            asked.given_up = True  # vLLM's scheduler has the other ranks give it up
            asked.engine.abort(asked.name)
        if fetch.ended:
            self._judge(asked)

    def _judge(self, asked: Asked, *, lost: bool = False) -> None:
        self.asked.remove(asked)
        failure = asked.fetch.failure
        verdict = self.judge.judge(
            "", asked.engine, asked.name, recompute=asked.recompute, lost=lost
        )
        assert verdict not in {Verdict.WRONG, Verdict.HANGING}, (asked, verdict)
        self._judge_end(asked, lost=lost)
        if verdict is Verdict.RIGHT and (ticket := asked.fetch.ticket):
            used = self.users.setdefault((ticket.engine_id, ticket.request_id), asked.engine)
            assert used is asked.engine, "two engines have used one ticket"
        if failure is None or lost or asked.is_excused:
            return
        assert failure.message
        excuses = [one for one in self.excuses if one.is_for(asked)]
        assert excuses, f"at {now():.2f}: nothing was done to {asked}"

    def _judge_end(self, asked: Asked, *, lost: bool) -> None:
        """A request whose ranks have ended is as they say, and its lease is released."""
        ticket = asked.fetch.ticket
        if lost or ticket is None:
            return
        states = {
            self.reported[asked.engine.engine_id, rank, asked.name]
            for rank in asked.engine.receivers
        }
        assert (asked.fetch.failure is None) == (states == {State.DONE}), (asked, states)
        key = ticket.engine_id, ticket.request_id
        if (*key, ticket.token) not in asked.engine.tickets.held:
            self.released[key] = asked.decode, now()

    # What happens.

    def _act(self) -> None:
        dice = self.dice.random() * 1000
        for share, act in (
            (250, self._send),
            (15, self._reuse),
            (15, self._abort),
            (10, self._give_up),
            (3, self._kill),
            (4, self._cut),
            (3, self._stop),
            (3, self._keep_busy),
        ):
            if dice < share:
                act()
                return
            dice -= share

    def _send(self) -> None:
        name = self.dice.choice(PREFILLS)
        prefill = self.prefills.get(name)
        if prefill is None or f"ns.c.prefill.{name}/" in self.network.stopped:
            return
        if len(prefill.free) < self.sizes[name].blocks_of(TOKENS):
            self.done["prefill is full"] += 1
            return
        seed = next(self.seeds)
        self.given.append((name, prefill.engine_id, prefill.compute(seed, TOKENS), seed))
        self._ask(self.given[-1], self.dice.choice(DECODES), again=False)

    def _reuse(self) -> None:
        """A router tries again, here or elsewhere, at any time."""
        if self.given:
            self._ask(self.dice.choice(self.given[-30:]), self.dice.choice(DECODES), again=True)

    def _ask(self, given: tuple[str, str, dict[str, Any], int], name: str, *, again: bool) -> None:
        prefill, engine_id, params, seed = given
        decode = self.decodes.get(name)
        if decode is None or len(decode.free) < 2 * self.sizes[name].blocks_of(TOKENS):
            self.done["decode is full"] += 1
            return
        request_id = f"r{seed}-{next(self.seeds)}"
        fetch = decode.fetch(request_id, params, seed, TOKENS)
        self.done["again" if again else "sent"] += 1
        if again:  # the first one may suffer from it, too
            if fetch.ticket is not None:
                self.shared.add((fetch.ticket.engine_id, fetch.ticket.request_id))
            for one in self.asked:
                one.is_excused |= one.name.startswith(f"r{seed}-")
        here = self.prefills.get(prefill)
        gone = here is None or here.engine_id != engine_id
        recompute = self.dice.random() < 0.5
        self.asked.append(
            Asked(request_id, prefill, name, decode, fetch, now(), recompute, again or gone)
        )

    def _abort(self) -> None:
        if self.asked:
            asked = self.dice.choice(self.asked)
            asked.is_excused = True
            asked.engine.abort(asked.name)
            self.done["aborted"] += 1

    def _give_up(self) -> None:
        """Prefill gives up the blocks of a request at once, and reuses them."""
        name = self.dice.choice(PREFILLS)
        prefill = self.prefills.get(name)
        if prefill is None or not prefill.held or f"ns.c.prefill.{name}/" in self.network.stopped:
            return
        request_id = self.dice.choice(list(prefill.held))
        for one in self.asked:
            ticket = one.fetch.ticket
            if ticket and (ticket.engine_id, ticket.request_id) == (prefill.engine_id, request_id):
                one.is_excused = True
        self.given_up.add((prefill.engine_id, request_id))
        prefill.leases.drop(request_id)
        prefill.step()
        if blocks := prefill.held.pop(request_id, None):
            for cache in prefill.caches:
                cache.bytes[:, blocks] = FREED
            prefill.free.extend(blocks)
        self.done["given up"] += 1

    def _kill(self) -> None:
        name = self.dice.choice(PREFILLS + DECODES)
        back = now() + self.dice.choice((0.0, self.dice.uniform(0.0, 3.0)))
        if name in self.prefills:
            self.prefills.pop(name).kill()
            self._excuse("killed", name, "", back)
            self._later(back, "_start_prefill", name)
        elif name in self.decodes:
            engine = self.decodes.pop(name)
            for asked in [one for one in self.asked if one.engine is engine]:
                self._judge(asked, lost=True)
            for keeper in self.keepers.pop(name):
                keeper.cancel()
                self.ending.append(keeper)
            self.ending += end_decode(engine)
            engine.kill()
            self._excuse("killed", "", name, back)
            self._later(back, "_start_decode", name)

    def _cut(self) -> None:
        prefill, decode = self.dice.choice((*PREFILLS, "")), self.dice.choice((*DECODES, ""))
        there, here = f"ns.c.prefill.{prefill}", f"ns.c.decode.{decode}"
        ways = self.dice.choice(({(here, there)}, {(there, here)}, {(here, there), (there, here)}))
        if ways & self.network.cuts:
            return
        end = now() + self.dice.uniform(0.1, 4.0)
        self.network.cuts |= ways
        self.network.change()
        self._excuse("cut", prefill, decode, end)
        self._later(end, "_mend", ways)

    def _mend(self, ways: set[tuple[str, str]]) -> None:
        self.network.cuts -= ways
        self.network.change()

    def _stop(self) -> None:
        name = self.dice.choice(PREFILLS)
        process = f"ns.c.prefill.{name}/"
        if process in self.network.stopped:
            return
        end = now() + self.dice.uniform(0.1, 4.0)
        self.network.stopped.add(process)
        self._excuse("stopped", name, "", end)
        self._later(end, "_go_on", process)

    def _go_on(self, process: str) -> None:
        self.network.stopped.discard(process)
        self.network.change()

    def _keep_busy(self) -> None:
        """An engine step that lasts."""
        name = self.dice.choice(DECODES)
        if name in self.busy:
            return
        end = now() + self.dice.uniform(0.1, 2.0)
        self.busy.add(name)
        self._excuse("busy", "", name, end)
        self._later(end, "_step_again", name)

    def _step_again(self, name: str) -> None:
        self.busy.discard(name)

    def _behaviour(self, transfer: Transfer) -> Behaviour:
        """What a read does."""
        dice = self.dice.random()
        if self.heals or dice >= self.share_of_reads:
            return Behaviour(hang=True)
        polls, dice = self.dice.randrange(4), self.dice.random() * 30
        prefill, decode = (name.split("/")[0][-2:] for name in (transfer.peer, transfer.agent))
        seconds = 0.0
        if dice < 12:
            seconds = self.dice.uniform(0.2, 9.0)
            fault = Behaviour(hang=True, delay=seconds, refuse_release=dice < 3)
        elif dice < 17:
            kind = self.dice.choice((NixlErrorKind.DISCONNECTED, NixlErrorKind.TRANSPORT))
            fault = Behaviour(hang=True, post_error=kind)
        elif dice < 25:
            kind = self.dice.choice(
                (NixlErrorKind.DISCONNECTED, NixlErrorKind.TRANSPORT, NixlErrorKind.LOST)
            )
            fault = Behaviour(hang=True, polls=polls, poll_error=kind, delay=0.5)
        else:
            fault = Behaviour(hang=True, polls=polls, poll_raises=RuntimeError("broken"), delay=0.5)
        # What comes after a read that hangs is not hit, unless the read is a probe.
        is_probe = transfer.nbytes == PROBE_BYTES
        kind = "probe" if is_probe else "read"
        self._excuse(f"{kind}: {fault}", prefill, decode, now() + seconds * is_probe)
        return fault

    def _excuse(self, what: str, prefill: str, decode: str, end: float) -> None:
        self.done[what.partition(" ")[0]] += 1
        self.excuses.append(Excuse(what, prefill, decode, now(), end + AFTER))
        self.excuses = [one for one in self.excuses if one.end + 60.0 > now()]

    def _later(self, at: float, what: str, which: Any) -> None:
        self.ends.append((at, what, which))
        self.ends.sort(key=lambda end: end[0])

    # The end.

    async def _end(self) -> None:
        """Everything heals: each request ends, and every pair of engines works. Nothing is left."""
        self.heals = True
        until = now() + QUIET
        while self.ends or self.asked or self._left():
            assert now() < until, (self.asked, self._left())
            await self._step()
        for prefill, decode in itertools.product(PREFILLS, DECODES):
            seed, engine = next(self.seeds), self.decodes[decode]
            name = f"last of {prefill}"
            fetch = engine.fetch(name, self.prefills[prefill].compute(seed, TOKENS), seed, TOKENS)
            while not fetch.ended:
                await self._step()
            assert fetch.failure is None
            assert engine.right(name)
            engine.forget(name)
        while self._left():
            assert now() < until, self._left()
            await self._step()
        assert self.fatal == []
        for decode in self.decodes.values():
            for cache in decode.caches:
                landed = cache.bytes[:, decode.free]
                assert ((landed == FREED) | (landed == 0)).all(), "a freed block was written to"
        await self._close()

    def _left(self) -> dict[str, Any]:
        """What is left of requests that have ended, and of what happened."""
        found: dict[str, Any] = {}
        for name, prefill in self.prefills.items():
            found[f"{name}: leases"] = [*prefill.leases._granted, *prefill.leases._armed]
            found[f"{name}: blocks"] = prefill.held
            found[f"{name}: free"] = len(prefill.free) - prefill.size.num_blocks + 1
        for name, decode in self.decodes.items():
            found[f"{name}: tickets"] = decode.tickets.held
            found[f"{name}: messages"] = decode._leases._outboxes
            found[f"{name}: free"] = len(decode.free) - decode.size.num_blocks + 1
            for book in decode._peers:
                found[f"{name}: waiters"] = [one for p in book._peers.values() for one in p.waiters]
                found[f"{name}: peers"] = len(book._peers) - len(PREFILLS)
            for rank, receiver in decode.receivers.items():
                found |= {f"{name} {rank}: {what}": it for what, it in left_of(receiver).items()}
        found["handles"] = open_handles(self.fabric)
        found["flying"] = self.fabric.flying
        agents = [a for e in self.prefills.values() for a in e.agents]
        receivers = [r for e in self.decodes.values() for r in e.receivers.values()]
        found["agents"] = len(self.fabric.agents) - len(agents) - len(receivers)
        found["tasks"] = [task for task in self.ending if not task.done()]
        return {what: left for what, left in found.items() if left}

    async def _close(self) -> None:
        for keepers in self.keepers.values():
            for keeper in keepers:
                keeper.cancel()
        for decode in self.decodes.values():
            self.ending += end_decode(decode)
            decode.close()
        for prefill in self.prefills.values():
            prefill.close()
        await asyncio.sleep(2.0)
        assert self.fabric.agents == {}
        assert self.fabric.flying == []
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        assert not tasks, tasks


def left_of(receiver: Any) -> dict[str, Any]:
    """What is left on one rank."""
    executor, connections = receiver._executor, receiver._connections
    rebuild, probing = executor._agent_rebuild, connections.probing
    opened = list(connections.by_engine.values())
    lists = 1 + sum(3 * len(one.sources) for one in opened)
    agent = connections.agent._nixl
    return {
        "receives": executor.jobs,
        "results": executor.ended,
        "transfers": bool(executor.transfers),
        "unseen": executor.transfers.unseen,
        "rebuild": [rebuild.by, rebuild.renew_by] != [None, None] or rebuild.held,
        "probes": [*probing.runs, *probing.waiting],
        "words": FENCE_WORDS - len(connections.fence_words.free),
        "slots": sum(slots._count - len(slots.free) for slots in probing.scratch.values()),
        "closing": connections.closing,
        "connections": len(opened) - len(PREFILLS),
        "broken": [one for one in opened if one.broken or one.stalled or one.transfers],
        "lists": len(agent.dlists) - lists,
        "loaded peers": len(agent.peers) - sum(len(one.sources) for one in opened),
        "registered": len(agent.ranges) - len(connections._memory) - 3,
        "crashes": receiver.crashes,
    }


def play(seed: int, seconds: float, monkeypatch: pytest.MonkeyPatch) -> Course:
    course = Course(seed, monkeypatch)
    try:
        with monkeypatch.context() as patch:
            course.monkeypatch = patch
            virtual_time.run(course.run(seconds))
    except BaseException:
        print(f"PDCLUSTER_FAULTS_SEED={seed} plays this course again: {dict(course.done)}")
        raise
    return course


SEEDS = [int(seed) for seed in os.environ.get("PDCLUSTER_FAULTS_SEED", "1 2 3").split()]


@pytest.mark.sampled
@pytest.mark.parametrize("seed", SEEDS)
def test_random_faults_cost_only_what_they_hit(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    course = play(seed, SECONDS, monkeypatch)
    counts = Counter[Verdict]()
    for (_, verdict, _), count in course.judge.counts.items():
        counts[verdict] += count
    assert counts[Verdict.RIGHT] > course.done["sent"] / 3, course.judge.table()
    assert counts[Verdict.FAILED] > 0
    assert counts[Verdict.RECOMPUTED] > 0


@pytest.mark.soak
@pytest.mark.timeout(2 * SOAK_SECONDS)
def test_an_hour_of_random_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    """Course after course: of a minute, so that many begin, and what is left is soon seen."""
    until, seed = time.monotonic() + SOAK_SECONDS, random.SystemRandom().randrange(10**9)
    requests: Counter[Verdict] = Counter()
    while True:
        for (_, verdict, _), count in play(seed, SECONDS, monkeypatch).judge.counts.items():
            requests[verdict] += count
        if time.monotonic() >= until:
            break
        seed += 1
    print(f"{sum(requests.values())} requests: {dict(requests)}")
    assert requests[Verdict.RIGHT] > sum(requests.values()) / 3
