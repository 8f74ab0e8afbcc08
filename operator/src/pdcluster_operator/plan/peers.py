"""Which prefill engines each decode engine keeps links to.

The planner remembers nothing, so the generation of a document is a hash of its content. Launchers
only look whether it changed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from pdcluster_operator.api.object_names import HTTP_PORT, SIDE_CHANNEL_PORT, EngineName
from pdcluster_operator.api.spec.types import Cluster
from pdcluster_operator.plan.launchers import url_host
from pdcluster_operator.plan.model import PeerAssignment
from pdcluster_operator.plan.observed.engines import EngineView
from pdcluster_operator.plan.observed.links import links_of
from pdcluster_operator.plan.reports import LinksReport

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
    known = {
        "model": cluster.served_name,
        "canary_interval_seconds": _canary_interval(cluster, (*prefill, *decode), kept),
    }

    @cache
    def body(names: tuple[EngineName, ...]) -> dict[str, Any]:
        document = {**known, "peers": [peers[name] for name in names if name in peers]}
        text = json.dumps(document, sort_keys=True)
        generation = int(hashlib.sha256(text.encode()).hexdigest()[:GENERATION_DIGITS], 16)
        return {"generation": generation, **document}

    return tuple(
        PeerAssignment(engine.name.logical, body(tuple(one.name for one in linked_to)))
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


def _peer(engine: EngineView) -> dict[str, Any]:
    host = url_host(engine.address)
    return {
        "engine": engine.name.logical,
        "engine_id": engine.engine_id,
        "side_channel": f"{host}:{SIDE_CHANNEL_PORT}",
        "api": f"http://{host}:{HTTP_PORT}",
        "data_parallel_size": engine.data_parallel_size,
        "follower_hosts": _rank_hosts(engine),
    }


def _rank_hosts(engine: EngineView) -> list[str]:
    """Return the hosts of the other pods that have data-parallel ranks, and so side channels."""
    return list(engine.follower_addresses) if engine.data_parallel_size > 1 else []
