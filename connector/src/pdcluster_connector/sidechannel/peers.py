"""The peers that this rank has met: it shakes hands with them and watches whether they live.

One thread runs an asyncio loop. Requests for the same engine share its attempts. Attempts for
different engines run at the same time, so a dead engine delays no other.

The first rank of an engine asks its peers every second whether they live. The other ranks get the
answer from the scheduler (``vllm/step_messages.py``) and ask rarely. So the questions that a
prefill engine gets grow with the number of decode engines, not with the number of their ranks.

A peer that refuses connections is gone, and so is one at whose address another incarnation answers.
If that answers elsewhere, both may live: the peer is asked, and is gone if it does not answer. Any
other peer that is silent may live: it may be starved, or packets get lost. So its link is reported
as failed, but who waits for it goes on waiting while the lease stands. Only those that come after
SILENT_SECONDS of silence get an answer soon.
"""

import asyncio
import logging
import random
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf

import aiohttp

from pdcluster_connector.certificate_files import Tls
from pdcluster_connector.compat.reasons import Reason
from pdcluster_connector.compat.shape import EngineShape
from pdcluster_connector.protocol.engine_id import parse_engine_id
from pdcluster_connector.protocol.failure import Failure
from pdcluster_connector.protocol.messages import EngineMetadata, HealthReply
from pdcluster_connector.sidechannel import handshake, loop_thread

logger = logging.getLogger(__name__)

Done = Callable[[EngineMetadata | Failure], None]
OnGone = Callable[[str, Failure], None]

POLL_SECONDS = 1.0
# Of the other ranks. No connection is kept between two questions: servers close it after 15 s.
RARE_POLL_SECONDS = (16.0, 24.0)
# A peer is silent after two questions without an answer, three seconds in all. One is not enough:
# it also times out if this loop itself was held up.
HEALTH_SECONDS = (2.0, 1.0)
ANSWER_SECONDS = 1.5  # so long waits who comes after SILENT_SECONDS of silence (handshake.py)
FORGET_SECONDS = 300.0  # no lease stands so long; a deleted pod's address answers never again
REFUSED_SECONDS = 1.0  # for so long a connection is tried that is refused
RESET_SECONDS = 5.0  # for so long one that is reset or not served: a crowd may be the cause
FIRST_RETRY_SECONDS = 0.05
LAST_RETRY_SECONDS = 1.0
FIRST_RANK = (0, 0)
# A clock that differs by so many seconds is warned about. A skew that moves less is not noted.
SKEW_SECONDS, SKEW_STEP_SECONDS = 5.0, 1.0
# What a question to a peer can find. Other failures are of one rank's own transfers.
CONCERNS_ALL_RANKS = frozenset(
    {Reason.SIDE_CHANNEL_UNREACHABLE, Reason.PEER_RESTARTED, Reason.AUTHENTICATION_FAILED}
)
MAX_PEERS = 4096
CLOSING = "this engine is shutting down"


@dataclass(eq=False, slots=True)
class Waiter:
    """Who waits for a handshake, and until when (``time.monotonic`` seconds).

    A lease that is renewed moves the deadline.
    """

    done: Done
    deadline: Callable[[], float]
    timer: asyncio.TimerHandle | None = None

    def answer(self, outcome: EngineMetadata | Failure) -> None:
        """Pass on how the handshake ended."""
        if self.timer is not None:
            self.timer.cancel()
        call([self.done], outcome)


@dataclass(eq=False, slots=True)
class KnownPeer:
    """One incarnation of an engine.

    Attributes:
        address: host and port of its side channel.
        metadata: what its handshake brought; None before that.
        last_error: why the last attempt did not succeed.
        task: shakes hands, and then watches the peer.
        skew: by how many seconds its clock is ahead of ours; None while not known.
        hurry: somebody waits for a silent peer, which is asked at once whether it lives.
        replaced: why it is gone if it does not answer now: another incarnation of its engine has.
        refused_at: since when its address refuses or resets connections, or does not serve them.
    """

    engine_id: str
    address: tuple[str, int]
    waiters: list[Waiter] = field(default_factory=list)
    metadata: EngineMetadata | None = None
    last_error: handshake.TryAgain | None = None
    task: asyncio.Task[None] | None = None
    skew: float | None = None
    hurry: asyncio.Event = field(default_factory=asyncio.Event)
    replaced: Failure | None = None
    refused_at: float = inf

    def answer_all(self, outcome: EngineMetadata | Failure) -> None:
        """Pass on to every waiter how the handshake ended."""
        waiters, self.waiters = self.waiters, []
        for waiter in waiters:
            waiter.answer(outcome)


def call(callbacks: Iterable[Callable[..., None]], *args: object) -> None:
    """Call listeners. A fault of one must not end the peers' thread."""
    for callback in callbacks:
        try:
            callback(*args)
        except Exception:
            logger.exception("a callback of the peer book failed")


class PeerBook:
    """Keeps the metadata of peers until they are gone. Public methods are thread-safe.

    Args:
        engine_id, shape: how this rank introduces itself.
        rank: (pipeline, tensor).
        tls: what it shows to peers and asks of them; None for plain HTTP.

    Attributes:
        on_gone: called as ``on_gone(engine_id, failure)`` on the book's thread when a connected
            incarnation has vanished; it must not block.
    """

    def __init__(
        self, engine_id: str, shape: EngineShape, rank: tuple[int, int], tls: Tls | None = None
    ) -> None:
        self.on_gone: OnGone = lambda engine_id, failure: None
        self.silence = handshake.Silence()
        self._me = handshake.introduction(engine_id, shape)
        self._tls = tls
        self._asks_often = rank == FIRST_RANK
        self._thread = loop_thread.LoopThread("pdcluster-peers")
        self._peers: dict[str, KnownPeer] = {}
        self._listeners: list[OnGone] = []
        self._silence_listeners: list[OnGone] = []
        self._session: aiohttp.ClientSession | None = None
        self._closed = False

    def start(self) -> None:
        """Start the thread. Calls made before wait for it."""
        self._thread.start()

    def close(self) -> None:
        """End every attempt; callers that wait get a failure. May be called twice."""
        self._closed = True
        if self._thread.alive:
            self._thread.submit(self._close()).result(timeout=10)
        self._thread.stop()

    def connect(
        self,
        engine_id: str,
        host: str,
        port: int,
        deadline: Callable[[], float],
        done: Done,
        since: float | None = None,
    ) -> None:
        """Ask for an engine's metadata; ``done`` is called once, on the book's thread.

        Never blocks and never raises. Attempts go on until ``deadline()`` (time.monotonic
        seconds), which may move meanwhile; concurrent calls for one engine share the attempts;
        the metadata is kept until the engine is gone or forgotten. A refusal is reported at once.

        ``since``: when what needs it began, time.monotonic seconds; None for now.
        """
        waiter = Waiter(done, deadline)
        if self._closed or not self._thread.call(
            self._connect, engine_id, host, port, waiter, since
        ):
            done(Failure(Reason.SIDE_CHANNEL_UNREACHABLE, CLOSING))

    def forget(self, engine_id: str, failure: Failure) -> None:
        """Drop what is known of an engine, because of ``failure``; waiters get the failure, too.

        The next ``connect`` shakes hands anew.
        """
        self._thread.call(self._forget, engine_id, failure)

    def hear(self, engine_id: str, failure: Failure) -> None:
        """Take in that another rank of this engine found a peer gone or silent. Thread-safe."""
        self._thread.call(self._hear, engine_id, failure)

    def __contains__(self, engine_id: str) -> bool:
        """Return whether a peer is watched, or shaken hands with. Thread-safe."""
        return engine_id in self._peers

    def skew(self, engine_id: str) -> float | None:
        """Return by how many seconds a peer's clock is ahead of ours; None while not known."""
        peer = self._peers.get(engine_id)
        return None if peer is None else peer.skew

    def listen(self, on_gone: OnGone, *, silence: bool = False) -> None:
        """Also call ``on_gone`` when a connected peer is gone or was forgotten.

        ``silence``: and when it has become silent.
        """
        self._listeners.append(on_gone)
        if silence:
            self._silence_listeners.append(on_gone)

    # From here on: the loop's thread only.

    def _connect(
        self, engine_id: str, host: str, port: int, waiter: Waiter, since: float | None = None
    ) -> None:
        peer = self._peers.get(engine_id)
        if peer is None:
            if len(self._peers) >= MAX_PEERS:
                message = f"{MAX_PEERS} handshakes are under way already"
                waiter.answer(Failure(Reason.SIDE_CHANNEL_UNREACHABLE, message))
                return
            peer = self._peers[engine_id] = KnownPeer(engine_id, (host, port))
        if peer.metadata is not None and not self.silence.is_long((host, port)):
            waiter.answer(peer.metadata)
            return
        peer.address = host, port
        if self.silence.is_long((host, port), since):
            soon, lease_end = time.monotonic() + ANSWER_SECONDS, waiter.deadline
            waiter.deadline = lambda: (
                min(soon, lease_end()) if self.silence.is_long((host, port)) else lease_end()
            )
            peer.hurry.set()
        peer.waiters.append(waiter)
        self._wait(peer, waiter)
        if peer.task is None:
            peer.task = self._thread.loop.create_task(self._attend(peer))

    def _wait(self, peer: KnownPeer, waiter: Waiter) -> None:
        wait = max(0.0, waiter.deadline() - time.monotonic())
        waiter.timer = self._thread.loop.call_later(wait, self._too_late, peer, waiter)

    async def _attend(self, peer: KnownPeer) -> None:
        """Shake hands while anyone waits; once connected, watch until the peer is gone."""
        try:
            await self._shake_hands(peer)
            if peer.metadata is not None:
                self._gone(peer, await self._why_gone(peer))
        finally:
            peer.task = None
            if peer.metadata is None:
                self._drop(peer)

    async def _shake_hands(self, peer: KnownPeer) -> None:
        pause, start = FIRST_RETRY_SECONDS, parse_engine_id(peer.engine_id)
        while peer.waiters:
            where = "{}:{}".format(*peer.address)
            outcome = await self.silence.asking(
                peer.address,
                handshake.shake_hands(
                    self._http(), self._me, peer.engine_id, *peer.address, self._tls
                ),
            )
            if isinstance(outcome, handshake.TryAgain):
                peer.last_error = outcome
                now = time.monotonic()
                peer.refused_at = inf if outcome.silent else min(peer.refused_at, now)
                seconds = REFUSED_SECONDS if outcome.refused else RESET_SECONDS
                if now - peer.refused_at >= seconds:  # long enough to believe it
                    peer.answer_all(handshake.unreachable(outcome))
                    return
                await asyncio.sleep(pause * random.uniform(0.5, 1.0))  # noqa: S311
                pause = min(2 * pause, LAST_RETRY_SECONDS)
                continue
            if isinstance(outcome, Failure):
                logger.warning("no KV from %s: %s", peer.engine_id, outcome)
                self._drop(peer)
            else:
                peer.metadata = outcome
                for other in self._peers.values():  # both may live: it is asked at once
                    if other.metadata and start.succeeds(parse_engine_id(other.engine_id)):
                        other.replaced = handshake.restarted(other.engine_id, peer.engine_id, where)
                        other.hurry.set()
            peer.answer_all(outcome)

    async def _why_gone(self, peer: KnownPeer) -> Failure:
        """Ask whether a peer lives, the first rank every second; return why it is gone, once so."""
        was_silent = False
        while True:
            rarely = random.uniform(*RARE_POLL_SECONDS)  # noqa: S311
            often = self._asks_often or was_silent
            with suppress(TimeoutError):
                await asyncio.wait_for(peer.hurry.wait(), POLL_SECONDS if often else rarely)
            peer.hurry.clear()
            reply = await self._health(peer, HEALTH_SECONDS[0])
            if isinstance(reply, handshake.TryAgain):  # the second time over a fresh connection
                reply = await self._health(peer, HEALTH_SECONDS[1])
            may_live = peer.waiters or self.silence.seconds(peer.address) < FORGET_SECONDS
            may_live = may_live and peer.replaced is None
            if isinstance(reply, handshake.TryAgain) and reply.silent and may_live:
                if not was_silent:
                    logger.warning("peer %s is silent: %s", peer.engine_id, reply.message)
                    call(self._silence_listeners, peer.engine_id, handshake.unreachable(reply))
                was_silent, peer.last_error = True, reply
                continue
            was_silent = False
            if isinstance(reply, handshake.TryAgain):
                return peer.replaced or handshake.unreachable(reply)
            if isinstance(reply, Failure):
                return reply
            if reply.engine_id != peer.engine_id:
                where = "{}:{}".format(*peer.address)
                return handshake.restarted(peer.engine_id, reply.engine_id, where)
            peer.replaced = None
            if peer.metadata is not None:  # to those that came while it was silent
                peer.answer_all(peer.metadata)

    async def _health(
        self, peer: KnownPeer, seconds: float
    ) -> HealthReply | Failure | handshake.TryAgain:
        asked = time.time()
        reply = await self.silence.asking(
            peer.address,
            handshake.ask_health(self._http(), peer.engine_id, *peer.address, seconds, self._tls),
        )
        if isinstance(reply, HealthReply) and reply.time is not None:
            self._note_skew(peer, reply.time - (asked + time.time()) / 2)
        return reply

    def _note_skew(self, peer: KnownPeer, skew: float) -> None:
        """Note by how much a peer's clock differs; the first rank warns when that becomes much."""
        known = peer.skew or 0.0
        if peer.skew is None or abs(skew - known) >= SKEW_STEP_SECONDS:
            peer.skew = round(skew, 1)
            if self._asks_often and abs(known) < SKEW_SECONDS <= abs(skew):
                words = "the clock of %s differs from ours by %+.0f s; certificates depend on it"
                logger.warning(words, peer.engine_id, skew)

    def _gone(self, peer: KnownPeer, failure: Failure) -> None:
        logger.warning("peer %s is gone: %s", peer.engine_id, failure)
        self._drop(peer)
        peer.answer_all(failure)
        call([self.on_gone, *self._listeners], peer.engine_id, failure)

    def _hear(self, engine_id: str, failure: Failure) -> None:
        if (peer := self._peers.get(engine_id)) is None or peer.metadata is None:
            return
        if failure.reason is Reason.SIDE_CHANNEL_UNREACHABLE and not failure.dead:
            self.silence.hear(peer.address, sum(HEALTH_SECONDS))
            peer.hurry.set()  # it may live: this rank asks, too
            return
        if peer.task is not None:
            peer.task.cancel()
        self._gone(peer, failure)

    def _too_late(self, peer: KnownPeer, waiter: Waiter) -> None:
        if waiter in peer.waiters and waiter.deadline() > time.monotonic():
            self._wait(peer, waiter)
        elif waiter in peer.waiters:
            peer.waiters.remove(waiter)
            where = "{}:{}".format(*peer.address)
            last = peer.last_error or handshake.TryAgain(f"{where} has not answered yet")
            message = f"no handshake before the deadline; last: {last.message}"
            if self.silence.is_long(peer.address):
                seconds = self.silence.seconds(peer.address)
                message = f"no answer for {seconds:.0f} s; last: {last.message}"
            waiter.answer(Failure(last.reason, message))
            if not peer.waiters and peer.metadata is None and peer.task is not None:
                peer.task.cancel()
                self._drop(peer)

    def _forget(self, engine_id: str, failure: Failure) -> None:
        if (peer := self._peers.pop(engine_id, None)) is None:
            return
        if peer.task is not None:
            peer.task.cancel()
        peer.answer_all(failure)
        if peer.metadata is not None:  # nobody watches it any more
            call(self._listeners, engine_id, failure)

    def _drop(self, peer: KnownPeer) -> None:
        if self._peers.get(peer.engine_id) is peer:
            del self._peers[peer.engine_id]

    def _http(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = handshake.client_session()
        return self._session

    async def _close(self) -> None:
        for engine_id in list(self._peers):
            self._forget(engine_id, Failure(Reason.SIDE_CHANNEL_UNREACHABLE, CLOSING))
        if self._session is not None:
            await self._session.close()
