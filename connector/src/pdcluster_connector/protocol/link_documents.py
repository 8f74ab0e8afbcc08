"""What launcher, workers and operator tell each other about links, as bounded JSON.

A link is one (prefill engine, decode engine) pair. The operator names a decode engine's
peers, the launcher hands the document to its workers, each worker reports what it found.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from pdcluster_connector.compat.field_types import Identifier, ParallelSize
from pdcluster_connector.plan.topology import node_of_data_rank
from pdcluster_connector.protocol.addresses import split_address
from pdcluster_connector.protocol.messages import (
    Malformed,
    Rank,
    RankNumber,
    Text,
    bounded,
)

MAX_DOCUMENT_BYTES = 1024 * 1024
MAX_SIDE_CHANNELS = 4096  # of all peers together: each data-parallel rank has one

Address = Annotated[str, Meta(min_length=1, max_length=512)]
Host = Annotated[str, Meta(min_length=1, max_length=255)]
Amount = Annotated[float, Meta(ge=0, le=1e18)]
Whole = Annotated[int, Meta(ge=0, le=2**62)]


class LinkState(StrEnum):
    """How far a link has come."""

    PENDING = "Pending"
    ESTABLISHED = "Established"
    FAILED = "Failed"


class PeerEntry(Struct, frozen=True):
    """One prefill engine that a decode engine keeps a link to.

    Attributes:
        engine: its logical id.
        side_channel: ``host:port`` of its first data-parallel rank; rank N listens on port + N.
        engine_id: the incarnation that the operator saw last; the peer may have restarted since.
        api: base URL of its OpenAI API.
        data_parallel_size: how many data-parallel ranks it has.
        follower_hosts: hosts of its other nodes that run data-parallel ranks. Each node runs the
            same number of them.
    """

    engine: Identifier
    side_channel: Address
    engine_id: Annotated[str, Meta(max_length=512)] = ""
    api: Annotated[str, Meta(max_length=512)] = ""
    data_parallel_size: ParallelSize = 1
    follower_hosts: Annotated[tuple[Host, ...], Meta(max_length=255)] = ()

    @property
    def data_ranks(self) -> range:
        """The peer's data-parallel ranks."""
        return range(self.data_parallel_size)

    def address(self, data_rank: int) -> tuple[str, int]:
        """Return (host, port) of a data-parallel rank's side channel; the entry was decoded."""
        host, port = split_address(self.side_channel) or ("", 0)
        hosts = (host, *self.follower_hosts)
        node = node_of_data_rank(data_rank, self.data_parallel_size, len(hosts))
        return hosts[node], port + data_rank


class PeersDocument(Struct, frozen=True):
    """``/v1/peers``. ``generation`` grows with every change."""

    generation: Whole
    peers: Annotated[tuple[PeerEntry, ...], Meta(max_length=4096)]
    model: Annotated[str, Meta(max_length=512)] = ""
    canary_interval_seconds: Whole = 0


class LinkReport(Struct, frozen=True):
    """One worker's view of its link to one data-parallel rank of a peer.

    Attributes:
        engine_id: the incarnation, without ``_dpN``; that is ``data_rank``.
        reason: a value of ``compat/reasons.py``, or empty.
        establishment: a new number each time that the link is established; 0 while it is not.
    """

    engine: Identifier
    engine_id: Annotated[str, Meta(max_length=512)]
    state: LinkState
    reason: Annotated[str, Meta(max_length=128)] = ""
    message: Text = ""
    bytes_per_second: Amount = 0.0
    probe_bytes: Whole = 0
    establishment: Whole = 0
    data_rank: RankNumber = 0


class RankReport(Struct, frozen=True):
    """``POST /v1/reports``: all links of one worker; ``of`` is (pipeline, tensor) sizes.

    ``data_rank`` is the worker's own. The data-parallel size is not in it: vLLM hides the size from
    workers if the data-parallel ranks of the model are independent of each other.
    """

    rank: Rank
    of: Rank
    links: Annotated[tuple[LinkReport, ...], Meta(max_length=MAX_SIDE_CHANNELS)]
    data_rank: RankNumber = 0


_PEERS = msgspec.json.Decoder(PeersDocument)
_REPORT = msgspec.json.Decoder(RankReport)


def encode_json(message: PeersDocument | RankReport) -> bytes:
    """Return the JSON of a document."""
    return msgspec.json.encode(message)


def decode_peers(raw: bytes) -> PeersDocument | Malformed:
    """Decode ``/v1/peers``. It is malformed if it names an engine twice or has a bad address."""
    document = bounded(raw, MAX_DOCUMENT_BYTES, _PEERS.decode)
    if isinstance(document, Malformed):
        return document
    names = [entry.engine for entry in document.peers]
    if len(set(names)) != len(names):
        return Malformed("an engine is named twice")
    wrong = next(filter(None, map(_wrong, document.peers)), "")
    if wrong:
        return Malformed(wrong)
    count = sum(entry.data_parallel_size for entry in document.peers)
    if count > MAX_SIDE_CHANNELS:
        return Malformed(
            f"{count} data-parallel ranks of {len(document.peers)} peers, more than the "
            f"{MAX_SIDE_CHANNELS} allowed"
        )
    return document


def _wrong(entry: PeerEntry) -> str:
    """Return why a data-parallel rank of a peer has no address; empty if each rank has one."""
    address = split_address(entry.side_channel)
    if address is None:
        return f"side_channel {entry.side_channel!r} is not host:port"
    size, nodes = entry.data_parallel_size, 1 + len(entry.follower_hosts)
    last = address[1] + size - 1
    if last > 65535:
        return (
            f"side_channel {entry.side_channel!r}: data-parallel rank {size - 1} would be on port "
            f"{last}"
        )
    if size % nodes:
        return f"{size} data-parallel ranks are not spread evenly over {nodes} nodes"
    return ""


def decode_report(raw: bytes) -> RankReport | Malformed:
    """Decode ``POST /v1/reports``."""
    return bounded(raw, MAX_DOCUMENT_BYTES, _REPORT.decode)
