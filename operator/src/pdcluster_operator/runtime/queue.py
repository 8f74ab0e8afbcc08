"""A work queue of keys: a key is reconciled by at most one worker at a time.

An event says only *which* object may have changed. The reconcile then reads the state as it is.
So the queue keeps keys, not events. Adding a key that is queued changes nothing. Adding a key
that is being reconciled requeues it once it is done. A key that failed is requeued after a delay
that doubles with each failure; other keys do not wait for it.

Which key is next: urgent keys, whose spec was changed, new keys and the others take turns, and so
do namespaces; see :class:`FairSlots`. A changed spec therefore does not wait behind a thousand new
PDClusters, nor does one whose pods have just become ready.

A key that was reconciled rests for half a second, unless its spec changes; see ``REST_SECONDS``.
"""

import asyncio
import logging
import random
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Set as AbstractSet
from dataclasses import KW_ONLY, dataclass

from pdcluster_operator.runtime.interfaces import Key

log = logging.getLogger(__name__)

TIMES_FREE = 3
"""One namespace alone gets 18 of 24 slots, and all 24 without it; see :class:`FairSlots`."""
BELIEVED_SECONDS = 120.0
"""How long a namespace counts as one that hangs after something in it has hung. Without it, many
such namespaces hold all slots in turn; see :class:`FairSlots`."""
CHECK_SECONDS = 1.0
"""How soon to check again for keys that wait: a call that becomes one that hangs is no event."""

_Line = OrderedDict[str, OrderedDict[Key, None]]
"""Keys that wait by namespace: namespaces take turns, and in one the oldest key is first."""
WORKERS = 24
"""Keys that are reconciled at once: a reconcile waits for the API server most of its time.

With 4, others wait for keys that hang (``operator/tests/runtime/test_fair_slots.py``). Without a
limit, each new PDCluster is reconciled more often (``operator/tests/runtime/test_crowd.py``).
"""
RECONCILE_HANGS_SECONDS = 15.0
"""A reconcile that takes longer hangs. While many PDClusters start, some take several seconds."""
REST_SECONDS = 0.5
"""How long a key rests. Without it, a new PDCluster is reconciled 13 times until it is Ready, and
not 9 times (``operator/tests/runtime/test_crowd.py``), and one that never stops reporting changes
without a pause."""
CROWD_RESTS = 4
"""How many times longer it rests while more keys wait than there are workers.

With 400 PDClusters that are created at once, each is reconciled 5.3 times until it is Ready, and
not 8.2 times, and all are Ready as soon (``operator/tests/runtime/test_crowd.py``).
"""

Handler = Callable[[Key], Awaitable["float | None"]]
"""Reconciles one key; returns seconds after which to requeue it, or None. Raising retries."""


@dataclass(frozen=True, slots=True)
class Backoff:
    """Delay after the n-th failure in a row: ``first * 2**(n-1)``, at most ``last``, jittered."""

    first: float = 1.0
    last: float = 300.0
    jitter: float = 0.2

    def delay(self, failures: int, uniform: Callable[[float, float], float]) -> float:
        """Seconds to wait after ``failures`` (at least 1) failures in a row."""
        wait = min(self.first * 2.0 ** min(failures - 1, 30), self.last)
        return wait * uniform(1 - self.jitter, 1 + self.jitter)


BACKOFF = Backoff()


@dataclass(eq=False)
class KeyedQueue:
    """Runs a handler over keys. Every method must be called on the event loop's thread.

    Args:
        is_urgent: whether a key whose delay has passed is queued as an urgent one.
        is_new: whether nothing was created for a key yet.
        rest: seconds for which a key rests.

    Attributes:
        slots: which keys wait, and which are reconciled.
    """

    handler: Handler
    _: KW_ONLY
    is_urgent: Callable[[Key], bool] = lambda _: False
    is_new: Callable[[Key], bool] = lambda _: False
    workers: int = WORKERS
    rest: float = REST_SECONDS
    backoff: Backoff = BACKOFF
    uniform: Callable[[float, float], float] = random.uniform

    def __post_init__(self) -> None:
        self.slots = FairSlots(self.workers, RECONCILE_HANGS_SECONDS, self._start, self.is_new)
        self._resting: dict[Key, bool] = {}  # whether it was added meanwhile
        self._running: dict[Key, asyncio.Task[None]] = {}
        self._again: dict[Key, bool] = {}  # added while it is reconciled: whether it is urgent
        self._timers: dict[Key, asyncio.TimerHandle] = {}
        self._failures: dict[Key, int] = {}
        self._started = self._stopping = False

    def add(self, key: Key, *, urgent: bool = False) -> None:
        """Queue a key.

        Args:
            urgent: its spec was changed, and somebody waits for the result.
        """
        if self._stopping:
            return
        if key in self._running:
            self._again[key] = urgent or self._again.get(key, False)
            return
        if key in self._resting and not urgent and not self.slots.waits(key):
            self._resting[key] = True
            return
        self.slots.add(key, urgent=urgent)
        self._hand_out()

    def add_after(self, key: Key, seconds: float) -> None:
        """Queue a key in ``seconds``, unless it is due earlier already."""
        if self._stopping:
            return
        loop = asyncio.get_running_loop()
        held = self._timers.get(key)
        if held is not None:
            if held.when() <= loop.time() + seconds:
                return
            held.cancel()
        self._timers[key] = loop.call_later(max(seconds, 0.0), self._due, key)

    @property
    def depth(self) -> int:
        """Number of keys that wait for a worker, or for the end of their rest."""
        return len(self.slots) + sum(self._resting.values())

    def start(self) -> None:
        """Begin to reconcile on the running loop."""
        self._started = True
        self._hand_out()

    async def stop(self, *, grace: float = 5.0) -> None:
        """Take no more keys, and cancel handlers that still run after ``grace`` seconds."""
        self._stopping = True
        for held in (self.slots, self._resting, self._again):
            held.clear()
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        if tasks := list(self._running.values()):
            _, late = await asyncio.wait(tasks, timeout=grace)
            for task in late:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _hand_out(self) -> None:
        if self._started:
            self.slots.hand_out()

    def _start(self, key: Key) -> None:
        if (timer := self._timers.pop(key, None)) is not None:
            timer.cancel()  # this reconcile says when the next one has to be
        self._running[key] = asyncio.create_task(self._work(key), name=f"reconcile {key}")

    def _due(self, key: Key) -> None:
        self._timers.pop(key, None)
        self.add(key, urgent=self.is_urgent(key))

    async def _work(self, key: Key) -> None:
        requeue_after: float | None = None
        try:
            requeue_after = await self.handler(key)
        except Exception as error:  # noqa: BLE001 - any failure of one key is retried alone
            self._failures[key] = self._failures.get(key, 0) + 1
            requeue_after = self.backoff.delay(self._failures[key], self.uniform)
            log.warning("%s: %s; trying again in %.1f s", key, error, requeue_after)
        else:
            self._failures.pop(key, None)
        finally:
            del self._running[key]
            self.slots.done(key)
        again = self._again.pop(key, None)
        if not again:
            self._resting[key] = again is not None
            rest = self.rest * (CROWD_RESTS if len(self.slots) > self.workers else 1)
            asyncio.get_running_loop().call_later(rest, self._rested, key)
            if again is None and requeue_after is not None:
                self.add_after(key, requeue_after)
        else:
            self.add(key, urgent=True)
        self._hand_out()

    def _rested(self, key: Key) -> None:
        if self._resting.pop(key, False):
            self.add(key)


@dataclass(eq=False)
class FairSlots:
    """Starts keys when they get a slot, so that no namespace gets all slots.

    Keys wait in three lines, urgent ones, new ones and the others, which take turns. In each line
    the namespaces take turns, and within a namespace the oldest key is first.

    **New keys** have three quarters of the slots at most, and namespaces share these. Each holds
    its slot for a dozen requests, and the others mostly need none. With one line for both, a
    PDCluster among a thousand new ones becomes Ready only when all have their children: it has two
    statuses and events more on the way (``operator/tests/runtime/test_crowd.py``).

    Each call into a namespace may hang for half a minute: it is enough that an admission webhook
    for that namespace does not answer. If the calls into one namespace held all workers, no
    PDCluster of another namespace would be reconciled.

    **The share of one namespace.** A namespace may have one more slot while it has fewer than
    ``TIMES_FREE`` times what is free. So one alone gets three quarters, two get three sevenths
    each, and something stays free for those that have nothing yet. This rule is from Choudhury and
    Hahne, "Dynamic queue length thresholds for shared-memory packet switches", IEEE/ACM
    Transactions on Networking 6(2), 1998.

    **Namespaces that hang.** All namespaces in which something hangs count as one. If each of many
    could have a few slots, they would hold all of them together. Before it is known that they hang,
    they do. So slots of hanging namespaces beyond three quarters are handed out again, because a
    call that hangs uses no CPU.

    ``operator/tests/runtime/test_fair_slots.py`` shows it in virtual time, and
    ``operator/tests/adapters/test_hanging_webhook.py`` on a real API server: without the shares, a
    change elsewhere waits until most of forty PDClusters had their thirty seconds.

    Args:
        total: number of slots. Up to a quarter more are given out while something hangs.
        hangs_seconds: what holds a slot for longer hangs.
        start: called with each key that gets a slot. :meth:`done` gives the slot back.
        is_new: whether nothing was created for a key yet.
    """

    total: int
    hangs_seconds: float
    start: Callable[[Key], None]
    is_new: Callable[[Key], bool] = lambda _: False

    def __post_init__(self) -> None:
        self._urgent: _Line = OrderedDict()
        self._new: _Line = OrderedDict()
        self._others: _Line = OrderedDict()
        self._turns = deque((self._urgent, self._new, self._others))
        self._new_holders: set[Key] = set()
        self._since: dict[str, dict[Key, float]] = {}  # when each holder got its slot, oldest first
        self._hung_until: dict[str, float] = {}
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        """Return how many keys wait."""
        return sum(len(keys) for line in self._turns for keys in line.values())

    def waiting(self) -> int:
        """Return how many keys wait, but for namespaces in which something hangs."""
        hanging = self.hanging()
        lines = ((name, keys) for line in self._turns for name, keys in line.items())
        return sum(len(keys) for name, keys in lines if name not in hanging)

    def waits(self, key: Key) -> bool:
        """Whether a key waits."""
        return any(key in line.get(key.namespace, ()) for line in self._turns)

    def add(self, key: Key, *, urgent: bool = False) -> None:
        """Let a key wait. One that waits keeps its place, unless it gets urgent."""
        if key in self._urgent.get(key.namespace, ()) or (self.waits(key) and not urgent):
            return
        if urgent:
            _drop(self._new, key)
            _drop(self._others, key)
            line = self._urgent
        else:
            line = self._new if self.is_new(key) else self._others
        line.setdefault(key.namespace, OrderedDict())[key] = None

    def done(self, key: Key) -> None:
        """Take back the slot that a key had."""
        self._new_holders.discard(key)
        held, now = self._since[key.namespace], _now()
        if now - held.pop(key) > self.hangs_seconds:
            self._hung_until[key.namespace] = now + BELIEVED_SECONDS
        if not held:
            del self._since[key.namespace]

    def clear(self) -> None:
        """Forget the keys that wait."""
        for line in self._turns:
            line.clear()

    def hand_out(self) -> None:
        """Start each key that may have a slot now."""
        while (key := self.take()) is not None:
            self.start(key)
        if any(self._turns) and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(CHECK_SECONDS, self._check)

    def take(self) -> Key | None:
        """Give a slot to the key whose turn it is, and return it; None if none may have one.

        A line or namespace that gets no slot now keeps its turn.
        """
        hanging = self.hanging()
        of_hanging = sum(len(held) for name, held in self._since.items() if name in hanging)
        quarter = self.total // (TIMES_FREE + 1)
        beyond = min(quarter, max(0, of_hanging - self.total + quarter))
        free = self.total + beyond - sum(map(len, self._since.values()))
        if free <= 0:  # thousands of namespaces may wait
            return None
        new = sum(key.namespace not in hanging for key in self._new_holders)
        room = max(1, self.total - quarter) - new  # what hangs computes nothing
        for _ in range(len(self._turns)):
            line = self._turns[0]
            self._turns.rotate(-1)
            if line is self._new and room <= 0:
                continue
            for namespace, keys in line.items():
                own = of_hanging if namespace in hanging else len(self._since.get(namespace, ()))
                if own < TIMES_FREE * (min(free, room) if line is self._new else free):
                    key = next(iter(keys))
                    line.move_to_end(namespace)
                    _drop(line, key)
                    self._since.setdefault(namespace, {})[key] = _now()
                    if line is self._new:
                        self._new_holders.add(key)
                    return key
        return None

    def hanging(self) -> AbstractSet[str]:
        """Return the namespaces in which something hangs, or did lately."""
        now = _now()
        self._hung_until = {name: until for name, until in self._hung_until.items() if now < until}
        long = (
            name
            for name, held in self._since.items()
            if now - next(iter(held.values())) > self.hangs_seconds
        )
        return self._hung_until.keys() | set(long)

    def _check(self) -> None:
        self._timer = None
        self.hand_out()


def _drop(line: _Line, key: Key) -> None:
    keys: OrderedDict[Key, None] = line.get(key.namespace, OrderedDict())
    keys.pop(key, None)
    if not keys:
        line.pop(key.namespace, None)


def _now() -> float:
    return asyncio.get_running_loop().time()
