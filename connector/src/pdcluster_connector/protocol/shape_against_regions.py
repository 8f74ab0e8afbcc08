"""Compares an engine's shape with the regions of its shards.

Both come from the same engine, so a difference is a fault of that engine: one rank has another
connector version, or the connector misread a cache. Each finding names the field and both values.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from pdcluster_connector.compat.reasons import Reason
from pdcluster_connector.compat.rules import Finding, Verdict
from pdcluster_connector.compat.shape import EngineShape, GroupShape, LayerKind, LayerShape
from pdcluster_connector.plan.geometry import Region
from pdcluster_connector.plan.topology import head_interval
from pdcluster_connector.protocol.messages import EngineMetadata, ShardMetadata

MOST_FINDINGS = 8
REPORT = "Report it: the engine's ranks describe its KV cache in contradicting ways."


def compare(metadata: EngineMetadata) -> Iterator[Finding]:
    """Yield where the shape contradicts itself or the regions, a few findings at most."""
    shape = metadata.shape
    found = [*_in_shape(shape), *_in_regions(metadata, shape)]
    yield from found[:MOST_FINDINGS]


def _in_shape(shape: EngineShape) -> Iterator[Finding]:
    """Yield where the shape contradicts itself."""
    for number, group in enumerate(shape.groups or ()):
        if group.block_size % group.kernel_blocks_per_block:
            ratio = f"{group.kernel_blocks_per_block} kernel blocks in a block"
            yield _differs("groups", f"group {number}", f"block size {group.block_size}", ratio)
    for layer in shape.layers or ():
        if shape.groups is not None and layer.group >= len(shape.groups):
            counted = f"{len(shape.groups)} groups"
            yield _differs("layers", layer.name, f"group {layer.group}", counted)
        total = sum(part.heads * part.head_bytes for part in layer.parts)
        if layer.kind is LayerKind.MAMBA and layer.parts and total != layer.token_bytes:
            both = f"{layer.token_bytes} bytes a state", f"{total} bytes over its parts"
            yield _differs("layers", layer.name, *both)


def _in_regions(metadata: EngineMetadata, shape: EngineShape) -> Iterator[Finding]:
    layers = {layer.name: layer for layer in shape.layers or ()}
    stages: dict[str, int] = {}
    for shard in metadata.shards:
        arrays: dict[str, list[Region]] = defaultdict(list)
        for region in shard.regions:
            arrays[region.layer].append(region)
        for name, regions in arrays.items():
            stage = stages.setdefault(name, shard.rank[0])
            if stage != shard.rank[0]:
                ranks = f"pipeline rank {stage}", f"pipeline rank {shard.rank[0]}"
                yield _differs("regions", name, *ranks)
            if name in layers:
                yield from _layer(shard, layers[name], regions, shape)


def _layer(
    shard: ShardMetadata, layer: LayerShape, regions: list[Region], shape: EngineShape
) -> Iterator[Finding]:
    where = f"{layer.name} of rank {shard.rank}"
    parts = [region.part for region in regions]
    if len(set(parts)) != len(parts):
        yield _differs("regions", where, f"{len(parts)} regions", f"parts {sorted(set(parts))}")
        return
    stated = {part.name: (part.heads, part.head_bytes) for part in layer.parts}
    if stated and stated.keys() != set(parts):
        yield _differs("parts", where, str(sorted(stated)), str(sorted(parts)))
        return
    total = sum(region.token_bytes for region in regions)
    if not stated and total != layer.token_bytes:
        both = f"{layer.token_bytes} bytes a token and head", f"regions of {total}"
        yield _differs("token_bytes", where, *both)
    group = _group(shape, layer)
    for region in regions:
        heads, size = stated.get(region.part, (layer.kv_heads, region.token_bytes))
        if region.token_bytes != size:
            yield _differs("token_bytes", where, str(size), str(region.token_bytes))
        if region.group != layer.group:
            yield _differs("group", where, str(layer.group), str(region.group))
        if group is not None and region.block_tokens != group.kernel_tokens:
            both = f"kernel blocks of {group.kernel_tokens}", f"{region.block_tokens} tokens"
            yield _differs("block_tokens", where, *both)
        yield from _heads(shard, where, heads, region, shape)


def _heads(
    shard: ShardMetadata, where: str, heads: int, region: Region, shape: EngineShape
) -> Iterator[Finding]:
    held = (region.head_start, region.head_stop)
    try:
        expected = head_interval(heads, shape.tensor, shard.rank[1])
    except ValueError:
        return  # a rule of compat or the check of the ranks refuses it
    if held != expected:
        share = f"{heads} heads over {shape.tensor} ranks, here {list(expected)}"
        yield _differs("heads", where, share, f"{list(held)}")


def _group(shape: EngineShape, layer: LayerShape) -> GroupShape | None:
    groups = shape.groups or ()
    return groups[layer.group] if layer.group < len(groups) else None


def _differs(field: str, where: str, stated: str, found: str) -> Finding:
    message = f"{field} of {where}: the engine states {stated}, and also {found}"
    return contradiction(Reason.LAYOUT_UNSUPPORTED, field, stated, message, REPORT)


def contradiction(reason: Reason, field: str, value: str, message: str, remedy: str) -> Finding:
    """Return a refusal of what one engine states about itself. No rule of compat is behind it."""
    return Finding(
        reason=reason,
        verdict=Verdict.REFUSED,
        field=field,
        prefill_value=value,
        decode_value="",
        message=message,
        remedy=remedy,
    )
