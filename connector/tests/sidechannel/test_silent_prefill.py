"""What becomes of requests while prefill is stopped, cut off or slow, or dies. In virtual time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from itertools import product
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
from pdcluster_connector.compat.reasons import Reason
from pdcluster_connector.protocol import launcher_documents as links
from pdcluster_connector.protocol.failure import Failure
from pdcluster_connector.protocol.launcher_documents import LinkState
from pdcluster_connector.sidechannel import lease_client
from pdcluster_connector.sidechannel.handshake import SILENT_SECONDS
from pdcluster_connector.testing.engines import Fetch, PrefillEngine, Size
from pdcluster_connector.testing.nixl import Fabric
from pdcluster_connector.transfer.options import ReceiverOptions
from pdcluster_connector.transfer.probing import BEHIND_KV_SECONDS
from pdcluster_connector.transfer.receive_machine import State
from pdcluster_connector.vllm.worker_side import link_keeper

PREFILL, DECODE = "ns.c.prefill.r.0/00000000000000aa", "ns.c.decode.r.0/00000000000000dd"
AGAIN = "ns.c.prefill.r.0/00000000000000bb"
LEASE = 60.0
STEP = 0.05  # of both engines
SOON = 2.0  # what must fail fails within it
DRAIN = ReceiverOptions().drain_deadline_seconds
TOKENS = 4
WARM_UP = "warm-up"


@dataclass
class Sent:
    """A request, and what became of it. Times in seconds."""

    name: str
    fetch: Fetch
    began: float
    may_fail: bool
    ended: float | None = None
    is_right: bool = False

    @property
    def failure(self) -> Failure | None:
        return self.fetch.failure


class Stage:
    """One prefill engine, one decode engine, and the link between them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
        self.fabric = Fabric()
        self.network = Network(self.fabric, random.Random(1))
        install(monkeypatch, self.network, random.Random(31))
        self.fatal: list[str] = []
        options = ReceiverOptions(fatal=self.fatal.append)
        self.prefill = start_prefill(self.fabric, PREFILL, lease_seconds=LEASE)
        size = Size(tensor=ranks)
        self.decode = start_decode(self.fabric, DECODE, size, lease_seconds=LEASE, options=options)
        self.receiver, *_ = self.decode.receivers.values()
        self.book, *_ = self.decode._peers
        self.is_dead = False
        self.sent: list[Sent] = []
        self.states: list[LinkState] = []

    def begin(self, fault: str) -> None:
        """Let nothing come from prefill any more, for one of four causes."""
        if fault == "stopped":
            self.network.stopped.add(PREFILL)
        elif fault == "only KV":
            self.network.kv = False
        else:
            self.network.cuts.add((DECODE, PREFILL) if fault == "to prefill" else (PREFILL, DECODE))

    def end(self) -> None:
        """End the fault."""
        self.network.stopped.clear()
        self.network.cuts.clear()
        self.network.kv = True
        self.network.change()

    def die(self) -> None:
        """End prefill's process."""
        self.is_dead = True
        self.prefill.kill()

    async def keep_link(self, prefill: PrefillEngine) -> None:
        """Keep a link to prefill, as with a launcher."""
        address = f"127.0.0.1:{prefill.server.port}"
        entry = links.PeerEntry("ns.c.prefill.r.0", address, prefill.engine_id)

        def changed() -> None:
            self.states.append(keeper.report.state)

        keeper = link_keeper.LinkKeeper(entry, 0, self.book, self.receiver.probe, changed)
        self.book.listen(keeper.gone, silence=True)
        await keeper.keep(Session(DECODE))  # type: ignore[arg-type]

    async def link_up(self) -> None:
        """Have a link that was established a while ago, and over which KV has come."""
        self.keeper = asyncio.create_task(self.keep_link(self.prefill))
        await asyncio.sleep(20.0)
        sent = self.send()
        await asyncio.sleep(6.0)
        lived(sent)

    async def step_for_ever(self) -> None:
        while True:
            if not (self.is_dead or self.network.stopped):
                self.prefill.step()
            self.network.carry()
            turns(self.decode)
            self.decode.step()
            for sent in self.sent:
                if sent.fetch.ended and sent.ended is None:
                    sent.ended = now()
                    sent.is_right = self.decode.right(sent.name)
                    self.decode.forget(sent.name)
            await asyncio.sleep(STEP)

    @property
    def is_silent(self) -> bool:
        """Whether a new request may fail now, because nothing has come from prefill for long."""
        connection = self.receiver._connections.by_engine.get(PREFILL)
        stalled = connection is not None and connection.stalled is not None
        return stalled or self.book.silence.is_long(("127.0.0.1", self.prefill.server.port))

    def send(self, params: dict[str, Any] | None = None) -> Sent:
        """Have decode fetch the KV of a prompt."""
        name, seed = f"r{len(self.sent)}", len(self.sent)
        params = params or self.prefill.compute(seed, TOKENS)
        fetch = self.decode.fetch(name, params, seed, TOKENS)
        self.sent.append(Sent(name, fetch, now(), self.is_silent))
        return self.sent[-1]

    async def send_in(self, moment: str) -> Sent:
        """Bring a request to a moment in which it waits for prefill."""
        sent = self.send()
        while self._moment(sent) != moment:
            assert sent.ended is None, f"it has ended without {moment!r}"
            await asyncio.sleep(STEP / 10)
        return sent

    def _moment(self, sent: Sent) -> str | None:
        job = self.receiver._executor.jobs.get(sent.name)
        if job is None or (job.machine.state is not State.HANDSHAKE and not self.fabric.flying):
            return None
        return WARM_UP if job.connection and job.connection.waiting else job.machine.state.value

    async def requests(self, seconds: float, every: float = 1.0) -> list[Sent]:
        """Send requests for a while; prefill's tickets come although its network does not work."""
        sent, ends = [], now() + seconds
        while now() < ends - 1e-6:
            sent.append(self.send())
            await asyncio.sleep(min(every, ends - now()))
        return sent

    def left(self) -> None:
        """Check that nothing is left of any request."""
        assert all(one.ended is not None for one in self.sent)
        assert self.receiver._executor.jobs == {}
        assert self.decode.tickets.held == {}
        assert self.prefill.leases.held == 0
        assert self.prefill.held == {}
        assert open_handles(self.fabric) == 0
        assert self.fatal == []


Story = Callable[[Stage], Coroutine[Any, Any, None]]
Play = Callable[..., None]


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Play:
    def played(story: Story, ranks: int = 1) -> None:
        async def run() -> None:
            stage = Stage(monkeypatch, ranks)
            steps = asyncio.create_task(stage.step_for_ever())
            await story(stage)
            assert not steps.done(), steps.result()
            end_decode(stage.decode)
            stage.decode.close()
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        virtual_time.run(run())

    return played


def lived(sent: Sent) -> None:
    assert sent.failure is None, (sent.began, sent.ended, sent.failure)
    assert sent.ended is not None
    assert sent.is_right


def judge(sent: list[Sent], began: float) -> int:
    """Check that each lived or was allowed to fail, soon, with a reason; return how many failed."""
    failed = 0
    for one in sent:
        if one.failure is None:
            lived(one)
            continue
        failed += 1
        assert one.may_fail, f"it began at {one.began}: {one.failure}"
        assert one.began - began >= SILENT_SECONDS
        assert one.ended is not None
        assert one.ended - one.began <= SOON, one.failure
        named = {
            Reason.SIDE_CHANNEL_UNREACHABLE: "no answer",
            Reason.TRANSFER_STALLED: "did not land in time: the KV transport is cut or stuck",
        }
        assert named[one.failure.reason] in one.failure.message
    return failed


@pytest.mark.sampled
@pytest.mark.parametrize("linked", [False, True], ids=["first contact", "linked"])
@pytest.mark.parametrize("moment", [State.NEW, State.HANDSHAKE, WARM_UP, State.POSTED, State.FENCE])
@pytest.mark.parametrize(
    ("fault", "seconds"),
    [
        *product(["stopped", "to prefill", "from prefill", "only KV"], [8.0, 20.0]),
        ("only KV", 45.0),
    ],
)
def test_what_waits_for_a_silent_prefill_lives_and_what_is_new_fails_soon(
    play: Play, fault: str, seconds: float, moment: str, linked: bool
) -> None:
    if linked and moment in {State.HANDSHAKE, WARM_UP}:
        return  # there is a connection already

    async def story(stage: Stage) -> None:
        if linked:
            await stage.link_up()
        if moment == State.NEW:
            computed = stage.prefill.compute(len(stage.sent), TOKENS)
            stage.begin(fault)
            waits = stage.send(computed)
        else:
            waits = await stage.send_in(moment)
            stage.begin(fault)
        began = now()
        during = await stage.requests(seconds, every=2.0)
        stage.end()
        await asyncio.sleep(1.0 + lease_client.LAST_RETRY_SECONDS)
        lived(waits)
        failed = judge(during, began)
        # KV may be slow: of a link that works but for KV, nothing has to come for half a minute.
        if linked and seconds > (BEHIND_KV_SECONDS if fault == "only KV" else 8.0):
            assert failed >= 4, "they waited"
        after = stage.send()
        await asyncio.sleep(1.0)
        lived(after)
        await asyncio.sleep(15.0)
        if linked:
            assert stage.states[-1] is LinkState.ESTABLISHED
            assert (failed > 0) <= (LinkState.FAILED in stage.states)
        stage.left()

    play(story)


@pytest.mark.parametrize("linked", [False, True], ids=["first contact", "linked"])
def test_requests_of_a_prefill_that_is_starved_for_a_minute_live(play: Play, linked: bool) -> None:
    """Answers take seconds, and so do reads."""

    async def story(stage: Stage) -> None:
        if linked:
            await stage.link_up()
        began = now()
        stage.network.seconds = (0.1, 1.2)  # three of them for an answer
        sent = await stage.requests(60.0, every=3.0)
        stage.network.seconds = (0.0, 0.02)
        await asyncio.sleep(10.0)
        failed = judge(sent, began)
        assert failed <= len(sent) / 2
        after = await stage.requests(5.0)
        await asyncio.sleep(1.0)
        for one in after:
            lived(one)
        await asyncio.sleep(15.0)
        stage.left()

    play(story)


@pytest.mark.sampled
@pytest.mark.parametrize("linked", [False, True], ids=["first contact", "linked"])
@pytest.mark.parametrize("moment", [State.NEW, State.HANDSHAKE, WARM_UP, State.POSTED, State.FENCE])
def test_requests_of_a_prefill_that_has_died_fail_soon(
    play: Play, moment: str, linked: bool
) -> None:
    if linked and moment in {State.HANDSHAKE, WARM_UP}:
        return

    async def story(stage: Stage) -> None:
        if linked:
            await stage.link_up()
        computed = stage.prefill.compute(len(stage.sent), TOKENS) if moment == State.NEW else None
        waits = None if computed else await stage.send_in(moment)
        stage.die()
        died = now()
        waits = waits or stage.send(computed)
        await asyncio.sleep(2 * SOON)
        assert waits.ended is not None
        assert waits.ended - died <= SOON, waits.failure
        assert waits.failure is not None
        assert waits.failure.reason in {Reason.SIDE_CHANNEL_UNREACHABLE, Reason.BACKEND_ERROR}
        assert "refused" in waits.failure.message or PREFILL in waits.failure.message

    play(story)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("moment", [State.NEW, State.POSTED, State.FENCE])
def test_of_two_living_starts_the_silence_of_one_ends_nothing_of_the_other(
    play: Play, moment: str, ranks: int
) -> None:
    """The old pod's node is cut off from the API server, and is powered off later.

    Nothing keeps a link to the old start any more, and it never answers again. What waits for it
    ends with its lease. What is new fails soon, on every rank.
    """

    async def story(stage: Stage) -> None:
        new = start_prefill(stage.fabric, AGAIN, lease_seconds=LEASE)

        def sent_to_new() -> Sent:
            return stage.send(new.compute(len(stage.sent), TOKENS))

        async def step_for_ever() -> None:
            while True:
                new.step()
                await asyncio.sleep(STEP)

        steps = asyncio.create_task(step_for_ever())
        both = [stage.send(), sent_to_new()]
        stage.keeper = asyncio.create_task(stage.keep_link(new))
        await asyncio.sleep(20.0)
        both += [stage.send(), sent_to_new()]
        await asyncio.sleep(6.0)
        for sent in both:
            lived(sent)
        computed = stage.prefill.compute(len(stage.sent), TOKENS) if moment == State.NEW else None
        waits = [] if computed else [await stage.send_in(moment)]
        stage.begin("stopped")
        began, to_new = now(), []
        waits += [stage.send(computed)] if computed else []
        to_old = []
        while now() < began + LEASE + DRAIN + 4 * SOON:
            to_old.append(stage.send())
            to_new.append(sent_to_new())
            await asyncio.sleep(SOON)
        for sent in to_new:
            lived(sent)
            assert sent.ended is not None
            assert sent.ended - sent.began <= SOON
        late = [sent for sent in to_old if sent.may_fail]
        assert judge(late, began) == len(late) > 40
        waits += [sent for sent in to_old if not sent.may_fail]
        assert 3 <= len(waits) <= 6
        for sent in waits:
            assert sent.failure is not None
            assert sent.failure.reason in {Reason.TRANSFER_STALLED, Reason.LEASE_EXPIRED}
            assert sent.ended is not None
            assert -1.0 <= sent.ended - sent.began - LEASE <= DRAIN + SOON
        assert LinkState.FAILED not in stage.states
        assert stage.fatal == []
        assert not steps.done()

    play(story, ranks)
