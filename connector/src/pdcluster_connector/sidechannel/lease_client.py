"""Sends renewals and releases of leases to prefill engines.

Runs on decode's scheduler side. A message is one HTTP request to one engine and carries
everything that waits for that engine; it is repeated until it arrives or its deadline has
passed (the lease has ended by itself then). What prefill says of a lease comes back as a
:class:`LeaseAnswer`. ``vllm/scheduler_side/decode_leases.py`` decides when a lease is renewed or
released. Prefill answers in ``lease_desk.py``.
"""

import asyncio
import logging
import random
import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from pdcluster_connector.certificate_files import Tls
from pdcluster_connector.protocol import host_port, messages
from pdcluster_connector.protocol.messages import LeaseKey, LeaseReply, Malformed, Standing
from pdcluster_connector.protocol.ticket import Ticket
from pdcluster_connector.sidechannel import handshake, loop_thread

logger = logging.getLogger(__name__)

# Releases wait for :meth:`LeaseClient.send` or for others. A message costs this engine half a
# millisecond of Python, and a thread that wakes takes the interpreter from the step. For 32
# requests at once, three go and not nine. [make bench]
GATHER_SECONDS = 0.02
# Renewals wait for the step's :meth:`LeaseClient.send`, and no longer than this. It is less: a
# data-parallel rank that makes no step now claims before another one's release ends the lease.
UNSENT_SECONDS = 0.005
FIRST_RETRY_SECONDS = 0.1
LAST_RETRY_SECONDS = 2.0
BATCH = 256  # messages of the longest ids still fit a request
MAX_PENDING = 65_536
SEND: Any = {
    "timeout": aiohttp.ClientTimeout(total=10.0, sock_connect=3.0),
    "limit": messages.MAX_REQUEST_BYTES,
}

Address = tuple[str, int, str]  # host, port, engine id


@dataclass(frozen=True, slots=True)
class LeaseAnswer:
    """What prefill ``engine_id`` says of one lease.

    ``until``: a lease that is held stands until then, time.monotonic seconds. It is counted from
    the moment at which the question was sent, which is before prefill counted from.
    """

    engine_id: str
    request_id: str
    token: int
    standing: Standing
    until: float = 0.0


@dataclass(eq=False, slots=True)
class _Outbox:
    """What waits for one engine: deadlines (time.monotonic seconds) by lease."""

    releases: dict[LeaseKey, float] = field(default_factory=dict)
    renewals: dict[LeaseKey, float] = field(default_factory=dict)
    task: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self.releases) + len(self.renewals)


class LeaseClient:
    """Thread-safe; its methods never raise, and only :meth:`wait` and :meth:`close` block.

    ``holder`` is this engine's id: leases are claimed for it. ``unanswered`` are engines that gave
    no answer of use when they were last asked. Nobody waits for the answer to a claim of theirs.

    At most ``MAX_PENDING`` renewals and releases wait, for all engines together. When there are
    more, the engine for which most wait loses its oldest. So an engine that does not answer costs
    the others none.
    """

    def __init__(self, holder: str, tls: Tls | None = None) -> None:
        self._tls = tls
        self._holder = holder
        self._answers: deque[LeaseAnswer] = deque(maxlen=MAX_PENDING)
        self._has_answers = threading.Event()
        self._thread = loop_thread.LoopThread("pdcluster-leases")
        self._asked: deque[tuple[Ticket, float, bool]] = deque()
        self._is_unsent = False  # renewals are among them, which are taken in UNSENT_SECONDS
        self._is_due = False  # releases are among them, which are taken in GATHER_SECONDS
        self._outboxes: dict[Address, _Outbox] = {}
        self._session: aiohttp.ClientSession | None = None
        self.unanswered: set[str] = set()

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self, seconds: float = 1.0) -> None:
        """Give what waits ``seconds`` to arrive, then stop. May be called twice."""
        if self._thread.alive:
            self._thread.submit(self._close(seconds)).result(timeout=seconds + 10)
        self._thread.stop()

    def release(self, ticket: Ticket, deadline: float) -> None:
        """Release a ticket's lease, until ``deadline`` (time.monotonic seconds) at the latest."""
        self._asked.append((ticket, deadline, True))
        if not self._is_due:
            self._is_due = True
            self._thread.call(self._thread.loop.call_later, GATHER_SECONDS, self._take_due)

    def renew(self, ticket: Ticket, deadline: float) -> None:
        """Renew a ticket's lease once. The first renewal claims it."""
        self._asked.append((ticket, deadline, False))
        if not self._is_unsent:
            self._is_unsent = True
            self._thread.call(self._thread.loop.call_later, UNSENT_SECONDS, self._take_unsent)

    def send(self, *, releases: bool = False) -> None:
        """Send all at once if there is a renewal: a receive may wait for what prefill says.

        ``releases``: also if there are only releases.
        """
        if releases:
            self._thread.call(self._take_all)
        elif self._is_unsent:
            self._thread.call(self._take_unsent)

    def doubt(self, engine_ids: Iterable[str]) -> None:
        """Note that engines are silent or gone, until they answer a message."""
        if len(self.unanswered) >= MAX_PENDING:  # of engines that are long gone
            self.unanswered.clear()
        self.unanswered.update(engine_ids)

    def wait(self, seconds: float) -> None:
        """Wait at most ``seconds`` until there are answers."""
        self._has_answers.clear()
        if not self._answers:
            self._has_answers.wait(seconds)

    def answers(self) -> list[LeaseAnswer]:
        """Return what prefill engines have answered to renewals since the last call."""
        return [self._answers.popleft() for _ in range(len(self._answers))]

    # From here on: the loop's thread only.

    def _take_due(self) -> None:
        self._is_due = False  # first: what is asked from now on wakes it again
        self._take_asked()

    def _take_unsent(self) -> None:
        if self._is_unsent:
            self._take_all()

    def _take_all(self) -> None:
        self._is_unsent = False  # first: what is asked from now on wakes it again
        self._take_asked()

    def _take_asked(self) -> None:
        while self._asked:
            self._add(*self._asked.popleft())

    def _add(self, ticket: Ticket, deadline: float, release: bool) -> None:
        if sum(map(len, self._outboxes.values())) >= MAX_PENDING:
            fullest = max(self._outboxes.values(), key=len)
            waiting = fullest.renewals or fullest.releases
            waiting.pop(next(iter(waiting)))
        address = ticket.host, ticket.port, ticket.engine_id
        key = ticket.request_id, ticket.token
        outbox = self._outboxes.setdefault(address, _Outbox())
        if release:
            outbox.renewals.pop(key, None)
            outbox.releases[key] = deadline
        elif key not in outbox.releases:
            outbox.renewals[key] = deadline
        if outbox.task is None:
            outbox.task = self._thread.loop.create_task(self._deliver(address, outbox))

    async def _deliver(self, address: Address, outbox: _Outbox) -> None:
        *_, engine_id = address
        pause = FIRST_RETRY_SECONDS
        try:
            while self._prune(outbox):
                renewals = tuple(outbox.renewals)[:BATCH]
                releases = tuple(outbox.releases)[: BATCH - len(renewals)]
                sent_at = time.monotonic()
                reply = await self._send(address, releases, renewals)
                if isinstance(reply, LeaseReply):
                    self._note(engine_id, renewals, reply, sent_at)
                    self.unanswered.discard(engine_id)
                else:
                    self.doubt([engine_id])
                if reply is None:
                    await asyncio.sleep(pause * random.uniform(0.5, 1.0))  # noqa: S311
                    pause = min(2 * pause, LAST_RETRY_SECONDS)
                    continue
                pause = FIRST_RETRY_SECONDS
                for key in releases:
                    outbox.releases.pop(key, None)
                for key in renewals:
                    outbox.renewals.pop(key, None)
        finally:
            self._outboxes.pop(address, None)

    def _note(
        self, engine_id: str, renewals: tuple[LeaseKey, ...], reply: LeaseReply, sent_at: float
    ) -> None:
        listed = dict.fromkeys(reply.renewed, Standing.HELD)
        listed |= dict.fromkeys(reply.expired, Standing.EXPIRED)
        listed |= dict.fromkeys(reply.claimed, Standing.CLAIMED)
        for key in renewals:
            standing = listed.get(key, Standing.GONE)
            self._answers.append(LeaseAnswer(engine_id, *key, standing, sent_at + reply.seconds))
        self._has_answers.set()

    def _prune(self, outbox: _Outbox) -> bool:
        """Drop what is too late; True while something is left."""
        now = time.monotonic()
        for waiting in (outbox.releases, outbox.renewals):
            for key in [key for key, deadline in waiting.items() if deadline <= now]:
                del waiting[key]
        return len(outbox) > 0

    async def _send(
        self, address: Address, releases: tuple[LeaseKey, ...], renewals: tuple[LeaseKey, ...]
    ) -> LeaseReply | Malformed | None:
        """Return the answer. None: try again. Malformed: there is no use in that."""
        host, port, engine_id = address
        body = messages.encode(messages.LeaseRequest(engine_id, self._holder, releases, renewals))
        if self._session is None:
            self._session = handshake.client_session()
        try:
            to = host_port.url(host, port, "/v1/leases", secured=self._tls is not None)
            status, raw = await handshake.request(
                self._session, "POST", to, self._tls, engine_id, data=body, **SEND
            )
            if status not in {200, 400, 403, 404, 409, 413}:
                return None
            refused = Malformed(f"refused with {status}")
            reply = messages.decode_lease_reply(raw) if status == 200 else refused
        except handshake.NETWORK_ERRORS as error:
            logger.debug("leases of %s: %s", engine_id, handshake.describe(error))
            return None
        except ValueError as error:  # a host that makes no URL
            reply = Malformed(str(error))
        if isinstance(reply, Malformed):
            logger.warning("leases of %s: %s", engine_id, reply.message)
        return reply

    async def _close(self, seconds: float) -> None:
        self._take_asked()
        tasks = [outbox.task for outbox in self._outboxes.values() if outbox.task]
        if tasks:
            await asyncio.wait(tasks, timeout=seconds)
        if self._session is not None:
            await self._session.close()
