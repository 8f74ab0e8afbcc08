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
    return Region(**_fields(message, RegionMessage))


def from_region(region: Region) -> RegionMessage:
    """Return the wire form of a region."""
    return RegionMessage(**_fields(region, RegionMessage))


def to_shard(message: ShardMetadata) -> Shard:
    """Return the planner's value of a wire shard."""
    regions = tuple(to_region(item) for item in message.regions)
    return Shard(rank=message.rank, regions=regions, seams=message.seams)


def to_shape(message: ShapeMessage) -> EngineShape:
    """Return the rules' value of a wire shape."""
    fields = _fields(message, ShapeMessage)
    if message.layers is not None:
        fields["layers"] = tuple(_to_layer(item) for item in message.layers)
    if message.groups is not None:
        fields["groups"] = tuple(
            GroupShape(**_fields(item, GroupMessage) | {"kind": _kind(item.kind)})
            for item in message.groups
        )
    return EngineShape(**fields)


def from_shape(shape: EngineShape) -> ShapeMessage:
    """Return the wire form of a shape."""
    fields = _fields(shape, ShapeMessage)
    if shape.layers is not None:
        fields["layers"] = tuple(_from_layer(layer) for layer in shape.layers)
    if shape.groups is not None:
        fields["groups"] = tuple(
            GroupMessage(**_fields(group, GroupMessage) | {"kind": group.kind.value})
            for group in shape.groups
        )
    return ShapeMessage(**fields)


def _to_layer(message: LayerMessage) -> LayerShape:
    parts = tuple(PartShape(**_fields(part, PartMessage)) for part in message.parts)
    fields = _fields(message, LayerMessage) | {"kind": _kind(message.kind), "parts": parts}
    return LayerShape(**fields)


def _from_layer(layer: LayerShape) -> LayerMessage:
    parts = tuple(PartMessage(**_fields(part, PartMessage)) for part in layer.parts)
    fields = _fields(layer, LayerMessage) | {"kind": layer.kind.value, "parts": parts}
    return LayerMessage(**fields)


def _kind(name: str) -> LayerKind:
    return _KINDS.get(name, LayerKind.OTHER)


def _fields(value: Any, kind: type[Struct]) -> dict[str, Any]:
    """Return what a message of ``kind`` says of ``value``, be it one or its mirror image."""
    return {name: getattr(value, name) for name in kind.__struct_fields__}
