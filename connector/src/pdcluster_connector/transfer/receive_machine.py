"""One request's receive on one rank: events and time go in, actions come out.

::

    NEW -> HANDSHAKE -> POSTED -> FENCE -> DONE
              | ^          |         |
              | +----------+---------+   the agent was destroyed for another's fault
              |            +-> QUARANTINE -> FAILED
              +--------------------------------^

The state machine does no I/O and reads no clock. Its executor (``receive_executor.py``) passes
events to it and carries out the actions that it returns. It keeps three promises:

* exactly one :attr:`Action.REPORT` for each request, whatever happens in whatever order;
* a request is DONE only when three things agree, in whatever order the last two come: the data
  was seen to land; every lease word, read after that, was the ticket's (the fence); prefill
  has acknowledged the lease for this engine (the claim), and that acknowledgement still stands;
* a request is not reported while a transfer of it may still write into its blocks. Releasing
  a NIXL handle does not stop the DMA. So only three things end a transfer: it was seen done,
  it was seen broken by the transport, or the agent that ran it was destroyed.
"""

from dataclasses import dataclass, field
from enum import Enum, StrEnum
from math import inf

from pdcluster_connector.compat.findings import counted
from pdcluster_connector.compat.reasons import Reason
from pdcluster_connector.protocol.failure import Failure


class State(StrEnum):
    """Where a receive stands."""

    NEW = "new"
    HANDSHAKE = "handshake"
    POSTED = "posted"
    FENCE = "fence"
    DONE = "done"
    QUARANTINE = "quarantine"
    FAILED = "failed"


class Action(Enum):
    """What the executor has to do next."""

    CONNECT = "find the peer and prepare its descriptor lists"
    POST = "post the transfers, each between an Opened and, at the end, one POSTED"
    FENCE = "post the reads of the lease words, in the same way"
    DESTROY_AGENT = "destroy the reading agent: nothing else stops what is still under way"
    REPORT = "report to the engine: DONE or FAILED, with failure"


class Signal(Enum):
    """The events that say nothing but that they happened."""

    STARTED = "the engine handed the request over"
    CONNECTED = "the peer is known and its descriptor lists are prepared"
    POSTED = "no further transfer will be opened"
    ABANDONED = "the engine gave the request up (abort)"
    TICK = "time passed"


@dataclass(frozen=True, slots=True)
class Opened:
    """Transfer ``transfer`` is about to be posted.

    It may be posted only if the machine has it in ``Receive.open`` afterwards: the lease may have
    ended in this very moment.
    """

    transfer: int


@dataclass(frozen=True, slots=True)
class Landed:
    """Transfer ``transfer`` was seen done: all its bytes are there; a lease word is right."""

    transfer: int


@dataclass(frozen=True, slots=True)
class Broken:
    """Transfer ``transfer`` can write no more and is of no use.

    It met a transport error, was never posted, or brought a wrong lease word.
    """

    transfer: int
    failure: Failure


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """Prefill has renewed the lease for this engine: it stands until ``until``."""

    until: float


@dataclass(frozen=True, slots=True)
class Failed:
    """Another failure: of the handshake or the plan, a peer that is gone, an exception."""

    failure: Failure


@dataclass(frozen=True, slots=True)
class AgentDestroyed:
    """The agent that ran this request's transfers is gone, and its DMA with it.

    Attributes:
        crashed: whether the transfer thread failed. If not, another request's transfer hung.
    """

    failure: Failure
    crashed: bool = False


Event = Signal | Opened | Landed | Broken | Acknowledged | Failed | AgentDestroyed

MAX_CRASHES = 3
ABANDONED = "given up by the engine before all data had landed"


@dataclass(slots=True)
class Receive:
    """The state of one receive.

    Attributes:
        request_id: for messages only.
        deadline: when the prefill engine's lease ends; same clock as the ``now`` of events.
            Acknowledgements move it.
        drain_seconds: how long a quarantine may last before the agent must be destroyed.
        stall_seconds: how long it may wait for a connection, and how long transfers may be under
            way of which none lands.
        claimed: whether prefill has acknowledged the lease for this engine.
        state: where it stands.
        failure: the first cause, once there is one.
        abandoned: whether the engine gave the request up before it was done.
        open: transfers that may still write, into the request's blocks or for its fence.
        posting: whether further transfers may be opened.
        entered: when each state was first entered.
        posted_at: when the last transfer of the data was posted.
        moved_at: when it began to connect, or a transfer was opened or has landed since. What is
            read again over another agent does not count before it lands.
        crashes: how often the transfer thread failed while it was under way.
        is_repeated: whether its reads were begun again over another agent.
    """

    request_id: str
    deadline: float
    drain_seconds: float
    stall_seconds: float
    claimed: bool = False
    state: State = State.NEW
    failure: Failure | None = None
    abandoned: bool = False
    open: set[int] = field(default_factory=set)
    entered: dict[State, float] = field(default_factory=dict)
    posting: bool = False
    posted_at: float | None = None
    moved_at: float = 0.0
    drain_at: float = inf
    destroy_asked: bool = False
    crashes: int = 0
    is_repeated: bool = False

    @property
    def finished(self) -> bool:
        """Whether the request has been reported."""
        return self.state in (State.DONE, State.FAILED)

    @property
    def next_tick(self) -> float:
        """When a ``TICK`` is due; infinite when time changes nothing any more."""
        if self.finished:
            return inf
        if self.state is State.QUARANTINE:
            return inf if self.destroy_asked else self.drain_at
        return min(self.deadline, self._stalled_at)

    @property
    def _stalled_at(self) -> float:
        """When it fails although its lease stands: leases are renewed also while no KV moves."""
        if self.state is State.HANDSHAKE or (self.open and self.state is not State.QUARANTINE):
            return self.moved_at + self.stall_seconds
        return inf

    def queue_moved(self, at: float) -> None:
        """Take in when a transfer landed that a source had before one of this request.

        A link carries transfers one after the other. So this request waits and does not hang.
        """
        self.moved_at = max(self.moved_at, at)
        if not self.destroy_asked:
            self.drain_at = max(self.drain_at, at + self.drain_seconds)

    def on(self, event: Event, now: float) -> tuple[Action, ...]:
        """Take in ``event`` at time ``now``; returns what to do, in order."""
        if self.finished:
            return ()
        actions: list[Action] = []
        expired = self.state is not State.QUARANTINE and now >= self.deadline
        if expired and not isinstance(event, Acknowledged | Failed):
            # The lease has ended, so data that lands now may belong to another request. That is
            # why the receive fails before it takes the event in. A Failed event is let through,
            # because it knows the cause better, and an Acknowledged event moves the deadline.
            self._fail(self._expired(), now, actions)
        elif now >= self._stalled_at and not isinstance(event, Failed):
            self._fail(self._stalled(now), now, actions)
        if not self.finished:
            self._take(event, now, actions)
        if self.state is State.QUARANTINE and now >= self.drain_at and not self.destroy_asked:
            self.destroy_asked = True
            actions.append(Action.DESTROY_AGENT)
        return tuple(actions)

    def _take(self, event: Event, now: float, actions: list[Action]) -> None:
        # An event that no case matches came late, or a second time. It changes nothing.
        match event:
            case Signal.STARTED if self.state is State.NEW:
                self.moved_at = now
                self._enter(State.HANDSHAKE, now)
                actions.append(Action.CONNECT)
            case Signal.CONNECTED if self.state is State.HANDSHAKE:
                self._enter(State.POSTED, now)
                self.posting = True
                actions.append(Action.POST)
            case Opened(transfer) if self.posting:
                self.open.add(transfer)
                self.moved_at = self.moved_at if self.is_repeated else now
            case Signal.POSTED if self.posting:
                self.posting = False
                if self.posted_at is None:
                    self.posted_at = now
                self._settle(now, actions)
            case Landed(transfer):
                if transfer in self.open:
                    self.open.discard(transfer)
                    self.moved_at = now
                self._settle(now, actions)
            case Acknowledged(until):
                self._acknowledge(until, now, actions)
            case Broken() | Failed() | Signal.ABANDONED | AgentDestroyed():
                self._take_failure(event, now, actions)

    def _take_failure(self, event: Event, now: float, actions: list[Action]) -> None:
        match event:
            case Broken(transfer, failure):
                self.open.discard(transfer)
                self._fail(failure, now, actions)
            case Failed(failure):
                self._fail(failure, now, actions)
            case Signal.ABANDONED:
                self.abandoned = True
                self._fail(Failure(Reason.TRANSFER_STALLED, ABANDONED), now, actions)
            case AgentDestroyed(failure, crashed):
                if self.open or self.posting:
                    self.open.clear()
                    self.crashes += crashed
                    self._begin_again_or_fail(failure, now, actions)

    def _begin_again_or_fail(self, failure: Failure, now: float, actions: list[Action]) -> None:
        """Read everything again over a new agent: the lease stands, and this was no fault of ours.

        MAX_CRASHES is for a receive that itself makes the transfer thread fail. Nothing else bounds
        how often it begins again but ``stall_seconds`` in which nothing of it lands.
        """
        if self.state is State.QUARANTINE or self.crashes >= MAX_CRASHES:
            self._fail(failure, now, actions)
            return
        self.posting = False
        self.posted_at = None
        self.is_repeated = True
        self._enter(State.HANDSHAKE, now)
        actions.append(Action.CONNECT)

    def _settle(self, now: float, actions: list[Action]) -> None:
        """End the receive if nothing of it is under way any more."""
        if self.open:
            return
        if self.state is State.QUARANTINE:
            self._enter(State.FAILED, now)
            actions.append(Action.REPORT)
        elif self.state is State.POSTED and not self.posting:
            # A lease word proves something only if it is read after all data has landed.
            self._enter(State.FENCE, now)
            self.posting = True
            actions.append(Action.FENCE)
        elif self.state is State.FENCE and not self.posting and self.claimed:
            self._enter(State.DONE, now)
            actions.append(Action.REPORT)

    def _acknowledge(self, until: float, now: float, actions: list[Action]) -> None:
        self.deadline = max(self.deadline, until) if self.claimed else until
        self.claimed = True
        if now >= self.deadline:
            self._fail(self._expired(), now, actions)
        else:
            self._settle(now, actions)

    def _fail(self, failure: Failure, now: float, actions: list[Action]) -> None:
        if self.failure is None:
            self.failure = failure
        self.posting = False
        if self.state is not State.QUARANTINE:
            self.drain_at = now + self.drain_seconds
            self._enter(State.QUARANTINE, now)
        self._settle(now, actions)

    def _expired(self) -> Failure:
        if self.open:
            message = f"{counted(len(self.open), 'transfer')} had not landed when the lease ended"
            return Failure(Reason.TRANSFER_STALLED, message)
        if self.posting:
            message = "not every transfer was posted when the lease ended"
            return Failure(Reason.TRANSFER_STALLED, message)
        message = "the lease ended before the prefill engine could be read"
        if self.state is State.FENCE:
            message = "prefill did not acknowledge the lease for this engine before it ended"
        return Failure(Reason.LEASE_EXPIRED, message)

    def _stalled(self, now: float) -> Failure:
        message = f"{counted(len(self.open), 'transfer')} under way, and none has landed"
        if self.state is State.HANDSHAKE:
            message = "no connection to the prefill engine"
        message += f" for {now - self.moved_at:.0f} s"
        return Failure(Reason.TRANSFER_STALLED, message)

    def _enter(self, state: State, now: float) -> None:
        self.state = state
        self.entered.setdefault(state, now)
