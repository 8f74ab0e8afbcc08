"""The JSON documents of a launcher. Workers, launcher and operator all use these types.

A link is one (prefill engine, decode engine) pair. The operator names the peers of a decode
engine. The launcher hands them to its workers, and each worker reports its part of every link. The
launcher joins these reports, and the operator reads the result::

    operator -> launcher   PUT  /v1/peers     PeersDocument
    launcher -> worker     GET  /v1/peers     PeersDocument
    worker   -> launcher   POST /v1/reports   RankReport
    launcher -> operator   GET  /readyz       EngineReport
    launcher -> operator   GET  /v1/links     LinksReport
    launcher -> operator   GET  /v1/changes   ChangesReport

The other end may be one version older or newer. Unknown fields are ignored, a missing field has its
default, and an unknown state is read as Unknown. In what the operator reads, an optional field with
a wrong value counts as missing: one such field must not make an engine unreachable. Every
``decode_*`` maps any bytes to a document or to :class:`Malformed`, and never raises.
"""

from enum import StrEnum
from typing import Annotated, Final, Self

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType
from msgspec.structs import force_setattr

from pdcluster_connector.compat.shape import Identifier, ParallelSize
from pdcluster_connector.plan.rank_pairs import node_of_data_rank
from pdcluster_connector.protocol import field_by_field, host_port
from pdcluster_connector.protocol.load_report import LoadReport, ReceiveRate
from pdcluster_connector.protocol.messages import Malformed, Rank, RankNumber, Text, bounded

# Where an engine's workers report to, and with which bearer token: variables of its environment.
URL_VARIABLE = "PDCLUSTER_CONTROL_URL"
TOKEN_VARIABLE = "PDCLUSTER_CONTROL_TOKEN"  # noqa: S105 - a variable's name

MAX_DOCUMENT_BYTES = 1024 * 1024  # of what the launcher reads
MAX_ANSWER_BYTES = 4 * 1024 * 1024  # of what the operator reads
MAX_SIDE_CHANNELS = 4096  # of all peers together: each data-parallel rank has one
MAX_MESSAGE = 1024
MAX_LINKS = 4096
LEAST_PROMPTS = 20
"""With fewer prompts, one of them would be more than five percent."""

Address = Annotated[str, Meta(min_length=1, max_length=512)]
Host = Annotated[str, Meta(min_length=1, max_length=255)]
Label = Annotated[str, Meta(max_length=512)]
Amount = Annotated[float, Meta(ge=0, le=1e18)]
Whole = Annotated[int, Meta(ge=0, le=2**62)]
Skew = Annotated[float, Meta(ge=-1e12, le=1e12)]
# Seconds since the epoch, before the year 10000: no time in Kubernetes can name a later one.
Moment = Annotated[float, Meta(gt=0, lt=253_402_300_800)]


class _State(StrEnum):
    @classmethod
    def _missing_(cls, value: object) -> Self:
        """A state of a newer version."""
        return cls("Unknown")


class LinkState(_State):
    """How far a link has come. Unknown: nothing that the reader understands was reported."""

    PENDING = "Pending"
    ESTABLISHED = "Established"
    FAILED = "Failed"
    UNKNOWN = "Unknown"


class CanaryState(_State):
    """The result of the latest canary of a link that had one. Pending: none had one yet."""

    PENDING = "Pending"
    PASSED = "Passed"
    FAILED = "Failed"
    UNKNOWN = "Unknown"


class EngineState(_State):
    """The state of an engine. The states are in the order in which an engine goes through them.

    The API of a Failed one answers errors, or refuses connections; that of a Frozen one, nothing.
    """

    STARTING = "Starting"
    LOADING_WEIGHTS = "LoadingWeights"
    WARMING_UP = "WarmingUp"
    READY = "Ready"
    DRAINING = "Draining"
    FAILED = "Failed"
    FROZEN = "Frozen"
    UNKNOWN = "Unknown"


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
        host, port = host_port.split_address(self.side_channel) or ("", 0)
        hosts = (host, *self.follower_hosts)
        node = node_of_data_rank(data_rank, self.data_parallel_size, len(hosts))
        return hosts[node], port + data_rank


class PeersDocument(Struct, frozen=True):
    """``/v1/peers``. ``generation`` grows with every change."""

    generation: Whole
    peers: Annotated[tuple[PeerEntry, ...], Meta(max_length=4096)]
    model: Annotated[str, Meta(max_length=512)] = ""
    canary_interval_seconds: Whole = 0


class RankLink(Struct, frozen=True):
    """One worker's view of its link to one data-parallel rank of a peer.

    Attributes:
        engine_id: the incarnation, without ``_dpN``; that is ``data_rank``.
        reason: a value of ``compat/reasons.py``, or empty.
        establishment: a new number each time that the link is established; 0 while it is not.
        clock_skew_seconds: by how much the peer's clock is ahead.
        descriptors: how many NIXL descriptors the KV of 1,000 tokens takes on this worker.
        receives: how fast they were. While one of these three is not known, it is not there.
    """

    engine: Identifier
    engine_id: Annotated[str, Meta(max_length=512)]
    state: LinkState
    reason: Annotated[str, Meta(max_length=128)] = ""
    message: Text = ""
    bytes_per_second: Amount = 0.0
    establishment: Whole = 0
    data_rank: RankNumber = 0
    clock_skew_seconds: Skew | UnsetType = UNSET
    descriptors: Whole | UnsetType = UNSET
    receives: ReceiveRate | UnsetType = UNSET


class RankReport(Struct, frozen=True):
    """``POST /v1/reports``: all links of one worker; ``of`` is (pipeline, tensor) sizes.

    ``data_rank`` is the worker's own. The data-parallel size is not in it: vLLM hides the size from
    workers if the data-parallel ranks of the model are independent of each other.
    """

    rank: Rank
    of: Rank
    links: Annotated[tuple[RankLink, ...], Meta(max_length=MAX_SIDE_CHANNELS)]
    data_rank: RankNumber = 0


class _WithMessage(Struct, frozen=True, kw_only=True):
    """A message is cut: the last words of an engine have no bound of their own."""

    message: str = ""

    def __post_init__(self) -> None:
        force_setattr(self, "message", self.message[:MAX_MESSAGE])


class EngineReport(_WithMessage, frozen=True, kw_only=True):
    """``GET /readyz`` of an engine's leader.

    Attributes:
        engine: logical id.
        engine_id: logical id and incarnation; changes with every restart.
        versions: of the packages that the KV path depends on, by name.
        side_channel: host:port of the KV handshake.
        api: base URL of the OpenAI API.
        data_parallel_size: its data-parallel ranks, each with a side channel of its own; None if
            it does not say.
        routed: whether routers may send it requests, as the operator said last; None if the
            launcher cannot be told.
        certificate_expires: when the certificate that it uses expires, in seconds since the epoch;
            None if it has none, or does not say.
    """

    engine: Identifier
    ready: bool = False
    engine_id: Label = ""
    role: Label = ""
    state: EngineState = EngineState.STARTING
    versions: Annotated[dict[Label, Label], Meta(max_length=64)] = {}
    side_channel: Label = ""
    data_parallel_size: Annotated[int, Meta(ge=1, le=1024)] | None = None
    api: Label = ""
    routed: bool | None = None
    certificate_expires: Moment | None = None


class CanaryReport(_WithMessage, frozen=True):
    """The latest canary of one link that had a result. ``bytes`` of KV moved.

    ``age_seconds`` is the age of the result if later canaries had none. A message of a canary that
    passed then says why. An engine that is busy gives no result.
    """

    state: CanaryState = CanaryState.PENDING
    bytes: Whole = 0
    age_seconds: Whole | UnsetType = UNSET


class LinkReport(_WithMessage, frozen=True):
    """One link of a decode engine, joined from the reports of its workers.

    It is made of pairs: each worker with each data-parallel rank of the prefill engine.

    Attributes:
        prefill: logical id of the prefill engine.
        prefill_engine_id: its engine id as the workers see it; before they see it, the operator's.
        state: Established when all pairs are established with one incarnation. Failed when one pair
            has failed.
        reason: the reason of the first pair that failed, a value of ``compat/reasons.py``.
        message: the message of that pair, or what the link waits for. For an established link, what
            makes it slow.
        shards: ``2/4``: the pairs that are established, and all pairs.
        bytes_per_second: the bandwidth of the slowest pair, because a request waits for it; 0 if
            none was measured.
        canary: the latest one since the link was established.
        clock_skew_seconds: by how many seconds the prefill engine's clock is ahead, where it
            differs most. No transfer depends on it.
        descriptors: of NIXL, for the KV of 1,000 tokens, on the worker that needs most.
        receives: of the slowest pair. While one of these three is not known, it is not there.
    """

    prefill: Identifier
    prefill_engine_id: Label = ""
    state: LinkState = LinkState.PENDING
    reason: Label = ""
    shards: Label = ""
    bytes_per_second: Amount = 0.0
    canary: CanaryReport = CanaryReport()
    clock_skew_seconds: Skew | UnsetType = UNSET
    descriptors: Whole | UnsetType = UNSET
    receives: ReceiveRate | UnsetType = UNSET


class PromptsReport(Struct, frozen=True, eq=False):
    """The latest prompts of a decode engine that prefill should have computed.

    The counts change all the time. Two reports are equal if they are judged alike.

    Attributes:
        window_seconds: how far back the counts reach.
        prompts: how many there were.
        local: how many of them decode computed itself; never more than ``prompts``.
        cause: the reason of most of these; empty if there are none.
    """

    prompts: Whole = 0
    local: Whole = 0
    cause: Label = ""
    window_seconds: Amount = 0.0

    def __post_init__(self) -> None:
        force_setattr(self, "local", min(self.local, self.prompts))

    @property
    def percent(self) -> int | None:
        """The share that decode computed, rounded up; 0 only if it computed none.

        None if there are too few prompts to judge.
        """
        if not self.local:
            return 0
        return -(-100 * self.local // self.prompts) if self.prompts >= LEAST_PROMPTS else None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PromptsReport) and self._judged() == other._judged()

    def __hash__(self) -> int:
        return hash(self._judged())

    def _judged(self) -> tuple[int | None, str]:
        return self.percent, self.cause if self.local else ""


class LinksReport(Struct, frozen=True):
    """``GET /v1/links`` of a decode engine's leader.

    Attributes:
        prompts: None if the engine's counts are not known. Not in the document if the launcher does
            not count, because its engine is no decode engine or its version is too old.
    """

    engine: Identifier
    engine_id: Label
    links: Annotated[tuple[LinkReport, ...], Meta(max_length=MAX_LINKS)]
    prompts: PromptsReport | UnsetType | None = UNSET


class ChangesReport(Struct, frozen=True, omit_defaults=True):
    """``GET /v1/changes``: a revision of the launcher's documents, and the documents.

    ``readyz`` and ``links`` are None if the revision has not changed, or if the launcher is of a
    version that does not send them here. ``load`` is None if the engine was not measured. It
    changes all the time, so it is no part of the revision.
    """

    revision: Annotated[str, Meta(max_length=64)]
    readyz: EngineReport | None = None
    links: LinksReport | None = None
    load: LoadReport | None = None


_PEERS = msgspec.json.Decoder(PeersDocument)
_REPORT = msgspec.json.Decoder(RankReport)

# Fields that are reports, or lists of them. These are read field by field, too.
PARTS: Final[dict[tuple[type[Struct], str], type[Struct]]] = {
    (ChangesReport, "readyz"): EngineReport,
    (ChangesReport, "links"): LinksReport,
    (ChangesReport, "load"): LoadReport,
    (LinksReport, "links"): LinkReport,
    (LinksReport, "prompts"): PromptsReport,
    (LinkReport, "canary"): CanaryReport,
    (LinkReport, "receives"): ReceiveRate,
}
_CHANGES = field_by_field.reader_of(ChangesReport, PARTS, MAX_LINKS)


def encode_json(message: Struct) -> bytes:
    """Return the JSON of a document."""
    return msgspec.json.encode(message)


def decode_changes(raw: bytes) -> ChangesReport | Malformed:
    """Decode ``/v1/changes``."""
    return bounded(raw, MAX_ANSWER_BYTES, _CHANGES)


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
    address = host_port.split_address(entry.side_channel)
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
    """Decode ``POST /v1/reports``. Workers are of the launcher's version: each state is known."""
    report = bounded(raw, MAX_DOCUMENT_BYTES, _REPORT.decode)
    if isinstance(report, RankReport):
        for link in report.links:
            if link.state is LinkState.UNKNOWN:
                return Malformed(f"the state of the link to {link.engine} is unknown")
    return report
