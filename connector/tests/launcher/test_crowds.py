"""Every server of the connector, with a crowd that is larger than its limit.

The crowd shows no certificate. It comes from one address or from many; it says nothing, asks and
stays, sends a byte a second, or begins with TLS and stops, at once or later, once or again and
again. Meanwhile decode engines claim their leases, and the kubelet, the operator, a scraper and a
router get their answers.
"""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import socket
import ssl
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from launched import Launched, http

import crowd
import machine
from authority import Authority
from crowd import Crowd
from loopback import free_port
from pdcluster_connector import listening
from pdcluster_connector.certificate_files import Tls
from pdcluster_connector.compat.shape import EngineShape, LayerKind, LayerShape, Memory
from pdcluster_connector.launcher import multi_node, supervisor
from pdcluster_connector.launcher.arguments import engine_command
from pdcluster_connector.launcher.engine.engine_api import EngineApi
from pdcluster_connector.launcher.engine.readiness import Readiness
from pdcluster_connector.launcher.interface import LauncherServer, metrics_page
from pdcluster_connector.launcher.links.link_table import LinkTable
from pdcluster_connector.launcher.router_gate import Gate
from pdcluster_connector.protocol.engine_id import OPERATOR_NAME, EngineId
from pdcluster_connector.protocol.messages import Standing
from pdcluster_connector.protocol.ticket import Ticket
from pdcluster_connector.sidechannel.lease_client import LeaseClient
from pdcluster_connector.sidechannel.lease_desk import LeaseDesk
from pdcluster_connector.sidechannel.loop_thread import LoopThread
from pdcluster_connector.sidechannel.server import SideChannelServer

LIMIT, SIZE = 64, 200
PREFILL, DECODE = "ns.c.prefill.r.0/00000000000000aa", "ns.c.decode.r.0/00000000000000dd"
LAYER = LayerShape("model.layers.0.self_attn.attn", LayerKind.FULL_ATTENTION, 0, 2, 64)
SHAPE = EngineShape(
    model="0123456789abcdef", kv_dtype="float32", block_size=16, kernel_blocks_per_block=1,
    prefix_caching=True, memory=Memory.DRAM, token_sliceable=True, packing="none", layers=(LAYER,),
)  # fmt: skip
KEY = "sk-the-right-one"
SOAK_SECONDS = 10.0
SOAK_BYTES = 300 << 20  # of which 150 MiB for TLS with 512 strangers
SERVERS = ("side-channel", "side-channel-tls", "launcher", "launcher-tls", "metrics", "gate")
CROWDS = [
    *((server, kind) for server in SERVERS for kind in crowd.KINDS),
    *((server, kind) for server in SERVERS if "tls" in server for kind in crowd.TLS_KINDS),
]


@dataclass
class Served:
    """A server, and what its own clients ask of it meanwhile.

    Attributes:
        asks: raise an exception if they get no answer, or another one. By who asks.
    """

    guard: listening.ConnectionGuard
    path: str
    tls: bool
    asks: dict[str, Callable[[], object]] = field(default_factory=dict)

    @property
    def port(self) -> int:
        return int(self.guard.listener.getsockname()[1])


def get(url: str, status: int, context: ssl.SSLContext | None = None, **headers: str) -> None:
    """Ask once, over a connection of its own, as the kubelet does."""
    request = urllib.request.Request(url, headers=headers)
    opener = urllib.request.build_opener(
        urllib.request.HTTPSHandler(context=context, check_hostname=False)
    )
    try:
        with opener.open(request, timeout=5) as answer:
            found = answer.status
    except urllib.error.HTTPError as error:
        with error:
            found = error.code
    assert found == status


def side_channel(stack: ExitStack, folder: Path, tls: bool) -> Served:
    leases = LeaseDesk(60.0)
    ours = theirs = None
    if tls:
        authority = Authority()
        ours = Tls(authority.files(folder / "p", PREFILL), PREFILL)
        theirs = Tls(authority.files(folder / "d", DECODE), DECODE)
    server = SideChannelServer("127.0.0.1", 0, PREFILL, SHAPE, leases=leases, tls=ours)
    server.start()
    stack.callback(server.stop)
    made = iter(range(10**6))

    def claim() -> None:
        """Four engines, each with a connection of its own."""
        clients = [LeaseClient(DECODE, theirs) for _ in range(4)]
        held = []
        try:
            for client in clients:
                client.start()
                name = f"r{next(made)}"
                leases.arm(name, 7)
                assert leases.grant(name)
                leases.take()
                ticket = Ticket(
                    PREFILL, "127.0.0.1", server.port, name, 7, (), 16, 0, b"d" * 16, 0.0
                )
                client.renew(ticket, time.monotonic() + 20)
            deadline = time.monotonic() + 20
            while len(held) < 4 and time.monotonic() < deadline:
                held += [answer for client in clients for answer in client.answers()]
                time.sleep(0.005)
        finally:
            for client in clients:
                client.close(0.0)
        assert [answer.standing for answer in held] == [Standing.HELD] * 4

    assert server._guard is not None
    return Served(server._guard, "/healthz", tls, {"four decode engines": claim})


def readiness_of_decode() -> Readiness:
    """That of an engine that is ready."""
    identity = EngineId("ns.c.decode.r.0", "00000000000000dd")
    config = '{"kv_role":"kv_consumer"}'
    command = engine_command(
        ["m", "--kv-transfer-config", config], engine_id=identity.engine, role="decode"
    )
    readiness = Readiness(identity, "decode", command, {})
    readiness.healthy()
    return readiness


def launcher(stack: ExitStack, folder: Path, tls: bool) -> Served:
    readiness = readiness_of_decode()
    authority, files, operator = Authority(), None, None
    kubelet = ssl.create_default_context()
    kubelet.check_hostname, kubelet.verify_mode = False, ssl.CERT_NONE
    if tls:
        files = Tls(authority.files(folder / "e", DECODE), DECODE)
        own = authority.files(folder / "o", "x", name=OPERATOR_NAME)
        operator = ssl.create_default_context(cafile=own.ca)
        operator.check_hostname = False
        operator.load_cert_chain(own.certificate, own.key)
    server = LauncherServer(readiness, LinkTable((1, 1)), "t", lambda: None, None, files)
    thread = LoopThread("launcher")
    thread.start()
    stack.callback(thread.stop)
    thread.submit(server.start("127.0.0.1", 0)).result(60)
    stack.callback(lambda: thread.submit(server.stop()).result(60))
    guard = server._guard
    assert guard is not None
    served = Served(guard, "/readyz", tls)
    url = f"http{'s' if tls else ''}://127.0.0.1:{served.port}"
    served.asks["the kubelet"] = lambda: get(f"{url}/readyz", 200, kubelet)
    served.asks["the operator"] = lambda: get(f"{url}/v1/links", 200, operator)
    return served


def metrics(stack: ExitStack) -> Served:
    thread = LoopThread("metrics")
    thread.start()
    stack.callback(thread.stop)

    async def fetch() -> bytes:
        return b"vllm:x 1\n"

    listener = listening.open_port("127.0.0.1", 0)
    guard = thread.submit(listening.serve(metrics_page(fetch), listener)).result(60)
    stack.callback(lambda: thread.submit(guard.close()).result(60))
    served = Served(guard, "/metrics", tls=False)
    url = f"http://127.0.0.1:{served.port}/metrics"
    served.asks["Prometheus"] = lambda: get(url, 200)
    return served


def gate(stack: ExitStack) -> Served:
    thread = LoopThread("router")
    thread.start()
    stack.callback(thread.stop)
    app = web.Application()
    app.router.add_get("/readiness", _ready)
    router = thread.submit(listening.serve(app, listening.open_port("127.0.0.1", 0))).result(60)
    stack.callback(lambda: thread.submit(router.close()).result(60))
    made = Gate(("127.0.0.1", 0), KEY, ("127.0.0.1", router.listener.getsockname()[1]))
    while not hasattr(made, "_guard"):
        time.sleep(0.001)
    stack.callback(made._thread.stop)
    stack.callback(lambda: made._thread.submit(made._guard.close()).result(60))
    served = Served(made._guard, "/readyz", tls=False)
    url = f"http://127.0.0.1:{served.port}"
    served.asks["the kubelet"] = lambda: get(f"{url}/readyz", 200)
    served.asks["the router"] = lambda: get(f"{url}/check", 200, Authorization=f"Bearer {KEY}")
    served.asks["a stranger"] = lambda: get(f"{url}/check", 401)
    return served


async def _ready(_: web.Request) -> web.Response:
    return web.Response()


@contextmanager
def serving(name: str, folder: Path) -> Iterator[Served]:
    with ExitStack() as stack:
        what, _, tls = name.rpartition("-tls") if name.endswith("-tls") else (name, "", None)
        make: Any = {
            "side-channel": lambda: side_channel(stack, folder, tls is not None),
            "launcher": lambda: launcher(stack, folder, tls is not None),
            "metrics": lambda: metrics(stack),
            "gate": lambda: gate(stack),
        }[what]
        yield make()


@contextmanager
def crowded(*crowds: Crowd) -> Iterator[None]:
    """These crowds have been there, and go on."""
    thread = LoopThread("crowd")
    thread.start()
    try:
        for each in crowds:
            there = asyncio.Event()
            thread.submit(each.run(there.set))
            thread.submit(there.wait()).result(60)
        yield
    finally:
        thread.stop()


def everybody_is_answered(served: Served, attempts: int = 3) -> dict[str, float]:
    """Return who took how many seconds. A kubelet asks three times before a pod is not ready."""
    took = {}
    for who, ask in served.asks.items():
        for attempt in range(1, attempts + 1):
            start = time.monotonic()
            try:
                ask()
            except (AssertionError, OSError):
                if attempt == attempts:
                    raise
                continue
            took[who] = time.monotonic() - start
            if took[who] < 1.0:
                break
    return took


@pytest.mark.sampled
@pytest.mark.parametrize("many", [False, True], ids=["one-address", "many-addresses"])
@pytest.mark.parametrize(("server", "kind"), CROWDS)
def test_a_crowd_that_is_larger_than_the_limit_keeps_nobody_out(
    server: str,
    kind: str,
    many: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
) -> None:
    monkeypatch.setattr(listening, "MAX_CONNECTIONS", LIMIT)
    monkeypatch.setattr(listening, "MAX_TLS_STRANGERS", LIMIT // 2)
    # There are 16 places for handshakes here, instead of 256: while the cores are busy, a crowd may
    # take them faster than a handshake ends.
    attempts = 10 if server.endswith("tls") else 3
    with serving(server, tmp_path) as served:
        with crowded(Crowd(served.port, kind, SIZE, served.path, served.tls, many)):
            for _ in range(3):
                took = everybody_is_answered(served, attempts)
            assert len(served.guard._strangers) <= LIMIT
            assert len(served.guard._speaking) <= (LIMIT // 2 if served.tls else LIMIT)
        record_property("seconds", took)


@pytest.mark.process
def test_a_launcher_stays_ready_with_1100_silent_connections_at_each_page(
    launch: Callable[..., Launched],
) -> None:
    """It had no file descriptor left to ask its engine, and said that the engine was not ready."""
    page = free_port()
    engine = launch("serve", "--metrics-port", str(page), files=1024)
    engine.ready()
    ports = int(engine.url.rpartition(":")[2]), page
    with crowded(*(Crowd(port, "silent", 1100, "/readyz", many=True) for port in ports)):
        # It asks its engine each second, and believes the third answer.
        end, late, asked = time.monotonic() + 5.0, 0, 0
        while time.monotonic() < end or asked < 5:
            asked += 1
            started = time.monotonic()
            status, document = http(f"{engine.url}/readyz")
            assert (status, document["state"]) == (200, "Ready"), document
            late = late + 1 if time.monotonic() - started > 1.0 else 0
            assert late < 3, "a kubelet waits for a second, and asks three times"
            assert http(f"http://127.0.0.1:{page}/metrics")[0] == 200
            time.sleep(0.1)
    assert "too many open files" not in engine.err.lower()


def test_a_crowd_at_the_gate_takes_no_thread_each(tmp_path: Path) -> None:
    with serving("gate", tmp_path) as served, ExitStack() as stack:
        before = threading.active_count()
        place = ("127.0.0.1", served.port)
        clients = [stack.enter_context(socket.create_connection(place)) for _ in range(100)]
        for client in clients[::2]:
            client.sendall(b"GET /readyz HTTP/1.1\r\nHost: x\r\n\r\n")
        everybody_is_answered(served)
        assert threading.active_count() <= before + 4


class Descriptors:
    """Sockets for a client, unless the process has none left."""

    def __init__(self) -> None:
        self.left = True

    def __call__(self, info: Any) -> socket.socket:
        if not self.left:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        family, kind, protocol, *_ = info
        return socket.socket(family, kind, protocol)


@pytest.fixture
async def descriptors() -> AsyncIterator[tuple[Descriptors, aiohttp.ClientSession]]:
    made = Descriptors()
    connector = aiohttp.TCPConnector(socket_factory=made, force_close=True)
    async with aiohttp.ClientSession(connector=connector) as http_session:
        yield made, http_session


async def test_a_fault_of_the_launcher_is_said_as_its_own(
    descriptors: tuple[Descriptors, aiohttp.ClientSession],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It was said of its engine: WarmingUp, too many open files."""
    monkeypatch.setattr(supervisor, "_SERVING_POLL", 0.001)
    files, session = descriptors
    readiness = readiness_of_decode()
    asked = asyncio.Semaphore(0)

    async def health(_: web.Request) -> web.Response:
        asked.release()
        return web.Response()

    app = web.Application()
    app.router.add_get("/health", health)
    async with TestServer(app) as server:
        api = EngineApi(session, str(server.make_url("")).rstrip("/"))
        watching = asyncio.create_task(supervisor.watch_health(api, readiness, lambda: 0))
        for _ in range(2):
            files.left = True
            for _ in range(3):
                await asyncio.wait_for(asked.acquire(), 60)
            files.left = False
            await asyncio.sleep(0.1)
            assert readiness.ready
    said = capsys.readouterr().err.splitlines()
    assert (
        said
        == [f"pdcluster: the launcher cannot call {api.address}/health: too many open files"] * 2
    )
    files.left = True  # and now the engine is gone
    async with asyncio.timeout(60):
        while readiness.ready:  # noqa: ASYNC110 - nobody reports it
            await asyncio.sleep(0.001)
    assert "does not answer" in readiness.report().message
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)


async def test_a_follower_without_descriptors_does_not_take_its_leader_for_gone(
    descriptors: tuple[Descriptors, aiohttp.ClientSession], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(multi_node, "ASK_EVERY", 0.001)
    monkeypatch.setattr(multi_node, "SILENCE", 0.1)
    files, session = descriptors
    files.left = False
    leader = multi_node.Leader(session, "http://127.0.0.1:9", 1, "s")
    leader.leaving = True  # then a leader that refuses is one that has drained
    why = await leader.watch(multi_node.Rendezvous("a.b.c.d.0/1", "t"), lambda _: None)
    assert "silent for 0 s" in why
    assert "Too many open files" in why


@pytest.mark.soak
@pytest.mark.needs("files")
@pytest.mark.parametrize("many", [False, True], ids=["one-address", "many-addresses"])
@pytest.mark.parametrize(("server", "kind"), CROWDS)
def test_a_crowd_of_9000_at_the_default_limit_keeps_nobody_out(
    server: str,
    kind: str,
    many: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, machine.OPEN_FILES), hard))
    # As with the 32,768 files that a container has at least.
    monkeypatch.setattr(listening, "connection_limit", lambda: listening.MAX_CONNECTIONS)
    with serving(server, tmp_path) as served:
        words = ["tls"] * served.tls + ["many"] * many
        place = str(served.port), kind, "9000", served.path
        before = most = memory()
        process = subprocess.Popen(
            [sys.executable, crowd.__file__, *place, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        with process:
            assert process.stdout is not None
            assert process.stdin is not None
            assert process.stdout.readline() == b"there\n"
            started, worst, cpu = time.monotonic(), 0.0, time.process_time()
            while time.monotonic() < started + SOAK_SECONDS:
                took = everybody_is_answered(served)
                worst, most = max(worst, *took.values()), max(most, memory())
                time.sleep(0.2)
            cores = (time.process_time() - cpu) / (time.monotonic() - started)
            process.stdin.close()
        record_property("seconds", round(worst, 3))
        record_property("MiB", (most - before) >> 20)
        record_property("cores", round(cores, 2))
        assert worst < 2.0
        assert most - before < SOAK_BYTES


def memory() -> int:
    """Bytes that this process has in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
