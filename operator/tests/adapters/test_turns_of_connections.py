"""Calls that hang in one namespace leave connections for the others."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from reached import reaching

import virtual_time
from pdcluster_operator.adapters.api_server.client import CONNECTIONS, KubeClient
from pdcluster_operator.runtime.pacing.api_calls import (
    Connections,
    namespace_of,
    written_namespace,
)


@pytest.mark.parametrize(
    ("path", "namespace"),
    [
        ("/api/v1/namespaces/ns/pods/p", "ns"),
        ("/apis/pdcluster.dev/v1alpha1/namespaces/ns/pdclusters", "ns"),
        ("/api/v1/namespaces/ns", "ns"),
        ("/apis/apps/v1/statefulsets", ""),
        ("/version", ""),
    ],
)
def test_the_namespace_in_a_path(path: str, namespace: str) -> None:
    assert namespace_of(path) == namespace
    assert written_namespace("PATCH", path) == namespace
    assert written_namespace("GET", path) == "", "no webhook is asked"


def pods(namespace: str) -> str:
    return f"/api/v1/namespaces/{namespace}/pods"


async def test_calls_that_hang_in_one_namespace_leave_connections_for_the_others() -> None:
    hanging, most = 0, 0
    end = asyncio.Event()

    async def answer(request: web.Request) -> web.Response:
        nonlocal hanging, most
        if request.match_info["namespace"] == "hangs":
            hanging += 1
            most = max(most, hanging)
            await end.wait()
            hanging -= 1
        return web.json_response({})

    app = web.Application()
    app.router.add_post("/api/v1/namespaces/{namespace}/pods", answer)
    async with (
        TestServer(app) as server,
        KubeClient(reaching(server)) as client,
        asyncio.timeout(60),
    ):
        hung = [asyncio.create_task(client.call("POST", pods("hangs"))) for _ in range(100)]
        while hanging < CONNECTIONS * 3 // 4:  # noqa: ASYNC110 - the handler announces nothing
            await asyncio.sleep(0.01)
        await asyncio.gather(*(client.call("POST", pods(f"ns{one % 5}")) for one in range(50)))
        assert not any(task.done() for task in hung)
        end.set()
        await asyncio.gather(*hung)
    assert most == CONNECTIONS * 3 // 4


def test_who_is_cancelled_while_it_waits_takes_nothing_away() -> None:
    """Three have connections, the fourth is cancelled, the fifth gets the first that is free."""

    async def story() -> None:
        connections = Connections(4)
        order: list[str] = []

        async def call(name: str) -> None:
            async with connections.one_for("ns"):
                order.append(name)
                await asyncio.sleep(1.0)

        tasks = [asyncio.create_task(call(str(number))) for number in range(5)]
        await asyncio.sleep(0.5)
        tasks[3].cancel()
        await asyncio.sleep(1.0)
        assert order == ["0", "1", "2", "4"]
        await asyncio.gather(*tasks, return_exceptions=True)
        async with asyncio.timeout(2.0):
            await asyncio.gather(*(call(f"later {number}") for number in range(3)))
        assert len(order) == 7

    virtual_time.run(story())


@pytest.mark.parametrize("cancelled_first", [True, False])
def test_who_is_cancelled_when_its_turn_comes_gives_it_on(*, cancelled_first: bool) -> None:
    async def story() -> None:
        connections = Connections(1)
        ran: list[str] = []

        async def call(name: str, release: asyncio.Event) -> None:
            async with connections.one_for("ns"):
                await release.wait()
                ran.append(name)

        release, others = asyncio.Event(), asyncio.Event()
        others.set()
        first = asyncio.create_task(call("first", release))
        await asyncio.sleep(0)
        second = asyncio.create_task(call("second", others))
        third = asyncio.create_task(call("third", others))
        await asyncio.sleep(0)
        if cancelled_first:
            second.cancel()
            release.set()
        else:
            release.set()
            await asyncio.sleep(0)  # the first ends, and the second is given its turn
            second.cancel()
        async with asyncio.timeout(5.0):
            await asyncio.gather(first, third)
        with suppress(asyncio.CancelledError):
            await second
        assert ran == ["first", "third"]

    virtual_time.run(story())


def test_many_namespaces_in_which_calls_hang_get_three_quarters_together() -> None:
    """Fifty namespaces, whose calls take half a minute each; calls elsewhere and reads go on."""

    async def story() -> None:
        connections = Connections(32)
        hanging = 0

        async def hang(namespace: str) -> None:
            nonlocal hanging
            while True:
                async with connections.one_for(namespace):
                    hanging += 1
                    await asyncio.sleep(30.0)
                    hanging -= 1

        tasks = [asyncio.create_task(hang(f"hangs-{number % 50}")) for number in range(400)]
        await asyncio.sleep(61.0)  # it is known now that each of them hangs
        for namespace in ("well", "", "well"):
            began = asyncio.get_running_loop().time()
            async with connections.one_for(namespace):
                await asyncio.sleep(0.05)
            assert asyncio.get_running_loop().time() - began < 0.1
            assert hanging == 24
            await asyncio.sleep(7.0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert connections._slots.free() == 32
        assert not len(connections._slots)

    virtual_time.run(story())
