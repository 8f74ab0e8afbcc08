"""The prefill engines that each decode engine keeps links to, as its launcher gets them.

The planner remembers nothing, so the generation of a document is a hash of its content. Launchers
only look whether it changed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from functools import cache

from msgspec.structs import replace

from pdcluster_connector.protocol.launcher_documents import (
    LinksReport,
    PeerEntry,
    PeersDocument,
    encode_json,
)
from pdcluster_operator.api.object_names import HTTP_PORT, SIDE_CHANNEL_PORT, EngineName
from pdcluster_operator.api.spec.types import Cluster
from pdcluster_operator.plan.launchers import url_host
from pdcluster_operator.plan.observed.engines import EngineView
from pdcluster_operator.plan.observed.links import links_of
from pdcluster_operator.plan.types import PeerAssignment

GENERATION_DIGITS = 12
CANARIES_PER_SECOND = 4
"""How many requests that prove links a cluster may get, beside those that new links get at once."""


def assign_peers(
    cluster: Cluster,
    prefill: tuple[EngineView, ...],
    decode: tuple[EngineView, ...],
    links: Mapping[str, LinksReport],
) -> tuple[PeerAssignment, ...]:
    """Return one assignment for each decode engine of a pairing key that has an address.

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
        digest = hashlib.sha256(encode_json(unnumbered)).hexdigest()
        return replace(unnumbered, generation=int(digest[:GENERATION_DIGITS], 16))

    return tuple(
        PeerAssignment(engine.name.logical, document(tuple(one.name for one in linked_to)))
        for engine, linked_to in zip(decode, kept, strict=True)
        if engine.address and engine.engine_id
    )


def _canary_interval(
    cluster: Cluster, engines: Iterable[EngineView], kept: Iterable[tuple[EngineView, ...]]
) -> int:
    """Return the interval of the spec, or a longer one if there are very many canaries."""
    ranks = max((engine.data_parallel_size for engine in engines), default=1)
    canaries = sum(map(len, kept)) * ranks
    asked = cluster.spec.verification.canary.interval_seconds
    return max(asked, -(-canaries // CANARIES_PER_SECOND))


def _peer(engine: EngineView) -> PeerEntry:
    host = url_host(engine.address)
    return PeerEntry(
        engine.name.logical,
        f"{host}:{SIDE_CHANNEL_PORT}",
        engine.engine_id,
        f"http://{host}:{HTTP_PORT}",
        engine.data_parallel_size,
        _rank_hosts(engine),
    )


def _rank_hosts(engine: EngineView) -> tuple[str, ...]:
    """Return the hosts of the other pods that have data-parallel ranks, and so side channels."""
    return engine.follower_addresses if engine.data_parallel_size > 1 else ()
