"""The canary against real HTTP servers that misbehave in every way."""

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

from pdcluster_connector.launcher.engine.engine_api import DATA_RANK_HEADER, MAX_ANSWER, EngineApi
from pdcluster_connector.launcher.links import canary
from pdcluster_connector.launcher.links.canary import Canaries, CanarySchedule
from pdcluster_connector.launcher.links.link_table import LinkTable
from pdcluster_connector.protocol.launcher_documents import (
    CanaryReport,
    CanaryState,
    LinkState,
    PeerEntry,
    PeersDocument,
    RankLink,
    RankReport,
)

P, D = "ns.c.prefill.r.0/aaaa", "ns.c.decode.r.0/bbbb"
HANDED = {"do_remote_prefill": True, "do_remote_decode": False, "ticket": "…"}
PATH = {
    "prefill": P,
    "decode": D,
    "tokens": 385,
    "blocks": 4,
    "bytes": 65536,
    "seconds": 0.01,
    "outcome": "transferred",
    "reason": "",
}
TOKENS = list(range(100, 485))

Answer = Callable[[dict[str, Any]], web.StreamResponse]


def params(value: Any) -> Answer:
    return lambda _: web.json_response({"choices": [], "kv_transfer_params": value})


def path(**changes: Any) -> Answer:
    return params({"kv_path": {**PATH, **changes}})


@asynccontextmanager
async def engine(
    answer: Answer, key: str | None = None
) -> AsyncIterator[tuple[EngineApi, list[dict[str, Any]]]]:
    asked: list[dict[str, Any]] = []

    async def completions(request: web.Request) -> web.StreamResponse:
        if request.headers.get("Authorization") != (f"Bearer {key}" if key else None):
            return web.json_response({"error": "Unauthorized"}, status=401)
        asked.append(await request.json())
        return answer(asked[-1])

    app = web.Application()
    app.router.add_post("/v1/completions", completions)
    async with TestServer(app) as server, aiohttp.ClientSession() as session:
        yield EngineApi(session, str(server.make_url("")).rstrip("/"), key), asked


async def run(
    prefill: EngineApi, decode: EngineApi, sizes: tuple[int, int] = (1, 1), **options: Any
) -> CanaryReport:
    # No limit but the test's own: a machine that stalls for seconds is no engine that hangs.
    options = {"seconds": 600.0, **options}
    canaries = Canaries(decode, D, sizes[1], lambda: TOKENS, **options)
    return await canaries.run(prefill, P, sizes[0], "llama")


async def result(prefill: Answer, decode: Answer) -> CanaryReport:
    async with engine(prefill) as (p, _), engine(decode) as (d, _):
        return await run(p, d)


async def test_kv_that_moved():
    async with engine(params(HANDED)) as (p, to_p), engine(path()) as (d, to_d):
        outcome = await run(p, d, names_key="k")
    assert outcome == CanaryReport(CanaryState.PASSED, 65536)
    (first,), (second,) = to_p, to_d
    assert first["kv_transfer_params"] == {"do_remote_decode": True}
    assert second["kv_transfer_params"] == {**HANDED, "kv_path_key": "k"}
    for request in (first, second):
        assert request["prompt"] == TOKENS
        assert (request["model"], request["max_tokens"]) == ("llama", 1)


@asynccontextmanager
async def ranked(
    names: Callable[[int], str], broken: tuple[int, int] | None = None
) -> AsyncIterator[tuple[EngineApi, list[tuple[int, int]]]]:
    """Both engines of a pair in one: tickets and answers name the ranks that were asked for."""
    served: list[tuple[int, int]] = []

    async def completions(request: web.Request) -> web.StreamResponse:
        rank = int(request.headers[DATA_RANK_HEADER])
        asked = (await request.json())["kv_transfer_params"]
        if asked.get("do_remote_decode"):
            return params({"do_remote_prefill": True, "from": rank})({})
        served.append((asked["from"], rank))
        moved = 0 if served[-1] == broken else 65536
        about = {"prefill": f"{P}{names(asked['from'])}", "decode": f"{D}{names(rank)}"}
        return path(**about, bytes=moved)({})

    app = web.Application()
    app.router.add_post("/v1/completions", completions)
    async with TestServer(app) as server, aiohttp.ClientSession() as session:
        yield EngineApi(session, str(server.make_url("")).rstrip("/")), served


async def through_ranks(api: EngineApi, sizes: tuple[int, int]) -> CanaryReport:
    return await run(api, api, sizes)


@pytest.mark.parametrize("sizes", [(2, 2), (2, 3), (3, 2), (4, 4)])
async def test_each_data_parallel_rank_gets_a_request_and_the_bytes_add_up(sizes):
    async with ranked("_dp{}".format) as (api, served):
        outcome = await through_ranks(api, sizes)
    assert outcome == CanaryReport(CanaryState.PASSED, 65536 * max(sizes))
    assert len(served) == max(sizes)
    assert {p for p, _ in served} == set(range(sizes[0]))
    assert {d for _, d in served} == set(range(sizes[1]))


async def test_one_rank_that_moves_nothing_fails_the_canary_and_is_named():
    async with ranked("_dp{}".format, broken=(1, 1)) as (api, served):
        outcome = await through_ranks(api, (3, 2))
    assert outcome.state == "Failed"
    assert outcome.bytes == 0
    assert outcome.message.startswith(
        "data-parallel rank 1 of prefill with data-parallel rank 1 of decode: "
    )
    assert "0 bytes moved" in outcome.message
    assert served == [(0, 0), (1, 1)]


async def test_an_api_that_sends_requests_to_another_rank_than_asked_is_seen():
    async with ranked(lambda _: "_dp0") as (api, _):
        outcome = await through_ranks(api, (2, 2))
    assert "rank 1 of prefill" in outcome.message
    assert f"another prefill engine: '{P}_dp0'" in outcome.message


async def test_an_engine_that_has_no_ranks_though_it_should_is_seen():
    async with ranked(lambda _: "") as (api, _):
        assert (await through_ranks(api, (1, 1))).state == "Passed"
        assert "another prefill engine" in (await through_ranks(api, (2, 2))).message


def refusal(status: int, message: str) -> Answer:
    body = {"error": {"message": message, "code": status}}
    return lambda _: web.json_response(body, status=status)


def text(body: bytes) -> Answer:
    return lambda _: web.Response(body=body, content_type="application/json")


@pytest.mark.parametrize(
    ("prefill", "decode", "says"),
    [
        (params(None), path(), "handed over no KV"),
        (params({}), path(), "handed over no KV"),
        (params({"do_remote_prefill": False}), path(), "handed over no KV"),
        (params({"do_remote_prefill": 1}), path(), "handed over no KV"),  # decode wants True itself
        (params({"do_remote_prefill": "no"}), path(), "handed over no KV"),
        (params([1]), path(), "handed over no KV"),
        (params(HANDED), refusal(500, "KV load failed"), "answered 500: KV load failed"),
        (params(HANDED), refusal(503, "PeerRestarted: it is gone"), "503: PeerRestarted: it is"),
        (params(HANDED), params(None), "holds no kv_path"),
        (params(HANDED), params({"kv_path": "yes"}), "holds no kv_path"),
        (params(HANDED), path(outcome="local", reason="no ticket"), "itself instead of receiving"),
        (params(HANDED), path(outcome="failed", reason="BackendError"), "'failed' (BackendError)"),
        (params(HANDED), path(outcome=None), "ended as None"),
        (params(HANDED), path(bytes=0), "reported as done, but 0 bytes moved"),
        (params(HANDED), path(bytes="many"), "but 'many' bytes moved"),
        (params(HANDED), path(bytes=True), "but True bytes moved"),
        (params(HANDED), path(prefill="other/cccc"), "another prefill engine: 'other/cccc'"),
        (params(HANDED), path(decode="other/cccc"), "another decode engine: 'other/cccc'"),
        (params(HANDED), path(prefill=""), "names no prefill engine: it did not accept our key"),
        (params(HANDED), path(decode=None), "names no decode engine: it did not accept our key"),
    ],
)
async def test_each_way_to_fail(prefill, decode, says):
    outcome = await result(prefill, decode)
    assert outcome.state == "Failed"
    assert outcome.bytes == 0
    assert says in outcome.message


@pytest.mark.parametrize(
    ("prefill", "decode", "says"),
    [
        (refusal(500, "EngineCore encountered an issue"), path(), "answered 500: EngineCore enc"),
        (refusal(404, "The model `llama` does not exist."), path(), "answered 404: The model"),
        (refusal(429, "too many requests"), path(), "answered 429: too many requests"),
        (refusal(503, "PeerRestarted: not of decode"), path(), "answered 503: PeerRestarted"),
        (text(b"<html>"), path(), "not answer with a JSON object"),
        (text(b"[]"), path(), "not answer with a JSON object"),
        (text(b"x" * (MAX_ANSWER + 2)), path(), "answered more than"),
        (params(HANDED), refusal(429, "too many requests"), "answered 429: too many requests"),
        (params(HANDED), refusal(503, "it takes no requests"), "answered 503: it takes no"),
        (params(HANDED), refusal(401, "Unauthorized"), "answered 401: Unauthorized"),
        (params(HANDED), text(b"<html>"), "not answer with a JSON object"),
        (params(HANDED), path(outcome="local", reason="CacheReset"), "of receiving its KV (Cache"),
        (params(HANDED), path(outcome="local", reason=""), "itself instead of receiving its KV"),
    ],
)
async def test_an_answer_that_says_nothing_of_kv_is_no_result(prefill, decode, says):
    outcome = await result(prefill, decode)
    assert (outcome.state, outcome.bytes) == ("Pending", 0)
    assert says in outcome.message


async def test_an_api_that_is_not_there_means_unknown():
    async with engine(params(HANDED)) as (p, _), aiohttp.ClientSession() as session:
        nobody = EngineApi(session, "http://127.0.0.1:9")
        for pair in ((nobody, p), (p, nobody)):
            outcome = await run(*pair)
            assert outcome.state == "Pending"
            assert "http://127.0.0.1:9/v1/completions does not answer" in outcome.message


async def test_a_connection_that_breaks_means_unknown():
    async def drop(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(10)
        writer.close()

    server = await asyncio.start_server(drop, "127.0.0.1", 0)
    async with server, aiohttp.ClientSession() as session:
        api = EngineApi(session, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        outcome = await run(api, api)
    assert outcome.state == "Pending"


async def test_a_server_that_speaks_no_http():
    async def babble(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"SSH-2.0-OpenSSH\r\n\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(babble, "127.0.0.1", 0)
    async with server, aiohttp.ClientSession() as session:
        api = EngineApi(session, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        outcome = await run(api, api)
    assert outcome.state != "Passed"
    assert outcome.message


async def test_an_api_that_hangs_means_unknown():
    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()  # until the client gives up
        writer.close()

    server = await asyncio.start_server(hang, "127.0.0.1", 0)
    async with server, aiohttp.ClientSession() as session:
        api = EngineApi(session, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        outcome = await run(api, api, seconds=0.3)
    assert outcome == CanaryReport(message="no answer within 0.3 s")


def test_prompts_are_long_enough_and_never_the_same():
    first, second = (canary.prompt(16, None, 32000) for _ in range(2))
    assert len(first) == 3 * 16 + 1
    assert first != second
    assert all(10 <= token < 256 for token in first), "in nearly every vocabulary"
    assert len(canary.prompt(None, None, None)) == 3 * 128 + 1
    assert len(canary.prompt(128, 100, None)) == 98
    assert len(canary.prompt(128, 1, None)) == 1


@pytest.mark.parametrize("size", [1, 2, 10, 11, 32, 255])
def test_prompts_keep_to_a_small_vocabulary(tmp_path, size):
    """vLLM refuses other ids, and each link would look as if it moved no KV."""
    (tmp_path / "config.json").write_text(f'{{"vocab_size": {size}}}')
    known = canary.vocabulary(str(tmp_path))
    assert known == size
    assert all(0 <= token < size for token in canary.prompt(128, None, known))


@pytest.mark.parametrize("config", ["", "[]", "{", '{"vocab_size": "9"}', '{"vocab_size": -1}'])
def test_a_vocabulary_that_is_not_known_counts_as_large(tmp_path, config):
    (tmp_path / "config.json").write_text(config)
    assert canary.vocabulary(str(tmp_path)) is None
    assert canary.vocabulary("org/model") is None


def established(*engines: str) -> LinkTable:
    links = LinkTable((1, 1))
    peers = tuple(PeerEntry(e, "10.0.0.1:5600", f"{e}/1", "http://10.0.0.1:8000") for e in engines)
    links.set_peers(PeersDocument(1, peers, "llama", 60))
    establish(links, *engines, establishment=1)
    return links


def establish(links: LinkTable, *engines: str, establishment: int) -> None:
    reports = tuple(
        RankLink(e, f"{e}/1", LinkState.ESTABLISHED, establishment=establishment) for e in engines
    )
    links.add(RankReport((0, 0), (1, 1), reports), 0.0)


def test_each_link_has_its_turn():
    schedule, rows = CanarySchedule(), established("a", "b").rows(0.0)
    for expected in ("a/1", "b/1"):
        row = schedule.due(rows, 0.0)
        assert row is not None
        assert row.report.prefill_engine_id == expected
        schedule.ran(row, CanaryReport(CanaryState.PASSED, 1), 60, 0.0)
    assert schedule.due(rows, 59.9) is None
    assert schedule.due(rows, 60.0) is not None


def test_failures_are_retried_with_growing_pauses():
    schedule, rows = CanarySchedule(), established("a").rows(0.0)
    now, pauses = 0.0, []
    for _ in range(8):
        schedule.ran(rows[0], CanaryReport(CanaryState.FAILED), 60, now)
        pause = next(p for p in range(1, 200) if schedule.due(rows, now + p))
        pauses.append(pause)
        now += pause
    assert pauses == [2, 4, 8, 16, 32, 60, 60, 60]


def test_without_an_interval_a_pass_is_enough():
    schedule, rows = CanarySchedule(), established("a").rows(0.0)
    schedule.ran(rows[0], CanaryReport(CanaryState.PASSED, 1), 0, 0.0)
    assert schedule.due(rows, 1e9) is None


@pytest.mark.parametrize("state", ["Passed", "Failed"])
def test_a_link_that_stands_again_is_due_soon(state):
    schedule, links = CanarySchedule(), established("a")
    for now in (0.0, 2.0, 6.0, 14.0):
        schedule.ran(links.rows(0.0)[0], CanaryReport(state), 0, now)
    assert schedule.due(links.rows(0.0), 20.0) is None
    establish(links, "a", establishment=2)
    assert schedule.due(links.rows(0.0), 15.9) is None
    assert schedule.due(links.rows(0.0), 16.0) is not None


def test_only_established_links_of_known_apis_are_due():
    links = established("a")
    assert CanarySchedule().due(links.rows(100.0), 0.0) is None  # the report is too old
    links.set_peers(PeersDocument(2, (PeerEntry("a", "10.0.0.1:5600", "a/1"),), "llama"))
    assert CanarySchedule().due(links.rows(0.0), 0.0) is None


@pytest.mark.parametrize("key", [None, "sk-1"])
async def test_the_loop_fills_the_link_table(key):
    """Also where both engines ask for a key."""
    async with engine(params(HANDED), key) as (p, _), engine(path(), key) as (d, _):
        links = LinkTable((1, 1))
        peer = PeerEntry("ns.c.prefill.r.0", "127.0.0.1:5600", P, p.address)
        links.set_peers(PeersDocument(1, (peer,), "llama", 0))
        links.add(
            RankReport(
                (0, 0),
                (1, 1),
                (RankLink(peer.engine, P, LinkState.ESTABLISHED, establishment=1),),
            ),
            time.monotonic(),
        )
        async with aiohttp.ClientSession() as session:
            task = asyncio.create_task(
                Canaries(d, D, 1, lambda: TOKENS, "k", key, 600.0).keep_running(
                    links, session, lambda: True
                )
            )
            async with asyncio.timeout(240):
                while links.rows(time.monotonic())[0].report.canary.state == "Pending":  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
            task.cancel()
        [row] = links.rows(time.monotonic())
        assert row.report.canary == CanaryReport(CanaryState.PASSED, 65536)
