"""Two operators and one Lease over hours, in virtual time and with the terms that are in use."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Awaitable, Callable, Mapping
from itertools import pairwise
from typing import Any

import pytest
from lease_client import LeaseClient

import virtual_time
from pdcluster_operator.adapters.api_server.namespace_leases import NamespaceLeases
from pdcluster_operator.plan.namespace_lease import holding_of
from pdcluster_operator.runtime.interfaces import ApiError, Conflict

NAME = "pdcluster-operator"


class Server:
    """Leases in memory, compared by version as the API server does."""

    def __init__(self) -> None:
        self.held: dict[str, dict[str, Any]] = {}
        self.writes: list[tuple[float, str, dict[str, Any]]] = []
        self.reads: list[tuple[float, str]] = []
        self.deaf: set[str] = set()  # operators that do not reach it

    def of(self, me: str) -> Client:
        return Client(self, me)


class Client(LeaseClient):
    """The API server as one operator reaches it."""

    def __init__(self, server: Server, me: str) -> None:
        self.server, self.me = server, me

    def _answer(self) -> None:
        if self.me in self.server.deaf:
            raise ApiError("ApiServerUnreachable", "no answer")

    async def read_lease(self, namespace: str, name: str) -> Mapping[str, Any] | None:
        assert name == NAME
        self.server.reads.append((now(), self.me))
        self._answer()
        return copy.deepcopy(self.server.held.get(namespace))

    async def write_lease(self, manifest: Mapping[str, Any]) -> None:
        self._answer()
        metadata = manifest["metadata"]
        live = self.server.held.get(metadata["namespace"], {}).get("metadata", {})
        if live.get("resourceVersion") != metadata.get("resourceVersion"):
            raise Conflict("another version")
        written = copy.deepcopy(dict(manifest))
        self.server.writes.append((now(), self.me, written["spec"]))
        written["metadata"]["resourceVersion"] = str(len(self.server.writes))
        self.server.held[metadata["namespace"]] = written


def now() -> float:
    return asyncio.get_running_loop().time()


def operator(server: Server, me: str) -> NamespaceLeases:
    return NamespaceLeases(server.of(me), NAME, me, clock=now)  # type: ignore[arg-type]


async def watched(seconds: float, *operators: NamespaceLeases) -> list[tuple[float, int | None]]:
    """Ask ten times a second who may act; return each change of the answer."""
    changes: list[tuple[float, int | None]] = []
    ends = now() + seconds
    while now() < ends:
        holders = [number for number, one in enumerate(operators) if one.holds("ns")]
        assert len(holders) < 2, "two operators work in one namespace"
        holder = holders[0] if holders else None
        if not changes or changes[-1][1] != holder:
            changes.append((now(), holder))
        await asyncio.sleep(0.1)
    return changes


def play(story: Callable[[Server], Awaitable[None]]) -> Server:
    server = Server()

    async def played() -> None:
        await story(server)

    virtual_time.run(played())
    return server


def test_a_lease_is_renewed_every_ten_seconds_and_read_before() -> None:
    async def story(server: Server) -> None:
        one = operator(server, "one")
        [_, (began, holder)] = await watched(600.0, one)
        assert holder == 0
        assert began < 0.2, "it begins at once"
        found = [later - sooner for (sooner, *_), (later, *_) in pairwise(server.writes)]
        assert 9.9 < min(found) <= max(found) < 10.1
        assert {spec["leaseDurationSeconds"] for _, _, spec in server.writes} == {30}
        assert server.held["ns"]["spec"]["leaseTransitions"] == 0
        assert len({spec["acquireTime"] for _, _, spec in server.writes}) == 1
        await one.stop()

    server = play(story)
    assert holding_of(server.held["ns"]).holder == ""


def test_who_does_not_hold_it_looks_every_two_seconds_and_takes_over_after_its_duration() -> None:
    async def story(server: Server) -> None:
        one, other = operator(server, "one"), operator(server, "other")
        await watched(65.0, one)
        assert await watched(60.0, one, other) == [(pytest.approx(65.0, abs=0.2), 0)]
        looks = [moment for moment, me in server.reads if me == "other"]
        found = [later - sooner for sooner, later in pairwise(looks)]
        assert 1.9 < min(found) <= max(found) < 2.1
        server.deaf.add("one")
        last = max(moment for moment, me, _ in server.writes if me == "one")
        [_, (stopped, nobody), (began, holder)] = await watched(60.0, one, other)
        assert (nobody, holder) == (None, 1)
        assert 19.8 < stopped - last < 20.2, "a holder that cannot renew stops after two thirds"
        assert 30.0 < began - last < 34.5, "the other begins when the duration is over"
        assert server.held["ns"]["spec"]["leaseTransitions"] == 1
        server.deaf.clear()
        assert [who for _, who in await watched(60.0, one, other)] == [1], "it does not come back"
        await one.stop()
        assert server.held["ns"]["spec"]["holderIdentity"] == "other", "it gives back its own alone"
        await other.stop()

    play(story)


def test_who_is_left_out_says_once_who_holds_the_lease(caplog: pytest.LogCaptureFixture) -> None:
    async def story(server: Server) -> None:
        one, other = operator(server, "one"), operator(server, "other")
        await watched(12.0, one)
        await watched(300.0, one, other)
        await one.stop()
        await watched(10.0, other)
        third = operator(server, "third")
        await watched(60.0, other, third)
        await other.stop()
        await third.stop()

    play(story)
    said = [one.message for one in caplog.records if "are left to the operator" in one.message]
    assert ["operator one," in said[0], "operator other," in said[1]] == [True, True]
    assert len(said) == 2, "by the other of the first, and by the third of the other"


def test_one_that_stops_properly_is_followed_within_two_seconds() -> None:
    async def story(server: Server) -> None:
        one, other = operator(server, "one"), operator(server, "other")
        await watched(5.0, one)
        await watched(21.0, one, other)
        await one.stop()
        left = now()
        [_, (began, who)] = await watched(10.0, other)
        assert who == 0
        assert began - left < 2.2
        assert server.held["ns"]["spec"]["holderIdentity"] == "other"
        await other.stop()

    play(story)


@pytest.mark.parametrize("outage", [5.0, 15.0, 25.0, 45.0])
def test_an_outage_of_the_api_server_ends_the_work_only_if_it_is_long(outage: float) -> None:
    async def story(server: Server) -> None:
        one, other = operator(server, "one"), operator(server, "other")
        await watched(12.0, one)
        await watched(28.0, one, other)
        server.deaf |= {"one", "other"}
        during = await watched(outage, one, other)
        server.deaf.clear()
        afterwards = await watched(60.0, one, other)
        assert (during[-1][1] is None) == (outage > 20.0)
        assert afterwards[-1][1] is not None, "somebody works again"
        await one.stop()
        await other.stop()

    play(story)


def test_a_process_that_works_in_many_namespaces_writes_once_a_second() -> None:
    async def story(server: Server) -> None:
        one = operator(server, "one")
        for _ in range(4):
            for number in range(30):
                one.holds(f"ns-{number}")
            await asyncio.sleep(100.0)
        late = [moment for moment, *_ in server.writes if moment >= 200.0]
        assert 170 <= len(late) <= 230
        assert all(one.holds(f"ns-{number}") for number in range(30))
        assert server.held["ns-7"]["spec"]["leaseDurationSeconds"] == 90
        await one.stop()

    play(story)
