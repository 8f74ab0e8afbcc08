"""The ticket: what a decode engine is told about KV that waits for it in a prefill engine.

It travels as one opaque string inside ``kv_transfer_params``, next to the keys that
routers know, through hands that need not be trusted. Decode reads only the ticket.
"""

from __future__ import annotations

import math
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from pdcluster_connector.compat.field_types import Count, Identifier, ParallelSize
from pdcluster_connector.protocol.block_ids import MAX_BLOCKS, BlockIds
from pdcluster_connector.protocol.messages import Malformed, Token, bounded
from pdcluster_connector.protocol.prompt_digest import DIGEST_BYTES

# Of the encoded text. A million tokens in four groups need 1.4 MB in the worst case, when their
# blocks are scattered, and a few hundred bytes when they lie in runs.
MAX_TICKET_BYTES = 4 * 1024 * 1024
FORMAT = 2  # 1 listed every block id by itself; it is still read
OLDEST_FORMAT = 1
MOST_IDS_FOR_ROUTERS = 4096

Port = Annotated[int, Meta(ge=1, le=65535)]


class Ticket(Struct, frozen=True):
    """One hand-off of one request's KV.

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
        signature: place of the HMAC over :func:`signed_bytes`; empty when unsigned.
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
    signature: Annotated[bytes, Meta(max_length=64)] = b""

    @property
    def side_channel(self) -> tuple[str, int]:
        """Return (host, port) of the prefill engine's side channel."""
        return self.host, self.port


class _Envelope(Struct, frozen=True, array_like=True):
    """The body stays bytes, so that a signature is checked before the body is parsed."""

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
        """Block ids in the form of format 2 or 1; raises ValueError on anything else."""
        if isinstance(value, bytes):
            ids = BlockIds.unpacked(value, self._left)
        elif isinstance(value, list) and all(type(item) is int for item in value):
            ids = BlockIds(value)
        else:
            raise ValueError("block ids that are no list of numbers")
        self._left -= len(ids)
        if self._left < 0:
            raise ValueError(f"more than {MAX_BLOCKS} block ids in one ticket")
        return ids


class _Listed(Struct, frozen=True):
    """A ticket's block ids as they are sent. Read first: what else stands there is not built."""

    blocks: Annotated[
        tuple[bytes | Annotated[tuple[int, ...], Meta(max_length=MAX_BLOCKS)], ...],
        Meta(max_length=256),
    ]


def _body(raw: bytes) -> Ticket:
    _LISTED.decode(raw)
    return msgspec.msgpack.decode(raw, type=Ticket, dec_hook=_Unpacking())


_LISTED = msgspec.msgpack.Decoder(_Listed)
_ENVELOPE = msgspec.msgpack.Decoder(_Envelope)
_BODY = msgspec.msgpack.Encoder(enc_hook=_pack)


def signed_bytes(ticket: Ticket) -> bytes:
    """Return the bytes that a signature covers: all fields but the signature.

    Raises:
        ValueError: more blocks than a ticket can list.
    """
    blocks = tuple(ids if isinstance(ids, BlockIds) else BlockIds(ids) for ids in ticket.blocks)
    if (listed := sum(map(len, blocks))) > MAX_BLOCKS:
        raise ValueError(f"{listed} block ids in one ticket, more than {MAX_BLOCKS}")
    return _BODY.encode(msgspec.structs.replace(ticket, blocks=blocks, signature=b""))


def encode(ticket: Ticket) -> str:
    """Return the ticket as URL-safe base64 text.

    Raises:
        ValueError: no decode engine would read it, since it is too long.
    """
    envelope = _Envelope(FORMAT, signed_bytes(ticket), ticket.signature)
    text = urlsafe_b64encode(msgspec.msgpack.encode(envelope)).decode("ascii")
    if len(text) > MAX_TICKET_BYTES:
        raise ValueError(f"a ticket of {len(text)} bytes, more than {MAX_TICKET_BYTES}")
    return text


def decode(text: str) -> Ticket | Malformed:
    """Return the ticket in ``text``; whatever ``text`` is, this does not raise."""
    if len(text) > MAX_TICKET_BYTES:
        return Malformed(f"a ticket of {len(text)} bytes, more than {MAX_TICKET_BYTES}")
    try:
        raw = urlsafe_b64decode(text.encode("ascii"))
    except ValueError as error:  # not ASCII, or not base64
        return Malformed(f"a ticket that is not base64: {str(error)[:200]}")
    envelope = bounded(raw, MAX_TICKET_BYTES, _ENVELOPE.decode)
    if isinstance(envelope, Malformed):
        return envelope
    if not OLDEST_FORMAT <= envelope.format <= FORMAT:
        ours = f"{OLDEST_FORMAT} to {FORMAT}"
        return Malformed(f"a ticket of format {envelope.format}; this version reads {ours}")
    ticket = bounded(envelope.body, MAX_TICKET_BYTES, _body)
    if isinstance(ticket, Ticket):
        if not math.isfinite(ticket.expires_at):
            return Malformed("a ticket whose expires_at is not a finite number")
        ticket = msgspec.structs.replace(ticket, signature=envelope.signature)
    return ticket


def kv_transfer_params(ticket: Ticket) -> dict[str, Any]:
    """Return what prefill answers with and a router hands to decode unchanged.

    Raises:
        ValueError: as :func:`encode`.
    """
    # For routers that look whether it is there: ours is read from the ticket alone, and a long
    # prompt's ids in plain would be the largest part of the answer.
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
        "ticket": encode(ticket),
    }


def ticket_of(params: Mapping[str, Any] | None) -> Ticket | Malformed | None:
    """Return the ticket that a request came with; None when none was meant.

    ``params`` is the client's JSON: ``do_remote_prefill`` decides whether KV waits
    elsewhere, and then a missing or wrong ticket is Malformed.
    """
    if not isinstance(params, Mapping) or params.get("do_remote_prefill") is not True:
        return None
    text = params.get("ticket")
    if text is None:
        return Malformed("do_remote_prefill without a ticket")
    if not isinstance(text, str):
        return Malformed(f"a ticket of type {type(text).__name__}, not a string")
    return decode(text)
