"""How the pods of one multi-node engine start and end together.

A follower learns its engine's identity from the leader's launcher and then keeps asking. So each
side notices when the other has restarted or is gone, and ends its own part. A follower that is told
to stop says so in its requests. It goes on until the leader has drained and ended. The leader's
answer holds the token for reports. With TLS, only a client with this engine's own certificate gets
it. Without TLS it is not encrypted, and only pods of the same cluster may reach the launcher.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, Final

import aiohttp
import msgspec
from msgspec import Meta, Struct

from pdcluster_connector.certificate_files import Tls
from pdcluster_connector.launcher.engine.engine_api import OWN_FAULTS
from pdcluster_connector.sidechannel import handshake

ASK_EVERY: Final = 1.0
SILENCE: Final = 20.0
_MAX_ANSWER: Final = 64 * 1024


class Rendezvous(Struct, frozen=True):
    """``GET /v1/rendezvous?rank=N&start=S[&of=ID][&leaving=1]``: what the leader tells a follower.

    ``of`` is the engine id that the follower joined. It counts as a follower of that engine only.
    The answer is 409 while the engine is about to end. Its next start takes the waiting followers.
    """

    engine_id: Annotated[str, Meta(min_length=1, max_length=512)]
    token: Annotated[str, Meta(max_length=200)]
    ready: bool = False


@dataclass(slots=True)
class Followers:
    """The leader's view of its followers. Times are seconds of any monotonic clock.

    Attributes:
        nodes: pods of the engine, the leader included.
        leaving: the first follower that was told to stop.
    """

    nodes: int
    leaving: int | None = None
    _starts: dict[int, str] = field(default_factory=dict)
    _heard: dict[int, float] = field(default_factory=dict)
    _restarted: set[int] = field(default_factory=set)

    def heard(self, rank: int, start: str, now: float, *, leaving: bool = False) -> str | None:
        """Record a follower's request; returns what is wrong with it, or None.

        ``start`` is random for every start of the follower's launcher. ``leaving`` says that the
        follower was told to stop.
        """
        if not 0 < rank < self.nodes:
            return f"rank is {rank}, but this engine's followers are 1 to {self.nodes - 1}"
        if not 0 < len(start) <= 64:
            return "start must have 1 to 64 characters"
        if self._starts.setdefault(rank, start) != start:
            self._restarted.add(rank)
        self._heard[rank] = now
        if leaving and self.leaving is None:
            self.leaving = rank
        return None

    def loss(self, now: float) -> str | None:
        """Tell why this engine cannot continue with its followers; None if it can."""
        if self._restarted:
            return f"node {min(self._restarted)} of this engine has restarted"
        for rank, at in sorted(self._heard.items()):
            if now - at > SILENCE:
                return f"node {rank} of this engine has been silent for {SILENCE:.0f} s"
        return None


@dataclass(eq=False)
class Leader:
    """The leader's launcher, as a follower sees it.

    Args:
        session: for the requests.
        address: ``http://host:port``.
        rank: this follower's node rank.
        start: random for every start of this launcher.
        tls: this engine's, if its launchers speak HTTPS.

    Attributes:
        leaving: set once this follower was told to stop.
    """

    session: aiohttp.ClientSession
    address: str
    rank: int
    start: str
    tls: Tls | None = None
    leaving: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._parameters = {"rank": str(self.rank), "start": self.start}

    async def meet(self, waiting: Callable[[str], None]) -> Rendezvous:
        """Ask until the leader answers; calls ``waiting`` with the reason while it does not."""
        while True:
            try:
                return await self._ask()
            except _NoAnswerError as error:
                waiting(f"waiting for the engine's leader: {error}")
            await asyncio.sleep(ASK_EVERY)

    async def watch(self, met: Rendezvous, heard: Callable[[Rendezvous], None]) -> str:
        """Keep asking; returns why this engine has ended: the leader restarted, or is gone."""
        # A restarted leader has another engine id. It must not count this process as its follower:
        # it would then take the end of this process for the loss of a follower.
        self._parameters["of"] = met.engine_id
        last, why = time.monotonic(), ""
        while time.monotonic() - last <= SILENCE:
            await asyncio.sleep(ASK_EVERY)
            try:
                answer = await self._ask()
            except _NoAnswerError as error:
                why = str(error)
                if self.leaving and not error.passing:
                    return why  # the leader has drained; do not wait until it comes back
                continue
            if answer.engine_id != met.engine_id:
                return f"the leader of this engine has restarted as {answer.engine_id}"
            last = time.monotonic()
            heard(answer)
        return f"the leader of this engine has been silent for {SILENCE:.0f} s: {why}"

    async def _ask(self) -> Rendezvous:
        address = f"{self.address}/v1/rendezvous"
        timeout = aiohttp.ClientTimeout(total=5.0)
        parameters = {**self._parameters, **({"leaving": "1"} if self.leaving else {})}
        ask: Any = {"params": parameters, "timeout": timeout, "limit": _MAX_ANSWER}
        try:
            status, data = await handshake.request(self.session, "GET", address, self.tls, **ask)
        except aiohttp.ClientConnectorError as error:
            why = f"{address} does not answer: {error}"
            raise _NoAnswerError(why, passing=error.errno in OWN_FAULTS) from None
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            why = f"{address} does not answer: {error or 'too slow'}"
            raise _NoAnswerError(why, passing=True) from None
        if status != 200:
            raise _NoAnswerError(
                f"{address} answered {status}: {data[:200].decode(errors='replace')}"
            )
        try:
            return msgspec.json.decode(data, type=Rendezvous)
        except msgspec.DecodeError as error:
            raise _NoAnswerError(f"{address} answered with a bad document: {error}") from None


class _NoAnswerError(Exception):
    """The leader gave no usable answer. The message says why.

    ``passing`` says that the leader may still live: it was slow, or a connection broke off.
    """

    def __init__(self, message: str, *, passing: bool = False) -> None:
        super().__init__(message)
        self.passing = passing
