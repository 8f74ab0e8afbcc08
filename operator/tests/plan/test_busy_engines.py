"""From the canary's HTTP answers to the conditions: an engine that is busy stays verified."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from msgspec.structs import replace
from simulated_cluster import SimulatedCluster, manifest

from launcher_answers import decode_links
from pdcluster_connector.launcher.engine.engine_api import EngineApi
from pdcluster_connector.launcher.links.canary import Canaries
from pdcluster_connector.launcher.links.link_table import LinkTable
from pdcluster_connector.protocol.launcher_documents import (
    LinksReport,
    LinkState,
    RankLink,
    RankReport,
    encode_json,
)

INTERVAL, HOUR = 300, 3600
HANDED = {"do_remote_prefill": True, "ticket": "…"}
Answer = Callable[[], web.StreamResponse]


def refusal(status: int, message: str) -> Answer:
    body = {"error": {"message": message, "code": status}}
    return lambda: web.json_response(body, status=status)


def path(**said: Any) -> Answer:
    return lambda: web.json_response({"kv_transfer_params": {"kv_path": said}})


class Canary:
    """A PDCluster that is Ready, and the launcher of its decode engine, with true canaries.

    ``prefill`` and ``decode`` are what the engines answer instead of well.
    """

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self.url, self.session = url, session
        self.prefill: Answer | None = None
        self.decode: Answer | None = None
        self.asked = 0
        self.world = SimulatedCluster(manifest())
        self.world.bring_up()
        [(self.name, assigned)] = self.world.plan().peers.items()
        [peer] = assigned.peers
        self.peer = replace(peer, api=url)
        self.table = LinkTable((1, 1))
        self.table.set_peers(replace(assigned, peers=(self.peer,)))
        assert assigned.canary_interval_seconds == INTERVAL
        self.report(time.monotonic())

    def report(self, now: float) -> None:
        link = RankLink(
            self.peer.engine, self.peer.engine_id, LinkState.ESTABLISHED, establishment=1
        )
        assert self.table.add(RankReport((0, 0), (1, 1), (link,)), now) is None

    def answer(self, params: dict[str, Any]) -> web.StreamResponse:
        self.asked += 1
        if params.get("do_remote_decode"):
            handed = lambda: web.json_response({"kv_transfer_params": HANDED})  # noqa: E731
            return (self.prefill or handed)()
        moved = {"prefill": self.peer.engine_id, "decode": "d/1", "bytes": 4096}
        return (self.decode or path(outcome="transferred", **moved))()

    async def run(self, address: str = "", seconds: float = 5.0) -> None:
        """Let one canary run to its end, as the launcher does."""
        ready, api = iter([True]), EngineApi(self.session, address or self.url)
        canaries = Canaries(api, "d/1", 1, lambda: [10, 11, 12], seconds=seconds)
        running = canaries.keep_running(self.table, self.session, lambda: next(ready, False))
        task = asyncio.create_task(running)
        results = self.table._canaries.copy()
        async with asyncio.timeout(60):
            while self.table._canaries == results:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        task.cancel()

    def conditions(self, later: float = 0.0) -> dict[str, tuple[str, str, str]]:
        """The conditions when the operator reads the launcher's links after ``later`` seconds."""
        now = time.monotonic() + later
        self.report(now)
        rows = tuple(row.report for row in self.table.rows(now))
        read = decode_links(encode_json(LinksReport(self.name, "d/1", rows)))
        assert isinstance(read, LinksReport)
        self.world.links[self.name] = read
        self.world.step()
        found = self.world.cluster["status"]["conditions"]
        return {one["type"]: (one["status"], one["reason"], one["message"]) for one in found}


@asynccontextmanager
async def verified() -> AsyncIterator[Canary]:
    async def completions(request: web.Request) -> web.StreamResponse:
        asked = await request.json()
        return watched[0].answer(asked["kv_transfer_params"])

    watched: list[Canary] = []
    app = web.Application()
    app.router.add_post("/v1/completions", completions)
    async with TestServer(app) as server, aiohttp.ClientSession() as session:
        watched.append(Canary(str(server.make_url("")).rstrip("/"), session))
        await watched[0].run()
        assert watched[0].conditions()["Ready"][:2] == ("True", "Ready")
        yield watched[0]


async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()  # until the client gives up
    writer.close()


BUSY = [
    ({"prefill": refusal(429, "too many requests")}, "answered 429: too many requests"),
    ({"decode": refusal(429, "too many requests")}, "answered 429: too many requests"),
    ({"prefill": refusal(503, "it takes no requests")}, "answered 503: it takes no requests"),
    ({"decode": refusal(503, "it takes no requests")}, "answered 503: it takes no requests"),
    ({"prefill": refusal(500, "EngineCore met an issue")}, "answered 500: EngineCore met"),
    ({"decode": path(outcome="local", reason="CacheReset")}, "computed the prompt itself"),
]


@pytest.mark.parametrize(("answers", "said"), BUSY)
async def test_a_busy_engine_stays_verified_and_a_result_that_is_old_is_told(
    answers: dict[str, Answer], said: str
) -> None:
    async with verified() as launcher:
        for role, answer in answers.items():
            setattr(launcher, role, answer)
        await launcher.run()
        for later in (0, HOUR, HOUR + INTERVAL - 60):
            conditions = launcher.conditions(later)
            assert conditions["KVPathVerified"][:2] == ("True", "CanaryPassed"), later
            assert conditions["Ready"][:2] == ("True", "Ready"), later
        conditions = launcher.conditions(HOUR + INTERVAL + 60)
        status, reason, message = conditions["KVPathVerified"]
        assert (status, reason) == ("True", "CanaryPassed")
        assert "no canary had a result for more than an hour: no newer result: " in message
        assert said in message
        assert conditions["Ready"][:2] == ("True", "Ready"), "a saturated cluster serves"
        assert conditions["Progressing"][1] == "Complete"
        assert conditions["Available"][:2] == ("True", "Serving"), "nothing shows that it is not"
        assert launcher.conditions(9 * HOUR)["KVPathVerified"][2] == message, "no number changes"
        launcher.prefill = launcher.decode = None
        await launcher.run()
        assert launcher.conditions(9 * HOUR)["Ready"][:2] == ("True", "Ready")


async def test_an_engine_that_does_not_answer_in_time_stays_verified() -> None:
    server = await asyncio.start_server(hang, "127.0.0.1", 0)
    async with server, verified() as launcher:
        await launcher.run(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", seconds=0.3)
        assert launcher.conditions()["Ready"][:2] == ("True", "Ready")
        message = launcher.conditions(2 * HOUR)["KVPathVerified"][2]
        assert message.endswith("no newer result: no answer within 0.3 s")


async def test_a_connection_that_is_refused_leaves_the_result_as_it_is() -> None:
    async with verified() as launcher:
        await launcher.run("http://127.0.0.1:9")
        assert launcher.conditions()["Ready"][:2] == ("True", "Ready")


@pytest.mark.parametrize(
    "shows",
    [
        path(outcome="local", reason="LeaseLost"),
        path(outcome="failed", reason="BackendError"),
        refusal(500, "Internal server error"),  # how vLLM ends a request whose KV did not come
        refusal(503, "TransferStalled: no KV from the prefill engine"),
    ],
)
async def test_an_answer_that_shows_that_no_kv_moved_counts_and_stands(shows: Answer) -> None:
    async with verified() as launcher:
        launcher.decode = shows
        await launcher.run()
        status, reason, message = launcher.conditions()["KVPathVerified"]
        assert (status, reason) == ("False", "CanaryFailed")
        launcher.decode = refusal(503, "it takes no requests")
        await launcher.run()
        assert launcher.conditions(9 * HOUR)["KVPathVerified"] == (status, reason, message)
