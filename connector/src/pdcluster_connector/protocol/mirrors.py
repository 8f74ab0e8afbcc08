"""Wire messages <-> the values that they mirror: the planner's regions, the rules' shapes."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from pdcluster_connector.compat.shape import (
    EngineShape,
    GroupShape,
    LayerKind,
    LayerShape,
    PartShape,
)
from pdcluster_connector.plan.geometry import Region, Shard
from pdcluster_connector.protocol.messages import (
    GroupMessage,
    LayerMessage,
    PartMessage,
    RegionMessage,
    ShapeMessage,
    ShardMetadata,
)

_KINDS = {kind.value: kind for kind in LayerKind}


def to_region(message: RegionMessage) -> Region:
    """Return the planner's value of a wire region."""
    return Region(**_fields(message))


def from_region(region: Region) -> RegionMessage:
    """Return the wire form of a region."""
    return RegionMessage(
        **{name: getattr(region, name) for name in RegionMessage.__struct_fields__}
    )


def to_shard(message: ShardMetadata) -> Shard:
    """Return the planner's value of a wire shard."""
    return Shard(rank=message.rank, regions=tuple(to_region(item) for item in message.regions))


def to_shape(message: ShapeMessage) -> EngineShape:
    """Return the rules' value of a wire shape."""
    fields = _fields(message)
    if message.layers is not None:
        fields["layers"] = tuple(_to_layer(item) for item in message.layers)
    if message.groups is not None:
        fields["groups"] = tuple(
            GroupShape(**_fields(item) | {"kind": _kind(item.kind)}) for item in message.groups
        )
    return EngineShape(**fields)


def from_shape(shape: EngineShape) -> ShapeMessage:
    """Return the wire form of a shape."""
    fields = {name: getattr(shape, name) for name in ShapeMessage.__struct_fields__}
    if shape.layers is not None:
        fields["layers"] = tuple(_from_layer(layer) for layer in shape.layers)
    if shape.groups is not None:
        fields["groups"] = tuple(
            GroupMessage(
                group.kind.value, group.block_size, group.kernel_blocks_per_block, group.window
            )
            for group in shape.groups
        )
    return ShapeMessage(**fields)


def _to_layer(message: LayerMessage) -> LayerShape:
    parts = tuple(PartShape(**_fields(part)) for part in message.parts)
    return LayerShape(**_fields(message) | {"kind": _kind(message.kind), "parts": parts})


def _from_layer(layer: LayerShape) -> LayerMessage:
    parts = tuple(
        PartMessage(part.name, part.heads, part.head_bytes, part.dtype) for part in layer.parts
    )
    fields = {name: getattr(layer, name) for name in LayerMessage.__struct_fields__}
    return LayerMessage(**fields | {"kind": layer.kind.value, "parts": parts})


def _kind(name: str) -> LayerKind:
    return _KINDS.get(name, LayerKind.OTHER)


def _fields(message: Struct) -> dict[str, Any]:
    return {name: getattr(message, name) for name in message.__struct_fields__}
