"""The leases of a prefill engine against a model that scans everything at every step."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pdcluster_connector.protocol.messages import CLEARED, SLOTS, LeaseRequest, Standing
from pdcluster_connector.sidechannel import lease_desk
from pdcluster_connector.sidechannel.lease_desk import LeaseDesk

ids = st.sampled_from(["a", "b", "c", "d"])
tokens = st.integers(1, 3)
holders = st.sampled_from(["d/1", "d/2", "e/1_dp0", "e/1_dp1"])
FEW = 3  # slots; fewer than there are ids
SECONDS = 10.0


def engine_of(holder: str) -> str:
    return holder.partition("_dp")[0]


class Desk(LeaseDesk):
    """A desk whose time the test sets, asked for one lease at a time."""

    def __init__(self, slots: int = SLOTS) -> None:
        self.now = 0.0
        super().__init__(SECONDS, lambda: self.now, slots)

    def renew(self, key: str, token: int, holder: str) -> Standing:
        reply = self.answer(LeaseRequest("p", holder, renewals=((key, token),)))
        if reply.renewed:
            return Standing.HELD
        if reply.claimed:
            return Standing.CLAIMED
        return Standing.EXPIRED if reply.expired else Standing.GONE

    def release(self, key: str, token: int, holder: str) -> bool:
        """Whether the lease has ended by it."""
        before = self.held + len(self._armed)
        self.answer(LeaseRequest("p", holder, releases=((key, token),)))
        return self.held + len(self._armed) < before

    def expired(self, now: float) -> list[str]:
        self.now = now
        return self.take().expired


class LeaseMachine(RuleBasedStateMachine):
    """The model: request -> [token, deadline or None, slot or None, engine, its readers].

    ``written`` is the table of words of a rank that has carried out all orders.
    """

    def __init__(self) -> None:
        super().__init__()
        self.desk = Desk(FEW)
        self.model: dict[str, list[Any]] = {}
        self.ended: list[str] = []
        self.over: dict[str, int] = {}  # the tokens of the last ones that expired
        self.written = dict.fromkeys(range(FEW), CLEARED)

    @rule(key=ids, token=tokens)
    def arm(self, key: str, token: int) -> None:
        kept = self.model.get(key)
        taken = {slot for _, _, slot, *_ in self.model.values() if slot is not None}
        self.desk.arm(key, token)
        if kept is not None and kept[1] is not None:
            return  # granted already
        _, slot = self.desk.place(key)
        if kept is not None and kept[2] is not None:
            assert slot == kept[2], "scheduled again, the word is replaced"
        elif len(taken) == FEW:
            assert slot is None
        else:
            assert slot not in taken
            assert slot is not None
        self.model[key] = [token, None, slot, "", set()]

    @rule(key=ids)
    def grant(self, key: str) -> None:
        kept = self.model.get(key)
        expected = kept is not None and kept[1] is None
        assert self.desk.grant(key) is expected
        if expected:
            self.model[key][1] = self.desk.now + SECONDS

    @rule(key=ids, token=tokens, holder=holders)
    def renew(self, key: str, token: int, holder: str) -> None:
        kept = self.model.get(key)
        expected = Standing.HELD
        if kept is None or kept[0] != token or kept[1] is None:
            expected = Standing.EXPIRED if self.over.get(key) == token else Standing.GONE
        elif kept[3] not in ("", engine_of(holder)):
            expected = Standing.CLAIMED
        assert self.desk.renew(key, token, holder) is expected
        if expected is Standing.HELD:
            kept[1], kept[3] = self.desk.now + SECONDS, engine_of(holder)
            kept[4].add(holder)

    @rule(key=ids, token=tokens, holder=holders)
    def release(self, key: str, token: int, holder: str) -> None:
        kept = self.model.get(key)
        ours = kept is not None and kept[0] == token and kept[3] in ("", engine_of(holder))
        ends = ours and kept[4] <= {holder}
        assert self.desk.release(key, token, holder) is ends, "no reader loses its blocks"
        if ours:
            kept[4].discard(holder)
        if ends:
            del self.model[key]
            self.ended.append(key)

    @rule(key=ids)
    def drop(self, key: str) -> None:
        self.desk.drop(key)
        self.model.pop(key, None)

    @rule(span=st.floats(0.0, 6.0))
    def step(self, span: float) -> None:
        """After a step's orders, the words are those of the leases that stand, and no others."""
        self.desk.now += span
        now = self.desk.now
        due = {k for k, (_, end, *_) in self.model.items() if end is not None and end <= now}
        changes = self.desk.take()
        assert sorted(changes.expired) == sorted(due)
        assert changes.released == self.ended
        for key in due:
            self.over[key] = self.model.pop(key)[0]
        self.ended = []
        self.written |= changes.words
        words = {slot: token for token, _, slot, *_ in self.model.values() if slot is not None}
        assert self.written == dict.fromkeys(range(FEW), CLEARED) | words
        assert self.desk.take().words == {}

    @invariant()
    def counts(self) -> None:
        held = sum(1 for _, end, *_ in self.model.values() if end is not None)
        assert self.desk.held == held
        assert len(self.desk._armed) == len(self.model) - held
        for key in ("a", "b", "c", "d"):
            kept = self.model.get(key)
            assert self.desk.place(key) == (None if kept is None else (kept[0], kept[2]))


LeaseMachine.TestCase.settings = settings(stateful_step_count=40)
TestLeaseMachine = LeaseMachine.TestCase


def granted(*keys: str, slots: int = SLOTS) -> Desk:
    """A desk with leases of token 1, granted at 0 s: they end at 10 s."""
    desk = Desk(slots)
    for key in keys:
        desk.arm(key, 1)
        desk.grant(key)
    return desk


def test_renewals_do_not_grow_the_table() -> None:
    desk = granted("r")
    for second in range(10_000):
        assert desk.expired(float(second)) == []
        assert desk.renew("r", 1, "d") is Standing.HELD
        assert (desk.held, len(desk._granted), len(desk._armed)) == (1, 1, 0)
    assert desk.expired(1e9) == ["r"]
    assert desk.held == 0


def test_what_is_remembered_of_expired_leases_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_desk, "SLOTS", 3)
    desk = granted(*map(str, range(5)))
    assert desk.expired(10.0) == ["0", "1", "2", "3", "4"]
    assert list(desk._expired) == ["2", "3", "4"]
    assert [desk.renew(key, 1, "d") for key in ("1", "2")] == [Standing.GONE, Standing.EXPIRED]


def test_a_lease_without_a_slot_writes_no_word_and_gives_no_slot_back() -> None:
    desk = Desk(1)
    for request_id in ("has", "waits"):
        desk.arm(request_id, 7)
    assert desk.place("waits") == (7, None)
    assert desk.take().words == {0: 7}
    desk.drop("waits")
    assert desk.take().words == {}
    desk.drop("has")
    assert desk.take().words == {0: CLEARED}
    for request_id in ("next", "last"):
        desk.arm(request_id, 8)
    assert [desk.place(request_id) for request_id in ("next", "last")] == [(8, 0), (8, None)]


def test_a_request_id_that_comes_again_has_a_deadline_of_its_own() -> None:
    desk = Desk()
    for turn in range(1, 100):
        desk.arm("r", turn)
        desk.grant("r")
        assert desk.expired(float(turn)) == []
        assert len(desk._granted) == 1
        if turn < 99:
            assert desk.release("r", turn, "d")
    assert desk.expired(107.9) == []
    assert desk.expired(108.0) == ["r"], "granted at 98 s"


def test_a_rank_reads_on_when_another_of_its_engine_has_released() -> None:
    """``n=2`` on an engine of two data-parallel ranks: both come with the one ticket."""
    desk = granted("r")
    assert desk.renew("r", 1, "d/1_dp0") is Standing.HELD
    assert desk.renew("r", 1, "d/1_dp1") is Standing.HELD
    for stranger in ("d/2_dp1", "e/1_dp1", "d/1x"):
        assert desk.renew("r", 1, stranger) is Standing.CLAIMED
        assert not desk.release("r", 1, stranger)
    assert not desk.release("r", 1, "d/1_dp0")
    assert not desk.release("r", 1, "d/1_dp0"), "sent again"
    assert not desk.release("r", 1, "d/1_dp2"), "a rank that computed the prompt itself"
    assert desk.renew("r", 1, "d/1_dp1") is Standing.HELD
    assert desk.release("r", 1, "d/1_dp1")
    assert desk.renew("r", 1, "d/1_dp2") is Standing.GONE


@pytest.mark.parametrize("first", ["d/1_dp0", "d/1_dp1", "d/1_dp2"])
def test_a_lease_ends_with_its_last_reader_whichever_that_is(first: str) -> None:
    desk = granted("r")
    ranks = ["d/1_dp0", "d/1_dp1", "d/1_dp2"]
    assert [desk.renew("r", 1, rank) for rank in ranks] == [Standing.HELD] * 3
    order = [first, *(rank for rank in reversed(ranks) if rank != first)]
    assert [desk.release("r", 1, rank) for rank in order] == [False, False, True]


@pytest.mark.parametrize("holder", ["d/1", "_dp0", "/_dp0"])
def test_whoever_claimed_first_holds_the_lease_whatever_its_name(holder: str) -> None:
    """An id that is nothing but a data-parallel rank has an empty engine."""
    desk = granted("r")
    assert desk.renew("r", 1, holder) is Standing.HELD
    assert desk.renew("r", 1, "e/1") is Standing.CLAIMED
    assert not desk.release("r", 1, "e/1")
    assert desk.renew("r", 1, holder) is Standing.HELD
    assert desk.release("r", 1, holder)


def test_a_renewal_counts_from_the_moment_of_the_answer() -> None:
    desk = granted("r")
    desk.now = 9.0
    assert desk.renew("r", 1, "d") is Standing.HELD
    assert desk.renew("r", 2, "d") is Standing.GONE, "another token moves nothing"
    assert desk.expired(18.9) == []
    assert desk.expired(19.0) == ["r"]


def test_a_handover_lasts_from_the_grant_to_the_first_renewal() -> None:
    desk = granted("r", "late", "never")
    desk.now = 3.0
    desk.renew("r", 1, "d/1_dp0")
    desk.now = 4.0
    desk.renew("r", 1, "d/1_dp1")
    desk.renew("r", 1, "e/1")
    desk.renew("late", 1, "e/1")
    assert desk.take().handovers == [3.0, 4.0]
    assert desk.take().handovers == [], "each once"


def test_a_used_request_id_does_not_inherit_the_old_deadline() -> None:
    desk = granted("r")
    desk.now = 5.0
    assert desk.release("r", 1, "d")
    desk.arm("r", 2)
    desk.grant("r")
    assert desk.expired(10.0) == []
    assert not desk.release("r", 1, "d")
    assert desk.expired(15.0) == ["r"]


def test_a_lease_that_was_renewed_keeps_no_other_from_its_end() -> None:
    desk = granted("renewed", "ended")
    desk.now = 5.0
    assert desk.renew("renewed", 1, "d/1") is Standing.HELD
    assert desk.expired(10.0) == ["ended"]
    assert desk.expired(15.0) == ["renewed"]


def test_16_384_leases_have_a_word_and_the_next_one_has_none() -> None:
    """docs/metrics.md says so. Decode reads the word over the network, so it has its place."""
    desk = Desk()
    for number in range(16_385):
        desk.arm(str(number), 1)
    slots = [(desk.place(str(number)) or (0, None))[1] for number in range(16_385)]
    assert set(slots[:-1]) == set(range(16_384))
    assert slots[-1] is None


def test_a_hundred_thousand_leases_expire_in_order() -> None:
    desk = Desk()
    for number in range(100_000):
        desk.now = number / 100
        desk.arm(str(number), number)
        desk.grant(str(number))
    seen: list[str] = []
    for second in range(1, 1012):
        seen += (expired := desk.expired(float(second)))
        assert all(second - 1 < int(key) / 100 + SECONDS <= second for key in expired)
    assert seen == [str(number) for number in range(100_000)]


def test_the_word_of_a_lease_that_has_ended_is_that_of_memory_never_written() -> None:
    """Decode engines of other versions read it, and no token is 0."""
    desk = granted("r")
    assert desk.take().words == {0: 1}
    desk.now = 10.0
    changes = desk.take()
    assert (changes.expired, changes.words) == (["r"], {0: 0})
