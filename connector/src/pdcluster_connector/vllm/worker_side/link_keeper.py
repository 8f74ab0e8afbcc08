"""Keeps the links of one decode worker to the peers that the launcher names, and reports them.

:class:`LauncherClient` asks the launcher for the peers. For each data-parallel rank of a peer, a
:class:`LinkKeeper` asks, shakes hands, probes, watches, and begins again. It asks the peer itself
which incarnation listens, so a prefill engine that has restarted is linked again at once, before
the operator notices. Without a launcher there is no client, and links come up with the first
request.

Three other files also say why a link fails. ``sidechannel/handshake.py`` applies the rules.
``sidechannel/peers.py`` says when a peer is gone. ``transfer/probing.py`` says when a
probe or a check fails. The keeper itself fails a link if the wrong engine or rank answers, or if a
probe takes too long. A NIXL connection of a receive breaks apart from that
(``transfer/connections.py``).
"""

import asyncio
import contextlib
import itertools
import logging
import random
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import KW_ONLY, dataclass
from typing import Any, Self

import aiohttp
from msgspec import UNSET
from msgspec.structs import replace

from pdcluster_connector.certificate_files import Tls
from pdcluster_connector.compat.reasons import Reason
from pdcluster_connector.nixl_io.reading_agent import ProbeResult
from pdcluster_connector.protocol import launcher_documents as documents
from pdcluster_connector.protocol.engine_id import parse_engine_id
from pdcluster_connector.protocol.failure import Failure
from pdcluster_connector.protocol.messages import EngineMetadata, Malformed
from pdcluster_connector.sidechannel import handshake, loop_thread
from pdcluster_connector.sidechannel.peers import PeerBook

logger = logging.getLogger(__name__)

HEALTH_SECONDS = 3.0
CONNECT_SECONDS = 30.0
PROBE_SECONDS = 60.0
RETRY_SECONDS = 0.5
REFUSED_SECONDS = 5.0  # wait this long after a refusal
# The pause between checks that an established link still carries data. transfer/options.py says
# how long a check may take, and transfer/probing.py when one is left out.
CHECK_SECONDS = (5.0, 7.0)

_ESTABLISHMENTS = itertools.count(1)


Probe = Callable[..., Future[ProbeResult]]  # Receiver.probe


@dataclass(eq=False)
class LinkKeeper:
    """Keeps the link to one data-parallel rank of a peer; :attr:`report` is its present state.

    Args:
        entry: the peer.
        data_rank: which of its data-parallel ranks.
        peers: where handshakes are made; what it reports of gone peers comes in by :meth:`gone`.
        probe: reads the peer's probe memory, at first and, as a check, from time to time.
        changed: called, without arguments, after :attr:`report` has changed.
        tls: for the peer's side channel; None for plain HTTP.
    """

    entry: documents.PeerEntry
    data_rank: int
    peers: PeerBook
    probe: Probe
    changed: Callable[[], None]
    tls: Tls | None = None

    def __post_init__(self) -> None:
        engine, state = self.entry.engine, documents.LinkState.PENDING
        named = self.entry.engine_id or engine
        self.report = documents.RankLink(engine, named, state, data_rank=self.data_rank)
        self.address = self.entry.address(self.data_rank)
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
            held = self.report.state is documents.LinkState.ESTABLISHED
            self._set(failure)
            lost = failure.reason in {Reason.SIDE_CHANNEL_UNREACHABLE, Reason.PEER_RESTARTED}
            pause = RETRY_SECONDS if held or lost else REFUSED_SECONDS
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))  # noqa: S311

    async def _once(self, session: aiohttp.ClientSession) -> Failure:
        """Establish the link and hold it; return why it could not be, or was lost."""
        address, engine = self.address, self.entry.engine
        health = await self.peers.silence.asking(
            address, handshake.ask_health(session, engine, *address, HEALTH_SECONDS, self.tls)
        )
        if isinstance(health, handshake.TryAgain):
            return handshake.unreachable(health)
        if isinstance(health, Failure):
            return health
        if wrong := self._mistaken(health.engine_id):
            where = f"{address[0]}:{address[1]}"
            return Failure(Reason.ENGINE_ID_INCONSISTENT, f"{where} is {wrong}")
        self._engine_id = health.engine_id
        self._lost = asyncio.get_running_loop().create_future()
        answer: Future[EngineMetadata | Failure] = Future()
        deadline = time.monotonic() + CONNECT_SECONDS
        self.peers.connect(self._engine_id, *address, lambda: deadline, answer.set_result)
        # A keeper that is cancelled cancels no answer: the peer book would set its result.
        metadata = await asyncio.shield(asyncio.wrap_future(answer))
        if isinstance(metadata, Failure):
            return metadata
        probed = await self._probed(metadata, self.probe(metadata))
        if isinstance(probed, Failure):
            return probed
        self._set(probed)
        return await self._hold(metadata)

    def _mistaken(self, engine_id: str) -> str:
        """Return who answers instead of this link's peer; empty if the peer itself answers."""
        found, size = parse_engine_id(engine_id), self.entry.data_parallel_size
        if found.logical != self.entry.engine:
            return f"{found.logical}, not {self.entry.engine}"
        wanted = self.data_rank if size > 1 else None
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
            checked = await self._probed(metadata, self.probe(metadata, check=True))
            if isinstance(checked, Failure):
                return checked
            self.report = replace(self.report, receives=checked.receives)

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

    def _set(self, outcome: ProbeResult | Failure) -> None:
        """Report that the link is established, as the probe measured it, or that it failed."""
        engine_id = parse_engine_id(self._engine_id).engine or self.report.engine_id
        report = documents.RankLink(
            self.entry.engine, engine_id, documents.LinkState.FAILED, data_rank=self.data_rank
        )
        if isinstance(outcome, Failure):
            report = replace(report, reason=outcome.reason.value, message=outcome.message[:4000])
        else:
            report = replace(
                report,
                state=documents.LinkState.ESTABLISHED,
                message=outcome.notice,
                bytes_per_second=outcome.bytes_per_second,
                descriptors=outcome.descriptors or UNSET,
                establishment=next(_ESTABLISHMENTS),
            )
        if report != self.report:
            self.report = report
            self.changed()

    def reported(self) -> documents.RankLink:
        """Return :attr:`report` with what is known of the peer's clock."""
        skew = self.peers.skew(self._engine_id)
        return self.report if skew is None else replace(self.report, clock_skew_seconds=skew)

    def rename(self, entry: documents.PeerEntry) -> None:
        """Take a newer entry for the same engine at the same side channel."""
        self.entry = entry
        if not self._engine_id and entry.engine_id:
            self.report = replace(self.report, engine_id=entry.engine_id)


def _named(data_rank: int | None) -> str:
    return "the only rank" if data_rank is None else f"data-parallel rank {data_rank}"


POLL_SECONDS = 20
REPORT_SECONDS = 4.0  # the launcher expects one every 5 s
GATHER_SECONDS = 0.02  # changes of one moment are sent together
ASK_AGAIN_SECONDS = 0.5


@dataclass(eq=False, repr=False)  # of no log: it holds a token
class LauncherClient:
    """Long-polls the launcher for peers, keeps a link to each, and reports.

    Args:
        address, token: the launcher's base URL, and the bearer token of this engine.
        rank, of: this worker's (pipeline, tensor) rank, and both sizes.
        data_rank: its data-parallel rank.
        peers: where handshakes are made.
        probe: reads and checks a peer's probe memory.
        tls: for side channels and for the launcher; None for plain HTTP.
    """

    address: str
    token: str
    _: KW_ONLY
    rank: tuple[int, int]
    of: tuple[int, int]
    data_rank: int
    peers: PeerBook
    probe: Probe
    tls: Tls | None = None

    def __post_init__(self) -> None:
        self._thread = loop_thread.LoopThread("pdcluster-control")
        self._keepers: dict[tuple[str, int], tuple[LinkKeeper, asyncio.Task[None]]] = {}
        self._changed = asyncio.Event()
        self._complaint = ""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str], **parts: Any) -> Self | None:
        """Make the client of the launcher that started this engine; None without a launcher."""
        address = environment.get(documents.URL_VARIABLE, "")
        token = environment.get(documents.TOKEN_VARIABLE, "")
        return cls(address, token, **parts) if address else None

    def start(self) -> None:
        """Start the client's thread."""
        self.peers.listen(self._on_gone, silence=True)
        self._thread.start()
        self._thread.submit(self._run())

    def close(self) -> None:
        """Stop. May be called twice."""
        self._thread.stop()

    def _on_gone(self, engine_id: str, failure: Failure) -> None:
        def report() -> None:
            for keeper, _ in self._keepers.values():
                keeper.gone(engine_id, failure)

        self._thread.call(report)

    async def _run(self) -> None:
        async with handshake.client_session() as session:
            await asyncio.gather(self._follow(session), self._report(session))

    async def _follow(self, session: aiohttp.ClientSession) -> None:
        """Learn of every new peers document."""
        generation = 0
        while True:
            document = await self._poll(session, generation)
            if document is None:
                await asyncio.sleep(ASK_AGAIN_SECONDS)
                continue
            if document.generation == generation:
                await asyncio.sleep(0.1)  # the launcher did not wait, so wait here
                continue
            generation = document.generation
            await self._apply(document, session)

    async def _poll(
        self, session: aiohttp.ClientSession, generation: int
    ) -> documents.PeersDocument | None:
        asked = {"after": str(generation), "wait": str(POLL_SECONDS)}
        timeout = aiohttp.ClientTimeout(total=POLL_SECONDS + 10, sock_connect=3.0)
        try:
            status, body = await self._call(session, "GET", "peers", timeout, params=asked)
        except (*handshake.NETWORK_ERRORS, ValueError) as error:
            self._complain(f"cannot ask the launcher for peers: {handshake.describe(error)}")
            return None
        document = documents.decode_peers(body)
        if status != 200 or isinstance(document, Malformed):
            why = document.message if isinstance(document, Malformed) else ""
            self._complain(f"the launcher answered {status} when asked for peers: {why}")
            return None
        return document

    async def _apply(
        self, document: documents.PeersDocument, session: aiohttp.ClientSession
    ) -> None:
        wanted = {(entry.engine, n): entry for entry in document.peers for n in entry.data_ranks}
        for key, (keeper, task) in list(self._keepers.items()):
            entry, size, place = wanted.get(key), keeper.entry.data_parallel_size, keeper.address
            if entry and (entry.data_parallel_size, entry.address(key[1])) == (size, place):
                keeper.rename(entry)
                continue
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            del self._keepers[key]
        for key, entry in wanted.items():
            if key not in self._keepers:
                keeper = LinkKeeper(
                    entry, key[1], self.peers, self.probe, self._changed.set, self.tls
                )
                self._keepers[key] = keeper, asyncio.create_task(keeper.keep(session))
        self._changed.set()

    async def _report(self, session: aiohttp.ClientSession) -> None:
        """Report each change, and without changes often enough to count as alive."""
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), REPORT_SECONDS)
                await asyncio.sleep(GATHER_SECONDS)
            self._changed.clear()
            if not await self._send(session):
                self._changed.set()
                await asyncio.sleep(ASK_AGAIN_SECONDS)

    async def _send(self, session: aiohttp.ClientSession) -> bool:
        links = tuple(keeper.reported() for keeper, _ in self._keepers.values())
        report = documents.RankReport(self.rank, self.of, links, self.data_rank)
        body, timeout = documents.encode_json(report), aiohttp.ClientTimeout(total=5.0)
        try:
            status, answer = await self._call(session, "POST", "reports", timeout, data=body)
        except (*handshake.NETWORK_ERRORS, ValueError) as error:
            self._complain(f"cannot report to the launcher: {handshake.describe(error)}")
            return False
        if status == 204:
            self._complaint = ""
        else:
            text = answer[:300].decode("utf-8", "replace")
            self._complain(f"the launcher answered {status} to a report: {text}")
        return status == 204

    async def _call(
        self,
        session: aiohttp.ClientSession,
        method: str,
        what: str,
        timeout: aiohttp.ClientTimeout,  # noqa: ASYNC109 - aiohttp's own type
        **arguments: Any,
    ) -> tuple[int, bytes]:
        url = f"{self.address.rstrip('/')}/v1/{what}"
        headers = {"Authorization": f"Bearer {self.token}", "Content-Type": "application/json"}
        limit, rest = documents.MAX_DOCUMENT_BYTES, {"headers": headers, **arguments}
        return await handshake.request(
            session, method, url, self.tls, timeout=timeout, limit=limit, **rest
        )

    def _complain(self, message: str) -> None:
        """Log a complaint once, not at every retry."""
        if message != self._complaint:
            self._complaint = message
            logger.warning("%s", message)
