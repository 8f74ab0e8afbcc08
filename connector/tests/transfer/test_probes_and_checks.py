"""Probes and checks turn by turn: what opens a connection, what is read, and who is answered."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

import pytest
from left_open import open_dlists, open_handles
from msgspec.structs import replace
from transfer_rig import PROBE_BYTES, Prefill
from turn_by_turn import CACHE, PROBE_SECONDS, Bench

from pdcluster_connector.compat.reasons import Reason
from pdcluster_connector.nixl_io.interface import NixlErrorKind
from pdcluster_connector.nixl_io.reading_agent import ProbeResult
from pdcluster_connector.plan import peer_plan
from pdcluster_connector.protocol.failure import Failure
from pdcluster_connector.protocol.messages import EngineMetadata
from pdcluster_connector.testing.nixl import Behaviour
from pdcluster_connector.transfer.options import ReceiverOptions
from pdcluster_connector.transfer.planned_reads import Slots

Ask = Callable[[Bench, EngineMetadata], Future[ProbeResult]]
CLOSED = Failure(Reason.BACKEND_ERROR, "the receiver is closed")


@pytest.fixture
def bench() -> Bench:
    return Bench()


def check(bench: Bench, metadata: EngineMetadata) -> Future[ProbeResult]:
    future: Future[ProbeResult] = Future()
    bench.connections.probing.begin(metadata, future, check=True)
    bench.turns()
    return future


def probe(bench: Bench, metadata: EngineMetadata) -> Future[ProbeResult]:
    future: Future[ProbeResult] = Future()
    bench.connections.probing.probe(metadata, future)
    bench.turns()
    return future


def without_probe_memory(prefill: Prefill) -> EngineMetadata:
    shards = prefill.metadata.shards
    return replace(
        prefill.metadata,
        shards=tuple(replace(one, probe=replace(one.probe, length=0)) for one in shards),
    )


def drop(bench: Bench, prefill: Prefill) -> Failure:
    """Let the peer book find a peer dead; returns how checks and probes of it are answered."""
    del bench.peers.table[prefill.engine_id]
    refused = Failure(Reason.SIDE_CHANNEL_UNREACHABLE, "connection refused", dead=True)
    bench.executor.gone(prefill.engine_id, refused)
    bench.turns()
    message = f"{prefill.engine_id} is gone, or was forgotten"
    return Failure(Reason.SIDE_CHANNEL_UNREACHABLE, message)


@pytest.mark.parametrize("ask", [check, probe])
def test_a_check_or_probe_that_comes_late_connects_no_dead_peer(bench: Bench, ask: Ask) -> None:
    """The warm-up would hang, and cost every other peer its connection again and again."""
    dead = bench.prefill("ns.c.prefill.r.0/1")
    assert bench.send(dead) in bench.take().received
    bench.fabric.cut(dead.engine_id)
    gone = drop(bench, dead)
    assert ask(bench, dead.metadata).result(0).failure == gone
    assert bench.connections.by_engine == {}


def test_a_probe_whose_peer_is_gone_when_its_turn_comes_is_answered(bench: Bench) -> None:
    """Peers behind it have theirs."""
    first, dead, other = (bench.prefill(name) for name in ("p/1", "q/1", "r/1"))
    bench.fabric.behave = lambda transfer: Behaviour(hang=transfer.nbytes == PROBE_BYTES)
    probes = [bench.probe(one) for one in (first, dead)]
    gone = drop(bench, dead)
    probes.append(bench.probe(other))
    assert not any(one.done() for one in probes)
    bench.fabric.behave = lambda _: Behaviour()
    bench.fabric.land()
    bench.turns()
    assert [one.result(0).failure for one in probes] == [None, gone, None]


def test_a_check_of_a_living_start_opens_its_connection_beside_that_of_another(
    bench: Bench,
) -> None:
    """The agent was destroyed, and a late ticket of the other start came first."""
    other, checked = bench.prefill("ns.c.prefill.r.0/1"), bench.prefill("ns.c.prefill.r.0/2")
    assert bench.send(other) in bench.take().received
    assert check(bench, checked.metadata).result(0).failure is None
    assert set(bench.connections.by_engine) == {other.engine_id, checked.engine_id}


def test_a_check_of_a_peer_without_a_connection_opens_one(bench: Bench) -> None:
    """Its agent was destroyed for another peer. The others that are connected do not matter."""
    other, checked = bench.prefill("ns.c.prefill.r.0/1"), bench.prefill("ns.c.prefill.r.1/2")
    assert bench.send(other) in bench.take().received
    assert check(bench, checked.metadata).result(0).failure is None
    posted = bench.fabric.posted
    assert bench.send(checked) in bench.take().received
    assert bench.fabric.posted == posted + 2, "one read of KV and its lease word, no warm-up"
    assert bench.peers.asked == [other.engine_id]


@pytest.mark.parametrize("ask", [check, probe])
def test_a_peer_whose_metadata_nixl_refuses_fails_its_own_question_alone(
    bench: Bench, ask: Ask
) -> None:
    bad, good = bench.prefill("bad/1"), bench.prefill("good/1")
    shard = replace(bad.metadata.shards[0], agent_metadata=b"?")
    failure = ask(bench, replace(bad.metadata, shards=(shard,))).result(0).failure
    assert failure is not None
    assert failure.reason is Reason.BACKEND_ERROR
    assert failure.message.startswith("NixlError: ")
    assert bench.probe(good).result(0).failure is None
    assert not bench.executor.busy


@pytest.mark.parametrize("first", [False, True], ids=["connected", "first"])
@pytest.mark.parametrize("ask", [check, probe])
def test_who_asks_is_answered_whatever_the_start_of_a_read_raises(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, ask: Ask, first: bool
) -> None:
    """Nothing is left of it: the next question and the next request are well."""
    prefill = bench.prefill("p/1")
    if not first:
        assert bench.send(prefill) in bench.take().received
        bench.pass_time(10.0)
    with monkeypatch.context() as broken:
        broken.setattr(Slots, "take", lambda _: 1 / 0)
        failure = ask(bench, prefill.metadata).result(0).failure
    assert failure == Failure(Reason.BACKEND_ERROR, "ZeroDivisionError: division by zero")
    assert not bench.executor.busy
    assert ask(bench, prefill.metadata).result(0).failure is None
    assert bench.send(prefill) in bench.take().received


def test_who_asks_after_the_end_is_told_of_it_at_once(bench: Bench) -> None:
    prefill = bench.prefill("p/1")
    bench.executor.rebuild(CLOSED, final=True)
    agents = set(bench.fabric.agents)
    for ask in (check, probe):
        assert ask(bench, prefill.metadata).result(0).failure == CLOSED
    assert agents == set(bench.fabric.agents), "no agent is made for it"


def test_at_the_end_every_probe_and_check_is_answered(bench: Bench) -> None:
    """Those under way and those that wait."""
    prefill, others = bench.prefill("p/1"), [bench.prefill(f"q{n}/1") for n in range(3)]
    assert bench.send(prefill) in bench.take().received
    bench.pass_time(10.0)
    bench.fabric.behave = lambda _: Behaviour(hang=True)
    asked = [check(bench, prefill.metadata), bench.probe(prefill), *map(bench.probe, others)]
    assert not any(future.done() for future in asked)
    bench.executor.rebuild(CLOSED, final=True)
    assert [future.result(0).failure for future in asked] == [CLOSED] * 5


def test_probes_run_one_at_a_time_and_in_their_order(bench: Bench) -> None:
    """Side by side, each would measure a part of the bandwidth."""
    engines = [bench.prefill(f"p{n}/1") for n in range(3)]
    for engine in engines:
        assert bench.send(engine) in bench.take().received
    bench.fabric.behave = lambda _: Behaviour(hang=True)
    probes = [bench.probe(engine) for engine in engines]
    order = []
    for _ in engines:
        [under_way] = bench.fabric.flying
        order.append(under_way.peer.partition("-")[0])
        bench.fabric.land()
        bench.turns()
    assert order == [engine.engine_id for engine in engines]
    assert [future.result(0).nbytes for future in probes] == [PROBE_BYTES] * 3


def test_a_probe_that_nobody_waits_for_any_more_holds_up_no_other(bench: Bench) -> None:
    """The link's keeper gives it up when its peer is lost."""
    lost, other = bench.prefill("p/1"), bench.prefill("q/1")
    for engine in (lost, other):
        assert bench.send(engine) in bench.take().received
    bench.hanging = {"p/1"}
    first, second = bench.probe(lost), bench.probe(other)
    assert not second.done()
    first.cancel()
    bench.turns()
    assert second.result(0).nbytes == PROBE_BYTES


@pytest.mark.parametrize(("idle", "pages"), [(1.75, 0), (2.0, 1)])
def test_a_check_reads_nothing_where_kv_has_landed_within_two_seconds(
    bench: Bench, idle: float, pages: int
) -> None:
    prefill = bench.prefill("p/1")
    assert bench.send(prefill) in bench.take().received
    bench.pass_time(idle)
    assert check(bench, prefill.metadata).result(0).nbytes == pages * 4096


def test_a_probe_reads_all_even_where_kv_has_just_landed(bench: Bench) -> None:
    prefill = bench.prefill("p/1")
    assert bench.send(prefill) in bench.take().received
    assert bench.probe(prefill).result(0).nbytes == PROBE_BYTES


def test_a_peer_without_probe_memory_is_read_from_all_the_same(bench: Bench) -> None:
    prefill = bench.prefill("p/1")
    told = bench.peers.table["p/1"] = without_probe_memory(prefill)
    result = probe(bench, told).result(0)
    assert (result.failure, result.nbytes) == (None, 0)
    assert bench.send(prefill) in bench.take().received


def test_a_check_that_hangs_behind_kv_is_given_half_a_minute(bench: Bench) -> None:
    """One transfer of much KV may take so long. A check behind nothing has five seconds."""
    slow, idle = bench.prefill("slow/1"), bench.prefill("idle/1")
    for engine in (slow, idle):
        assert bench.send(engine) in bench.take().received
    bench.pass_time(10.0)
    bench.fabric.behave = lambda _: Behaviour(hang=True)
    bench.send(slow)
    behind, alone = check(bench, slow.metadata), check(bench, idle.metadata)
    bench.pass_time(4.75)
    assert not alone.done()
    bench.pass_time(0.25)
    assert alone.done()
    bench.pass_time(24.75)
    assert not behind.done()
    bench.pass_time(0.25)
    failure = behind.result(0).failure
    assert failure is not None
    assert failure.reason is Reason.TRANSFER_STALLED
    assert failure.message.startswith("a read from slow/1 (rank (0, 0)) did not land in time")


def test_a_probe_lasts_as_long_as_it_may_and_no_longer(bench: Bench) -> None:
    prefill = bench.prefill("p/1")
    assert bench.send(prefill) in bench.take().received
    bench.fabric.behave = lambda _: Behaviour(hang=True)
    probed = bench.probe(prefill)
    bench.pass_time(PROBE_SECONDS - 0.25)
    assert not probed.done()
    bench.pass_time(0.25)
    assert probed.done()
    assert bench.connections.by_engine["p/1"].stalled == probed.result(0).failure


def test_the_agent_is_renewed_for_the_check_that_has_hung_the_longest() -> None:
    bench = Bench(ReceiverOptions(drain_deadline_seconds=30.0))
    first, second = bench.prefill("p/1"), bench.prefill("q/1")
    for engine in (first, second):
        assert bench.send(engine) in bench.take().received
    bench.pass_time(10.0)
    bench.fabric.behave = lambda _: Behaviour(hang=True)
    agents = set(bench.fabric.agents)
    check(bench, first.metadata)
    bench.pass_time(20.0)
    check(bench, second.metadata)
    bench.pass_time(14.75)  # the first one failed after five seconds, and has hung for 30 then
    assert agents == set(bench.fabric.agents)
    bench.pass_time(0.25)
    assert agents != set(bench.fabric.agents)


def test_a_probe_that_has_ended_leaves_nothing_behind(bench: Bench) -> None:
    prefill = bench.prefill("p/1")
    assert bench.send(prefill) in bench.take().received
    lists = open_dlists(bench.fabric)
    bench.pass_time(10.0)
    for ask in (check, probe):
        assert ask(bench, prefill.metadata).result(0).failure is None
    assert (open_handles(bench.fabric), open_dlists(bench.fabric)) == (0, lists)


def test_a_probe_that_may_still_write_keeps_its_handle_and_its_place(bench: Bench) -> None:
    """Only the end of the agent ends it. It fails at once all the same."""
    prefill = bench.prefill("p/1")
    assert bench.send(prefill) in bench.take().received
    lists = open_dlists(bench.fabric)
    bench.fabric.behave = lambda _: Behaviour(poll_error=NixlErrorKind.LOST)
    failure = bench.probe(prefill).result(0).failure
    assert failure is not None
    assert failure.reason is Reason.BACKEND_ERROR
    assert failure.message.startswith("reading p/1-0#")
    assert (open_handles(bench.fabric), open_dlists(bench.fabric)) == (1, lists + 2)
    assert bench.executor.busy
    bench.executor.rebuild(Failure(Reason.BACKEND_ERROR, "x"))
    bench.turns()
    assert open_handles(bench.fabric) == 0
    assert not bench.executor.busy


def test_a_wrong_byte_is_told_with_what_was_read_and_what_should_have_been(bench: Bench) -> None:
    prefill = bench.prefill("p/1")
    memory = prefill.agents[0]._probe.bytes
    right, wrong = int(memory[100]), int(memory[100]) ^ 1
    memory[100] = wrong
    failure = probe(bench, prefill.metadata).result(0).failure
    assert failure is not None
    assert failure.reason is Reason.PROBE_CORRUPTED
    assert failure.message.startswith("1 of 4096 probe bytes of rank (0, 0) are wrong, the first")
    assert failure.message.endswith(f"at offset 100: {wrong} instead of {right}")


def test_a_check_that_fails_over_a_connection_that_is_broken_says_nothing_new(
    bench: Bench,
) -> None:
    """The peer book has heard of the first cause, and may have connected the peer anew since."""
    prefill = bench.prefill("p/1")
    assert bench.send(prefill) in bench.take().received
    bench.pass_time(10.0)
    bench.fabric.behave = lambda _: Behaviour(hang=True)
    checked = check(bench, prefill.metadata)
    connection = bench.connections.by_engine["p/1"]
    first = Failure(Reason.BACKEND_ERROR, "the transport broke")
    bench.connections.break_off(connection, first)
    bench.pass_time(5.0)
    assert checked.result(0).failure is not None
    assert connection.broken == first
    assert bench.peers.forgotten == []


@pytest.mark.parametrize(
    "behaviour",
    [Behaviour(corrupt=True), Behaviour(poll_error=NixlErrorKind.TRANSPORT)],
    ids=["another byte", "transport"],
)
def test_every_probe_of_a_peer_is_answered_when_its_warm_up_fails_at_once(
    bench: Bench, behaviour: Behaviour
) -> None:
    """The connection closes then. To open it for each probe would go on for ever."""
    bad, good = bench.prefill("bad/1"), bench.prefill("good/1")
    bench.fabric.behave = lambda transfer: (
        behaviour if transfer.peer.startswith("bad") else Behaviour()
    )
    asked: list[Future[ProbeResult]] = [Future() for _ in range(3)]
    for future, engine in zip(asked, (bad, good, bad), strict=True):
        bench.connections.probing.probe(engine.metadata, future)
    bench.turns()
    first, well, second = (future.result(0).failure for future in asked)
    assert well is None
    assert first == second
    assert first is not None
    corrupted = first.reason is Reason.PROBE_CORRUPTED
    assert corrupted == behaviour.corrupt
    assert not bench.executor.busy
    bench.fabric.behave = lambda _: Behaviour()
    assert bench.probe(bad).result(0).failure is None


def test_a_read_that_brought_nothing_is_not_taken_for_an_earlier_one(bench: Bench) -> None:
    """The place that it reads into still holds what was right then."""
    prefill = bench.prefill("p/1")
    assert bench.probe(prefill).result(0).failure is None
    bench.fabric.behave = lambda _: Behaviour(drop=True)
    failure = bench.probe(prefill).result(0).failure
    assert failure is not None
    assert failure.reason is Reason.PROBE_CORRUPTED


def test_the_time_of_a_check_begins_anew_with_each_read_of_kv_that_lands(bench: Bench) -> None:
    """It may wait in the same queue."""
    prefill = bench.prefill("p/1")
    assert bench.send(prefill) in bench.take().received
    bench.pass_time(10.0)
    bench.fabric.behave = lambda transfer: Behaviour(hang=transfer.nbytes == 4096)
    checked = check(bench, prefill.metadata)
    for _ in range(5):
        bench.pass_time(4.0)
        assert bench.send(prefill) in bench.take().received
    bench.pass_time(4.75)
    assert not checked.done()
    bench.pass_time(0.25)
    assert checked.result(0).failure is not None


def test_one_rank_with_fewer_lease_words_bounds_the_ticket(bench: Bench) -> None:
    prefill = Prefill(bench.fabric, "p/1", tensor=2, **CACHE)
    shards = prefill.metadata.shards
    for few in (0, 1):
        words = shards[few].lease_words
        assert words is not None
        less = replace(shards[few], lease_words=replace(words, slots=1))
        bench.peers.table["p/1"] = replace(
            prefill.metadata, shards=tuple(less if n == few else shards[n] for n in (0, 1))
        )
        request = bench.send(prefill)  # its ticket names slot 1 or 2
        failure = bench.take().failed[request]
        assert failure.reason is Reason.TICKET_INVALID
        assert failure.message == f"the ticket names lease word {few + 1}, the engine has 1"
        gone = Failure(Reason.PEER_RESTARTED, "so that it is connected anew")
        bench.connections.break_off(bench.connections.by_engine["p/1"], gone)


def test_a_probe_tells_that_its_link_takes_many_descriptors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench()
    few = bench.probe(bench.prefill("few")).result(0)
    assert (few.notice, few.descriptors) == ("", 2 * 250), "two layers, blocks of four tokens"
    monkeypatch.setattr(peer_plan, "MANY", 499)
    many = bench.probe(bench.prefill("many")).result(0)
    assert "1,000 tokens take up to 500 descriptors" in many.notice
    assert "--block-size 64" in many.notice
