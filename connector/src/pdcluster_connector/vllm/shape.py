"""A shape as bytes, to cross from a worker to its own engine's scheduler role."""

from __future__ import annotations

import msgspec

from pdcluster_connector.compat.shape import EngineShape
from pdcluster_connector.protocol.messages import ShapeMessage, encode, from_shape, to_shape


def encode_shape(shape: EngineShape) -> bytes:
    """Bytes of a shape; inverse of :func:`decode_shape`."""
    return encode(from_shape(shape))


def decode_shape(raw: bytes) -> EngineShape:
    """Shape from bytes of the same engine; raises ``msgspec.MsgspecError`` on anything else."""
    return to_shape(msgspec.msgpack.decode(raw, type=ShapeMessage))
