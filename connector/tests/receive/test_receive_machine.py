"""The receive machine under every order of events, against a model of the DMA.

The model knows nothing of the machine's states: it only tracks which transfers may still
write, whether anything has gone wrong, and which of the three proofs are there: data that has
landed, lease words that were read after it, and an acknowledged lease. Sequences that lead to
the same situation share their continuation, so with three transfers and a few times all
sequences, of any length, are covered without walking each of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any

import pytest

from pdcluster_connector.compat.reasons import Reason
from pdcluster_connector.protocol.failure import Failure
from pdcluster_connector.transfer import receive_machine
from pdcluster_connector.transfer.receive_machine import (
    Acknowledged,
    Action,
    AgentDestroyed,
    Broken,
    Event,
    Failed,
    Landed,
    Opened,
    Receive,
    Signal,
    State,
)

LEASE_END = 10.0
RENEWED = 30.0
DRAIN = 5.0
STALL = 12.0  # longer than the first lease, shorter than the renewed one
WORD = 2  # the transfer that reads the lease word; 0 and 1 are data
BROKEN = Failure(Reason.BACKEND_ERROR, "broken")
FAILED = Failure(Reason.PEER_RESTARTED, "gone")
DESTROYED = Failure(Reason.BACKEND_ERROR, "destroyed")


@dataclass
class Dma:
    """What really may write, and whether the request may still end well."""

    flying: set[int] = field(default_factory=set)
    landed: set[int] = field(default_factory=set)
    posting: bool = False
    posted: bool = False
    fencing: bool = False
    fenced: bool = False
    claimed: bool = False
    lease_end: float = LEASE_END
    clean: bool = True
    reports: int = 0
    destroys: int = 0
    started: bool = False
    connecting: bool = False
    repeated: bool = False
    crashes: int = 0
    moved_at: float = 0.0
    now: float = 0.0
    trouble_at: float | None = None
    cause: Failure | None = None

    def may_open(self, now: float) -> bool:
        """Whether a further transfer may begin to write: nothing has gone wrong so far."""
        posting = self.fencing and not self.fenced if self.posted else self.posting
        return posting and self.clean and not self.over(now)

    def stalled(self, now: float) -> bool:
        """Whether nothing has begun or landed for too long, and something should have."""
        return bool(self.flying or self.connecting) and now >= self.moved_at + STALL

    def over(self, now: float) -> bool:
        """Whether time has ended the receive."""
        return now >= self.lease_end or self.stalled(now)

    def land(self, transfer: int) -> None:
        if transfer in self.flying:
            self.moved_at = self.now
        self.flying.discard(transfer)
        self.landed.add(transfer)

    def destroyed(self, reading: bool, crashed: bool) -> None:
        """Destroying an agent on which nothing of this request ran does not hurt it."""
        self.flying.clear()
        self.crashes += reading and crashed
        if reading and self.clean and self.crashes < receive_machine.MAX_CRASHES:
            self.connecting = self.repeated = True
            self.landed.clear()
            self.posting = self.posted = self.fencing = self.fenced = False
        else:
            self.clean = self.clean and not reading

    def connect(self, event: Event) -> None:
        if event is Signal.STARTED and not self.started and self.clean:
            self.started = self.connecting = True
            self.moved_at = self.now
        self.connecting = self.connecting and event is not Signal.CONNECTED

    def apply(self, event: Event, reading: bool) -> None:
        if isinstance(event, Acknowledged):
            self.lease_end = max(self.lease_end, event.until) if self.claimed else event.until
            self.claimed = True
        if self.over(self.now):
            self.clean = False
        self.connect(event)
        match event:
            case Opened(transfer):
                self.flying.add(transfer)
                self.moved_at = self.moved_at if self.repeated else self.now
            case Signal.POSTED if self.posted:
                self.fenced = True
            case Signal.POSTED:
                self.posted = True
            case Landed(transfer):
                self.land(transfer)
            case Broken(transfer):
                self.flying.discard(transfer)
                self.clean = False
            case Failed() | Signal.ABANDONED:
                self.clean = False
            case AgentDestroyed(_, crashed):
                self.destroyed(reading, crashed)


def choices(machine: Receive, dma: Dma) -> list[tuple[Event, float]]:
    """Every event that an executor may deliver now, late and repeated ones included."""
    now = dma.now
    events: list[tuple[Event, float]] = [
        (Signal.STARTED, now),
        (Signal.CONNECTED, now),
        (Failed(FAILED), now),
        (Signal.ABANDONED, now),
        (AgentDestroyed(DESTROYED), now),
        (AgentDestroyed(DESTROYED, crashed=True), now),
        (Signal.TICK, now),
    ]
    later = (LEASE_END, STALL, LEASE_END + STALL, LEASE_END + 6 * DRAIN)
    events += [(Signal.TICK, time) for time in later if time > now]
    # The first answer may say less than what was guessed, and the next one come late.
    events += [(Acknowledged(until), now) for until in (LEASE_END - 5, RENEWED)]
    if now < LEASE_END:
        events.append((Acknowledged(RENEWED), LEASE_END))
    if now < LEASE_END:
        events.append((Failed(FAILED), LEASE_END))
    # Whether it may or not: the executor learns of an end only when it asks for the next transfer.
    kind = (WORD,) if dma.posted else (0, 1)
    fresh = [t for t in kind if t not in dma.flying | dma.landed][:1]
    events += [(Opened(t), time) for t in fresh for time in (now, max(now, LEASE_END))]
    if machine.posting:
        events.append((Signal.POSTED, now))
    for transfer in sorted(dma.flying | dma.landed):
        events.append((Landed(transfer), now))
        events.append((Broken(transfer, BROKEN), now))
        events += [(Landed(transfer), time) for time in (LEASE_END, STALL) if time > now]
    return events


def deliver(machine: Receive, dma: Dma, event: Event, now: float) -> None:
    """One event; every promise of the machine is checked after it."""
    finished = machine.finished
    dma.now = now
    reading = bool(dma.flying) or machine.posting
    over = dma.over(now)
    may_open = dma.may_open(now)
    last = machine.crashes == receive_machine.MAX_CRASHES - 1 and getattr(event, "crashed", False)
    cause = None if dma.cause or finished else cause_of(event, not over, reading and last)
    actions = machine.on(event, now)
    if isinstance(event, Opened):
        assert (event.transfer in machine.open) == may_open, "written to after trouble, or never"
    if finished:
        assert actions == (), "a finished receive asked for something"
        return
    if not isinstance(event, Opened) or event.transfer in machine.open:
        dma.apply(event, reading)  # an executor posts only what the machine took in
    elif dma.over(now):
        dma.clean = False
    if not dma.clean and dma.trouble_at is None:
        dma.trouble_at = now
        dma.cause = machine.failure
        assert cause is None or machine.failure == cause, "another cause than what is known"
    assert machine.failure == dma.cause, "the first cause was forgotten"
    dma.posting = dma.posting or Action.POST in actions
    dma.fencing = dma.fencing or Action.FENCE in actions
    dma.reports += actions.count(Action.REPORT)
    dma.destroys += actions.count(Action.DESTROY_AGENT)
    check(machine, dma, actions)


def cause_of(event: Event, held: bool, reading: bool) -> Failure | None:
    """What a receive that was well until now has to name if this event ends it; None: its words."""
    match event:
        case Failed(failure):  # at the lease's end too: it knows why
            return failure
        case Broken(_, failure) if held:
            return failure
        case AgentDestroyed(failure) if held and reading:
            return failure
    return None


def check(machine: Receive, dma: Dma, actions: tuple[Action, ...]) -> None:
    assert dma.reports <= 1
    assert dma.destroys <= 1
    assert machine.finished == (dma.reports == 1)
    assert machine.open == dma.flying
    if machine.finished:
        assert not dma.flying, "reported while a transfer could still write"
    if machine.state is State.DONE:
        assert dma.clean
        assert dma.posted
        assert dma.fenced
        assert dma.claimed
        assert dma.now < dma.lease_end
        assert machine.failure is None
    if dma.clean and (dma.flying or dma.connecting):
        assert machine.next_tick == min(dma.lease_end, dma.moved_at + STALL)
    if not dma.clean:
        assert machine.failure is not None
        assert machine.finished == (not dma.flying), "trouble with nothing under way must report"
    if Action.POST in actions:
        assert dma.clean
    if Action.CONNECT in actions:
        assert dma.clean
        assert not dma.flying, "begun again while the old transfers could still write"
    assert not dma.clean or machine.crashes == dma.crashes
    if Action.FENCE in actions:
        assert dma.clean
        assert dma.posted
        assert not dma.flying, "a lease word that is read beside the data proves nothing"
    if Action.DESTROY_AGENT in actions:
        assert dma.flying
        assert dma.trouble_at is not None
        assert dma.now >= dma.trouble_at + DRAIN
    if dma.clean and dma.posted and not dma.flying:
        assert dma.fencing
        assert (machine.state is State.DONE) == (dma.fenced and dma.claimed)


def close(machine: Receive, dma: Dma) -> None:
    """Whatever happened, time and a destroyed agent end the receive."""
    deliver(machine, dma, Signal.TICK, max(dma.now, dma.lease_end))
    if not machine.finished:
        assert dma.destroys or machine.next_tick <= dma.now + DRAIN
        deliver(machine, dma, Signal.TICK, dma.now + DRAIN)
    if not machine.finished:
        assert dma.destroys == 1
        deliver(machine, dma, AgentDestroyed(DESTROYED), dma.now)
    assert machine.finished
    assert dma.reports == 1


def snapshot(machine: Receive, dma: Dma) -> tuple[object, ...]:
    return (
        machine.state,
        machine.failure,
        machine.abandoned,
        machine.posted_at is None,
        machine.drain_at,
        machine.destroy_asked,
        frozenset(dma.flying),
        frozenset(dma.landed),
        dma.posting,
        dma.posted,
        dma.fencing,
        dma.fenced,
        dma.claimed,
        dma.lease_end,
        dma.moved_at if dma.flying or dma.connecting else 0.0,
        dma.connecting,
        dma.repeated,
        dma.crashes,
        machine.claimed,
        machine.deadline,
        dma.clean,
        dma.cause,
        dma.trouble_at,
        dma.reports,
        dma.now,
    )


def fields_of(kind: type) -> Callable[[Any], tuple[Any, ...]]:
    return attrgetter(*(one.name for one in fields(kind)))


MACHINE, DMA = fields_of(Receive), fields_of(Dma)


def twins(machine: Receive, dma: Dma) -> tuple[Receive, Dma]:
    """Copies of both that share nothing that can change; ``replace`` takes twice as long."""
    branch, model = Receive(*MACHINE(machine)), Dma(*DMA(dma))
    branch.open, branch.entered = branch.open.copy(), branch.entered.copy()
    model.flying, model.landed = model.flying.copy(), model.landed.copy()
    return branch, model


def never_changes(machine: Receive, dma: Dma) -> None:
    """What is finished takes in every event at any time, one after the other, and stays so."""
    before = MACHINE(twins(machine, dma)[0])
    offered = choices(machine, dma)
    times = sorted({time for _, time in offered})
    for event, _ in offered:
        for now in times:
            assert machine.on(event, now) == (), "a finished receive asked for something"
            assert not machine.open, "written to after trouble, or never"
    assert MACHINE(machine) == before


def test_every_order_of_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        receive_machine, "MAX_CRASHES", 1
    )  # or there would be three times as many orders
    seen: set[tuple[object, ...]] = set()
    states: set[State] = set()
    frontier = [(Receive("r", LEASE_END, DRAIN, STALL), Dma())]
    steps = 0
    while frontier:
        machine, dma = frontier.pop()
        key = snapshot(machine, dma)
        if key in seen:
            continue
        seen.add(key)
        states.add(machine.state)
        close(*twins(machine, dma))
        if machine.finished:
            never_changes(machine, dma)
            continue
        for event, now in choices(machine, dma):
            branch, model = twins(machine, dma)
            deliver(branch, model, event, now)
            frontier.append((branch, model))
            steps += 1
    assert states == set(State)
    assert len(seen) > 100
    assert steps > 1000


def ready(*transfers: int, claimed: bool = True) -> Receive:
    machine = Receive("r", LEASE_END, DRAIN, STALL, claimed)
    assert machine.on(Signal.STARTED, 0) == (Action.CONNECT,)
    assert machine.on(Signal.CONNECTED, 1) == (Action.POST,)
    for transfer in transfers:
        assert machine.on(Opened(transfer), 2) == ()
    return machine


def test_a_whole_life_passes_the_fence_and_knows_its_times() -> None:
    machine = ready(0, 1)
    assert machine.on(Signal.POSTED, 3) == ()
    assert machine.on(Landed(1), 4) == ()
    assert machine.on(Landed(0), 5) == (Action.FENCE,)
    assert machine.on(Opened(WORD), 6) == ()
    assert machine.on(Signal.POSTED, 6) == ()
    assert machine.on(Landed(WORD), 7) == (Action.REPORT,)
    assert machine.state is State.DONE
    assert machine.entered == {
        State.HANDSHAKE: 0,
        State.POSTED: 1,
        State.FENCE: 5,
        State.DONE: 7,
    }
    assert machine.posted_at == 3
    assert machine.next_tick == float("inf")


def fenced(*, claimed: bool) -> Receive:
    """Its data has landed, and its lease word is being read."""
    machine = ready(0, claimed=claimed)
    machine.on(Signal.POSTED, 3)
    machine.on(Landed(0), 4)
    machine.on(Opened(WORD), 4)
    machine.on(Signal.POSTED, 4)
    return machine


def test_nothing_to_read_needs_no_lease_word() -> None:
    machine = ready()
    assert machine.on(Signal.POSTED, 2) == (Action.FENCE,)
    assert machine.on(Signal.POSTED, 2) == (Action.REPORT,)
    assert machine.state is State.DONE


def test_a_wrong_lease_word_fails_the_receive() -> None:
    machine = fenced(claimed=True)
    lost = Failure(Reason.LEASE_LOST, "another word")
    assert machine.on(Broken(WORD, lost), 5) == (Action.REPORT,)
    assert (machine.state, machine.failure) == (State.FAILED, lost)


def test_nothing_is_believed_before_the_claim() -> None:
    machine = fenced(claimed=False)
    assert machine.on(Landed(WORD), 5) == ()
    assert machine.state is State.FENCE
    assert machine.on(Acknowledged(RENEWED), 6) == (Action.REPORT,)
    assert machine.state is State.DONE


def test_a_claim_before_the_data_is_enough() -> None:
    machine = ready(0, claimed=False)
    assert machine.on(Acknowledged(RENEWED), 2) == ()
    machine.on(Signal.POSTED, 3)
    assert machine.on(Landed(0), 4) == (Action.FENCE,)
    machine.on(Opened(WORD), 4)
    machine.on(Signal.POSTED, 4)
    assert machine.on(Landed(WORD), 5) == (Action.REPORT,)


def test_transfers_of_which_none_lands_end_the_receive_although_the_lease_stands() -> None:
    machine = ready(0, 1)
    machine.on(Signal.POSTED, 3)
    machine.on(Acknowledged(1000.0), 4)
    assert machine.next_tick == 2 + STALL
    machine.on(Landed(1), 5)
    assert machine.next_tick == 5 + STALL
    machine.on(Landed(1), 6)  # a second time: nothing has moved
    machine.on(Acknowledged(2000.0), 4 + STALL)
    assert machine.state is State.POSTED
    machine.on(Acknowledged(2001.0), 5 + STALL)
    assert machine.state is State.QUARANTINE
    assert machine.failure == Failure(
        Reason.TRANSFER_STALLED, f"1 transfer under way, and none has landed for {STALL:.0f} s"
    )
    assert machine.next_tick == 5 + STALL + DRAIN


def test_a_lease_word_that_does_not_come_ends_the_receive() -> None:
    machine = fenced(claimed=True)
    machine.on(Acknowledged(1000.0), 5)
    machine.on(Signal.TICK, 4 + STALL)
    assert machine.failure is not None
    assert machine.failure.reason is Reason.TRANSFER_STALLED


def test_a_receive_that_waits_for_its_claim_alone_has_not_stalled() -> None:
    machine = fenced(claimed=False)
    machine.deadline = 1000.0
    machine.on(Landed(WORD), 5)
    assert machine.next_tick == 1000.0
    machine.on(Signal.TICK, 5 + STALL)
    assert machine.state is State.FENCE


def test_a_claim_that_does_not_come_is_named() -> None:
    machine = fenced(claimed=False)
    machine.on(Landed(WORD), 5)
    assert machine.on(Signal.TICK, LEASE_END) == (Action.REPORT,)
    assert machine.failure is not None
    assert machine.failure.reason is Reason.LEASE_EXPIRED
    assert "did not acknowledge" in machine.failure.message


@pytest.mark.parametrize(("until", "state"), [(5.0, State.FAILED), (5.5, State.DONE)])
def test_an_acknowledgement_that_ends_now_acknowledges_nothing(until: float, state: State) -> None:
    """At its end, prefill may already have given the blocks to another request."""
    machine = fenced(claimed=False)
    machine.on(Landed(WORD), 4)
    assert machine.on(Acknowledged(until), 5.0) == (Action.REPORT,)
    assert machine.state is state


def test_the_deadline_follows_what_prefill_acknowledges() -> None:
    machine = ready(0, claimed=False)
    machine.stall_seconds = 1000.0
    machine.on(Acknowledged(6.0), 3)
    assert machine.next_tick == 6.0, "not what was guessed before"
    machine.on(Acknowledged(16.0), 5)
    machine.on(Acknowledged(15.0), 6)
    assert machine.next_tick == 16.0
    machine.on(Signal.POSTED, LEASE_END + 5)
    assert machine.on(Landed(0), LEASE_END + 5) == (Action.FENCE,), "slow, and its lease stands"
    machine.on(Acknowledged(40.0), 17.0)  # sent before the end, it comes after it
    assert not machine.finished
    machine.on(Acknowledged(41.0), 50.0)
    assert machine.finished


def test_a_sibling_keeps_a_failed_request_in_quarantine() -> None:
    machine = ready(0, 1)
    assert machine.on(Broken(0, BROKEN), 3) == ()
    assert machine.state is State.QUARANTINE
    assert not machine.posting
    assert machine.on(Landed(1), 4) == (Action.REPORT,)
    assert machine.failure == BROKEN


@pytest.mark.parametrize(
    ("machine", "reason"),
    [
        (Receive("r", LEASE_END, DRAIN, STALL), Reason.LEASE_EXPIRED),
        (ready(0), Reason.TRANSFER_STALLED),
    ],
)
def test_the_lease_end_names_what_it_interrupted(machine: Receive, reason: Reason) -> None:
    machine.on(Signal.TICK, LEASE_END)
    assert machine.failure is not None
    assert machine.failure.reason is reason


def under_way(*events: Event) -> Receive:
    machine = Receive("r", LEASE_END, DRAIN, STALL, claimed=True)
    for event in events:
        machine.on(event, 1)
    return machine


TO_THE_FENCE = (Signal.STARTED, Signal.CONNECTED, Opened(0), Signal.POSTED, Landed(0))


@pytest.mark.parametrize(
    ("events", "reason", "message"),
    [
        ((), Reason.LEASE_EXPIRED, "the lease ended before the prefill engine could be read"),
        (
            (Signal.STARTED,),
            Reason.LEASE_EXPIRED,
            "the lease ended before the prefill engine could be read",
        ),
        (
            TO_THE_FENCE[:2],
            Reason.TRANSFER_STALLED,
            "not every transfer was posted when the lease ended",
        ),
        (
            TO_THE_FENCE[:3],
            Reason.TRANSFER_STALLED,
            "1 transfer had not landed when the lease ended",
        ),
        (
            TO_THE_FENCE,
            Reason.TRANSFER_STALLED,
            "not every transfer was posted when the lease ended",
        ),
        (
            (*TO_THE_FENCE, Opened(WORD), Signal.POSTED),
            Reason.TRANSFER_STALLED,
            "1 transfer had not landed when the lease ended",
        ),
    ],
    ids=["new", "handshake", "nothing posted", "data under way", "no word yet", "word under way"],
)
def test_the_end_of_the_lease_says_how_far_the_receive_had_come(
    events: tuple[Event, ...], reason: Reason, message: str
) -> None:
    machine = under_way(*events)
    machine.on(Signal.TICK, LEASE_END)
    assert machine.failure == Failure(reason, message)


@pytest.mark.parametrize("transfers", [(), (0,)])
def test_a_known_cause_is_not_hidden_by_the_lease_end(transfers: tuple[int, ...]) -> None:
    machine = ready(*transfers) if transfers else Receive("r", LEASE_END, DRAIN, STALL)
    machine.on(Failed(FAILED), LEASE_END + 1)
    assert machine.failure == FAILED
    machine.on(Signal.TICK, LEASE_END + 2)
    assert machine.failure == FAILED


@pytest.mark.parametrize(
    "trouble", [Signal.ABANDONED, Broken(0, BROKEN), Failed(FAILED), Signal.TICK], ids=str
)
def test_nothing_is_opened_in_quarantine(trouble: Event) -> None:
    """A transfer that is posted after the trouble would write into blocks that are given back."""
    machine = ready(0, 1)
    machine.on(trouble, LEASE_END if trouble is Signal.TICK else 3)
    assert machine.state is State.QUARANTINE
    machine.on(Opened(2), machine.deadline)
    assert 2 not in machine.open


def test_that_all_is_posted_means_nothing_before_the_peer_is_known_and_a_second_time() -> None:
    machine = Receive("r", LEASE_END, DRAIN, STALL)
    assert machine.on(Signal.POSTED, 0) == ()
    machine.on(Signal.STARTED, 0)
    assert machine.on(Signal.POSTED, 0) == ()
    assert machine.posted_at is None
    assert machine.state is State.HANDSHAKE
    machine = ready(0)
    assert machine.on(Signal.POSTED, 3) == ()
    assert machine.on(Landed(0), 4) == (Action.FENCE,)
    machine.on(Opened(WORD), 5)
    machine.on(Signal.POSTED, 5)
    assert machine.on(Signal.POSTED, 6) == ()
    assert (machine.state, machine.posted_at, machine.open) == (State.FENCE, 3, {WORD})


def test_nothing_is_opened_before_the_peer_is_known_or_after_the_last_was_posted() -> None:
    machine = Receive("r", LEASE_END, DRAIN, STALL)
    machine.on(Opened(0), 0)
    machine.on(Signal.STARTED, 0)
    machine.on(Opened(0), 0)
    assert not machine.open
    machine = ready(0)
    machine.on(Signal.POSTED, 3)
    machine.on(Opened(1), 3)
    assert machine.open == {0}


def test_data_that_lands_after_the_lease_is_not_believed() -> None:
    machine = ready(0)
    machine.on(Signal.POSTED, 3)
    assert machine.on(Landed(0), LEASE_END) == (Action.REPORT,)
    assert machine.state is State.FAILED


def test_a_hanging_transfer_costs_the_agent_after_the_drain_deadline() -> None:
    machine = ready(0)
    machine.on(Signal.POSTED, 3)
    machine.on(Signal.ABANDONED, 4)
    assert machine.next_tick == 4 + DRAIN
    assert machine.on(Signal.TICK, 4 + DRAIN) == (Action.DESTROY_AGENT,)
    assert machine.next_tick == float("inf"), "a time that has passed would keep the thread awake"
    assert machine.on(Signal.TICK, 99) == ()
    assert machine.on(AgentDestroyed(DESTROYED), 99) == (Action.REPORT,)
    assert machine.abandoned


def test_a_second_fault_does_not_put_the_end_of_the_drain_off() -> None:
    machine = ready(0, 1, 2)
    machine.on(Broken(0, BROKEN), 3)
    machine.on(Broken(1, BROKEN), 4)
    assert machine.next_tick == 3 + DRAIN
    assert machine.on(Signal.TICK, 3 + DRAIN) == (Action.DESTROY_AGENT,)


def begins_again(machine: Receive, *, crashed: bool) -> None:
    assert machine.on(AgentDestroyed(DESTROYED, crashed), 4) == (Action.CONNECT,)
    assert machine.open == set()
    assert machine.on(Signal.CONNECTED, 5) == (Action.POST,)
    machine.on(Opened(0), 5)


def test_a_healthy_receive_begins_again_when_its_agent_is_destroyed() -> None:
    machine = ready(0)
    for _ in range(10):
        begins_again(machine, crashed=False)
    for _ in range(receive_machine.MAX_CRASHES - 1):
        begins_again(machine, crashed=True)
    assert machine.on(AgentDestroyed(DESTROYED, crashed=True), 6) == (Action.REPORT,)
    assert machine.failure == DESTROYED, "whoever makes the thread fail must not go on for ever"


def test_an_agent_that_went_for_another_request_is_no_crash_of_this_one() -> None:
    """Of its own crashes, the third ends the receive."""
    machine = ready(0)
    for _ in range(5):
        assert machine.on(AgentDestroyed(DESTROYED), 4) == (Action.CONNECT,)
        machine.on(Signal.CONNECTED, 4)
        machine.on(Opened(0), 4)
    outcomes = []
    for _ in range(3):
        outcomes.append(machine.on(AgentDestroyed(DESTROYED, crashed=True), 4))
        machine.on(Signal.CONNECTED, 4)
        machine.on(Opened(0), 4)
    assert outcomes == [(Action.CONNECT,), (Action.CONNECT,), (Action.REPORT,)]


def test_a_receive_that_gets_no_connection_ends_although_its_lease_is_renewed() -> None:
    machine = Receive("r", LEASE_END, DRAIN, STALL)
    assert machine.on(Signal.STARTED, 3) == (Action.CONNECT,)
    machine.on(Acknowledged(10 * STALL), 4)
    assert machine.next_tick == 3 + STALL
    assert machine.on(Signal.TICK, 3 + STALL) == (Action.REPORT,)
    assert machine.failure is not None
    assert machine.failure.message == f"no connection to the prefill engine for {STALL:.0f} s"


def test_transfers_that_wait_in_a_queue_that_moves_do_not_hang() -> None:
    machine = ready(0)
    machine.on(Acknowledged(10 * STALL), 3)
    opened = machine.moved_at
    machine.queue_moved(opened + 1)
    assert machine.on(Signal.TICK, opened + STALL) == ()
    assert machine.next_tick == opened + 1 + STALL
    machine.on(Signal.ABANDONED, opened + STALL)
    machine.queue_moved(opened + STALL + 1)
    assert machine.on(Signal.TICK, opened + STALL + DRAIN) == ()
    assert machine.on(Signal.TICK, opened + STALL + 1 + DRAIN) == (Action.DESTROY_AGENT,)
    machine.queue_moved(opened + 2 * STALL)
    assert machine.drain_at == opened + STALL + 1 + DRAIN, "it is asked for already"


def test_old_news_of_a_queue_shortens_nothing() -> None:
    """A transfer before it may have landed before this one was opened."""
    machine = ready(0)
    machine.on(Acknowledged(10 * STALL), 3)
    machine.queue_moved(machine.moved_at - 1)
    assert machine.next_tick == 2 + STALL
    machine.on(Signal.ABANDONED, 4)
    machine.queue_moved(3)
    assert machine.next_tick == 4 + DRAIN


def test_what_is_read_again_has_no_more_time_than_before() -> None:
    machine = ready(0)
    machine.on(Acknowledged(10 * STALL), 3)
    opened = machine.moved_at
    begins_again(machine, crashed=False)
    assert machine.next_tick == opened + STALL
    machine.on(Landed(0), opened + 7)
    machine.on(Opened(1), opened + 8)
    assert machine.next_tick == opened + 7 + STALL


def test_what_landed_before_the_agent_was_destroyed_is_read_again() -> None:
    machine = ready(0)
    machine.on(Opened(1), 3)
    machine.on(Landed(0), 3)
    assert machine.on(AgentDestroyed(DESTROYED), 4) == (Action.CONNECT,)
    machine.on(Signal.CONNECTED, 5)
    machine.on(Opened(0), 5)
    machine.on(Signal.POSTED, 5)
    assert machine.on(Landed(1), 6) == (), "news of an agent that is gone"
    assert machine.on(Landed(0), 6) == (Action.FENCE,)


def test_what_is_read_again_counts_as_posted_when_it_was_posted_again() -> None:
    machine = ready(0)
    machine.on(Signal.POSTED, 3)
    assert machine.posted_at == 3
    assert machine.on(AgentDestroyed(DESTROYED), 4) == (Action.CONNECT,)
    machine.on(Signal.CONNECTED, 5)
    machine.on(Opened(1), 5)
    machine.on(Signal.POSTED, 6)
    assert machine.posted_at == 6
    assert machine.entered == {State.HANDSHAKE: 0, State.POSTED: 1}, "when it was there first"


def test_a_lease_that_has_ended_is_not_begun_again() -> None:
    machine = ready(0)
    assert machine.on(AgentDestroyed(DESTROYED), LEASE_END) == (Action.REPORT,)
    assert machine.failure is not None
    assert machine.failure.reason is not Reason.BACKEND_ERROR


@pytest.mark.parametrize("before", [[], [Signal.STARTED], [Signal.STARTED, Signal.CONNECTED]])
@pytest.mark.parametrize(
    "event",
    [Signal.STARTED, Signal.CONNECTED, Opened(0), Signal.POSTED, Landed(0), Broken(0, BROKEN),
     Failed(FAILED), Signal.ABANDONED, AgentDestroyed(DESTROYED), Signal.TICK,
     Acknowledged(LEASE_END)],
    ids=lambda event: type(event).__name__,
)  # fmt: skip
def test_whatever_comes_when_the_lease_has_ended_the_receive_is_reported_once(
    before: list[Event], event: Event
) -> None:
    """With nothing under way, it is over at once, and what comes then is not taken in."""
    machine = Receive("r", LEASE_END, DRAIN, STALL)
    for one in before:
        machine.on(one, 0.0)
    actions = [*machine.on(event, LEASE_END), *machine.on(Signal.TICK, LEASE_END + 2 * DRAIN)]
    assert actions.count(Action.REPORT) == 1
    assert machine.state is State.FAILED
    assert not machine.open
    assert machine.on(event, LEASE_END + 3 * DRAIN) == ()
