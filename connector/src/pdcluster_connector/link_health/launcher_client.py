"""Asks the launcher which peers to keep links to, and reports the state of the links to it.

``link_keeper.py`` keeps each link. Without a launcher there is no client, and links come up with
the first request.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping

import aiohttp

from pdcluster_connector.certificate_files import Tls, own_arguments
from pdcluster_connector.link_health.link_keeper import LinkKeeper, Probe
from pdcluster_connector.protocol.failure import Failure
from pdcluster_connector.protocol.launcher_documents import (
    MAX_DOCUMENT_BYTES,
    PeerEntry,
    PeersDocument,
    RankReport,
    decode_peers,
    encode_json,
)
from pdcluster_connector.protocol.messages import Malformed
from pdcluster_connector.sidechannel.handshake import (
    NETWORK_ERRORS,
    client_session,
    describe,
    read_bounded,
)
from pdcluster_connector.sidechannel.loop_thread import LoopThread
from pdcluster_connector.sidechannel.peers import PeerBook

logger = logging.getLogger(__name__)

URL_VARIABLE = "PDCLUSTER_CONTROL_URL"
TOKEN_VARIABLE = "PDCLUSTER_CONTROL_TOKEN"  # noqa: S105 - a variable's name

POLL_SECONDS = 20
REPORT_SECONDS = 4.0  # the launcher expects one every 5 s
GATHER_SECONDS = 0.02  # changes of one moment are sent together
RETRY_SECONDS = 0.5


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

    def __init__(
        self,
        address: str,
        token: str,
        *,
        rank: tuple[int, int],
        of: tuple[int, int],
        data_rank: int,
        peers: PeerBook,
        probe: Probe,
        tls: Tls | None = None,
    ) -> None:
        self._address = address.rstrip("/")
        self._headers = {"Authorization": f"Bearer {token}"}
        self._rank = rank
        self._of = of
        self._data_rank = data_rank
        self._peers = peers
        self._probe = probe
        self._tls = tls
        self._thread = LoopThread("pdcluster-control")
        self._keepers: dict[tuple[str, int], tuple[LinkKeeper, asyncio.Task[None]]] = {}
        self._changed = asyncio.Event()
        self._complaint = ""

    @classmethod
    def from_environment(
        cls,
        environment: Mapping[str, str],
        *,
        rank: tuple[int, int],
        of: tuple[int, int],
        data_rank: int,
        peers: PeerBook,
        probe: Probe,
        tls: Tls | None = None,
    ) -> LauncherClient | None:
        """Make the client of the launcher that started this engine; None without a launcher."""
        address = environment.get(URL_VARIABLE, "")
        if not address:
            return None
        token = environment.get(TOKEN_VARIABLE, "")
        return cls(
            address,
            token,
            rank=rank,
            of=of,
            data_rank=data_rank,
            peers=peers,
            probe=probe,
            tls=tls,
        )

    def start(self) -> None:
        """Start the client's thread."""
        self._peers.listen(self._on_gone)
        self._thread.start()
        self._thread.submit(self._run())

    def close(self) -> None:
        """Stop. May be called twice."""
        self._thread.stop()

    def _on_gone(self, engine_id: str, failure: Failure) -> None:
        self._thread.call(self._tell_keepers, engine_id, failure)

    def _tell_keepers(self, engine_id: str, failure: Failure) -> None:
        for keeper, _ in self._keepers.values():
            keeper.gone(engine_id, failure)

    async def _run(self) -> None:
        async with client_session() as session:
            await asyncio.gather(self._follow(session), self._report(session))

    async def _follow(self, session: aiohttp.ClientSession) -> None:
        """Learn of every new peers document."""
        generation = 0
        while True:
            document = await self._poll(session, generation)
            if document is None:
                await asyncio.sleep(RETRY_SECONDS)
                continue
            if document.generation == generation:
                await asyncio.sleep(0.1)  # the launcher did not wait, so wait here
                continue
            generation = document.generation
            await self._apply(document, session)

    async def _poll(self, session: aiohttp.ClientSession, generation: int) -> PeersDocument | None:
        try:
            async with session.get(
                f"{self._address}/v1/peers",
                params={"after": str(generation), "wait": str(POLL_SECONDS)},
                headers=self._headers,
                timeout=aiohttp.ClientTimeout(total=POLL_SECONDS + 10, sock_connect=3.0),
                allow_redirects=False,
                **own_arguments(self._tls),
            ) as response:
                body = await read_bounded(response, MAX_DOCUMENT_BYTES)
                status = response.status
        except (*NETWORK_ERRORS, ValueError) as error:
            self._complain(f"cannot ask the launcher for peers: {describe(error)}")
            return None
        document = decode_peers(body)
        if status != 200 or isinstance(document, Malformed):
            why = document.message if isinstance(document, Malformed) else ""
            self._complain(f"the launcher answered {status} when asked for peers: {why}")
            return None
        return document

    async def _apply(self, document: PeersDocument, session: aiohttp.ClientSession) -> None:
        wanted = {(entry.engine, n): entry for entry in document.peers for n in entry.data_ranks}
        for key, (keeper, task) in list(self._keepers.items()):
            entry = wanted.get(key)
            if entry is not None and _same_place(entry, keeper.entry, key[1]):
                keeper.rename(entry)
                continue
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            del self._keepers[key]
        for key, entry in wanted.items():
            if key not in self._keepers:
                keeper = LinkKeeper(
                    entry, key[1], self._peers, self._probe, self._changed.set, self._tls
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
                await asyncio.sleep(RETRY_SECONDS)

    async def _send(self, session: aiohttp.ClientSession) -> bool:
        links = tuple(keeper.report for keeper, _ in self._keepers.values())
        try:
            async with session.post(
                f"{self._address}/v1/reports",
                data=encode_json(RankReport(self._rank, self._of, links, self._data_rank)),
                headers={**self._headers, "Content-Type": "application/json"},
                timeout=aiohttp.ClientTimeout(total=5.0),
                allow_redirects=False,
                **own_arguments(self._tls),
            ) as response:
                if response.status == 204:
                    self._complaint = ""
                    return True
                text = (await read_bounded(response, 300)).decode("utf-8", "replace")
                self._complain(f"the launcher answered {response.status} to a report: {text}")
        except (*NETWORK_ERRORS, ValueError) as error:
            self._complain(f"cannot report to the launcher: {describe(error)}")
        return False

    def _complain(self, message: str) -> None:
        """Log a complaint once, not at every retry."""
        if message != self._complaint:
            self._complaint = message
            logger.warning("%s", message)


def _same_place(one: PeerEntry, other: PeerEntry, data_rank: int) -> bool:
    """Tell whether two entries give a rank the same address, and its engine the same size."""
    sizes = one.data_parallel_size, other.data_parallel_size
    return sizes[0] == sizes[1] and one.address(data_rank) == other.address(data_rank)
