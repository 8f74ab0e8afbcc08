"""The lease table against a model that scans everything at every step."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pdcluster_connector.protocol.lease import CLEARED, Standing
from pdcluster_connector.sidechannel.lease_desk import LeaseTable

ids = st.sampled_from(["a", "b", "c", "d"])
tokens = st.integers(1, 3)
holders = st.sampled_from(["d/1", "d/2", "e/1_dp0", "e/1_dp1"])
spans = st.floats(0.0, 10.0)
SLOTS = 3  # fewer than there are ids


def engine_of(holder: str) -> str:
    return holder.partition("_dp")[0]


class LeaseMachine(RuleBasedStateMachine):
    """The model: request -> [token, deadline or None, slot or None, engine, its readers].

    ``written`` is the table of words of a rank that has carried out all orders.
    """

    def __init__(self) -> None:
        super().__init__()
        self.table = LeaseTable(SLOTS)
        self.model: dict[str, list[Any]] = {}
        self.written = dict.fromkeys(range(SLOTS), CLEARED)
        self.now = 0.0

    @rule(key=ids, token=tokens)
    def arm(self, key: str, token: int) -> None:
        kept = self.model.get(key)
        expected = kept is None or kept[1] is None
        taken = {slot for _, _, slot, *_ in self.model.values() if slot is not None}
        assert self.table.arm(key, token) is expected
        if not expected:
            return
        _, slot = self.table.place(key)
        if kept is not None and kept[2] is not None:
            assert slot == kept[2], "scheduled again, the word is replaced"
        elif len(taken) == SLOTS:
            assert slot is None
        else:
            assert slot not in taken
            assert slot is not None
        self.model[key] = [token, None, slot, "", set()]

    @rule(key=ids, span=spans)
    def grant(self, key: str, span: float) -> None:
        kept = self.model.get(key)
        expected = kept is not None and kept[1] is None
        assert self.table.grant(key, self.now + span) is expected
        if expected:
            self.model[key][1] = self.now + span

    @rule(key=ids, token=tokens, holder=holders, span=spans)
    def renew(self, key: str, token: int, holder: str, span: float) -> None:
        kept = self.model.get(key)
        expected = Standing.HELD
        if kept is None or kept[0] != token or kept[1] is None:
            expected = Standing.GONE
        elif kept[3] not in ("", engine_of(holder)):
            expected = Standing.CLAIMED
        assert self.table.renew(key, token, holder, self.now + span) is expected
        if expected is Standing.HELD:
            kept[1], kept[3] = max(kept[1], self.now + span), engine_of(holder)
            kept[4].add(holder)

    @rule(key=ids, token=tokens, holder=holders)
    def release(self, key: str, token: int, holder: str) -> None:
        kept = self.model.get(key)
        ours = kept is not None and kept[0] == token and kept[3] in ("", engine_of(holder))
        ends = ours and kept[4] <= {holder}
        assert self.table.release(key, token, holder) is ends, "no reader loses its blocks"
        if ours:
            kept[4].discard(holder)
        if ends:
            del self.model[key]

    @rule(key=ids)
    def drop(self, key: str) -> None:
        self.table.drop(key)
        self.model.pop(key, None)

    @rule(span=st.floats(0.0, 6.0))
    def pass_time(self, span: float) -> None:
        self.now += span
        due = {k for k, (_, end, *_) in self.model.items() if end is not None and end <= self.now}
        expired = self.table.expire(self.now)
        assert sorted(expired) == sorted(due)
        for key in due:
            del self.model[key]

    @rule()
    def carry_out(self) -> None:
        """After a step's orders, the words are those of the leases that stand, and no others."""
        self.written |= self.table.take_words()
        words = {slot: token for token, _, slot, *_ in self.model.values() if slot is not None}
        assert self.written == dict.fromkeys(range(SLOTS), CLEARED) | words
        assert self.table.take_words() == {}

    @invariant()
    def counts(self) -> None:
        held = sum(1 for _, end, *_ in self.model.values() if end is not None)
        assert self.table.held == held
        assert self.table.armed == len(self.model) - held
        for key in ("a", "b", "c", "d"):
            kept = self.model.get(key)
            assert self.table.place(key) == (None if kept is None else (kept[0], kept[2]))


LeaseMachine.TestCase.settings = settings(stateful_step_count=40)
TestLeaseMachine = LeaseMachine.TestCase


def test_renewals_do_not_grow_the_heap() -> None:
    table = LeaseTable()
    table.arm("r", 1)
    table.grant("r", 10.0)
    for second in range(10_000):
        assert table.renew("r", 1, "d", second + 10.0)
        assert table.expire(float(second)) == []
        assert len(table._heap) == 1
    assert table.expire(1e9) == ["r"]
    assert table.held == 0


def test_a_lease_without_a_slot_writes_no_word_and_gives_no_slot_back() -> None:
    table = LeaseTable(1)
    for request_id in ("has", "waits"):
        table.arm(request_id, 7)
    assert table.place("waits") == (7, None)
    assert table.take_words() == {0: 7}
    table.drop("waits")
    assert table.take_words() == {}
    table.drop("has")
    assert table.take_words() == {0: CLEARED}
    assert [table.arm(request_id, 8) for request_id in ("next", "last")] == [True, True]
    assert [table.place(request_id) for request_id in ("next", "last")] == [(8, 0), (8, None)]


def test_a_request_id_that_comes_again_does_not_grow_the_heap() -> None:
    table = LeaseTable()
    for turn in range(1, 100):
        table.arm("r", turn)
        table.grant("r", turn + 10.0)
        assert table.expire(turn) == []
        assert len(table._heap) <= 11, "entries go when their time comes"
        if turn < 99:
            table.release("r", turn, "d")
    assert table.expire(108.9) == []
    assert len(table._heap) == 1
    assert table.expire(109.0) == ["r"]


def test_a_rank_reads_on_when_another_of_its_engine_has_released() -> None:
    """``n=2`` on an engine of two data-parallel ranks: both come with the one ticket."""
    table = LeaseTable()
    table.arm("r", 1)
    table.grant("r", 10.0)
    assert table.renew("r", 1, "d/1_dp0", 20.0) is Standing.HELD
    assert table.renew("r", 1, "d/1_dp1", 20.0) is Standing.HELD
    for stranger in ("d/2_dp1", "e/1_dp1", "d/1x"):
        assert table.renew("r", 1, stranger, 20.0) is Standing.CLAIMED
        assert not table.release("r", 1, stranger)
    assert not table.release("r", 1, "d/1_dp0")
    assert not table.release("r", 1, "d/1_dp0"), "sent again"
    assert not table.release("r", 1, "d/1_dp2"), "a rank that computed the prompt itself"
    assert table.renew("r", 1, "d/1_dp1", 30.0) is Standing.HELD
    assert table.release("r", 1, "d/1_dp1")
    assert table.renew("r", 1, "d/1_dp2", 30.0) is Standing.GONE


@pytest.mark.parametrize("first", ["d/1_dp0", "d/1_dp1", "d/1_dp2"])
def test_a_lease_ends_with_its_last_reader_whichever_that_is(first: str) -> None:
    table = LeaseTable()
    table.arm("r", 1)
    table.grant("r", 10.0)
    ranks = ["d/1_dp0", "d/1_dp1", "d/1_dp2"]
    assert [table.renew("r", 1, rank, 20.0) for rank in ranks] == [Standing.HELD] * 3
    order = [first, *(rank for rank in reversed(ranks) if rank != first)]
    assert [table.release("r", 1, rank) for rank in order] == [False, False, True]


@pytest.mark.parametrize("holder", ["d/1", "_dp0", "/_dp0"])
def test_whoever_claimed_first_holds_the_lease_whatever_its_name(holder: str) -> None:
    """An id that is nothing but a data-parallel rank has an empty engine."""
    table = LeaseTable()
    table.arm("r", 1)
    table.grant("r", 10.0)
    assert table.renew("r", 1, holder, 20.0) is Standing.HELD
    assert table.renew("r", 1, "e/1", 20.0) is Standing.CLAIMED
    assert not table.release("r", 1, "e/1")
    assert table.renew("r", 1, holder, 20.0) is Standing.HELD
    assert table.release("r", 1, holder)


def test_a_renewal_never_shortens_a_lease() -> None:
    """Two renewals may overtake each other on their way."""
    table = LeaseTable()
    table.arm("r", 1)
    table.grant("r", 10.0)
    assert table.renew("r", 1, "d", 30.0) is Standing.HELD
    assert table.renew("r", 1, "d", 20.0) is Standing.HELD
    assert table.expire(29.0) == []
    assert table.expire(30.0) == ["r"]
    table.arm("s", 1)
    table.grant("s", 10.0)
    assert table.renew("s", 1, "d", 5.0) is Standing.HELD
    assert table.expire(9.0) == []
    assert table.expire(10.0) == ["s"]


def test_a_used_request_id_does_not_inherit_the_old_deadline() -> None:
    table = LeaseTable()
    table.arm("r", 1)
    table.grant("r", 5.0)
    assert table.release("r", 1, "d")
    table.arm("r", 2)
    table.grant("r", 50.0)
    assert table.expire(10.0) == []
    assert not table.release("r", 1, "d")
    assert table.expire(50.0) == ["r"]


def test_a_lease_that_was_renewed_keeps_no_other_from_its_end() -> None:
    table = LeaseTable()
    for request_id in ("renewed", "ended"):
        table.arm(request_id, 1)
        table.grant(request_id, 10.0)
    assert table.renew("renewed", 1, "d/1", 20.0) is Standing.HELD
    assert table.expire(10.0) == ["ended"]
    assert table.expire(20.0) == ["renewed"]


def test_16_384_leases_have_a_word_and_the_next_one_has_none() -> None:
    """docs/metrics.md says so. Decode reads the word over the network, so it has its place."""
    table = LeaseTable()
    for number in range(16_385):
        table.arm(str(number), 1)
    slots = [(table.place(str(number)) or (0, None))[1] for number in range(16_385)]
    assert set(slots[:-1]) == set(range(16_384))
    assert slots[-1] is None


def test_a_hundred_thousand_leases_expire_in_order() -> None:
    table = LeaseTable()
    for number in range(100_000):
        table.arm(str(number), number)
        table.grant(str(number), float(number % 1000))
    seen: list[str] = []
    for now in range(1000):
        expired = table.expire(float(now))
        assert {int(key) % 1000 for key in expired} == {now}
        seen += expired
    assert len(set(seen)) == 100_000


def test_the_word_of_a_lease_that_has_ended_is_that_of_memory_never_written() -> None:
    """Decode engines of other versions read it, and no token is 0."""
    table = LeaseTable()
    table.arm("r", 5)
    table.grant("r", 10.0)
    assert table.take_words() == {0: 5}
    assert table.expire(10.0) == ["r"]
    assert table.take_words() == {0: 0}
