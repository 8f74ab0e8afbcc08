"""The peers that each decode engine keeps links to, and how often canaries prove these links.

The planner remembers nothing, so the generation of a document with peers is a hash of its content.
Launchers only compare it.
"""

import hashlib
from collections.abc import Iterable, Mapping
from functools import cache

from msgspec.structs import replace

from pdcluster_connector.protocol import launcher_documents
from pdcluster_connector.protocol.launcher_documents import LinksReport, PeerEntry, PeersDocument
from pdcluster_operator.api import object_names
from pdcluster_operator.api.object_names import EngineName
from pdcluster_operator.api.spec.types import Cluster
from pdcluster_operator.plan.observed.engines import EngineView
from pdcluster_operator.plan.observed.links import links_of


def has_other_peers(sent: PeersDocument, links: LinksReport) -> bool:
    """Return whether a launcher has links to other peers than those that were sent to it last.

    A request with an older document may have timed out and still arrive after ``sent``. That
    document may name fewer engines, or engines that are gone. The peers must then be sent again.
    """
    peers = {peer.engine for peer in sent.peers}
    return peers != {link.prefill for link in links.links}


GENERATION_DIGITS = 12
CANARIES_PER_SECOND = 4
"""How many requests that prove links a cluster may get, beside those that new links get at once."""


def assign_peers(
    cluster: Cluster,
    prefill: tuple[EngineView, ...],
    decode: tuple[EngineView, ...],
    links: Mapping[str, LinksReport],
) -> dict[str, PeersDocument]:
    """Return the peers of each decode engine of a pairing key that has an address.

    A prefill engine becomes a peer when it is ready. Before that, its start would look like a
    failed link. It stays a peer when it no longer answers or starts again: the link then shows it.
    """
    linked = {link.prefill for report in links.values() for link in report.links}
    kept = links_of(prefill, decode)
    peers = {
        engine.name: _peer(engine)
        for engine in prefill
        if engine.address
        and engine.engine_id
        and all(_rank_hosts(engine))
        and (engine.ready is not False or engine.name.logical in linked)
    }
    interval = _canary_interval(cluster, (*prefill, *decode), kept)

    @cache
    def document(names: tuple[EngineName, ...]) -> PeersDocument:
        entries = tuple(peers[name] for name in names if name in peers)
        unnumbered = PeersDocument(0, entries, cluster.served_name, interval)
        digest = hashlib.sha256(launcher_documents.encode_json(unnumbered)).hexdigest()
        return replace(unnumbered, generation=int(digest[:GENERATION_DIGITS], 16))

    return {
        engine.name.logical: document(tuple(one.name for one in linked_to))
        for engine, linked_to in zip(decode, kept, strict=True)
        if engine.address and engine.engine_id
    }


def _canary_interval(
    cluster: Cluster, engines: Iterable[EngineView], kept: Iterable[tuple[EngineView, ...]]
) -> int:
    """Return the interval of the spec, or a longer one if there are very many canaries."""
    ranks = max((engine.data_parallel_size for engine in engines), default=1)
    canaries = sum(map(len, kept)) * ranks
    asked = cluster.spec.verification.canary.interval_seconds
    return max(asked, -(-canaries // CANARIES_PER_SECOND))


def _peer(engine: EngineView) -> PeerEntry:
    host = object_names.url_host(engine.address)
    return PeerEntry(
        engine.name.logical,
        f"{host}:{object_names.SIDE_CHANNEL_PORT}",
        engine.engine_id,
        f"http://{host}:{object_names.HTTP_PORT}",
        engine.data_parallel_size,
        _rank_hosts(engine),
    )


def _rank_hosts(engine: EngineView) -> tuple[str, ...]:
    """Return the hosts of the other pods that have data-parallel ranks, and so side channels."""
    return engine.follower_addresses if engine.data_parallel_size > 1 else ()
