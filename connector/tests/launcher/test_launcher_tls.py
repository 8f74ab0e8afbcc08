"""The launcher's interface over TLS: the operator and the engine itself, and nobody else."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from authority import Authority
from pdcluster_connector import certificate_files
from pdcluster_connector.certificate_files import Tls
from pdcluster_connector.launcher.arguments import engine_command
from pdcluster_connector.launcher.engine.readiness import Readiness
from pdcluster_connector.launcher.interface import LauncherServer
from pdcluster_connector.launcher.links.link_table import LinkTable
from pdcluster_connector.launcher.multi_node import Followers, Leader
from pdcluster_connector.protocol.engine_id import OPERATOR_NAME, EngineId, engine_name, role_name
from pdcluster_connector.sidechannel.peers import PeerBook
from pdcluster_connector.vllm.worker_side.link_keeper import LauncherClient

ENGINE = EngineId("ns.c.decode.r.0", "00000000000000dd")
NEIGHBOUR = "ns.c.decode.r.1/00000000000000ee"
CALLS = (
    ("PUT", "/v1/peers"), ("GET", "/v1/peers"), ("POST", "/v1/reports"), ("GET", "/v1/links"),
    ("POST", "/v1/drain"), ("PUT", "/v1/routed"), ("DELETE", "/v1/routed"),
    ("GET", "/v1/rendezvous"), ("GET", "/no/such/path"),
)  # fmt: skip
NO_PEERS = b'{"generation":1,"peers":[]}'


@dataclass
class Launched:
    """A launcher that listens, and what it did."""

    port: int
    links: LinkTable
    readiness: Readiness
    drained: list[int]
    folder: Path
    authority: Authority
    by_role: bool

    def tls(self, engine_id: str, **kind: object) -> Tls:
        return Tls(
            self.authority.files(self.folder / str(time.monotonic_ns()), engine_id), engine_id
        )

    def context(self, name: str | None, authority: Authority | None = None) -> ssl.SSLContext:
        """A client's context; ``name``: of its certificate, None for a client without one."""
        folder = self.folder / str(time.monotonic_ns())
        files = (authority or self.authority).files(folder, "x", name=name or "nobody")
        trusted = self.authority.files(folder / "trusted", "x").ca
        context = ssl.create_default_context(cafile=trusted)
        if name is not None:
            context.load_cert_chain(files.certificate, files.key)
        return context

    async def ask(self, context: ssl.SSLContext, method: str, path: str) -> int:
        async with self._answer(context, method, path) as answer:
            return answer.status

    async def read(self, context: ssl.SSLContext, path: str) -> dict[str, Any]:
        async with self._answer(context, "GET", path) as answer:
            return dict(await answer.json())

    @asynccontextmanager
    async def _answer(
        self, context: ssl.SSLContext, method: str, path: str
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        body = NO_PEERS if method == "PUT" else None
        async with (
            aiohttp.ClientSession() as http,
            http.request(
                method,
                f"https://127.0.0.1:{self.port}{path}",
                data=body,
                ssl=context,
                server_hostname=(role_name if self.by_role else engine_name)(ENGINE.engine),
            ) as answer,
        ):
            yield answer


@asynccontextmanager
async def launcher(folder: Path, *, by_role: bool = False) -> AsyncIterator[Launched]:
    authority = Authority()
    config = '{"kv_role":"kv_consumer"}'
    command = engine_command(
        ["m", "--kv-transfer-config", config], engine_id=ENGINE.engine, role="decode"
    )
    readiness = Readiness(ENGINE, "decode", command, {})
    drained: list[int] = []
    links = LinkTable((1, 1))
    files = authority.files(folder / "launcher", ENGINE.engine, by_role=by_role)
    tls = Tls(files, ENGINE.engine)
    server = LauncherServer(
        readiness, links, "secret", lambda: drained.append(1), Followers(2), tls
    )
    await server.start("127.0.0.1", 0)
    try:
        port = server._guard.listener.getsockname()[1]
        yield Launched(port, links, readiness, drained, folder, authority, by_role)
    finally:
        await server.stop()


async def test_the_kubelet_may_ask_whether_it_is_ready(tmp_path: Path) -> None:
    """It shows no certificate."""
    async with launcher(tmp_path) as launched:
        assert await launched.ask(launched.context(None), "GET", "/readyz") == 503


async def test_the_launcher_tells_when_the_certificate_in_use_expires(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(certificate_files, "LOOK_SECONDS", 0.0)
    async with launcher(tmp_path) as launched:
        told = await launched.read(launched.context(None), "/readyz")
        context = launched.context(OPERATOR_NAME)
        revision = (await launched.read(context, "/v1/changes"))["revision"]
        before = told["certificate_expires"]
        assert 0 < before - time.time() < 10 * 86_400
        launched.authority.files(tmp_path / "launcher", ENGINE.engine, days=20)
        told = await launched.read(launched.context(None), "/readyz")
        assert told["certificate_expires"] - before >= 9 * 86_400
        assert (await launched.read(context, "/v1/changes"))["revision"] != revision


@pytest.mark.parametrize(
    "name", [None, engine_name(NEIGHBOUR), "operator.pdcluster.dev.evil.example", "localhost"]
)
async def test_strangers_may_do_nothing_else(tmp_path: Path, name: str | None) -> None:
    """Another engine of the same PDCluster is a stranger to a launcher."""
    async with launcher(tmp_path) as launched:
        context = launched.context(name)
        answers = {call: await launched.ask(context, *call) for call in CALLS}
        assert set(answers.values()) == {403}
        assert launched.drained == []
        assert launched.links.peers.generation == 0


async def test_a_foreign_authority_may_not_even_ask(tmp_path: Path) -> None:
    async with launcher(tmp_path) as launched:
        context = launched.context(OPERATOR_NAME, Authority("foreign CA"))
        with pytest.raises((aiohttp.ClientError, OSError)):
            await launched.ask(context, "GET", "/readyz")


@pytest.mark.parametrize("name", [OPERATOR_NAME, engine_name(ENGINE.engine)])
async def test_the_operator_and_the_engine_itself_may(tmp_path: Path, name: str) -> None:
    async with launcher(tmp_path) as launched:
        context = launched.context(name)
        assert await launched.ask(context, "PUT", "/v1/peers") == 204
        assert await launched.ask(context, "GET", "/v1/links") == 200
        assert await launched.ask(context, "POST", "/v1/drain") == 202
        assert launched.drained == [1]


@pytest.mark.parametrize(
    ("name", "status"),
    [(role_name(ENGINE.engine), 200), (OPERATOR_NAME, 200), (engine_name(NEIGHBOUR), 403),
     (role_name("ns.c.prefill.r.0/a"), 403), (role_name("ns.other.decode.r.0/a"), 403)],
)  # fmt: skip
async def test_with_certificates_of_roles_a_launcher_is_for_its_role(
    tmp_path: Path, name: str, status: int
) -> None:
    async with launcher(tmp_path, by_role=True) as launched:
        assert await launched.ask(launched.context(name), "GET", "/v1/links") == status


async def test_reports_need_the_token_beside_the_certificate(tmp_path: Path) -> None:
    async with launcher(tmp_path) as launched:
        context = launched.context(engine_name(ENGINE.engine))
        assert await launched.ask(context, "POST", "/v1/reports") == 401


async def test_a_worker_reports_and_a_follower_meets_its_leader(tmp_path: Path) -> None:
    async with launcher(tmp_path) as launched:
        address = f"https://127.0.0.1:{launched.port}"
        tls = launched.tls(ENGINE.engine)
        shape: object = None
        peers = PeerBook(ENGINE.engine, shape, (0, 0), tls)  # type: ignore[arg-type]
        client = LauncherClient(
            address,
            "secret",
            rank=(0, 0),
            of=(1, 1),
            data_rank=0,
            peers=peers,
            probe=_never,
            tls=tls,
        )
        peers.start()
        client.start()
        try:
            await asyncio.to_thread(_until, lambda: launched.links._reports)
            async with aiohttp.ClientSession() as http:
                met = await Leader(http, address, 1, "a", tls).meet(lambda why: None)
            assert met.engine_id == ENGINE.engine
            waits: list[str] = []
            async with aiohttp.ClientSession() as http:
                stranger = Leader(http, address, 1, "b", launched.tls(NEIGHBOUR))
                meeting = asyncio.create_task(stranger.meet(waits.append))
                await asyncio.to_thread(_until, lambda: waits)
                assert not meeting.done()
                meeting.cancel()
                await asyncio.gather(meeting, return_exceptions=True)
        finally:
            await asyncio.to_thread(client.close)
            await asyncio.to_thread(peers.close)


def _never(*_: object, **__: object) -> object:
    raise AssertionError("no peer was named")


def _until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
