"""The ticket: what a decode engine is told about KV that waits for it in a prefill engine.

It travels as one opaque string (:mod:`transfer_params`). The client and the router need not be
trusted: decode acts upon nothing but the ticket, and the ticket is signed with a key that only the
engines hold.
"""

from __future__ import annotations

import math
from binascii import a2b_base64, b2a_base64
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from pdcluster_connector.compat.field_types import Count, Identifier, ParallelSize
from pdcluster_connector.compat.reasons import Reason
from pdcluster_connector.protocol.block_ids import MAX_BLOCKS, BlockIds
from pdcluster_connector.protocol.lease import LEASE_SECONDS
from pdcluster_connector.protocol.messages import Malformed, Token, bounded
from pdcluster_connector.protocol.prompt_digest import DIGEST_BYTES
from pdcluster_connector.protocol.ticket_keys import TicketKeys

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
        prompt_digest: of the prompt that the KV belongs to (:mod:`prompt_digest`).
        expires_at: when the lease ends unless renewed, Unix seconds of prefill's clock;
            advice, since clocks differ.
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

    @property
    def side_channel(self) -> tuple[str, int]:
        """Return (host, port) of the prefill engine's side channel."""
        return self.host, self.port


@dataclass(frozen=True, slots=True)
class Rejected:
    """A ticket that decode must not use, why in one sentence, and nothing else of it."""

    reason: Reason
    message: str


class _Envelope(Struct, frozen=True, array_like=True):
    """The body stays bytes, so that the signature is checked before the body is parsed."""

    format: int
    body: bytes
    signature: Annotated[bytes, Meta(max_length=64)] = b""


def _pack(value: Any) -> bytes:
    if isinstance(value, BlockIds):
        return value.packed()
    raise TypeError(type(value).__name__)


class _Unpacking:
    """Reads the block ids of one ticket, which share one bound: a run of a million is 12 bytes."""

    def __init__(self) -> None:
        self._left = MAX_BLOCKS

    def __call__(self, _: type, value: Any) -> BlockIds:
        """Return the ids of one group; raises ValueError on anything else."""
        if not isinstance(value, bytes):
            raise ValueError("block ids in an unknown form")
        ids = BlockIds.unpacked(value, self._left)
        self._left -= len(ids)
        return ids


class _Listed(Struct, frozen=True):
    """A ticket's block ids as they are sent. Read first: what else stands there is not built."""

    blocks: Annotated[tuple[bytes, ...], Meta(max_length=256)]


def _body(raw: bytes) -> Ticket:
    _LISTED.decode(raw)
    return msgspec.msgpack.decode(raw, type=Ticket, dec_hook=_Unpacking())


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


def decode(text: str, keys: TicketKeys | None, audience: str = "") -> Ticket | Rejected:
    """Return the ticket in ``text``; whatever ``text`` is, this does not raise.

    Args:
        keys: the keys of which one must have signed the ticket. None accepts any ticket, which is
            for engines that were told to be insecure.
        audience: the ticket must be meant for it.
    """
    body = _verified(text, keys)
    if isinstance(body, Rejected):
        return body
    ticket = bounded(body, MAX_TICKET_BYTES, _body)
    if isinstance(ticket, Malformed):
        return Rejected(Reason.TICKET_INVALID, ticket.message)
    if not math.isfinite(ticket.expires_at):
        return Rejected(Reason.TICKET_INVALID, "a ticket whose expires_at is not a finite number")
    if ticket.audience != audience:
        return Rejected(
            Reason.AUDIENCE_MISMATCH,
            f"the ticket is meant for engines with ticket_audience {ticket.audience!r}; this one "
            f"has {audience!r}",
        )
    return ticket


def _verified(text: str, keys: TicketKeys | None) -> bytes | Rejected:
    """Return the body that one of ``keys`` has signed."""
    envelope = _envelope(text)
    if isinstance(envelope, Malformed):
        return Rejected(Reason.TICKET_INVALID, envelope.message)
    if envelope.format != FORMAT:
        return Rejected(
            Reason.TICKET_INVALID,
            f"a ticket of format {envelope.format}; this version reads {FORMAT}: "
            "give the prefill and the decode engine the same connector",
        )
    if keys is not None and not keys.verify(envelope.body, envelope.signature):
        return _stranger(envelope)
    return envelope.body


def _envelope(text: str) -> _Envelope | Malformed:
    if len(text) > MAX_TICKET_BYTES:
        return Malformed(f"a ticket of {len(text)} bytes, more than {MAX_TICKET_BYTES}")
    try:
        raw = a2b_base64(text, strict_mode=True)
    except ValueError as error:  # not ASCII, or not base64
        return Malformed(f"a ticket that is not base64: {str(error)[:200]}")
    return bounded(raw, MAX_TICKET_BYTES, _ENVELOPE.decode)


def _stranger(envelope: _Envelope) -> Rejected:
    if not envelope.signature:
        return Rejected(
            Reason.UNSIGNED,
            "the ticket is not signed, and this engine has a ticket key; start the prefill engine "
            "with the same ticket_key_file",
        )
    return Rejected(
        Reason.FORGED,
        "none of this engine's ticket keys made the ticket's signature: the ticket was changed on "
        "its way, or the prefill engine has another ticket_key_file",
    )
