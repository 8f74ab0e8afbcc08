"""A receive is believed only if its lease stood after the data had landed, and was ours."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from left_open import open_handles
from transfer_rig import Decode, FakePeers, Prefill, eventually

from pdcluster_connector.compat.reasons import Reason
from pdcluster_connector.nixl_io.serving_agent import WORD_BYTES
from pdcluster_connector.protocol.failure import Failure
from pdcluster_connector.protocol.messages import CLEARED, SLOTS
from pdcluster_connector.testing.nixl import Behaviour, Fabric, Transfer
from pdcluster_connector.transfer import receiver
from pdcluster_connector.transfer.options import ReceiverOptions
from pdcluster_connector.transfer.planned_reads import FENCE_WORDS, FenceWords
from pdcluster_connector.transfer.receive_machine import Failed, State

CACHE = {"kv_heads": 4, "layers": 2, "num_blocks": 32, "block_tokens": 4, "token_bytes": 4}
BLOCKS, OWN = [3, 4, 5], [28, 27, 26]
TOKENS = 10
SEED, OTHER = 7, 8  # as Prefill.give_up counts
KINDS = {8: "word", 4096: "probe"}  # by bytes; all others are data


@pytest.fixture(autouse=True)
def rare_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """While nothing moves, look five times less often: these tests wait for seconds."""
    monkeypatch.setattr(receiver, "LONGEST_SLEEP", 5e-3)


class Rig:
    """A prefill engine, one decode rank, and transfers of KV that land when the test says so."""

    def __init__(self, tensor: int = 1) -> None:
        self.fabric, self.peers = Fabric(), FakePeers()
        self.prefill = Prefill(self.fabric, tensor=tensor, **CACHE)
        self.peers.table[self.prefill.engine_id] = self.prefill.metadata
        options = ReceiverOptions(drain_deadline_seconds=3.0, probe_seconds=5.0)
        self.decode = Decode(self.fabric, self.peers, options=options, **CACHE)
        self.held = True
        self.posted: list[str] = []
        self.fabric.behave = self.behave

    def behave(self, transfer: Transfer) -> Behaviour:
        kind = KINDS.get(transfer.nbytes, "data")
        self.posted.append(kind)
        return Behaviour(hang=self.held and kind == "data")

    def send(self, request_id: str = "r", *, lease: float = 20.0, claimed: bool = True) -> None:
        ticket = self.prefill.ticket(SEED, BLOCKS, TOKENS)
        request = self.decode.request(request_id, ticket, OWN, lease=lease, claimed=claimed)
        self.decode.receive(request)

    @property
    def under_way(self) -> int:
        """Transfers of KV: a probe flies for a moment, too."""
        with self.fabric.lock:
            return sum(transfer.nbytes not in KINDS for transfer in self.fabric.flying)

    def give_to_another(self, word: int = CLEARED) -> None:
        """End the lease, and compute another request in its blocks."""
        self.prefill.give_up(SEED, BLOCKS, TOKENS, word)

    def free_words(self) -> int:
        return len(self.decode.receiver._connections.fence_words.free)

    def right(self) -> bool:
        return self.decode.cache.wrong_tokens(SEED, OWN, 0, TOKENS) == []


@pytest.fixture(params=[1, 2])
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    made = Rig(request.param)
    yield made
    made.decode.receiver.close()


def test_the_words_are_read_once_a_rank_after_all_data(rig: Rig) -> None:
    ranks = len(rig.prefill.caches)
    rig.send()
    eventually(lambda: rig.under_way == ranks)
    for transfer in list(rig.fabric.flying):
        assert "word" not in rig.posted, "beside the data it proves nothing"
        rig.fabric.land(transfer)
        time.sleep(0.01)
    assert "r" in rig.decode.wait("r").received
    assert rig.right()
    assert [kind for kind in rig.posted if kind != "probe"] == ["data"] * ranks + ["word"] * ranks
    assert rig.free_words() == FENCE_WORDS


def test_blocks_that_were_given_away_are_found_out_fifty_times(rig: Rig) -> None:
    """The data is another request's by the time it lands. Every second time, so is the word."""
    for run in range(50):
        rig.held = True
        rig.send(f"r{run}")
        eventually(lambda: rig.under_way == len(rig.prefill.caches))
        rig.give_to_another(OTHER if run % 2 else CLEARED)
        rig.fabric.land()
        failure = rig.decode.wait(f"r{run}").failed[f"r{run}"]
        assert failure.reason is Reason.LEASE_LOST
        assert not rig.right(), "the blocks do hold another request's KV"
        if run % 10 == 0:
            rig.held = False
            rig.send(f"next {run}")
            assert f"next {run}" in rig.decode.wait(f"next {run}").received
            assert rig.right()
    assert rig.free_words() == FENCE_WORDS
    assert open_handles(rig.fabric) == 0


def test_one_ranks_word_is_enough_to_fail(rig: Rig) -> None:
    rig.send()
    eventually(lambda: rig.under_way == len(rig.prefill.caches))
    rig.prefill.agents[-1].write_lease_words({SEED: CLEARED})
    rig.fabric.land()
    failure = rig.decode.wait("r").failed["r"]
    assert failure.reason is Reason.LEASE_LOST
    assert f"rank (0, {len(rig.prefill.caches) - 1})" in failure.message


def test_a_slot_that_is_taken_again_holds_no_word() -> None:
    """A fence that was not read yet must not be taken for the one before it."""
    words = FenceWords()
    slot = words.take()
    assert slot is not None
    words.bytes_of(slot, WORD_BYTES)[:] = 255
    assert words.read(slot) == 2**64 - 1
    words.give_back(slot)
    assert words.take() == slot
    assert words.read(slot) == CLEARED


@pytest.mark.parametrize("bit", [0, 31, 32, 63])
def test_each_bit_of_a_lease_word_counts(rig: Rig, bit: int) -> None:
    rig.send()
    eventually(lambda: rig.under_way == len(rig.prefill.caches))
    rig.give_to_another(SEED ^ (1 << bit))
    rig.fabric.land()
    assert rig.decode.wait("r").failed["r"].reason is Reason.LEASE_LOST


@pytest.mark.parametrize("slot", [-1, SLOTS, 2**31 - 1])
def test_a_ticket_without_a_lease_word_is_not_read(rig: Rig, slot: int) -> None:
    ticket = rig.prefill.ticket(SEED, BLOCKS, TOKENS, fence_slot=slot)
    rig.decode.receive(rig.decode.request("r", ticket, OWN))
    failure = rig.decode.wait("r").failed["r"]
    assert failure.reason is Reason.TICKET_INVALID
    assert "data" not in rig.posted


def test_nothing_is_reported_before_the_claim(rig: Rig) -> None:
    rig.held = False
    rig.send(claimed=False)
    eventually(lambda: rig.posted.count("word") == len(rig.prefill.caches))
    rig.decode.nothing()
    rig.decode.acknowledge("r", "unknown", until=time.monotonic() + 20)
    assert "r" in rig.decode.wait("r").received


def test_a_refused_claim_fails_the_receive_when_nothing_can_write_any_more(rig: Rig) -> None:
    rig.send(claimed=False)
    eventually(lambda: rig.under_way == len(rig.prefill.caches))
    refused = Failure(Reason.LEASE_CLAIMED, "another engine's")
    rig.decode.receiver.pass_on([("r", Failed(refused))])
    rig.decode.nothing()
    rig.fabric.land()
    assert rig.decode.wait("r").failed["r"] == refused
    assert "word" not in rig.posted


def test_a_slow_transfer_is_well_while_its_lease_is_renewed(rig: Rig) -> None:
    rig.send(lease=3.0)
    eventually(lambda: rig.under_way == len(rig.prefill.caches))
    rig.decode.acknowledge("r", until=time.monotonic() + 20)
    rig.decode.nothing(3.2)
    rig.fabric.land()
    assert "r" in rig.decode.wait("r").received


def test_without_renewals_it_fails_when_the_lease_ends(rig: Rig) -> None:
    executor = rig.decode.receiver._executor
    executor._drain_seconds = 60.0  # nothing but the landing ends it
    rig.send(lease=3.0)
    eventually(lambda: rig.under_way == len(rig.prefill.caches))
    eventually(lambda: [j.machine.state for j in executor.jobs.values()] == [State.QUARANTINE])
    rig.fabric.land()
    assert rig.decode.wait("r").failed["r"].reason is Reason.TRANSFER_STALLED


def test_a_lease_word_that_never_comes_costs_the_agent_and_no_slot(rig: Rig) -> None:
    rig.fabric.behave = lambda transfer: Behaviour(hang=transfer.nbytes == 8)
    rig.send(lease=3.0)
    failure = rig.decode.wait("r").failed["r"]
    assert failure.reason is Reason.TRANSFER_STALLED
    rig.held, rig.fabric.behave = False, rig.behave
    rig.send("next")
    assert "next" in rig.decode.wait("next").received
    assert rig.free_words() == FENCE_WORDS
