"""The receiver over the in-memory NIXL: what arrives, what fails, and when it is reported."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace

import numpy as np
import pytest
from left_open import open_dlists, open_handles
from transfer_rig import PROBE_BYTES, Decode, FakePeers, Prefill, eventually

from pdcluster_connector.compat.reasons import Reason
from pdcluster_connector.nixl_io.interface import NixlErrorKind
from pdcluster_connector.nixl_io.reading_agent import ProbeResult
from pdcluster_connector.protocol.failure import Failure
from pdcluster_connector.testing.nixl import Behaviour, Fabric, Transfer
from pdcluster_connector.transfer import receiver
from pdcluster_connector.transfer.options import ReceiverOptions
from pdcluster_connector.transfer.probing import RECENT_SECONDS

# Long enough for a busy machine to post a request before its lease ends.
POSTED_IN_TIME = 3.0
OF_THE_AGENT = 1  # descriptor list, of the memory that lease words are read into
CACHE = {"kv_heads": 4, "layers": 2, "num_blocks": 32, "block_tokens": 4, "token_bytes": 4}


@pytest.fixture(autouse=True)
def rare_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """While nothing moves, look five times less often: these tests wait for seconds."""
    monkeypatch.setattr(receiver, "LONGEST_SLEEP", 5e-3)


class Rig:
    """One prefill engine (replaceable), one decode rank, one fabric."""

    def __init__(self, prefill_tensor: int = 1, options: ReceiverOptions | None = None) -> None:
        self.fabric = Fabric()
        self.peers = FakePeers()
        self.prefill = self.add_prefill("prefill/1", prefill_tensor)
        self.decode = Decode(self.fabric, self.peers, options=options, **CACHE)

    def add_prefill(self, engine_id: str, tensor: int = 1) -> Prefill:
        prefill = Prefill(self.fabric, engine_id, tensor, **CACHE)
        self.peers.table[engine_id] = prefill.metadata
        return prefill

    def send(self, request_id: str, seed: int = 1, *, lease: float = 20.0) -> None:
        """Have request ``seed`` of 10 tokens read from blocks 3, 4, 5 into 10+seed...."""
        self.send_from(self.prefill, request_id, seed, lease=lease)

    def send_from(
        self, prefill: Prefill, request_id: str, seed: int = 1, *, lease: float = 20.0
    ) -> None:
        ticket = prefill.ticket(seed, [3 * seed, 3 * seed + 1, 3 * seed + 2], 10)
        blocks = self.blocks(seed)
        self.decode.receive(self.decode.request(request_id, ticket, blocks, lease=lease))

    @staticmethod
    def blocks(seed: int) -> list[int]:
        return [31 - 3 * seed, 30 - 3 * seed, 29 - 3 * seed]

    def right(self, seed: int = 1) -> bool:
        return self.decode.cache.wrong_tokens(seed, self.blocks(seed), 0, 10) == []

    def works(self, request_id: str, prefill: Prefill | None = None, seed: int = 8) -> None:
        """The receiver is as good as new."""
        self.fabric.behave = lambda _: Behaviour()
        self.send_from(prefill or self.prefill, request_id, seed)
        results = self.decode.wait(request_id)
        assert request_id in results.received, results.failed
        assert self.right(seed)

    def of_kv(self, behaviour: Behaviour, first: int = 99) -> None:
        """Give ``behaviour`` to the next ``first`` KV transfers; probes and others are well."""
        left = [first]

        def behave(transfer: Transfer) -> Behaviour:
            if len(transfer.copies) == 1 or left[0] == 0:
                return Behaviour()
            left[0] -= 1
            return behaviour

        self.fabric.behave = behave

    @property
    def hanging(self) -> int:
        """KV transfers that hang; a warm-up flies for a moment too."""
        return sum(transfer.behaviour.hang for transfer in list(self.fabric.flying))


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    finish(made)


@pytest.fixture
def two() -> Iterator[Rig]:
    """A prefill engine of two ranks: every receive has two transfers."""
    made = Rig(prefill_tensor=2)
    yield made
    finish(made)


THREADS = "pdcluster-transfer"


def finish(rig: Rig) -> None:
    assert rig.decode.receiver.close()
    rig.decode.take()
    assert open_handles(rig.fabric) == 0
    assert not [item for item in rig.fabric.flying if item.agent.startswith("decode")]
    # On a loaded machine the watchdog's thread ends a moment later.
    eventually(lambda: not [t for t in threading.enumerate() if t.name.startswith(THREADS)])
    assert rig.decode.fatal == []


@pytest.mark.parametrize("prefill_tensor", [1, 2, 4, 8])
@pytest.mark.parametrize("decode_tensor", [1, 2, 4, 8])
def test_bytes_arrive(prefill_tensor: int, decode_tensor: int) -> None:
    fabric, peers = Fabric(), FakePeers()
    prefill = Prefill(fabric, "prefill/1", prefill_tensor, **CACHE)
    peers.table["prefill/1"] = prefill.metadata
    ticket = prefill.ticket(7, [9, 2, 3, 4, 20], 18)
    for rank in range(decode_tensor):
        decode = Decode(fabric, peers, rank=rank, tensor=decode_tensor, **CACHE)
        blocks = [5, 6, 30, 1, 8]
        decode.receive(decode.request("r", ticket, blocks, start=4))
        received = decode.wait("r").received["r"]
        assert decode.cache.wrong_tokens(7, blocks, 4, 18) == []
        assert decode.cache.wrong_tokens(7, blocks, 0, 4) == [0, 1, 2, 3]  # not asked for
        # 4 blocks of 4 tokens of 4 bytes, 2 layers, and this rank's heads.
        assert received.nbytes == 4 * 4 * 4 * 2 * len(decode.cache.heads)
        assert not decode.cache.bytes[:, [0, 2, 3, 4, 7, 9, 20]].any(), "a foreign block changed"
        assert decode.receiver.close()


def test_stats_and_received_agree(rig: Rig) -> None:
    rig.send("a")
    rig.send("b", 2)
    eventually(lambda: not rig.fabric.flying and rig.fabric.posted >= 3)
    seen = rig.decode.wait("a", "b")
    assert seen.received["a"].nbytes == 3 * 4 * 4 * 4 * 2
    assert seen.received["a"].seconds > 0


def test_stats_by_phase_and_reason(rig: Rig) -> None:
    rig.send("a")
    ticket = rig.prefill.ticket(2, [6], 4, tokens=3)
    rig.decode.receive(rig.decode.request("b", ticket, [1], stop=4))
    nbytes = 0
    failures: dict[str, int] = {}
    phases: dict[str, int] = {}
    while phases.get("total", 0) + sum(failures.values()) < 2:
        stats = rig.decode.take()
        nbytes += sum(received.nbytes for received in stats.received.values())
        failures.update(dict.fromkeys((why.reason.value for why in stats.failed.values()), 1))
        phases.update({phase: len(values) for phase, values in stats.phase_seconds.items()})
    assert nbytes == 3 * 4 * 4 * 4 * 2
    assert failures == {"CoverageIncomplete": 1}
    assert phases == {"handshake": 1, "post": 1, "transfer": 1, "fence": 1, "total": 1}


def test_one_peer_is_planned_and_prepared_once(rig: Rig) -> None:
    rig.works("first", seed=1)
    lists = open_dlists(rig.fabric)
    for number in range(20):
        rig.works(f"r{number}", seed=2)
    assert open_dlists(rig.fabric) == lists
    assert rig.peers.asked == ["prefill/1"]


def test_nothing_wanted_is_done_without_a_handshake(rig: Rig) -> None:
    ticket = rig.prefill.ticket(1, [3], 4)
    rig.decode.receive(rig.decode.request("r", ticket, [1], start=4, stop=4))
    assert rig.decode.wait("r").received["r"].nbytes == 0
    assert rig.peers.asked == []


def test_the_seconds_of_an_order_count_from_when_its_step_began(rig: Rig) -> None:
    """The order may have waited for a forward pass, or for the transfer thread."""
    order = rig.decode.request("r", rig.prefill.ticket(1, [3, 4, 5], 10), rig.blocks(1), lease=20)
    rig.decode.receiver.receive([order], time.monotonic() - 21)
    assert rig.decode.wait("r").failed["r"].reason is Reason.LEASE_EXPIRED


def test_an_id_under_way_is_not_taken_twice(rig: Rig) -> None:
    rig.of_kv(Behaviour(hang=True))
    ticket = rig.prefill.ticket(1, [3, 4, 5], 10)
    request = rig.decode.request("r", ticket, rig.blocks(1))
    # In one batch: of two, the second may be taken after the first has landed and is no more.
    rig.decode.receive(request, request)
    eventually(lambda: rig.hanging == 1)
    rig.fabric.land()
    assert "r" in rig.decode.wait("r").received
    rig.decode.nothing()


def test_a_call_that_does_not_return_ends_the_worker() -> None:
    """Nothing else could notice: deadlines are kept by the thread that hangs."""
    said: list[str] = []
    rig = Rig(options=ReceiverOptions(fatal=said.append, stall_seconds=1.0))
    returns = threading.Event()

    def behave(transfer: Transfer) -> Behaviour:
        if len(transfer.copies) > 1:
            returns.wait(60)
        return Behaviour()

    try:
        rig.works("before")
        rig.fabric.behave = behave
        rig.send("r")
        eventually(lambda: said)
        assert "has been in one call" in said[0]
    finally:
        returns.set()
    finish(rig)


def test_a_thread_that_waits_or_polls_for_long_is_not_hanging() -> None:
    said: list[str] = []
    rig = Rig(options=ReceiverOptions(fatal=said.append, stall_seconds=4.0))
    try:
        rig.of_kv(Behaviour(hang=True))
        rig.send("r")
        eventually(lambda: rig.hanging == 1)
        time.sleep(4.5)
        rig.fabric.land()
        rig.decode.wait("r")
        time.sleep(4.5)
    finally:
        finish(rig)
    assert said == []


@pytest.mark.parametrize(
    ("changes", "blocks", "reason"),
    [
        ({"blocks": ((3, 32, 5),)}, [1, 2, 4], Reason.TICKET_INVALID),
        ({"blocks": ((3, -1, 5),)}, [1, 2, 4], Reason.COVERAGE_INCOMPLETE),
        ({"blocks": ((3, 3, 5),)}, [1, 2, 4], Reason.COVERAGE_INCOMPLETE),
        ({"blocks": ((3, 4),)}, [1, 2, 4], Reason.COVERAGE_INCOMPLETE),
        ({"blocks": ()}, [1, 2, 4], Reason.TICKET_INVALID),
        ({"blocks": ((3,), (4,))}, [1, 2, 4], Reason.TICKET_INVALID),
        ({"block_size": 8}, [1, 2, 4], Reason.TICKET_INVALID),
        ({"tokens": 9}, [1, 2, 4], Reason.COVERAGE_INCOMPLETE),
        ({"engine_id": "prefill/0"}, [1, 2, 4], Reason.SIDE_CHANNEL_UNREACHABLE),
        ({"blocks": (("x", None, 5),)}, [1, 2, 4], Reason.COVERAGE_INCOMPLETE),
        ({}, [1, 2], Reason.COVERAGE_INCOMPLETE),
        ({}, [1, 2, 32], Reason.COVERAGE_INCOMPLETE),
        ({}, [1, 2, -1], Reason.COVERAGE_INCOMPLETE),
    ],
)
def test_what_does_not_fit_fails_that_request_alone(
    rig: Rig, changes: dict[str, object], blocks: list[int], reason: Reason
) -> None:
    ticket = rig.prefill.ticket(1, [3, 4, 5], 10, **changes)
    rig.decode.receive(rig.decode.request("r", ticket, blocks, stop=10))
    assert rig.decode.wait("r").failed["r"].reason is reason
    assert not rig.decode.cache.bytes.any()
    rig.works("next")


@pytest.mark.parametrize(
    "kind", [NixlErrorKind.DISCONNECTED, NixlErrorKind.INVALID, NixlErrorKind.INTERNAL]
)
def test_error_at_post(rig: Rig, kind: NixlErrorKind) -> None:
    rig.of_kv(Behaviour(post_error=kind))
    rig.send("r")
    failure = rig.decode.wait("r").failed["r"]
    assert failure.reason is Reason.BACKEND_ERROR
    rig.works("next")


def test_a_post_that_failed_but_writes_costs_the_agent_first(rig: Rig) -> None:
    """Part of a transfer may be under way when posting it fails."""
    rig.of_kv(Behaviour(post_error=NixlErrorKind.TRANSPORT, hang=True))
    before = set(rig.fabric.agents)
    rig.send("r")
    assert rig.decode.wait("r").failed["r"].reason is Reason.BACKEND_ERROR
    assert rig.fabric.land() == 0, "something could still have landed"
    assert not rig.decode.cache.bytes.any()
    assert before - set(rig.fabric.agents) == {name for name in before if "decode" in name}
    rig.works("next")


@pytest.mark.parametrize("kind", [NixlErrorKind.DISCONNECTED, NixlErrorKind.TRANSPORT])
def test_error_at_poll(rig: Rig, kind: NixlErrorKind) -> None:
    rig.of_kv(Behaviour(polls=2, poll_error=kind))
    rig.send("r")
    assert rig.decode.wait("r").failed["r"].reason is Reason.BACKEND_ERROR
    assert rig.peers.forgotten == ["prefill/1"]
    rig.works("next")
    assert rig.peers.asked == ["prefill/1", "prefill/1"]  # the link was made anew


def test_a_failed_sibling_waits_for_the_other_transfer(two: Rig) -> None:
    # The hanging one first: were the other polled before it is posted, it would not be.
    two.decode.receiver._executor._drain_seconds = 600.0  # nothing but the landing ends it
    behaviours = [Behaviour(hang=True), Behaviour(poll_error=NixlErrorKind.TRANSPORT)]
    two.fabric.behave = lambda t: Behaviour() if len(t.copies) == 1 else behaviours.pop(0)
    two.send("r")
    eventually(lambda: not behaviours and len(two.fabric.flying) == 1)
    two.decode.nothing(0.1)
    two.fabric.land()
    assert two.decode.wait("r").failed["r"].reason is Reason.BACKEND_ERROR


def test_no_sibling_is_posted_after_a_failure(two: Rig) -> None:
    two.of_kv(Behaviour(post_error=NixlErrorKind.DISCONNECTED), first=1)
    two.send("warm")
    two.decode.wait("warm")
    assert [item.peer for item in two.fabric.flying] == []
    # Two warm-ups (one a rank) and the transfer whose posting failed.
    assert two.fabric.posted == 3


def test_unlucky_handles_are_not_reported_before_they_are_quiet(rig: Rig) -> None:
    """Past the lease's end the request waits, and what lands then lands in its own blocks."""
    rig.decode.receiver._executor._drain_seconds = 600.0  # nothing but the landing ends it
    rig.of_kv(Behaviour(hang=True))
    rig.send("r", lease=POSTED_IN_TIME)
    eventually(lambda: rig.hanging == 1)
    rig.fabric.land(copies=3)
    rig.decode.nothing(POSTED_IN_TIME + 0.1)
    rig.fabric.land()
    assert rig.decode.wait("r").failed["r"].reason is Reason.TRANSFER_STALLED
    rig.works("next")


def test_a_hanging_transfer_costs_the_agent_and_nobody_else(rig: Rig) -> None:
    """A slow receive whose lease stands is read again over the new agent."""
    rig.of_kv(Behaviour(hang=True, refuse_release=True), first=2)
    rig.send("r", lease=POSTED_IN_TIME)
    rig.send("slow", 2)
    results = rig.decode.wait("r", "slow")
    assert results.failed["r"].reason is Reason.TRANSFER_STALLED
    assert "slow" in results.received
    assert rig.right(2)
    assert rig.fabric.land() == 0
    assert not rig.decode.cache.bytes[:, rig.blocks(1)].any()
    rig.works("next")


def test_a_receive_that_hangs_over_every_agent_ends_with_its_lease(rig: Rig) -> None:
    rig.of_kv(Behaviour(hang=True))
    rig.send("r", lease=POSTED_IN_TIME)
    rig.send("other", 2, lease=2 * POSTED_IN_TIME)
    results = rig.decode.wait("r", "other")
    assert results.failed["r"].reason is Reason.TRANSFER_STALLED
    assert results.failed["other"].reason in {Reason.TRANSFER_STALLED, Reason.BACKEND_ERROR}
    assert rig.fabric.land() == 0
    assert not rig.decode.cache.bytes.any()
    rig.works("next")


def test_an_agent_that_survives_ends_the_worker(rig: Rig) -> None:
    rig.of_kv(Behaviour(hang=True))
    rig.fabric.survive_close = True
    rig.send("r", lease=POSTED_IN_TIME)
    eventually(lambda: len(rig.decode.fatal) == 1)
    rig.decode.nothing(0.1)  # its blocks may still be written
    rig.decode.fatal.clear()
    rig.fabric.survive_close = False


def test_an_agent_that_survives_without_transfers_is_left_behind(rig: Rig) -> None:
    rig.works("before")
    rig.fabric.survive_close = True
    rig.peers.hold = True
    rig.send_from(rig.add_prefill("prefill/2"), "r")
    assert rig.decode.receiver.close()
    assert "r" in rig.decode.wait("r").failed
    assert rig.decode.fatal == []


def gone(rig: Rig, *engine_ids: str) -> None:
    assert rig.peers.on_gone is not None
    for engine_id in engine_ids:
        rig.peers.on_gone(engine_id, Failure(Reason.PEER_RESTARTED, "its place is taken"))


def test_an_incarnation_that_is_gone_is_retired(rig: Rig) -> None:
    rig.works("before", seed=1)
    lists = open_dlists(rig.fabric)
    gone(rig, "prefill/1")
    rig.works("after", rig.add_prefill("prefill/2"))
    assert open_dlists(rig.fabric) == lists
    rig.send("late", 2)
    assert "late" in rig.decode.wait("late").finished


def test_data_parallel_ranks_live_side_by_side_and_are_retired(rig: Rig) -> None:
    first, second = (rig.add_prefill(f"prefill/2_dp{rank}") for rank in range(2))
    lists = open_dlists(rig.fabric)
    for seed, rank in enumerate((first, second, first, second), start=1):
        rig.works(f"r{seed}", rank, seed=seed)
    grown = open_dlists(rig.fabric) - lists
    assert rig.peers.asked == [first.engine_id, second.engine_id], "no link was made anew"
    gone(rig, first.engine_id, second.engine_id)
    rig.works("after", rig.add_prefill("prefill/3_dp1"), seed=5)
    assert open_dlists(rig.fabric) == lists + grown // 2


@pytest.mark.sampled
@pytest.mark.parametrize("broken", [NixlErrorKind.LOST, RuntimeError("x"), SystemExit("x")])
def test_an_unseen_transfer_costs_the_agent_but_not_the_healthy(
    rig: Rig, broken: NixlErrorKind | BaseException
) -> None:
    if isinstance(broken, NixlErrorKind):
        unseen = Behaviour(poll_error=broken, polls=3)
    else:
        unseen = Behaviour(poll_raises=broken, polls=3)
    behaviours = [unseen, Behaviour(polls=60)]
    rig.fabric.behave = lambda t: Behaviour() if len(t.copies) == 1 else behaviours.pop(0)
    rig.send("unseen")
    rig.send("healthy", 2)
    results = rig.decode.wait("unseen", "healthy")
    assert results.failed["unseen"].reason is Reason.BACKEND_ERROR
    assert "healthy" in results.received
    assert rig.right(2)
    assert rig.fabric.land() == 0
    assert not rig.decode.cache.bytes[:, rig.blocks(1)].any()
    rig.works("next")


def test_requests_that_come_while_the_agent_drains_wait_for_the_new_one(rig: Rig) -> None:
    behaviours = [Behaviour(hang=True), Behaviour(poll_error=NixlErrorKind.LOST)]
    rig.fabric.behave = lambda t: Behaviour() if len(t.copies) == 1 else behaviours.pop(0)
    rig.send("slow", 2)
    eventually(lambda: rig.hanging == 1)  # or the loss alone would rebuild the agent at once
    rig.send("unseen")
    eventually(lambda: rig.decode.receiver._executor.transfers.unseen == 1)
    rig.fabric.behave = lambda _: Behaviour()
    rig.send("late", 3)
    rig.decode.nothing()
    rig.fabric.land(next(t for t in rig.fabric.flying if not t.behaviour.poll_error))
    results = rig.decode.wait("unseen", "slow", "late")
    assert set(results.received) == {"slow", "late"}
    assert rig.right(3)


@pytest.mark.parametrize("posted", [False, True])
def test_peer_death_and_a_new_incarnation(two: Rig, posted: bool) -> None:
    two.works("before", seed=1)
    if posted:
        two.of_kv(Behaviour(hang=True))
        two.send("r", 2)
        eventually(lambda: len(two.fabric.flying) == 2)
        two.fabric.kill("prefill/1")
    else:
        two.fabric.kill("prefill/1")
        two.send("r", 2)
    assert two.decode.wait("r").failed["r"].reason is Reason.BACKEND_ERROR
    eventually(lambda: open_dlists(two.fabric) == OF_THE_AGENT)
    two.works("after", two.add_prefill("prefill/2"))


def test_a_restarted_peer_fails_what_reads_from_it_when_it_is_quiet(rig: Rig) -> None:
    rig.works("before", seed=1)
    rig.of_kv(Behaviour(hang=True))
    rig.send("r", 2)
    eventually(lambda: rig.hanging == 1)
    assert rig.peers.on_gone is not None
    rig.peers.on_gone("prefill/1", Failure(Reason.PEER_RESTARTED, "another incarnation"))
    rig.decode.nothing(0.1)
    rig.fabric.land()
    assert rig.decode.wait("r").failed["r"].reason is Reason.PEER_RESTARTED
    eventually(lambda: open_dlists(rig.fabric) == OF_THE_AGENT)


def test_a_silent_peer_is_only_suspect(rig: Rig) -> None:
    rig.works("before", seed=1)
    rig.of_kv(Behaviour(hang=True))
    rig.send("r", 2)
    eventually(lambda: rig.hanging == 1)
    assert rig.peers.on_gone is not None
    rig.peers.on_gone("prefill/1", Failure(Reason.SIDE_CHANNEL_UNREACHABLE, "silent"))
    rig.decode.nothing()
    rig.fabric.land()
    assert "r" in rig.decode.wait("r").received
    rig.works("again")


def test_only_what_is_new_asks_a_peer_that_has_been_silent_for_long(rig: Rig) -> None:
    rig.works("before", seed=1)
    rig.of_kv(Behaviour(hang=True))
    rig.send("under-way", 2)
    eventually(lambda: rig.hanging == 1)
    rig.of_kv(Behaviour())
    rig.peers.silent = True
    known, rig.peers.table = rig.peers.table, {}
    rig.send("new", 3)
    assert rig.decode.wait("new").failed["new"].reason is Reason.SIDE_CHANNEL_UNREACHABLE
    rig.fabric.land()
    assert "under-way" in rig.decode.wait("under-way").received
    rig.peers.silent, rig.peers.table = False, known
    asked = len(rig.peers.asked)
    rig.works("again", seed=4)
    assert len(rig.peers.asked) == asked, "the connection was never given up"


def test_a_refused_handshake_is_the_requests_cause(rig: Rig) -> None:
    rig.peers.table["prefill/1"] = Failure(Reason.MODEL_MISMATCH, "a against b")
    rig.send("r")
    assert rig.decode.wait("r").failed["r"] == Failure(Reason.MODEL_MISMATCH, "a against b")


def test_an_answer_of_another_incarnation_is_refused(rig: Rig) -> None:
    rig.peers.table["prefill/1"] = rig.add_prefill("prefill/2").metadata
    rig.send("r")
    assert rig.decode.wait("r").failed["r"].reason is Reason.PEER_RESTARTED


def test_a_handshake_that_never_ends_is_ended_by_the_lease(rig: Rig) -> None:
    rig.peers.hold = True
    rig.send("r", lease=0.1)
    assert rig.decode.wait("r").failed["r"].reason is Reason.LEASE_EXPIRED
    rig.peers.release()  # too late, and nobody minds
    rig.decode.nothing()
    rig.works("next")


def test_a_peer_source_that_raises_fails_the_request(rig: Rig) -> None:
    good, rig.peers.connect = rig.peers.connect, None  # type: ignore[assignment, method-assign]
    rig.send("r")
    assert rig.decode.wait("r").failed["r"].reason is Reason.BACKEND_ERROR
    rig.peers.connect = good  # type: ignore[method-assign]
    rig.works("next")


def test_metadata_that_nixl_refuses_fails_the_request(rig: Rig) -> None:
    import msgspec

    shard = msgspec.structs.replace(rig.prefill.metadata.shards[0], agent_metadata=b"?")
    rig.peers.table["prefill/1"] = msgspec.structs.replace(rig.prefill.metadata, shards=(shard,))
    rig.send("r")
    assert rig.decode.wait("r").failed["r"].reason is Reason.BACKEND_ERROR
    rig.peers.table["prefill/1"] = rig.prefill.metadata
    rig.works("next")


def test_a_peer_without_the_needed_shard_fails_the_request(two: Rig) -> None:
    import msgspec

    whole = two.prefill.metadata
    two.peers.table["prefill/1"] = msgspec.structs.replace(whole, shards=whole.shards[:1])
    two.send("r")
    assert two.decode.wait("r").failed["r"].reason is Reason.SHARD_MISSING
    two.peers.table["prefill/1"] = whole
    two.works("next")


def test_wrong_probe_bytes_stop_the_peer_before_any_kv(rig: Rig) -> None:
    rig.prefill.agents[0]._probe.bytes[100] ^= 1
    rig.send("r")
    failure = rig.decode.wait("r").failed["r"]
    assert failure.reason is Reason.PROBE_CORRUPTED
    assert "offset 100" in failure.message
    assert not rig.decode.cache.bytes.any()
    rig.prefill.agents[0]._probe.bytes[100] ^= 1
    rig.works("next")


def test_a_warm_up_that_hangs_holds_no_blocks(rig: Rig) -> None:
    rig.fabric.behave = lambda _: Behaviour(hang=True)
    rig.send("r", lease=60.0)
    links = rig.decode.receiver._connections.by_engine
    eventually(lambda: [link.stalled for link in links.values()] not in ([], [None]))
    posted = rig.fabric.posted
    rig.send("s", 2)
    assert rig.decode.wait("s").failed["s"].reason is Reason.TRANSFER_STALLED
    assert rig.fabric.posted == posted, "the link is known to hang: nothing is tried"
    rig.fabric.behave = lambda _: Behaviour()
    assert "r" in rig.decode.wait("r").received, "with nothing else to lose, the agent goes"
    rig.works("next")


# Abort at each moment.


def test_abort_during_the_handshake(rig: Rig) -> None:
    rig.peers.hold = True
    rig.send("r")
    rig.decode.abandon("r")
    results = rig.decode.wait("r")
    assert results.abandoned == {"r"}
    assert "r" in results.failed
    rig.peers.release()
    rig.works("next")


def test_abort_during_the_warm_up(rig: Rig) -> None:
    rig.fabric.behave = lambda _: Behaviour(polls=200)
    rig.send("r")
    eventually(lambda: len(rig.fabric.flying) == 1)
    rig.decode.abandon("r")
    assert rig.decode.wait("r").abandoned == {"r"}
    rig.works("next")


def test_abort_of_what_is_posted_waits_for_it(rig: Rig) -> None:
    rig.of_kv(Behaviour(hang=True))
    rig.send("r")
    eventually(lambda: rig.hanging == 1)
    rig.decode.abandon("r")
    rig.decode.nothing(0.1)
    rig.fabric.land()
    assert rig.decode.wait("r").abandoned == {"r"}


def test_abort_before_and_after(rig: Rig) -> None:
    rig.decode.abandon("r")
    rig.works("r")
    rig.decode.abandon("r", "never")
    rig.decode.nothing()


# The thread.


def test_a_broken_turn_costs_the_agent_and_not_the_thread(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.works("before", seed=1)
    rig.of_kv(Behaviour(hang=True), first=1)
    rig.send("r", 2)
    eventually(lambda: rig.hanging == 1)
    good = rig.decode.receiver._connections.probing.step

    def broken() -> bool:
        monkeypatch.setattr(rig.decode.receiver._connections.probing, "step", good)
        raise MemoryError("a turn that breaks")

    monkeypatch.setattr(rig.decode.receiver._connections.probing, "step", broken)
    rig.decode.receiver.probe(rig.prefill.metadata)
    assert "r" in rig.decode.wait("r").received, "it is read again over the new agent"
    assert rig.fabric.land() == 0
    rig.works("next")


def test_a_dead_thread_fails_everything_instead_of_hanging(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.of_kv(Behaviour(hang=True))
    rig.send("posted")
    eventually(lambda: rig.hanging == 1)
    rig.peers.hold = True
    rig.send_from(rig.add_prefill("prefill/2"), "waiting", 2)

    def broken() -> bool:
        raise RuntimeError("every turn breaks")

    monkeypatch.setattr(rig.decode.receiver._executor, "turn", broken)
    late = []
    while rig.decode.receiver._thread.is_alive():
        late.append(f"late{len(late)}")
        rig.send(late[-1], 3)
        time.sleep(0.001)
    results = rig.decode.wait("posted", "waiting", *late)
    assert {failure.reason for failure in results.failed.values()} == {Reason.BACKEND_ERROR}
    assert rig.fabric.land() == 0
    rig.send("later", 4)
    assert rig.decode.wait("later").failed["later"].reason is Reason.BACKEND_ERROR
    probe = rig.decode.receiver.probe(rig.prefill.metadata).result(timeout=60)
    assert probe.failure is not None


def test_closing_fails_what_is_under_way(rig: Rig) -> None:
    rig.of_kv(Behaviour(hang=True))
    rig.send("posted")
    eventually(lambda: rig.hanging == 1)
    rig.peers.hold = True
    rig.send_from(rig.add_prefill("prefill/2"), "waiting", 2)
    assert rig.decode.receiver.close()
    assert set(rig.decode.wait("posted", "waiting").failed) == {"posted", "waiting"}
    assert rig.fabric.land() == 0


def test_a_port_that_cannot_be_made_is_start_s_error() -> None:
    fabric = Fabric()
    with pytest.raises(RuntimeError, match="no nixl here"):
        Decode(_Refusing(fabric), FakePeers(), **CACHE)  # type: ignore[arg-type]


class _Refusing:
    def __init__(self, fabric: Fabric) -> None:
        self.fabric = fabric

    def agent(self, name: str) -> object:
        raise RuntimeError(f"no nixl here for {name}")


def test_an_odd_event_raises_nothing_in_the_engine_step(rig: Rig) -> None:
    rig.decode.receiver.pass_on([None])  # type: ignore[list-item]
    rig.works("next")


# Probes.


def test_a_probe_reads_every_shard_whole(two: Rig) -> None:
    result = two.decode.receiver.probe(two.prefill.metadata).result(timeout=60)
    assert result.failure is None
    assert result.nbytes == 2 * PROBE_BYTES
    assert result.bytes_per_second > 0


def test_a_probe_finds_a_wrong_byte_at_the_end(two: Rig) -> None:
    two.prefill.agents[1]._probe.bytes[-1] ^= 255
    result = two.decode.receiver.probe(two.prefill.metadata).result(timeout=60)
    assert result.failure is not None
    assert result.failure.reason is Reason.PROBE_CORRUPTED
    assert f"offset {PROBE_BYTES - 1}" in result.failure.message
    assert result.nbytes == PROBE_BYTES, "the first shard is right"
    two.works("kv", seed=1)


def test_probes_of_hanging_peers_end_and_disturb_nobody(rig: Rig) -> None:
    rig.works("before", seed=1)
    others = [rig.add_prefill(f"other{number}/1") for number in range(4)]
    rig.fabric.behave = lambda t: Behaviour(hang=t.peer.startswith("other"))
    futures = [rig.decode.receiver.probe(other.metadata) for other in others]
    for number in range(20):
        rig.send(f"r{number}", 2)
        assert f"r{number}" in rig.decode.wait(f"r{number}").received
    for future in futures:
        failure = future.result(timeout=60).failure
        assert failure is not None
        assert failure.reason is Reason.TRANSFER_STALLED
    rig.works("after")


def test_a_check_of_an_idle_link_reads_one_page_a_shard(two: Rig) -> None:
    two.works("before", seed=1)
    eventually(lambda: not two.fabric.flying)
    for source in two.decode.receiver._connections.by_engine.get("prefill/1").sources:  # type: ignore[union-attr]
        source.moved_at -= RECENT_SECONDS
    posted = two.fabric.posted
    result = two.decode.receiver.probe(two.prefill.metadata, check=True).result(timeout=60)
    assert result.failure is None
    assert result.nbytes == 2 * 4096
    assert two.fabric.posted == posted + 2


def test_a_check_of_a_link_over_which_kv_has_just_come_reads_nothing(two: Rig) -> None:
    two.works("before", seed=1)
    posted = two.fabric.posted
    result = two.decode.receiver.probe(two.prefill.metadata, check=True).result(timeout=60)
    assert (result.failure, result.nbytes) == (None, 0)
    assert two.fabric.posted == posted


def cut(rig: Rig, prefill: Prefill) -> Failure:
    """Have nothing come from ``prefill`` any more; returns what a check finds."""
    rig.works("before", prefill, seed=1)
    rig.fabric.behave = lambda t: Behaviour(hang=t.peer.startswith(prefill.engine_id))
    link = rig.decode.receiver._connections.by_engine.get(prefill.engine_id)
    assert link is not None
    for source in link.sources:
        source.moved_at = 0.0
    failure = rig.decode.receiver.probe(prefill.metadata, check=True).result(timeout=60).failure
    assert failure is not None
    return failure


def test_a_cut_link_is_found_by_a_check_and_used_no_more(rig: Rig) -> None:
    failure = cut(rig, rig.prefill)
    assert failure.reason is Reason.TRANSFER_STALLED
    for word in ("prefill/1", "rank (0, 0)", "network policies"):
        assert word in failure.message
    rig.send("r", 2)
    assert rig.decode.wait("r").failed["r"] == failure  # not at the lease's end
    again = rig.decode.receiver.probe(rig.prefill.metadata).result(timeout=60)
    assert again.failure == failure
    (link,) = rig.decode.receiver._connections.by_engine.values()
    rig.fabric.land()  # the network delivers late what it held
    eventually(lambda: link.stalled is None)
    rig.works("next", seed=3)


def test_a_cut_link_is_made_anew_beside_traffic_that_does_not_stop(rig: Rig) -> None:
    """What was sent into the cut may never come: the agent is rebuilt, and nobody pays for it."""
    other = rig.add_prefill("other/1")
    assert cut(rig, other).reason is Reason.TRANSFER_STALLED
    cut_off = rig.fabric.behave
    rig.fabric.behave = lambda t: replace(cut_off(t), delay=0.02)
    agents = {name for name in rig.fabric.agents if name.startswith("decode")}
    sent, ended = 0, 0
    until = time.monotonic() + 60.0
    while ended < sent or agents & set(rig.fabric.agents):
        assert time.monotonic() < until, "the agent is never rebuilt"
        # One at a time, so that they do not end together: never idle.
        if sent - ended < 3 and agents & set(rig.fabric.agents):
            rig.send(f"r{sent}", 1 + sent % 5)
            sent += 1
        results = rig.decode.take()
        assert not results.failed
        ended += len(results.finished)
        time.sleep(0.002)
    eventually(lambda: rig.hanging == 1)  # the new agent's own warm-up alone
    rig.fabric.land()
    eventually(lambda: not rig.decode.receiver._connections.by_engine["other/1"].stalled)
    rig.works("healed", other, seed=6)
    assert rig.decode.receiver.probe(other.metadata).result(timeout=60).failure is None


def test_a_check_that_waits_behind_kv_is_not_late(rig: Rig) -> None:
    rig.works("before", seed=1)
    link = rig.decode.receiver._connections.by_engine.get("prefill/1")
    assert link is not None
    (source,) = link.sources
    source.moved_at = 0.0

    def hang(_: Transfer) -> Behaviour:
        source.moved_at = time.monotonic() + 600  # KV keeps landing for more than a check may take
        return Behaviour(hang=True)

    rig.fabric.behave = hang
    checked = rig.decode.receiver.probe(rig.prefill.metadata, check=True)
    eventually(lambda: rig.hanging == 1)
    time.sleep(3.0)
    assert not checked.done()
    rig.fabric.land()
    assert checked.result(timeout=60).failure is None


def test_a_check_cut_short_by_a_rebuild_accuses_nobody(rig: Rig) -> None:
    rig.works("before", seed=1)
    other = rig.add_prefill("other/1")
    rig.works("other", other, seed=2)
    for engine_id in ("prefill/1", "other/1"):
        link = rig.decode.receiver._connections.by_engine.get(engine_id)
        assert link is not None
        link.sources[0].moved_at = 0.0
    rig.fabric.behave = lambda _: Behaviour(hang=True)
    checked = rig.decode.receiver.probe(rig.prefill.metadata, check=True)
    eventually(lambda: rig.hanging == 1)
    rig.decode.receiver._inbox.put(
        lambda: rig.decode.receiver._executor.rebuild(Failure(Reason.BACKEND_ERROR, "x"))
    )
    result = checked.result(timeout=60)
    assert result.failure is None
    rig.works("after", seed=3)


def test_a_cut_is_seen_within_fifteen_seconds() -> None:
    """The operator asks every second, and a report takes a moment."""
    from pdcluster_connector.vllm.worker_side.link_keeper import CHECK_SECONDS

    assert CHECK_SECONDS[1] + RECENT_SECONDS + ReceiverOptions().check_seconds <= 14.0


def test_a_cancelled_probe_is_no_trouble(rig: Rig) -> None:
    first: Future[ProbeResult] = rig.decode.receiver.probe(rig.prefill.metadata)
    first.cancel()
    assert rig.decode.receiver.probe(rig.prefill.metadata).result(timeout=60).failure is None


def test_pages_of_the_pattern_differ_between_places_ranks_and_incarnations() -> None:
    from pdcluster_connector.nixl_io.serving_agent import pattern

    pages = [
        pattern("a/1", (0, 0), 8192)[:4096],
        pattern("a/1", (0, 0), 8192)[4096:],
        pattern("a/1", (0, 1), 4096),
        pattern("a/2", (0, 0), 4096),
    ]
    assert (pages[0] == pattern("a/1", (0, 0), 100_000)[:4096]).all()
    for one in range(4):
        for other in range(one):
            assert np.mean(pages[one] == pages[other]) < 0.05


def test_who_waits_goes_on_when_a_receive_has_ended(rig: Rig) -> None:
    waiting = rig.decode.receiver
    for number in range(3):
        rig.send(f"r{number}")
        before = time.monotonic()
        waiting.wait(60.0)
        waiting.wait(60.0)
        assert time.monotonic() - before < 60.0
        assert waiting.results().finished == {f"r{number}"}
    waiting.wait(0.001)
    assert waiting.results().finished == set()
