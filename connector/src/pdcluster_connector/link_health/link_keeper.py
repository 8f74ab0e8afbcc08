"""Keeps one link of one decode worker: asks, shakes hands, probes, watches, and begins again.

The other end is one data-parallel rank of a prefill engine, with a side channel of its own. The
keeper asks the peer itself which incarnation listens. So a prefill engine that has restarted is
linked again at once, before the operator notices.

Three other files also say why a link fails. ``sidechannel/handshake.py`` applies the rules.
``sidechannel/peers.py`` says when a peer is gone. ``transfer/probing.py`` says when a
probe or a check fails. The keeper itself fails a link if the wrong engine or rank answers, or if a
probe takes too long. A NIXL connection of a receive breaks apart from that
(``transfer/connections.py``).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

import aiohttp
from msgspec.structs import replace

from pdcluster_connector.certificate_files import Tls
from pdcluster_connector.compat.reasons import Reason
from pdcluster_connector.nixl_io.reading_agent import ProbeResult
from pdcluster_connector.protocol.engine_id import parse_engine_id
from pdcluster_connector.protocol.failure import Failure
from pdcluster_connector.protocol.launcher_documents import LinkState, PeerEntry, RankLink
from pdcluster_connector.protocol.messages import EngineMetadata
from pdcluster_connector.sidechannel.handshake import TryAgain, ask_health, unreachable
from pdcluster_connector.sidechannel.peers import PeerBook

logger = logging.getLogger(__name__)

HEALTH_SECONDS = 3.0
CONNECT_SECONDS = 30.0
PROBE_SECONDS = 60.0
RETRY_SECONDS = 0.5
REFUSED_SECONDS = 5.0  # wait this long after a refusal
# The pause between checks that an established link still carries data. transfer/job.py says
# how long a check may take, and transfer/probing.py when one is left out.
CHECK_SECONDS = (5.0, 7.0)

_ESTABLISHMENTS = itertools.count(1)


class Probe(Protocol):
    """Reads the probe memory of a peer (``Receiver.probe``)."""

    def __call__(self, peer: EngineMetadata, /, *, check: bool = False) -> Future[ProbeResult]:
        """Read all of it; with ``check`` only enough to show that the link still carries data."""


class LinkKeeper:
    """Keeps the link to one data-parallel rank of a peer; :attr:`report` is its present state.

    Args:
        entry: the peer.
        data_rank: which of its data-parallel ranks.
        peers: where handshakes are made; its news of gone peers comes in by :meth:`gone`.
        probe: reads the peer's probe memory, at first and, as a check, from time to time.
        changed: called, without arguments, after :attr:`report` has changed.
        tls: for the peer's side channel; None for plain HTTP.
    """

    def __init__(
        self,
        entry: PeerEntry,
        data_rank: int,
        peers: PeerBook,
        probe: Probe,
        changed: Callable[[], None],
        tls: Tls | None = None,
    ) -> None:
        self.entry = entry
        self.report = RankLink(
            entry.engine,
            entry.engine_id or entry.engine,
            LinkState.PENDING,
            data_rank=data_rank,
        )
        self._data_rank = data_rank
        self._peers = peers
        self._probe = probe
        self._changed = changed
        self._tls = tls
        self._engine_id = ""
        self._lost: asyncio.Future[Failure] = asyncio.get_running_loop().create_future()

    def gone(self, engine_id: str, failure: Failure) -> None:
        """Note that an incarnation is gone. Called on the loop's thread."""
        if engine_id == self._engine_id and not self._lost.done():
            self._lost.set_result(failure)

    async def keep(self, session: aiohttp.ClientSession) -> None:
        """Keep the link until cancelled."""
        while True:
            try:
                failure = await self._once(session)
            except Exception as error:  # the other links go on
                logger.exception("the link to %s", self.entry.engine)
                failure = Failure(Reason.BACKEND_ERROR, f"{type(error).__name__}: {error}")
            held = self.report.state is LinkState.ESTABLISHED
            self._set(LinkState.FAILED, reason=failure.reason.value, message=failure.message[:4000])
            lost = failure.reason in {Reason.SIDE_CHANNEL_UNREACHABLE, Reason.PEER_RESTARTED}
            pause = RETRY_SECONDS if held or lost else REFUSED_SECONDS
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))  # noqa: S311

    async def _once(self, session: aiohttp.ClientSession) -> Failure:
        """Establish the link and hold it; return why it could not be, or was lost."""
        address = self.entry.address(self._data_rank)
        health = await ask_health(session, self.entry.engine, *address, HEALTH_SECONDS, self._tls)
        if isinstance(health, TryAgain):
            return unreachable(health)
        if isinstance(health, Failure):
            return health
        if wrong := self._mistaken(health.engine_id):
            where = f"{address[0]}:{address[1]}"
            return Failure(Reason.ENGINE_ID_INCONSISTENT, f"{where} is {wrong}")
        self._engine_id = health.engine_id
        self._lost = asyncio.get_running_loop().create_future()
        metadata = await self._connect(*address)
        if isinstance(metadata, Failure):
            return metadata
        probed = await self._probed(metadata, self._probe(metadata))
        if isinstance(probed, Failure):
            return probed
        self._set(
            LinkState.ESTABLISHED,
            message=probed.notice,
            bytes_per_second=probed.bytes_per_second,
            probe_bytes=probed.nbytes,
            establishment=next(_ESTABLISHMENTS),
        )
        return await self._hold(metadata)

    def _mistaken(self, engine_id: str) -> str:
        """Return who answers instead of this link's peer; empty if the peer itself answers."""
        found, size = parse_engine_id(engine_id), self.entry.data_parallel_size
        if found.logical != self.entry.engine:
            return f"{found.logical}, not {self.entry.engine}"
        wanted = self._data_rank if size > 1 else None
        if found.data_rank == wanted:
            return ""
        return (
            f"{_named(found.data_rank)} of {found.logical}, not {_named(wanted)}; state the"
            f" data-parallel size that the peer runs with, not {size}, and the port of its first"
            " rank's side channel"
        )

    async def _hold(self, metadata: EngineMetadata) -> Failure:
        """Return why an established link was lost, once it is."""
        while True:
            pause = random.uniform(*CHECK_SECONDS)  # noqa: S311
            done, _ = await asyncio.wait({self._lost}, timeout=pause)
            if done:
                return self._lost.result()
            checked = await self._probed(metadata, self._probe(metadata, check=True))
            if isinstance(checked, Failure):
                return checked

    async def _connect(self, host: str, port: int) -> EngineMetadata | Failure:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[EngineMetadata | Failure] = loop.create_future()

        def done(outcome: EngineMetadata | Failure) -> None:
            loop.call_soon_threadsafe(_settle, answer, outcome)

        deadline = time.monotonic() + CONNECT_SECONDS
        self._peers.connect(self._engine_id, host, port, lambda: deadline, done)
        return await answer

    async def _probed(
        self, metadata: EngineMetadata, probe: Future[ProbeResult]
    ) -> ProbeResult | Failure:
        running = asyncio.wrap_future(probe)
        both: set[asyncio.Future[Any]] = {running, self._lost}
        done, _ = await asyncio.wait(
            both, timeout=PROBE_SECONDS, return_when=asyncio.FIRST_COMPLETED
        )
        if running in done and running.cancelled():  # the receiver shuts down
            return Failure(Reason.BACKEND_ERROR, "the probe was cancelled")
        if running in done:
            return running.result().failure or running.result()
        running.cancel()
        if self._lost in done:
            return self._lost.result()
        message = f"a probe of {metadata.engine_id} took more than {PROBE_SECONDS:.0f} s"
        return Failure(Reason.TRANSFER_STALLED, message)

    def _set(
        self,
        state: LinkState,
        *,
        reason: str = "",
        message: str = "",
        bytes_per_second: float = 0.0,
        probe_bytes: int = 0,
        establishment: int = 0,
    ) -> None:
        report = RankLink(
            engine=self.entry.engine,
            engine_id=parse_engine_id(self._engine_id).engine or self.report.engine_id,
            state=state,
            reason=reason,
            message=message,
            bytes_per_second=bytes_per_second,
            probe_bytes=probe_bytes,
            establishment=establishment,
            data_rank=self._data_rank,
        )
        if report != self.report:
            self.report = report
            self._changed()

    def rename(self, entry: PeerEntry) -> None:
        """Take a newer entry for the same engine at the same side channel."""
        self.entry = entry
        if not self._engine_id and entry.engine_id:
            self.report = replace(self.report, engine_id=entry.engine_id)


def _named(data_rank: int | None) -> str:
    return "the only rank" if data_rank is None else f"data-parallel rank {data_rank}"


def _settle(
    answer: asyncio.Future[EngineMetadata | Failure], outcome: EngineMetadata | Failure
) -> None:
    if not answer.done():
        answer.set_result(outcome)
