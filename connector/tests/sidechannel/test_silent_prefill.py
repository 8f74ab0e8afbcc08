"""What becomes of requests while prefill is stopped, cut off or slow, or dies. In virtual time.

A decode rank's book of peers, its leases, its link keeper and its receives are the real ones, and
so is prefill's lease desk. Only the network between them is the test's.
"""

from __future__ import annotations

import asyncio
import errno
import random
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from itertools import product
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec
import pytest
from own_loop import Here, now
from transfer_rig import Prefill
from turn_by_turn import CACHE, Bench

import virtual_time
from pdcluster_connector.compat.reasons import Reason
from pdcluster_connector.compat.shape import EngineShape
from pdcluster_connector.plan.block_pairs import GroupBlocks
from pdcluster_connector.protocol import launcher_documents as links, messages as m
from pdcluster_connector.protocol.failure import Failure
from pdcluster_connector.protocol.launcher_documents import LinkState
from pdcluster_connector.protocol.receive_order import ReceiveOrder
from pdcluster_connector.protocol.ticket import Ticket
from pdcluster_connector.sidechannel import handshake, lease_client, lease_desk, peers
from pdcluster_connector.testing.nixl import Behaviour, Transfer
from pdcluster_connector.transfer.options import ReceiverOptions
from pdcluster_connector.transfer.probing import BEHIND_KV_SECONDS
from pdcluster_connector.transfer.receive_machine import Acknowledged, Failed, State
from pdcluster_connector.vllm.scheduler_side.decode_leases import DecodeLeases
from pdcluster_connector.vllm.worker_side import link_keeper

PREFILL, DECODE = "ns.c.prefill.r.0/00000000000000aa", "ns.c.decode.r.0/00000000000000dd"
LEASE = 60.0
STEP = 0.05  # of both engines
SOON = 2.0  # what must fail fails within it
TOKENS = CACHE["block_tokens"]
WARM_UP = "warm-up"
FIRST_SEED = 1000  # a ticket of the rig also writes its seed into the lease word of this number


class Network:
    """Between the two: what travels, how fast, and what the side channel of prefill answers."""

    def __init__(self) -> None:
        self.running, self.to_prefill, self.to_decode, self.kv = (asyncio.Event() for _ in range(4))
        self.dead = False
        self.dice = random.Random(1)
        self.slowness = (0.0, 0.0)  # seconds that an answer takes, and a read
        self.desk = lease_desk.LeaseDesk(LEASE, now)
        self._landing: dict[Transfer, float] = {}
        self._serving: set[asyncio.Task[None]] = set()
        for event in (self.running, self.to_prefill, self.to_decode, self.kv):
            event.set()

    def takes(self) -> float:
        return self.dice.uniform(*self.slowness)

    async def request(
        self, _session: object, _method: str, url: str, *_peer: object, **how: Any
    ) -> tuple[int, bytes]:
        answer: asyncio.Future[tuple[int, bytes]] = asyncio.get_running_loop().create_future()
        serving = asyncio.create_task(self._serve(urlsplit(url).path, how.get("data"), answer))
        self._serving.add(serving)
        serving.add_done_callback(self._serving.discard)
        timeout: aiohttp.ClientTimeout = how["timeout"]
        bounds = [timeout.total, timeout.sock_read]
        if not (self.to_prefill.is_set() and self.to_decode.is_set()):
            bounds.append(timeout.sock_connect)
        return await asyncio.wait_for(answer, min(bound for bound in bounds if bound))

    async def _serve(
        self, path: str, body: bytes | None, answer: asyncio.Future[tuple[int, bytes]]
    ) -> None:
        await self.to_prefill.wait()
        if self.dead:
            answer.set_exception(ConnectionRefusedError(errno.ECONNREFUSED, "refused"))
            return
        await self.running.wait()
        await asyncio.sleep(self.takes())
        reply = b""
        if path == "/healthz":
            reply = msgspec.json.encode(m.HealthReply(PREFILL, "prefill", 1))
        elif path == "/v1/leases":
            asked = m.decode_lease_request(body or b"")
            assert isinstance(asked, m.LeaseRequest)
            reply = m.encode(self.desk.answer(asked))
        await self.to_decode.wait()
        if not answer.done():
            answer.set_result((200, reply))

    def die(self, bench: Bench) -> None:
        self.dead = True
        bench.fabric.kill(PREFILL)

    def carry(self, bench: Bench) -> None:
        """Let the reads land whose time has come."""
        ways = (self.running, self.to_prefill, self.to_decode, self.kv)
        for transfer in list(bench.fabric.flying):
            due = self._landing.setdefault(transfer, now() + self.takes())
            if all(way.is_set() for way in ways) and now() >= due:
                bench.fabric.land(transfer)
                del self._landing[transfer]


@dataclass
class Sent:
    """A request, and what became of it. Times in seconds."""

    ticket: Ticket
    block: int
    began: float
    may_fail: bool
    ended: float | None = None
    failure: Failure | None = None
    is_right: bool = False


class Stage:
    """One prefill engine, one decode rank, and the link between them."""

    def __init__(self, book: peers.PeerBook, leases: lease_client.LeaseClient) -> None:
        self.network = Network()
        self.bench = Bench(ReceiverOptions(), peers=book, clock=now)
        self.bench.fabric.behave = lambda _: Behaviour(hang=True)
        self.prefill = Prefill(self.bench.fabric, PREFILL, **CACHE)
        self.tickets = DecodeLeases(leases, LEASE, now)
        self.book = book
        self.sent: dict[str, Sent] = {}
        self.held: dict[str, tuple[int, int]] = {}
        self.free = list(range(1, CACHE["num_blocks"]))
        self.free_here = list(self.free)
        self.states: list[tuple[float, LinkState, str]] = []

    async def keep_link(self) -> None:
        """Keep a link to prefill, as with a launcher."""

        def probe(metadata: m.EngineMetadata, *, check: bool = False) -> Any:
            future: Any = link_keeper.Future()
            probing = self.bench.connections.probing
            (probing.check if check else probing.probe)(metadata, future)
            return future

        def changed() -> None:
            self.states.append((now(), keeper.report.state, keeper.report.message))

        entry = links.PeerEntry("ns.c.prefill.r.0", "127.0.0.1:5600", PREFILL)
        keeper = link_keeper.LinkKeeper(entry, 0, self.book, probe, changed)
        self.book.listen(keeper.gone, silence=True)
        await keeper.keep(SimpleNamespace())  # type: ignore[arg-type]

    async def link_up(self) -> None:
        """Have a link that was established a while ago, and over which KV has come."""
        self.keeper = asyncio.create_task(self.keep_link())
        await asyncio.sleep(20.0)
        sent = self.send()
        await asyncio.sleep(6.0)
        lived(sent)

    async def step_for_ever(self) -> None:
        while True:
            self.step()
            await asyncio.sleep(STEP)

    def step(self) -> None:
        if self.network.running.is_set() and not self.network.dead:
            self._step_prefill()
        self.tickets.renew_all()
        renewed, lost = self.tickets.take_news()
        self.bench.executor.pass_on((one, Acknowledged(now() + s)) for one, s in renewed.items())
        self.bench.executor.pass_on((one, Failed(why)) for one, why in lost.items())
        self.network.carry(self.bench)
        self.bench.turns()
        results = self.bench.take()
        for request_id in results.finished:
            sent = self.sent[request_id]
            assert sent.ended is None, "reported twice"
            sent.ended, sent.failure = now(), results.failed.get(request_id)
            wrong = self.bench.cache.wrong_tokens(sent.ticket.token, [sent.block], 0, TOKENS)
            sent.is_right = sent.failure is None and wrong == []
            self.tickets.done(sent.ticket, request_id)
            self.free_here.append(sent.block)

    def _step_prefill(self) -> None:
        changes = self.network.desk.take()
        for slot, word in changes.words.items():
            self.prefill.write_word(slot, word)
        for request_id in changes.released + changes.expired:
            block, seed = self.held.pop(request_id)
            self.prefill.caches[0].write(seed + 500_000, [block], TOKENS)
            self.free.append(block)

    @property
    def is_silent(self) -> bool:
        """Whether a new request may fail now, because nothing has come from prefill for long."""
        connection = self.bench.connections.by_engine.get(PREFILL)
        stalled = connection is not None and connection.stalled is not None
        return stalled or self.book.silence.is_long(("127.0.0.1", 5600))

    def compute(self) -> tuple[Ticket, int]:
        """A ticket of prefill, for a prompt of one block."""
        seed, block = FIRST_SEED + len(self.sent), self.free.pop(0)
        desk, request_id = self.network.desk, f"p-{seed}"
        desk.arm(request_id, seed)
        _, slot = desk.place(request_id) or (0, None)
        for slot_, word in desk.take().words.items():
            self.prefill.write_word(slot_, word)
        desk.grant(request_id)
        self.held[request_id] = block, seed
        times = {"expires_at": now() + LEASE, "lease_seconds": LEASE}
        return self.prefill.ticket(seed, [block], TOKENS, fence_slot=slot, **times), block

    def send(self, ticket: Ticket | None = None) -> Sent:
        """Have decode fetch the KV of a prompt."""
        ticket = ticket or self.compute()[0]
        block, request_id = self.free_here.pop(0), f"r{len(self.sent)}"
        self.tickets.use(ticket, request_id)
        seconds, claimed = self.tickets.park(ticket, request_id)
        sent = self.sent[request_id] = Sent(ticket, block, now(), self.is_silent)
        blocks = (GroupBlocks([block]),)
        self.bench.receive(ReceiveOrder(request_id, ticket, blocks, 0, TOKENS, seconds, claimed))
        return sent

    async def send_in(self, moment: str) -> Sent:
        """Bring a request to a moment in which it waits for prefill."""
        sent = self.send()
        while self._moment(sent) != moment:
            assert sent.ended is None, f"it has ended without {moment!r}"
            await asyncio.sleep(STEP / 10)
        return sent

    def _moment(self, sent: Sent) -> str | None:
        jobs = {job.request.ticket.token: job for job in self.bench.executor.jobs.values()}
        job, reads = jobs.get(sent.ticket.token), self.bench.fabric.flying
        if job is None or (job.machine.state is not State.HANDSHAKE and not reads):
            return None
        return WARM_UP if job.connection and job.connection.waiting else job.machine.state.value

    async def requests(self, seconds: float, every: float = 1.0) -> list[Sent]:
        """Send requests for a while; prefill's tickets come although its network does not work."""
        sent, ends = [], now() + seconds
        while now() < ends - 1e-6:
            if self.free and self.free_here:
                sent.append(self.send())
            await asyncio.sleep(min(every, ends - now()))
        return sent


Story = Callable[[Stage], Coroutine[Any, Any, None]]
Play = Callable[[Story], None]


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Play:
    def played(story: Story) -> None:
        book = peers.PeerBook(DECODE, EngineShape(block_size=TOKENS), (0, 0))
        leases = lease_client.LeaseClient(DECODE)
        for client in (book, leases):
            client.close()
        book._closed = False

        async def run() -> None:
            clock = SimpleNamespace(monotonic=now, time=now)
            for module in (peers, handshake, lease_client, link_keeper):
                monkeypatch.setattr(module, "time", clock)
            for module in (peers, lease_client, link_keeper):
                monkeypatch.setattr(module, "random", random.Random(31))
            for client in (book, leases):
                monkeypatch.setattr(client, "_thread", Here())
            monkeypatch.setattr(handshake, "client_session", SimpleNamespace)
            stage = Stage(book, leases)
            monkeypatch.setattr(handshake, "request", stage.network.request)
            monkeypatch.setattr(handshake, "judge", lambda *_: stage.prefill.metadata)
            steps = asyncio.create_task(stage.step_for_ever())
            await story(stage)
            assert not steps.done(), steps.result()
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
        assert one.began - began >= handshake.SILENT_SECONDS
        assert one.ended is not None
        assert one.ended - one.began <= SOON, one.failure
        named = {
            Reason.SIDE_CHANNEL_UNREACHABLE: "no answer",
            Reason.TRANSFER_STALLED: "did not land in time: the KV transport is cut or stuck",
        }
        assert named[one.failure.reason] in one.failure.message
    return failed


@pytest.mark.parametrize("linked", [False, True], ids=["first contact", "linked"])
@pytest.mark.parametrize("moment", [State.NEW, State.HANDSHAKE, WARM_UP, State.POSTED, State.FENCE])
@pytest.mark.parametrize(
    ("fault", "seconds"),
    [*product(["running", "to_prefill", "to_decode", "kv"], [8.0, 20.0]), ("kv", 45.0)],
)
def test_what_waits_for_a_silent_prefill_lives_and_what_is_new_fails_soon(
    play: Play, fault: str, seconds: float, moment: str, linked: bool
) -> None:
    if linked and moment in {State.HANDSHAKE, WARM_UP}:
        return  # there is a connection already

    async def story(stage: Stage) -> None:
        event: asyncio.Event = getattr(stage.network, fault)
        if linked:
            await stage.link_up()
        if moment == State.NEW:
            computed, _ = stage.compute()
            event.clear()
            waits = stage.send(computed)
        else:
            waits = await stage.send_in(moment)
            event.clear()
        began = now()
        during = await stage.requests(seconds, every=2.0)
        event.set()
        await asyncio.sleep(1.0 + lease_client.LAST_RETRY_SECONDS)
        lived(waits)
        failed = judge(during, began)
        # KV may be slow: of a link that works but for KV, nothing has to come for half a minute.
        if linked and seconds > (BEHIND_KV_SECONDS if fault == "kv" else 8.0):
            assert failed >= 4, "they waited"
        after = stage.send()
        await asyncio.sleep(1.0)
        lived(after)
        await asyncio.sleep(15.0)
        if linked:
            assert stage.states[-1][1] is LinkState.ESTABLISHED
            assert (failed > 0) <= any(state is LinkState.FAILED for _, state, _ in stage.states)
        left(stage)

    play(story)


@pytest.mark.parametrize("linked", [False, True], ids=["first contact", "linked"])
def test_requests_of_a_prefill_that_is_starved_for_a_minute_live(play: Play, linked: bool) -> None:
    """Answers take seconds, and so do reads."""

    async def story(stage: Stage) -> None:
        if linked:
            await stage.link_up()
        began = now()
        stage.network.slowness = (0.2, 8.0)
        sent = await stage.requests(60.0, every=3.0)
        stage.network.slowness = (0.0, 0.0)
        await asyncio.sleep(10.0)
        failed = judge(sent, began)
        assert failed <= len(sent) / 2
        after = await stage.requests(5.0)
        await asyncio.sleep(1.0)
        for one in after:
            lived(one)
        await asyncio.sleep(15.0)
        left(stage)

    play(story)


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
        computed = stage.compute()[0] if moment == State.NEW else None
        waits = None if computed else await stage.send_in(moment)
        stage.network.die(stage.bench)
        died = now()
        waits = waits or stage.send(computed)
        await asyncio.sleep(2 * SOON)
        assert waits.ended is not None
        assert waits.ended - died <= SOON, waits.failure
        assert waits.failure is not None
        assert waits.failure.reason in {Reason.SIDE_CHANNEL_UNREACHABLE, Reason.BACKEND_ERROR}
        assert "refused" in waits.failure.message or PREFILL in waits.failure.message

    play(story)


def left(stage: Stage) -> None:
    """Nothing is left of any request."""
    assert all(one.ended is not None for one in stage.sent.values())
    assert stage.bench.executor.jobs == {}
    assert stage.tickets.held == {}
    assert stage.network.desk.held == 0
    assert stage.held == {}
    assert stage.bench.fabric.open_handles() == 0
