"""The worker's client of the launcher: against its HTTP interface and real side channels."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, InvalidStateError
from types import SimpleNamespace

import pytest
from aiohttp import web
from loopback_engines import HeldQuestions, probed, until
from msgspec.structs import replace

from pdcluster_connector.compat.reasons import Reason
from pdcluster_connector.nixl_io.reading_agent import ProbeResult
from pdcluster_connector.protocol import launcher_documents as links, messages as m
from pdcluster_connector.protocol.failure import Failure
from pdcluster_connector.protocol.launcher_documents import LinkState, RankLink
from pdcluster_connector.sidechannel import peers, server as server_module
from pdcluster_connector.sidechannel.loop_thread import LoopThread
from pdcluster_connector.sidechannel.peers import PeerBook
from pdcluster_connector.sidechannel.server import SideChannelError, SideChannelServer
from pdcluster_connector.vllm.worker_side import link_keeper
from pdcluster_connector.vllm.worker_side.link_keeper import LauncherClient

Serve = Callable[..., SideChannelServer]
ENGINE = "ns.c.prefill.r.0"
FIRST, SECOND = f"{ENGINE}/00000000000000aa", f"{ENGINE}/00000000000000bb"


class Launcher:
    """The launcher's side: serves the peers document, keeps the reports."""

    def __init__(self) -> None:
        self.document = links.PeersDocument(0, ())
        self.reports: list[tuple[float, links.RankReport]] = []
        self.tokens: set[str | None] = set()
        self.polls = 0
        self.broken = False
        self.port = 0
        self._new = asyncio.Event()
        self._thread = LoopThread("test-launcher")
        self._thread.start()
        self._thread.submit(self._serve()).result(60)

    async def _serve(self) -> None:
        app = web.Application()
        app.router.add_get("/v1/peers", self._peers)
        app.router.add_post("/v1/reports", self._take)
        self.runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", 0)
        await site.start()
        self.port = self.runner.addresses[0][1]

    async def _peers(self, request: web.Request) -> web.Response:
        self.polls += 1
        if self.broken:
            return web.Response(status=200, body=b'{"generation": "many", "peers": 7}')
        after = int(request.query["after"])
        if after == self.document.generation:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._new.wait(), float(request.query["wait"]))
        return web.Response(body=links.encode_json(self.document))

    async def _take(self, request: web.Request) -> web.Response:
        self.tokens.add(request.headers.get("Authorization"))
        report = links.decode_report(await request.read())
        assert isinstance(report, links.RankReport)
        self.reports.append((time.monotonic(), report))
        return web.Response(status=204)

    def put(self, *entries: links.PeerEntry) -> None:
        def change() -> None:
            self.document = links.PeersDocument(self.document.generation + 1, entries)
            self._new.set()
            self._new = asyncio.Event()

        self._thread.call(change)

    def link(self, engine: str = ENGINE) -> RankLink | None:
        if not self.reports:
            return None
        return next((link for link in self.reports[-1][1].links if link.engine == engine), None)

    def shows(self, state: LinkState, engine_id: str | None = None, reason: str = "") -> bool:
        link = self.link()
        return (
            link is not None
            and (link.state, link.reason) == (state, reason)
            and engine_id in {None, link.engine_id}
        )

    def close(self) -> None:
        self._thread.submit(self.runner.cleanup()).result(60)
        self._thread.stop()


class Probe:
    """Hands out what the test says; by default a good result at once."""

    def __init__(self) -> None:
        self.outcome: ProbeResult | Exception | None = probed()
        self.asked: list[str] = []
        self.checked: list[float] = []
        self.waiting: list[Future[ProbeResult]] = []

    def __call__(
        self, metadata: m.EngineMetadata, /, *, check: bool = False
    ) -> Future[ProbeResult]:
        if check:
            self.checked.append(time.monotonic())
        else:
            self.asked.append(metadata.engine_id)
        future: Future[ProbeResult] = Future()
        if isinstance(self.outcome, Exception):
            future.set_exception(self.outcome)
        elif self.outcome is not None:
            future.set_result(self.outcome)
        else:
            self.waiting.append(future)
        return future

    def go_on(self) -> None:
        """From now on a probe is good at once, also one that waits."""
        self.outcome = probed()
        for future in self.waiting:
            with contextlib.suppress(InvalidStateError):  # it was given up
                future.set_result(self.outcome)


@pytest.fixture
def launcher() -> Iterator[Launcher]:
    launcher = Launcher()
    yield launcher
    launcher.close()


@pytest.fixture
def probe() -> Probe:
    return Probe()


@pytest.fixture
def client(
    launcher: Launcher, books: Callable[..., PeerBook], probe: Probe
) -> Iterator[LauncherClient]:
    environment = {
        "PDCLUSTER_CONTROL_URL": f"http://127.0.0.1:{launcher.port}",
        "PDCLUSTER_CONTROL_TOKEN": "secret",
    }
    client = LauncherClient.from_environment(
        environment, rank=(0, 1), of=(1, 2), data_rank=3, peers=books(), probe=probe
    )
    assert client is not None
    client.start()
    yield client
    client.close()
    client.close()


def entry(server: SideChannelServer, engine_id: str = FIRST) -> links.PeerEntry:
    return links.PeerEntry(ENGINE, f"127.0.0.1:{server.port}", engine_id)


@pytest.mark.usefixtures("client")
def test_a_link_comes_up_and_is_reported(launcher: Launcher, probe: Probe, serve: Serve) -> None:
    launcher.put(entry(serve(FIRST)))
    until(lambda: launcher.shows(LinkState.ESTABLISHED, FIRST))
    link = launcher.link()
    assert link is not None
    assert link.bytes_per_second == 2**31
    assert probe.asked == [FIRST]
    assert launcher.tokens == {"Bearer secret"}
    report = launcher.reports[-1][1]
    assert (report.rank, report.of, report.data_rank) == ((0, 1), (1, 2), 3)


@pytest.mark.usefixtures("client")
def test_a_clock_that_is_wrong_is_reported_with_the_link(
    launcher: Launcher, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "RARE_POLL_SECONDS", (0.1, 0.2))  # this client is not the first rank
    real = time.time
    clock = SimpleNamespace(time=lambda: real() + 61.0, monotonic=time.monotonic)
    monkeypatch.setattr(server_module, "time", clock)
    monkeypatch.setattr(link_keeper, "REPORT_SECONDS", 0.1)
    launcher.put(entry(serve(FIRST)))
    until(lambda: (link := launcher.link()) and link.clock_skew_seconds == 61.0)
    assert launcher.shows(LinkState.ESTABLISHED, FIRST)


@pytest.mark.usefixtures("client")
def test_death_and_return_without_the_operator(
    launcher: Launcher,
    probe: Probe,
    serve: Serve,
    record_property: Callable[[str, object], None],
) -> None:
    server = serve(FIRST)
    launcher.put(entry(server))
    until(lambda: launcher.shows(LinkState.ESTABLISHED))
    server.stop()
    dead = until(lambda: launcher.shows(LinkState.FAILED, FIRST, "SideChannelUnreachable"))
    link = launcher.link()
    assert link is not None
    assert f"the side channel at 127.0.0.1:{server.port}: " in link.message
    assert "network policies" in link.message  # what to do about it
    serve(SECOND, port=server.port)  # the document still names FIRST
    back = until(lambda: launcher.shows(LinkState.ESTABLISHED, SECOND))
    assert probe.asked == [FIRST, SECOND]
    record_property("dead_seen_s", round(dead, 2))
    record_property("back_after_s", round(back, 2))


def test_a_quick_restart_is_called_one(
    client: LauncherClient,
    launcher: Launcher,
    serve: Serve,
    probe: Probe,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    questions = HeldQuestions(client.peers, monkeypatch)
    server = serve(FIRST)
    launcher.put(entry(server))
    until(lambda: launcher.shows(LinkState.ESTABLISHED, FIRST))
    server.stop()
    serve(SECOND, port=server.port)
    probe.outcome = None  # until it was reported why the link was lost
    questions.go()
    until(lambda: launcher.shows(LinkState.FAILED, FIRST, "PeerRestarted"))
    until(lambda: probe.asked == [FIRST, SECOND])
    probe.go_on()
    until(lambda: launcher.shows(LinkState.ESTABLISHED, SECOND))


@pytest.mark.usefixtures("client")
def test_reports_keep_coming_when_nothing_changes(launcher: Launcher, serve: Serve) -> None:
    launcher.put(entry(serve(FIRST)))
    until(lambda: launcher.shows(LinkState.ESTABLISHED))
    seen, polls = len(launcher.reports), launcher.polls
    until(lambda: len(launcher.reports) > seen)
    assert launcher.polls == polls  # one long poll waits, it does not spin


@pytest.mark.usefixtures("client")
def test_a_refusal_names_the_rule_and_both_values(launcher: Launcher, serve: Serve) -> None:
    launcher.put(entry(serve(FIRST, model="another model")))
    until(lambda: launcher.shows(LinkState.FAILED, FIRST, "ModelMismatch"))
    link = launcher.link()
    assert link is not None
    assert "another model" in link.message
    assert "0123456789abcdef" in link.message


@pytest.mark.usefixtures("client")
def test_what_makes_a_link_slow_is_reported(launcher: Launcher, probe: Probe, serve: Serve) -> None:
    probe.outcome = probed(notice="1,000 tokens take 3,024 descriptors")
    launcher.put(entry(serve(FIRST)))
    until(lambda: launcher.shows(LinkState.ESTABLISHED, FIRST))
    link = launcher.link()
    assert link is not None
    assert link.message == "1,000 tokens take 3,024 descriptors"


@pytest.mark.usefixtures("client")
def test_a_wrong_probe_is_a_failed_link(launcher: Launcher, probe: Probe, serve: Serve) -> None:
    probe.outcome = probed(Failure(Reason.PROBE_CORRUPTED, "byte 7 differs"))
    launcher.put(entry(serve(FIRST)))
    until(lambda: launcher.shows(LinkState.FAILED, FIRST, "ProbeCorrupted"))


@pytest.mark.usefixtures("client")
def test_a_probe_that_raises_is_a_failed_link(
    launcher: Launcher, probe: Probe, serve: Serve
) -> None:
    probe.outcome = OSError("no device")
    launcher.put(entry(serve(FIRST)))
    until(lambda: launcher.shows(LinkState.FAILED, FIRST, "BackendError"))
    link = launcher.link()
    assert link is not None
    assert "no device" in link.message


@pytest.mark.usefixtures("client")
def test_a_peer_that_dies_while_its_probe_hangs(
    launcher: Launcher, probe: Probe, serve: Serve
) -> None:
    probe.outcome = None
    server = serve(FIRST)
    launcher.put(entry(server))
    until(lambda: probe.asked)
    server.stop()
    until(lambda: launcher.shows(LinkState.FAILED, FIRST, "SideChannelUnreachable"))


def test_a_link_that_the_receiver_drops_is_probed_again(
    client: LauncherClient, launcher: Launcher, probe: Probe, serve: Serve
) -> None:
    launcher.put(entry(serve(FIRST)))
    until(lambda: launcher.shows(LinkState.ESTABLISHED, FIRST))
    probe.outcome = None  # until it was reported why the link was lost
    client.peers.forget(FIRST, Failure(Reason.BACKEND_ERROR, "a transport error"))
    until(lambda: launcher.shows(LinkState.FAILED, FIRST, "BackendError"))
    until(lambda: probe.asked == [FIRST, FIRST])
    probe.go_on()
    until(lambda: launcher.shows(LinkState.ESTABLISHED, FIRST))
    seen = [link for _, report in launcher.reports for link in report.links]
    assert "a transport error" in [link.message for link in seen]
    numbers = {link.establishment for link in seen if link.state is LinkState.ESTABLISHED}
    assert len(numbers - {0}) == 2, "a canary of the first establishment does not count"


@pytest.mark.usefixtures("client")
def test_an_established_link_is_looked_at_again_and_lost_when_nothing_comes_through(
    launcher: Launcher, probe: Probe, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The side channel answers all the time: only KV memory cannot be read any more."""
    monkeypatch.setattr(link_keeper, "CHECK_SECONDS", (0.05, 0.1))
    launcher.put(entry(serve(FIRST)))
    until(lambda: len(probe.checked) >= 3)
    until(lambda: launcher.shows(LinkState.ESTABLISHED, FIRST))  # a report comes a moment later
    assert probe.asked == [FIRST]
    probe.outcome = probed(Failure(Reason.TRANSFER_STALLED, "a read did not land"))
    until(lambda: launcher.shows(LinkState.FAILED, FIRST, "TransferStalled"))
    link = launcher.link()
    assert link is not None
    assert link.message == "a read did not land"
    probe.outcome = probed()
    until(lambda: launcher.shows(LinkState.ESTABLISHED, FIRST))


@pytest.mark.usefixtures("client")
def test_another_engine_at_the_address(launcher: Launcher, serve: Serve, probe: Probe) -> None:
    launcher.put(entry(serve("ns.c.prefill.r.7/00000000000000cc")))
    until(lambda: launcher.shows(LinkState.FAILED, FIRST, "EngineIdInconsistent"))
    assert probe.asked == []


@pytest.mark.usefixtures("client")
def test_one_dead_peer_of_many(launcher: Launcher, serve: Serve, probe: Probe) -> None:
    entries = [links.PeerEntry("ns.c.prefill.r.99", "127.0.0.1:1")]
    for number in range(6):
        engine = f"ns.c.prefill.r.{number}"
        server = serve(f"{engine}/aa")
        entries.append(links.PeerEntry(engine, f"127.0.0.1:{server.port}"))
    launcher.put(*entries)

    def states() -> list[str]:
        return sorted(link.state for _, report in launcher.reports[-1:] for link in report.links)

    until(lambda: states() == ["Established"] * 6 + ["Failed"])
    assert len(probe.asked) == 6


@pytest.mark.usefixtures("client")
def test_peers_come_go_and_move(launcher: Launcher, serve: Serve) -> None:
    first, moved = serve(FIRST), serve(SECOND)
    launcher.put(entry(first))
    until(lambda: launcher.shows(LinkState.ESTABLISHED, FIRST))
    launcher.put(entry(moved, SECOND))
    until(lambda: launcher.shows(LinkState.ESTABLISHED, SECOND))
    launcher.put()
    until(lambda: launcher.reports[-1][1].links == ())  # gone from the table


@pytest.mark.usefixtures("client")
def test_a_launcher_that_talks_nonsense_for_a_while(launcher: Launcher, serve: Serve) -> None:
    launcher.broken = True
    launcher.put(entry(serve(FIRST)))  # ends the poll under way, the next one is nonsense
    until(lambda: launcher.polls >= 3)
    launcher.broken = False
    until(lambda: launcher.shows(LinkState.ESTABLISHED, FIRST))


# Data-parallel peers.


def serve_ranks(serve: Serve, incarnation: str, count: int = 2) -> list[SideChannelServer]:
    """Side channels of one engine's data-parallel ranks, on ports in a row."""
    while True:
        servers = [serve(f"{incarnation}_dp0")]
        try:
            for rank in range(1, count):
                servers.append(serve(f"{incarnation}_dp{rank}", port=servers[0].port + rank))
        except SideChannelError:  # somebody else has that port
            servers[0].stop()
            continue
        return servers


def of_ranks(server: SideChannelServer, size: int = 2) -> links.PeerEntry:
    return links.PeerEntry(ENGINE, f"127.0.0.1:{server.port}", FIRST, data_parallel_size=size)


def states(launcher: Launcher) -> dict[int, tuple[str, str]]:
    found = launcher.reports[-1][1].links if launcher.reports else ()
    return {link.data_rank: (link.state.value, link.reason) for link in found}


UP = ("Established", "")


@pytest.mark.usefixtures("client")
def test_each_data_parallel_rank_of_a_peer_has_a_link(
    launcher: Launcher, probe: Probe, serve: Serve
) -> None:
    first, second = serve_ranks(serve, FIRST)
    launcher.put(of_ranks(first))
    until(lambda: states(launcher) == {0: UP, 1: UP})
    assert sorted(probe.asked) == [f"{FIRST}_dp0", f"{FIRST}_dp1"]
    assert {link.engine_id for link in launcher.reports[-1][1].links} == {FIRST}
    second.stop()
    until(lambda: states(launcher) == {0: UP, 1: ("Failed", "SideChannelUnreachable")})
    failed = launcher.reports[-1][1].links[1]
    assert f"127.0.0.1:{second.port}" in failed.message
    serve(f"{FIRST}_dp1", port=second.port)
    until(lambda: states(launcher) == {0: UP, 1: UP})
    assert probe.asked.count(f"{FIRST}_dp0") == 1


@pytest.mark.usefixtures("client")
def test_a_rank_on_another_node_is_looked_for_there(
    launcher: Launcher, probe: Probe, serve: Serve
) -> None:
    first, second = serve_ranks(serve, FIRST)
    entry = links.PeerEntry(
        ENGINE, f"127.0.0.1:{first.port}", data_parallel_size=2, follower_hosts=("127.0.0.2",)
    )
    launcher.put(entry)
    until(lambda: states(launcher) == {0: UP, 1: ("Failed", "SideChannelUnreachable")})
    assert f"127.0.0.2:{second.port}" in launcher.reports[-1][1].links[1].message
    launcher.put(replace(entry, follower_hosts=("localhost",)))
    until(lambda: states(launcher) == {0: UP, 1: UP})
    assert probe.asked.count(f"{FIRST}_dp0") == 1, "the other rank's link went on"


@pytest.mark.usefixtures("client")
def test_a_rank_in_the_place_of_another_is_no_peer(
    launcher: Launcher, probe: Probe, serve: Serve
) -> None:
    server = serve(f"{FIRST}_dp1")
    launcher.put(of_ranks(server))
    until(lambda: states(launcher).get(0) == ("Failed", "EngineIdInconsistent"))
    message = launcher.reports[-1][1].links[0].message
    assert "is data-parallel rank 1 of ns.c.prefill.r.0, not data-parallel rank 0" in message
    assert probe.asked == []


@pytest.mark.parametrize(("runs", "size"), [("_dp0", 1), ("", 2)])
@pytest.mark.usefixtures("client")
def test_an_engine_of_another_data_parallel_size_is_no_peer(
    launcher: Launcher, serve: Serve, runs: str, size: int
) -> None:
    launcher.put(of_ranks(serve(f"{FIRST}{runs}"), size))
    until(lambda: states(launcher).get(0) == ("Failed", "EngineIdInconsistent"))
    message = launcher.reports[-1][1].links[0].message
    assert "the only rank" in message
    assert f"not {size}" in message


@pytest.mark.usefixtures("client")
def test_a_peer_that_gets_and_loses_ranks(launcher: Launcher, serve: Serve) -> None:
    only = serve(FIRST)
    launcher.put(entry(only))
    until(lambda: states(launcher) == {0: UP})
    first, _ = serve_ranks(serve, SECOND)
    launcher.put(of_ranks(first))
    until(lambda: states(launcher) == {0: UP, 1: UP})
    launcher.put(entry(only))
    until(lambda: states(launcher) == {0: UP})


def test_without_a_launcher_there_is_no_agent(books: Callable[..., PeerBook]) -> None:
    assert (
        LauncherClient.from_environment(
            {}, rank=(0, 0), of=(1, 1), data_rank=0, peers=books(), probe=Probe()
        )
        is None
    )
