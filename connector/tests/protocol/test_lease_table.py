"""The lease table against a model that scans everything at every step."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pdcluster_connector.protocol.lease import LeaseTable

ids = st.sampled_from(["a", "b", "c", "d"])
tokens = st.integers(1, 3)
spans = st.floats(0.0, 10.0)


class LeaseMachine(RuleBasedStateMachine):
    """The model: request -> [token, deadline or None]."""

    def __init__(self) -> None:
        super().__init__()
        self.table = LeaseTable()
        self.model: dict[str, list[float | int | None]] = {}
        self.now = 0.0

    @rule(key=ids, token=tokens)
    def arm(self, key: str, token: int) -> None:
        kept = self.model.get(key)
        expected = kept is None or kept[1] is None
        assert self.table.arm(key, token, self.now) is expected
        if expected:
            self.model[key] = [token, None]

    @rule(key=ids, span=spans)
    def grant(self, key: str, span: float) -> None:
        kept = self.model.get(key)
        expected = kept is not None and kept[1] is None
        assert self.table.grant(key, self.now + span) is expected
        if expected:
            self.model[key][1] = self.now + span

    @rule(key=ids, token=tokens, span=spans)
    def renew(self, key: str, token: int, span: float) -> None:
        kept = self.model.get(key)
        expected = kept is not None and kept[0] == token and kept[1] is not None
        assert self.table.renew(key, token, self.now + span) is expected
        if expected:
            kept[1] = max(kept[1], self.now + span)

    @rule(key=ids, token=tokens)
    def release(self, key: str, token: int) -> None:
        expected = key in self.model and self.model[key][0] == token
        assert self.table.release(key, token) is expected
        if expected:
            del self.model[key]

    @rule(key=ids)
    def drop(self, key: str) -> None:
        self.table.drop(key)
        self.model.pop(key, None)

    @rule(span=st.floats(0.0, 6.0))
    def pass_time(self, span: float) -> None:
        self.now += span
        due = {k for k, (_, end) in self.model.items() if end is not None and end <= self.now}
        expired = self.table.expire(self.now)
        assert sorted(expired) == sorted(due)
        for key in due:
            del self.model[key]

    @invariant()
    def counts(self) -> None:
        held = sum(1 for _, end in self.model.values() if end is not None)
        assert self.table.held == held
        assert self.table.armed == len(self.model) - held
        for key in ("a", "b", "c", "d"):
            assert self.table.token(key) == (self.model[key][0] if key in self.model else None)


LeaseMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestLeaseMachine = LeaseMachine.TestCase


def test_renewals_do_not_grow_the_heap() -> None:
    table = LeaseTable()
    table.arm("r", 1, 0.0)
    table.grant("r", 10.0)
    for second in range(10_000):
        assert table.renew("r", 1, second + 10.0)
        assert table.expire(float(second)) == []
        assert len(table._heap) == 1
    assert table.expire(1e9) == ["r"]
    assert table.held == 0


def test_a_renewal_never_shortens_a_lease() -> None:
    """Two renewals may overtake each other on their way."""
    table = LeaseTable()
    table.arm("r", 1, 0.0)
    table.grant("r", 10.0)
    assert table.renew("r", 1, 30.0)
    assert table.renew("r", 1, 20.0)
    assert table.expire(29.0) == []
    assert table.expire(30.0) == ["r"]
    table.arm("s", 1, 0.0)
    table.grant("s", 10.0)
    assert table.renew("s", 1, 5.0)
    assert table.expire(9.0) == []
    assert table.expire(10.0) == ["s"]


def test_a_used_request_id_does_not_inherit_the_old_deadline() -> None:
    table = LeaseTable()
    table.arm("r", 1, 0.0)
    table.grant("r", 5.0)
    assert table.release("r", 1)
    table.arm("r", 2, 1.0)
    table.grant("r", 50.0)
    assert table.expire(10.0) == []
    assert not table.release("r", 1)
    assert table.expire(50.0) == ["r"]


def test_a_hundred_thousand_leases_expire_in_order() -> None:
    table = LeaseTable()
    for number in range(100_000):
        table.arm(str(number), number, 0.0)
        table.grant(str(number), float(number % 1000))
    seen: list[str] = []
    for now in range(1000):
        expired = table.expire(float(now))
        assert {int(key) % 1000 for key in expired} == {now}
        seen += expired
    assert len(set(seen)) == 100_000
