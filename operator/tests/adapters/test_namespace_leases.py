"""Only the holder of a namespace's Lease works there."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from lease_client import LeaseClient

from pdcluster_operator.adapters.api_server.namespace_leases import NamespaceLeases
from pdcluster_operator.plan.namespace_lease import (
    LONGEST_SECONDS,
    SHORTEST_SECONDS,
    Holding,
    act_seconds,
    holding_of,
    lease_manifest,
    lease_name,
    may_hold,
    renew_seconds,
    term_of,
)
from pdcluster_operator.plan.types import Place
from pdcluster_operator.runtime.control_loop import ControlLoop
from pdcluster_operator.runtime.interfaces import ApiError, Conflict


class Server(LeaseClient):
    """Leases in memory, compared by version as the API server does."""

    def __init__(self) -> None:
        self.held: dict[tuple[str, str], dict[str, Any]] = {}
        self.holders: list[str] = []
        self.down = False
        self.version = 0

    async def read_lease(self, namespace: str, name: str) -> Mapping[str, Any] | None:
        self._answer()
        return copy.deepcopy(self.held.get((namespace, name)))

    async def write_lease(self, manifest: Mapping[str, Any]) -> None:
        self._answer()
        await asyncio.sleep(0)  # others run between a read and a write
        metadata = manifest["metadata"]
        key = metadata["namespace"], metadata["name"]
        live = self.held.get(key, {}).get("metadata", {}).get("resourceVersion")
        if live != metadata.get("resourceVersion"):
            raise Conflict("another version")
        self.version += 1
        written = copy.deepcopy(dict(manifest))
        written["metadata"]["resourceVersion"] = str(self.version)
        self.held[key] = written
        self.holders.append(holding_of(written).holder)

    def holder(self, namespace: str = "ns") -> str:
        return holding_of(self.held.get((namespace, "pdcluster-operator"))).holder

    def _answer(self) -> None:
        if self.down:
            raise ApiError("ApiServerUnreachable", "no answer")


class Process:
    """One operator, with a clock of its own that stands still until it is moved."""

    def __init__(self, server: Server, me: str) -> None:
        self.now = 0.0
        self.clusters = {"ns"}
        self.woken: list[str] = []
        self.leases = NamespaceLeases(
            server,  # type: ignore[arg-type]
            lease_name(""),
            me,
            needed=lambda namespace: namespace in self.clusters,
            acquired=self.woken.append,
            renew=0.005,
            retry=0.005,
            clock=lambda: self.now,
        )

    def holds(self) -> bool:
        return self.leases.holds("ns")


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(120):
        while not condition():  # noqa: ASYNC110 - nothing announces it
            await asyncio.sleep(0.002)


async def test_one_of_two_works_and_the_other_takes_over_when_it_leaves() -> None:
    server = Server()
    one, two = Process(server, "one"), Process(server, "two")
    await until(one.holds)
    assert one.woken == ["ns"]
    two.holds()
    await asyncio.sleep(0.05)
    assert not two.holds()
    await one.leases.stop()
    assert "" in server.holders
    await until(two.holds)
    assert two.woken == ["ns"]
    lease = server.held["ns", "pdcluster-operator"]
    assert lease["spec"]["leaseTransitions"] == 0, "it was given back, and not taken"
    await two.leases.stop()


async def test_a_lease_that_cannot_be_read_is_asked_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = Server()
    read = server.read_lease
    strange: list[Any] = [{}, {"metadata": None}]

    async def answer(namespace: str, name: str) -> Mapping[str, Any] | None:
        return strange.pop() if strange else await read(namespace, name)

    monkeypatch.setattr(server, "read_lease", answer)
    one = Process(server, "one")
    await until(one.holds)
    assert not strange
    await one.leases.stop()


async def test_a_lease_that_another_has_taken_meanwhile_is_not_given_back() -> None:
    server = Server()
    one = Process(server, "one")
    await until(one.holds)
    held = server.held["ns", "pdcluster-operator"]
    taken = lease_manifest(held, "ns", "pdcluster-operator", "two", 0.0)
    server.held["ns", "pdcluster-operator"] = taken
    await one.leases.stop()
    assert server.holder() == "two"


async def test_a_holder_that_finds_another_in_its_lease_stops_at_once() -> None:
    """Whoever wrote it there: two that act would undo each other's work."""
    server = Server()
    one = Process(server, "one")
    await until(one.holds)
    held = server.held["ns", "pdcluster-operator"]
    taken = lease_manifest(held, "ns", "pdcluster-operator", "two", 0.0)
    taken["metadata"]["resourceVersion"] = "another"
    server.held["ns", "pdcluster-operator"] = taken
    await until(lambda: not one.holds())
    await one.leases.stop()
    assert server.holder() == "two"


async def test_where_no_lease_could_be_made_none_is_given_back() -> None:
    server = Server()
    server.down = True
    one = Process(server, "one")
    assert not one.holds()
    await asyncio.sleep(0)
    server.down = False
    await one.leases.stop()
    assert server.held == {}


async def test_two_that_ask_at_once_do_not_both_get_it() -> None:
    for _ in range(20):
        server = Server()
        processes = [Process(server, name) for name in ("one", "two", "three")]
        await until(lambda held=processes: sum(process.holds() for process in held))
        for _ in range(20):
            assert sum(process.holds() for process in processes) == 1
            await asyncio.sleep(0)
        for process in processes:
            await process.leases.stop()


async def one_that_finds_a_lease_of(holder: str) -> tuple[Server, Process]:
    """Return a server with a Lease of ``holder``, and a process that has seen it."""
    server = Server()
    lease = lease_manifest(None, "ns", "pdcluster-operator", holder, 0.0)
    server.held["ns", "pdcluster-operator"] = lease
    lease["metadata"]["resourceVersion"] = "7"
    two = Process(server, "two")
    two.holds()
    await asyncio.sleep(0.05)
    return server, two


async def test_a_holder_that_is_killed_keeps_others_away_for_the_duration_only() -> None:
    server, two = await one_that_finds_a_lease_of("dead")
    two.now += SHORTEST_SECONDS - 1
    await asyncio.sleep(0.05)
    assert not two.holds()
    two.now += 2
    await until(two.holds)
    assert server.held["ns", "pdcluster-operator"]["spec"]["leaseTransitions"] == 1
    await two.leases.stop()


def test_the_count_of_transitions_fits_into_its_field() -> None:
    """Another client may have written the largest number. The API server refuses a larger one."""
    lease = lease_manifest(None, "ns", "pdcluster-operator", "dead", 0.0)
    lease["metadata"]["resourceVersion"] = "7"
    for before in (2**31 - 1, 2**31 - 2):
        lease["spec"]["leaseTransitions"] = before
        taken = lease_manifest(lease, "ns", "pdcluster-operator", "two", 0.0)
        assert taken["spec"]["leaseTransitions"] == 2**31 - 1


async def test_a_lease_that_was_deleted_keeps_others_away_for_the_duration() -> None:
    """Its holder does not know yet, and acts. Its namespace may have been made again."""
    server, two = await one_that_finds_a_lease_of("one")
    server.held.clear()
    for _ in range(2):
        await asyncio.sleep(0.05)
        assert not two.holds()
        assert not server.held
        two.now += SHORTEST_SECONDS - 1
    await until(two.holds)
    await two.leases.stop()


async def test_a_holder_makes_its_lease_again_at_once() -> None:
    server = Server()
    one = Process(server, "one")
    await until(one.holds)
    server.held.clear()
    await until(lambda: server.holder() == "one")
    assert one.holds()
    await one.leases.stop()


async def test_a_holder_that_cannot_renew_stops_before_another_may_begin() -> None:
    server = Server()
    one = Process(server, "one")
    await until(one.holds)
    server.down = True
    one.now += act_seconds(SHORTEST_SECONDS) - 1
    assert one.holds()
    one.now += 2
    assert not one.holds()
    server.down = False
    await until(one.holds)
    assert one.woken == ["ns", "ns"], "what changed meanwhile is looked at"
    await one.leases.stop()


async def test_a_shorter_term_holds_although_the_answer_to_its_write_is_lost() -> None:
    server = Server()
    one, two = Process(server, "one"), Process(server, "two")
    terms = [LONGEST_SECONDS]
    one.leases._term = lambda: terms[-1]  # type: ignore[method-assign]
    await until(one.holds)

    class Mute(LeaseClient):
        """The server takes one more write of ``one``, and then ``one`` is cut off."""

        written = False

        async def read_lease(self, namespace: str, name: str) -> Mapping[str, Any] | None:
            return await self._ask(server.read_lease(namespace, name))

        async def write_lease(self, manifest: Mapping[str, Any]) -> None:
            await self._ask(server.write_lease(manifest))
            self.written = True
            raise ApiError("ApiServerUnreachable", "no answer")

        async def _ask(self, call: Any) -> Any:
            if self.written:
                call.close()
                raise ApiError("ApiServerUnreachable", "no answer")
            return await call

    mute = Mute()
    one.now = two.now = LONGEST_SECONDS / 3
    terms.append(SHORTEST_SECONDS)
    one.leases.client = mute  # type: ignore[assignment]
    await until(lambda: mute.written)
    two.holds()
    await asyncio.sleep(0.05)
    one.now = two.now = LONGEST_SECONDS / 3 + SHORTEST_SECONDS + 1
    await until(two.holds)
    assert not one.holds()
    one.leases.client = server  # type: ignore[assignment]
    await one.leases.stop()
    await two.leases.stop()


async def test_a_process_with_many_namespaces_renews_less_often() -> None:
    server = Server()
    one = Process(server, "one")
    one.clusters = {f"ns-{number}" for number in range(25)}
    await until(lambda: all(one.leases.holds(name) for name in one.clusters))

    def durations() -> set[int]:
        return {lease["spec"]["leaseDurationSeconds"] for lease in server.held.values()}

    await until(lambda: durations() == {75})
    server.down = True
    one.now += 75 * 2 / 3 - 1
    assert all(one.leases.holds(name) for name in one.clusters), "it acts for longer, too"
    one.now += 2
    assert not any(one.leases.holds(name) for name in one.clusters)
    server.down = False
    await one.leases.stop()


@pytest.mark.parametrize("leases", [0, 1, 10, 11, 30, 40, 1_000])
def test_the_term_grows_until_there_is_a_renewal_a_second(leases: int) -> None:
    term = term_of(leases)
    assert SHORTEST_SECONDS <= term <= LONGEST_SECONDS
    assert renew_seconds(term) * 2 <= act_seconds(term) + 0.01, (
        "a renewal that fails has a second try"
    )
    assert term - act_seconds(term) >= 10, "seconds between two holders"
    if term < LONGEST_SECONDS:
        assert leases / renew_seconds(term) <= 1.0


async def test_what_was_left_while_a_renewal_was_slow_is_looked_at() -> None:
    server = Server()
    one = Process(server, "one")
    await until(one.holds)
    write = server.write_lease

    async def slowly(manifest: Mapping[str, Any]) -> None:
        server.write_lease = write  # type: ignore[method-assign]
        one.now += 2
        assert not one.holds(), "what comes up now is left alone"
        await write(manifest)

    async def late(manifest: Mapping[str, Any]) -> None:
        server.write_lease = slowly  # type: ignore[method-assign]
        await write(manifest)
        one.now += act_seconds(SHORTEST_SECONDS) - 1

    server.write_lease = late  # type: ignore[method-assign]
    await until(lambda: one.woken == ["ns", "ns"])
    assert one.holds()
    await one.leases.stop()


async def test_a_process_that_starts_again_under_its_name_goes_on_at_once() -> None:
    server = Server()
    first = Process(server, "pod-a")
    await until(first.holds)
    for claim in list(first.leases._claims.values()):  # killed: nothing is given back
        assert claim.task is not None
        claim.task.cancel()
    again = Process(server, "pod-a")
    await until(again.holds)
    await again.leases.stop()


async def test_a_namespace_without_clusters_is_given_back() -> None:
    server = Server()
    one = Process(server, "one")
    await until(one.holds)
    one.clusters.clear()
    await until(lambda: server.holder() == "")
    given_back = server.held["ns", "pdcluster-operator"]["spec"]
    assert given_back["leaseDurationSeconds"] == 1, "no client has to wait for its end"
    await one.leases.stop()


async def test_a_cluster_that_comes_while_the_lease_is_given_back_is_worked_on() -> None:
    server = Server()
    one = Process(server, "one")
    await until(one.holds)
    write = server.write_lease

    async def slowly(manifest: Mapping[str, Any]) -> None:
        if not holding_of(manifest).holder:
            one.clusters.add("ns")  # deleted, and created again
            assert not one.holds(), "so it is left alone"
        await write(manifest)

    server.write_lease = slowly  # type: ignore[method-assign]
    one.clusters.clear()
    await until(lambda: one.woken == ["ns", "ns"])
    assert one.holds()
    await one.leases.stop()


@pytest.mark.parametrize(
    ("held", "unchanged", "may"),
    [
        (Holding(), 0.0, True),
        (Holding("me", 30), 0.0, True),
        (Holding("other", 30), 29.0, False),
        (Holding("other", 30), 30.5, True),
        (Holding("", 1, 4), 0.0, True),
    ],
)
def test_who_may_hold_a_lease(held: Holding, unchanged: float, may: bool) -> None:
    assert may_hold(held, "me", unchanged) is may


def test_the_lease_of_a_class_has_a_name_of_its_own() -> None:
    assert lease_name("") == "pdcluster-operator"
    assert lease_name("blue") == "pdcluster-operator-blue"


async def test_a_lease_is_needed_only_where_a_cluster_of_the_class_is() -> None:
    parts: dict[str, Any] = dict.fromkeys(
        ("api_server", "launchers", "events", "connector", "clock")
    )
    loop = ControlLoop(**parts, place=Place(operator_class="blue"))
    for namespace, operator_class in (("ours", "blue"), ("theirs", "red")):
        metadata = {"namespace": namespace, "name": "c", "uid": namespace}
        spec = {"operatorClass": operator_class}
        loop.store.put({"kind": "PDCluster", "metadata": metadata, "spec": spec})
    asked = {name: loop.works_in(name) for name in ("ours", "theirs", "empty")}
    assert asked == {"ours": True, "theirs": False, "empty": False}
