"""Shapes of one engine's ranks: sent as bytes between its processes, and joined to one shape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from pdcluster_connector.compat.shape import EngineShape, GroupShape, LayerShape
from pdcluster_connector.protocol.messages import encode

Rank = tuple[int, int]
"""The (pipeline, tensor) rank of a worker."""

# What depends on the layers that a pipeline stage has.
_OF_A_STAGE = frozenset({"kernel_blocks_per_block", "token_sliceable", "packing", "groups"})


def encode_shape(shape: EngineShape) -> bytes:
    """Bytes of a shape; inverse of :func:`decode_shape`."""
    return encode(shape)


def decode_shape(raw: bytes) -> EngineShape:
    """Shape from bytes of the same engine; raises ``msgspec.MsgspecError`` on anything else."""
    return msgspec.msgpack.decode(raw, type=EngineShape)


def join_shapes(shapes: Mapping[Rank, EngineShape]) -> EngineShape:
    """Join the shapes of an engine's ranks to the engine's: the layers of all stages, in order.

    Raises:
        ValueError: two ranks contradict each other, for instance because a node holds other
            weights. The message names the field, both ranks and both values.
    """
    known = _check(shapes)
    ranks = tuple(shapes.values())
    packings = {name for shape in ranks for name in (shape.packing or "").split("+") if name}
    sliceable = {shape.token_sliceable for shape in ranks} - {None}
    groups = _groups(ranks)
    ratios = {group.kernel_blocks_per_block for group in groups or () if group.kernel_tokens > 1}
    return replace(
        ranks[0],
        **known,
        kernel_blocks_per_block=(
            ranks[0].kernel_blocks_per_block
            if not groups
            else ratios.pop()
            if len(ratios) == 1
            else None
        ),
        token_sliceable=all(sliceable) if sliceable else None,
        packing="+".join(sorted(packings)) or None,
        layers=_layers(ranks),
        groups=groups,
    )


def _check(shapes: Mapping[Rank, EngineShape]) -> dict[str, Any]:
    """Return what the ranks that know them say of the fields that an engine has only once.

    The tensor ranks of one stage are alike in every field but the layers, whose scales may differ.
    """
    known: dict[str, Any] = {}
    for field in EngineShape.__struct_fields__:
        if field == "layers":
            continue
        of_stage: dict[int, Rank] = {}
        of_engine: list[Rank] = []
        for rank, shape in shapes.items():
            value = getattr(shape, field)
            others = [of_stage.setdefault(rank[0], rank)]
            if value is not None and field not in _OF_A_STAGE:
                known[field] = value
                of_engine.append(rank)
                others.append(of_engine[0])
            for other in others:
                theirs = getattr(shapes[other], field)
                if value != theirs:
                    raise ValueError(
                        f"rank {rank} has {field} {value}, rank {other} has {theirs}; give every "
                        "rank of an engine the same model files, settings and kind of machine"
                    )
    return known


def _layers(shapes: Sequence[EngineShape]) -> tuple[LayerShape, ...]:
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
