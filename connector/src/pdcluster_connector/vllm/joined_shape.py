"""Shapes of one engine's ranks: sent as bytes between its processes, and joined to one shape."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from pdcluster_connector.compat.shape import EngineShape, GroupShape, LayerShape
from pdcluster_connector.protocol.messages import encode

_ALIKE = ("model", "kv_dtype", "block_size", "prefix_caching", "memory", "layout")


def encode_shape(shape: EngineShape) -> bytes:
    """Bytes of a shape; inverse of :func:`decode_shape`."""
    return encode(shape)


def decode_shape(raw: bytes) -> EngineShape:
    """Shape from bytes of the same engine; raises ``msgspec.MsgspecError`` on anything else."""
    return msgspec.msgpack.decode(raw, type=EngineShape)


def join_shapes(shapes: Sequence[EngineShape]) -> EngineShape:
    """Join the shapes of the ranks to the engine's: the layers of all pipeline ranks, in order.

    Raises:
        ValueError: two ranks contradict each other. The message names the field and both values.
    """
    packings = {name for shape in shapes for name in (shape.packing or "").split("+") if name}
    sliceable = {shape.token_sliceable for shape in shapes} - {None}
    groups = _groups(shapes)
    ratios = {group.kernel_blocks_per_block for group in groups or () if group.kernel_tokens > 1}
    return replace(
        shapes[0],
        **{field: _same(field, shapes) for field in _ALIKE},
        kernel_blocks_per_block=(
            shapes[0].kernel_blocks_per_block
            if not groups
            else ratios.pop()
            if len(ratios) == 1
            else None
        ),
        token_sliceable=all(sliceable) if sliceable else None,
        packing="+".join(sorted(packings)) or None,
        layers=join_layers(shapes),
        groups=groups,
    )


def join_layers(shapes: Iterable[EngineShape]) -> tuple[LayerShape, ...]:
    """Return all layers of an engine's ranks.

    If tensor ranks read a layer with different scales (one for each head), the layer's scale is
    None, because it has no single scale.
    """
    layers: dict[str, LayerShape] = {}
    for shape in shapes:
        for layer in shape.layers or ():
            known = layers.setdefault(layer.name, layer)
            if known.scales != layer.scales:
                layers[layer.name] = replace(known, scales=None)
    return tuple(layers.values())


def _groups(shapes: Sequence[EngineShape]) -> tuple[GroupShape, ...] | None:
    """Return each group as described by a rank that has layers of the group."""
    if shapes[0].groups is None:
        return None
    found = list(shapes[0].groups)
    for shape in shapes:
        for number in {layer.group for layer in shape.layers or ()}:
            found[number] = (shape.groups or ())[number]
    return tuple(found)


def _same(field: str, shapes: Sequence[EngineShape]) -> Any:
    values = [value for shape in shapes if (value := getattr(shape, field)) is not None]
    for value in values:
        if value != values[0]:
            raise ValueError(f"{field} is {values[0]} on one rank and {value} on another")
    return values[0] if values else None
