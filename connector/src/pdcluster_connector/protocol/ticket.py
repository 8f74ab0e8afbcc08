"""The ticket: what prefill hands to decode about KV that waits for it.

It travels as one opaque string in ``kv_transfer_params``. The client and the router need not be
trusted: decode acts upon nothing but the ticket, and the ticket is signed with a key that only the
engines hold. A ticket serves only the prompt that it was made for, which is why it holds a digest
of what KV depends on. Here it is read, and its signature checked. Whether it fits its request (the
prompt, the time, used once) is decided in ``vllm/scheduler_side/decode.py``.

A long prompt has very many block ids: 250,000 for a million tokens in four groups. vLLM hands
blocks out in runs. So the ticket holds by how much each id differs from the one before, and how
often in a row.
"""

import hmac
import math
from binascii import a2b_base64, b2a_base64
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Self

import msgspec
import numpy as np
from msgspec import Meta, Struct
from numpy.typing import NDArray

from pdcluster_connector.compat.reasons import Reason
from pdcluster_connector.compat.shape import Count, Identifier, ParallelSize
from pdcluster_connector.protocol.failure import Failure
from pdcluster_connector.protocol.messages import LEASE_SECONDS, Malformed, Token, bounded

MAX_BLOCKS: Final = 2**20  # in one group, and in all groups of a ticket
LOWEST: Final = -1  # nothing is held at this position

_STEPS: Final = {1: "<i1", 2: "<i2", 4: "<i4"}
_COUNTS: Final = {0: "", 1: "<u1", 2: "<u2", 4: "<u4"}


class BlockIds(Sequence[int]):
    """Block ids as a sequence that is never changed; equal to any sequence of the same ids.

    Raises:
        ValueError: an id that is none, or more than MAX_BLOCKS of them.
    """

    __slots__ = ("_ids",)

    def __init__(self, ids: Sequence[int] | NDArray[np.int32]) -> None:
        if len(ids) > MAX_BLOCKS:
            raise ValueError(f"{len(ids)} block ids in one group, more than {MAX_BLOCKS}")
        try:
            self._ids = np.asarray(ids, np.int32).view()  # the caller may go on writing to its own
        except (TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"block ids that are no numbers of 32 bits: {error}") from error
        if self._ids.ndim != 1 or (self._ids.size and int(self._ids.min()) < LOWEST):
            raise ValueError(f"the block ids are not a list of whole numbers of at least {LOWEST}")
        self._ids.setflags(write=False)

    def packed(self) -> bytes:
        """Return the compact form: two bytes with the widths of a step and of a count, then all
        steps, then how often each is repeated (width 0: once).
        """
        steps = np.diff(self._ids, prepend=np.int32(0))  # wraps around, and back when summed up
        first = np.flatnonzero(np.concatenate([[True], steps[1:] != steps[:-1]])[: steps.size])
        counts = np.diff(first, append=steps.size)
        step = next(width for width, kind in _STEPS.items() if _fits(steps, kind))
        count = next(width for width, kind in _COUNTS.items() if kind and _fits(counts, kind))
        if first.size * (step + count) < steps.size * step:
            steps, repeated = steps[first], counts.astype(_COUNTS[count]).tobytes()
        else:  # scattered
            count, repeated = 0, b""
        return bytes((step, count)) + steps.astype(_STEPS[step]).tobytes() + repeated

    @classmethod
    def unpacked(cls, raw: bytes, most: int = MAX_BLOCKS) -> Self:
        """Return the ids of :meth:`packed`.

        Raises:
            ValueError: whatever else ``raw`` is, and more than ``most`` ids. A few bytes can stand
                for very many, so that is known before they are made.
        """
        if len(raw) < 2 or raw[0] not in _STEPS or raw[1] not in _COUNTS:
            raise ValueError("block ids in an unknown form")
        size, rest = divmod(len(raw) - 2, raw[0] + raw[1])
        if rest:
            raise ValueError("block ids that are cut off")
        if size > most:
            raise ValueError(f"{size} block ids, more than {most}")
        steps = np.frombuffer(raw, _STEPS[raw[0]], size, 2).astype(np.int32)
        if raw[1]:
            counts = np.frombuffer(raw, _COUNTS[raw[1]], size, 2 + raw[0] * size).astype(np.int64)
            total = int(counts.sum())
            if total > most:
                raise ValueError(f"{total} block ids, more than {most}")
            steps = np.repeat(steps, counts)
        return cls(np.cumsum(steps, dtype=np.int32))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.array(self._ids, dtype) if copy else np.asarray(self._ids, dtype)

    def __len__(self) -> int:
        return self._ids.size

    def __getitem__(self, index: Any) -> Any:
        return self._ids[index].tolist()

    def __iter__(self) -> Iterator[int]:
        return iter(self._ids.tolist())

    def __eq__(self, other: object) -> bool:
        if isinstance(other, BlockIds):
            return np.array_equal(self._ids, other._ids)
        return isinstance(other, tuple | list) and self._ids.tolist() == list(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return f"BlockIds({self._ids.tolist()})"


def _fits(values: NDArray[Any], kind: str) -> bool:
    bounds = np.iinfo(kind)
    return not values.size or bool(bounds.min <= values.min() and values.max() <= bounds.max)


DIGEST_BYTES: Final = 16

# Of the encoded text. A million tokens in four groups need 1.4 MB in the worst case, when their
# blocks are scattered, and a few hundred bytes when they lie in runs.
MAX_TICKET_BYTES = 4 * 1024 * 1024
FORMAT = 3  # 1 and 2 had no signature; they are refused

Port = Annotated[int, Meta(ge=1, le=65535)]


class Ticket(Struct, frozen=True):
    """One hand-off of one request's KV. The signature covers every field.

    Attributes:
        engine_id: the prefill engine's incarnation.
        host, port: its side channel.
        request_id: prefill's own id of the request.
        token: the lease's 64 random bits.
        blocks: logical block ids for each KV cache group; block i covers tokens
            ``[i * block_size, (i + 1) * block_size)``. Any sequences; decoded ones are BlockIds.
        block_size: tokens in a logical block of the prefill engine.
        tokens: tokens covered, counted from the prompt's start.
        prompt_digest: of the prompt that the KV belongs to (``PromptDigest``).
        expires_at: when the lease ends unless renewed, Unix seconds of prefill's clock. Decode
            never compares it with its own clock. Prefill says whether the lease stands.
        tensor, pipeline: prefill's parallel sizes.
        fence_slot: index of the lease word in every rank's table; -1 without a fence.
        lease_seconds: how long prefill holds the blocks after each renewal.
        audience: which engines may use the ticket; prefill's own ``ticket_audience``.
    """

    engine_id: Identifier
    host: Annotated[str, Meta(min_length=1, max_length=255)]
    port: Port
    request_id: Identifier
    token: Token
    blocks: Annotated[tuple[BlockIds, ...], Meta(max_length=256)]
    block_size: Count
    tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)]
    prompt_digest: Annotated[bytes, Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]
    expires_at: float
    tensor: ParallelSize = 1
    pipeline: ParallelSize = 1
    fence_slot: Annotated[int, Meta(ge=-1, le=2**31 - 1)] = -1
    lease_seconds: Annotated[float, Meta(ge=1, le=86400)] = LEASE_SECONDS
    audience: Annotated[str, Meta(max_length=512)] = ""


@dataclass(frozen=True, slots=True)
class TicketKeys:
    """The keys of a cluster's engines: one or two. Nothing here prints them.

    Attributes:
        accepted: the keys whose signatures count.
        signing: the one that signs; one of ``accepted``.
    """

    accepted: tuple[bytes, ...] = field(repr=False)
    signing: bytes = field(repr=False)

    def sign(self, body: bytes) -> bytes:
        """Return the HMAC-SHA256 of ``body``, 32 bytes."""
        return hmac.digest(self.signing, body, "sha256")

    def verify(self, body: bytes, signature: bytes) -> bool:
        """Whether an accepted key made ``signature``. The comparison takes constant time."""
        return any(
            hmac.compare_digest(hmac.digest(key, body, "sha256"), signature)
            for key in self.accepted
        )


class _Envelope(Struct, frozen=True, array_like=True):
    """The body stays bytes, so that the signature is checked before the body is parsed."""

    format: int
    body: bytes
    signature: Annotated[bytes, Meta(max_length=64)] = b""


def _pack(value: Any) -> bytes:
    if isinstance(value, BlockIds):
        return value.packed()
    raise TypeError(type(value).__name__)


class _Listed(Struct, frozen=True):
    """A ticket's block ids as they are sent. Read first: what else stands there is not built."""

    blocks: Annotated[tuple[bytes, ...], Meta(max_length=256)]


def _body(raw: bytes) -> Ticket:
    left = MAX_BLOCKS  # of all groups together: a run of a million is 12 bytes

    def unpack(_: type, value: Any) -> BlockIds:
        nonlocal left
        if not isinstance(value, bytes):
            raise ValueError("block ids in an unknown form")
        ids = BlockIds.unpacked(value, left)
        left -= len(ids)
        return ids

    _LISTED.decode(raw)
    return msgspec.msgpack.decode(raw, type=Ticket, dec_hook=unpack)


_LISTED = msgspec.msgpack.Decoder(_Listed)
_ENVELOPE = msgspec.msgpack.Decoder(_Envelope)
_BODY = msgspec.msgpack.Encoder(enc_hook=_pack)


def encode(ticket: Ticket, keys: TicketKeys | None) -> str:
    """Return the ticket as base64 text, signed with ``keys``; unsigned without any.

    Raises:
        ValueError: no decode engine would read it, since it is too long.
    """
    blocks = tuple(ids if isinstance(ids, BlockIds) else BlockIds(ids) for ids in ticket.blocks)
    if (listed := sum(map(len, blocks))) > MAX_BLOCKS:
        raise ValueError(f"{listed} block ids in one ticket, more than {MAX_BLOCKS}")
    body = _BODY.encode(msgspec.structs.replace(ticket, blocks=blocks))
    envelope = _Envelope(FORMAT, body, b"" if keys is None else keys.sign(body))
    text = b2a_base64(msgspec.msgpack.encode(envelope), newline=False).decode("ascii")
    if len(text) > MAX_TICKET_BYTES:
        raise ValueError(f"a ticket of {len(text)} bytes, more than {MAX_TICKET_BYTES}")
    return text


def decode(text: str, keys: TicketKeys | None, audience: str = "") -> Ticket | Failure:
    """Return the ticket in ``text``, or why decode must not use it. Any ``text`` raises nothing.

    Args:
        keys: the keys of which one must have signed the ticket. None accepts any ticket, which is
            for engines with ``allow_insecure``.
        audience: the ticket must be meant for it.
    """
    body = _verified(text, keys)
    if isinstance(body, Failure):
        return body
    ticket = bounded(body, MAX_TICKET_BYTES, _body)
    if isinstance(ticket, Malformed):
        return Failure(Reason.TICKET_INVALID, ticket.message)
    if not math.isfinite(ticket.expires_at):
        return Failure(Reason.TICKET_INVALID, "a ticket whose expires_at is not a finite number")
    if ticket.audience != audience:
        return Failure(
            Reason.AUDIENCE_MISMATCH,
            f"the ticket is meant for engines with ticket_audience {ticket.audience!r}; this one "
            f"has {audience!r}",
        )
    return ticket


def _verified(text: str, keys: TicketKeys | None) -> bytes | Failure:
    """Return the body that one of ``keys`` has signed."""
    if len(text) > MAX_TICKET_BYTES:
        why = f"a ticket of {len(text)} bytes, more than {MAX_TICKET_BYTES}"
        return Failure(Reason.TICKET_INVALID, why)
    try:
        raw = a2b_base64(text, strict_mode=True)
    except ValueError as error:  # not ASCII, or not base64
        why = f"a ticket that is not base64: {str(error)[:200]}"
        return Failure(Reason.TICKET_INVALID, why)
    envelope = bounded(raw, MAX_TICKET_BYTES, _ENVELOPE.decode)
    if isinstance(envelope, Malformed):
        return Failure(Reason.TICKET_INVALID, envelope.message)
    if envelope.format != FORMAT:
        return Failure(
            Reason.TICKET_INVALID,
            f"a ticket of format {envelope.format}; this version reads {FORMAT}: "
            "give the prefill and the decode engine the same connector",
        )
    if keys is not None and not keys.verify(envelope.body, envelope.signature):
        return _stranger(envelope)
    return envelope.body


def _stranger(envelope: _Envelope) -> Failure:
    if not envelope.signature:
        return Failure(
            Reason.UNSIGNED,
            "the ticket is not signed, and this engine has a ticket key; start the prefill engine "
            "with the same ticket_key_file",
        )
    return Failure(
        Reason.FORGED,
        "none of this engine's ticket keys made the ticket's signature: the ticket was changed on "
        "its way, or the prefill engine has another ticket_key_file",
    )


MOST_IDS_FOR_ROUTERS = 4096
MAX_TRANSFER_ID = 512


def kv_transfer_params(ticket: Ticket, keys: TicketKeys | None) -> dict[str, Any]:
    """Return what prefill answers with and a router hands to decode unchanged.

    Raises:
        ValueError: as :func:`encode`.
    """
    # Some routers look whether remote_block_ids is there. Decode reads the ids from the ticket
    # alone. For a long prompt the list is left empty: it would be most of the answer.
    listed = sum(len(ids) for ids in ticket.blocks) <= MOST_IDS_FOR_ROUTERS
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": ticket.engine_id,
        "remote_host": ticket.host,
        "remote_port": ticket.port,
        "remote_request_id": ticket.request_id,
        "remote_block_ids": [list(ids) if listed else [] for ids in ticket.blocks],
        "tp_size": ticket.tensor,
        "ticket": encode(ticket, keys),
    }


def ticket_of(
    params: Mapping[str, Any] | None, keys: TicketKeys | None, audience: str = ""
) -> Ticket | Failure | None:
    """Return the ticket that a request came with; None when none was meant.

    ``params`` is the client's JSON: ``do_remote_prefill`` decides whether KV waits elsewhere, and
    then a missing or wrong ticket is a Failure. :func:`decode` says what ``keys`` and
    ``audience`` are.
    """
    if not isinstance(params, Mapping) or params.get("do_remote_prefill") is not True:
        return None
    text = params.get("ticket")
    if text is None:
        return Failure(Reason.TICKET_INVALID, "do_remote_prefill without a ticket")
    if not isinstance(text, str):
        why = f"a ticket of type {type(text).__name__}, not a string"
        return Failure(Reason.TICKET_INVALID, why)
    return decode(text, keys, audience)


def passed_on(params: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return what an answer repeats of a request: the id that some routers give a transfer.

    Nothing else is done with it.
    """
    given = params.get("transfer_id") if isinstance(params, Mapping) else None
    if isinstance(given, str) and 0 < len(given) <= MAX_TRANSFER_ID:
        return {"transfer_id": given}
    return {}
