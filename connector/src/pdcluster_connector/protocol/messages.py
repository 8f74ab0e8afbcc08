"""What travels on the side channel between engines: msgpack structs with total parsers.

Every ``decode_*`` maps any bytes to a value or to :class:`Malformed` and never raises.
Sizes are bounded before parsing (the byte limits) and while parsing (the limits of the
types), so a bad message costs one message. Maps are keyed by field name and unknown keys are
skipped, so a newer peer may add fields.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Annotated, Final, TypeVar

import msgspec
from msgspec import Meta, Struct

from pdcluster_connector.compat.shape import Address, Count, EngineShape, Identifier
from pdcluster_connector.plan import geometry

PROTOCOL_OLDEST = 3  # since 3: signed tickets, lease words and claims; there is no way without
PROTOCOL_NEWEST = 3

MAX_REQUEST_BYTES = 256 * 1024  # a request carries its engine's layers: 60 bytes each
MAX_REPLY_BYTES = 64 * 1024 * 1024
MAX_HEALTH_BYTES = 4096
MAX_REGIONS_PER_ENGINE = 100_000
MAX_SEAMS = 65_536

LEASE_SECONDS: Final = 60.0  # the default of the option `lease_seconds` and of spec.transfer
SLOTS: Final = 16_384  # lease words of a rank: 128 KiB
CLEARED: Final = 0  # the word of a slot without a lease; never a token

Text = Annotated[str, Meta(max_length=4096)]
RankNumber = Annotated[int, Meta(ge=0, le=4095)]
Token = Annotated[int, Meta(ge=0)]  # 64 random bits; msgpack has no larger integers
Rank = tuple[RankNumber, RankNumber]  # (pipeline rank, tensor rank)
LeaseKey = tuple[Identifier, Token]  # (prefill's request id, lease token)


@dataclass(frozen=True, slots=True)
class Malformed:
    """Bytes that are not the message they should be, and why in one sentence."""

    message: str


class LeaseWords(Struct, frozen=True):
    """Host memory with one 64-bit lease word a slot, read by decode after the data."""

    address: Address
    slots: Count


class ShardMetadata(Struct, frozen=True):
    """What one worker (rank) publishes about the memory that peers may read.

    ``probe``: what peers read to verify and measure a link.
    ``seams``: where one registered slice of memory ends and the next one begins; no descriptor
    row may reach over one.
    """

    engine_id: Identifier
    rank: Rank
    agent_name: Identifier
    agent_metadata: Annotated[bytes, Meta(max_length=8 * 1024 * 1024)]
    regions: Annotated[tuple[geometry.Region, ...], Meta(max_length=MAX_REGIONS_PER_ENGINE)]
    probe: geometry.MemoryRange
    lease_words: LeaseWords | None = None
    seams: Annotated[tuple[Address, ...], Meta(max_length=MAX_SEAMS)] = ()

    @property
    def shard(self) -> geometry.Shard:
        """Return what the planner needs of it."""
        return geometry.Shard(self.rank, self.regions, self.seams)


class EngineMetadata(Struct, frozen=True, tag="engine"):
    """The answer to a handshake: everything that a peer needs to read this engine's KV."""

    protocol: int
    engine_id: Identifier
    shape: EngineShape
    shards: Annotated[tuple[ShardMetadata, ...], Meta(max_length=4096)]
    lease_seconds: float = LEASE_SECONDS  # not read; 0.1.0 refuses an answer without it


class Refusal(Struct, frozen=True, tag="refusal"):
    """The other answer to a handshake: the rule that forbids the pair, and both values."""

    reason: Identifier
    message: Text
    prefill_value: Text = ""
    decode_value: Text = ""


class HandshakeRequest(Struct, frozen=True):
    """Decode introduces itself. ``protocols`` is the (oldest, newest) version it speaks."""

    protocols: tuple[int, int]
    engine_id: Identifier
    shape: EngineShape
    rank: Rank = (0, 0)  # not read; 0.1.0 refuses a request without it


class Standing(StrEnum):
    """How a lease stands for the decode engine that asks. It is not sent."""

    HELD = "held"
    GONE = "gone"
    EXPIRED = "expired"
    CLAIMED = "claimed"  # by another decode engine


class LeaseRequest(Struct, frozen=True):
    """Decode ``holder`` releases and renews leases of prefill ``engine_id``.

    The first renewal of a lease claims it for ``holder``.
    """

    engine_id: Identifier
    holder: Identifier
    releases: Annotated[tuple[LeaseKey, ...], Meta(max_length=1024)] = ()
    renewals: Annotated[tuple[LeaseKey, ...], Meta(max_length=1024)] = ()


class LeaseReply(Struct, frozen=True):
    """Prefill's answer: what became of each renewal. One that is not listed has no lease left.

    Attributes:
        seconds: how long the renewed leases stand from now on.
        renewed: leases that the asking engine holds.
        claimed: leases that another decode engine holds.
        expired: leases that ended because nobody renewed them. 0.1.0 does not list them.
    """

    seconds: Annotated[float, Meta(gt=0, le=86400)]
    renewed: Annotated[tuple[LeaseKey, ...], Meta(max_length=1024)] = ()
    claimed: Annotated[tuple[LeaseKey, ...], Meta(max_length=1024)] = ()
    expired: Annotated[tuple[LeaseKey, ...], Meta(max_length=1024)] = ()


class HealthReply(Struct, frozen=True):
    """``GET /healthz`` (JSON): which incarnation listens here, and how many shards it serves.

    ``time`` is that of its clock, in seconds since the epoch; None if it does not say.
    """

    engine_id: Identifier
    role: Identifier
    shards: Annotated[int, Meta(ge=0, le=4096)]
    time: Annotated[float, Meta(gt=0, lt=1e12)] | None = None


T = TypeVar("T")

# What msgspec raises on hostile input: ValueError from text that is not UTF-8, OverflowError from
# numbers out of range. RecursionError comes from deep nesting in skipped fields.
DECODE_ERRORS = (msgspec.MsgspecError, RecursionError, ValueError, OverflowError, MemoryError)


def bounded(raw: bytes, limit: int, decoder: Callable[[bytes], T]) -> T | Malformed:
    """Apply ``decoder`` to at most ``limit`` bytes; its known errors become Malformed."""
    if len(raw) > limit:
        return Malformed(f"{len(raw)} bytes, more than the {limit} allowed")
    try:
        return decoder(raw)
    except RecursionError:
        return Malformed("it is nested too deep")
    except DECODE_ERRORS as error:
        return Malformed(f"{type(error).__name__}: {str(error)[:300]}")


encode: Callable[[Struct], bytes] = msgspec.msgpack.encode
encode_health: Callable[[HealthReply], bytes] = msgspec.json.encode


def _parser(kind: type[T], limit: int) -> Callable[[bytes], T | Malformed]:
    return partial(bounded, limit=limit, decoder=msgspec.msgpack.Decoder(kind).decode)


decode_handshake_request = _parser(HandshakeRequest, MAX_REQUEST_BYTES)
decode_lease_request = _parser(LeaseRequest, MAX_REQUEST_BYTES)
decode_lease_reply = _parser(LeaseReply, MAX_REQUEST_BYTES)
decode_health: Callable[[bytes], HealthReply | Malformed] = partial(
    bounded, limit=MAX_HEALTH_BYTES, decoder=msgspec.json.Decoder(HealthReply).decode
)

_REPLY = msgspec.msgpack.Decoder(EngineMetadata | Refusal)


def decode_handshake_reply(raw: bytes) -> EngineMetadata | Refusal | Malformed:
    """Decode a handshake's answer; limits over all shards together are checked here."""
    reply = bounded(raw, MAX_REPLY_BYTES, _REPLY.decode)
    if isinstance(reply, EngineMetadata):
        regions = sum(len(shard.regions) for shard in reply.shards)
        if regions > MAX_REGIONS_PER_ENGINE:
            return Malformed(f"{regions} regions, more than the {MAX_REGIONS_PER_ENGINE} allowed")
    return reply
