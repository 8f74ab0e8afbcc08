"""Finds contradictions inside one engine's metadata, before anything is planned from it.

The rules of ``compat`` compare two engines. This module judges one engine: its shards must be
complete, agree on the engine id, describe memory that can exist, and fit the engine's shape. Shape
and regions come from the same engine. So a difference is a fault of that engine: one rank has
another connector version, or the connector misread a cache.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import suppress

from pdcluster_connector.compat.findings import Finding, Verdict
from pdcluster_connector.compat.reasons import Reason
from pdcluster_connector.compat.shape import EngineShape, LayerKind, LayerShape
from pdcluster_connector.plan import geometry, rank_pairs
from pdcluster_connector.protocol.messages import EngineMetadata, ShardMetadata

MAX_RANKS = 4096
REPORT = "Report it: the engine's ranks describe its KV cache in contradicting ways."


def contradictions(metadata: EngineMetadata) -> Iterator[Finding]:
    """Yield all contradictions in ``metadata``; none if a plan can be made from it.

    A handshake reports the first one. A peer may send a hundred thousand, so they are found one by
    one.
    """
    yield from _shards(metadata)
    if metadata.shape.layers is not None:
        yield from _layers(metadata)
        yield from _in_shape(metadata.shape)
        yield from _in_regions(metadata)
    for shard in metadata.shards:
        faults = ((region.layer, geometry.region_fault(region)) for region in shard.regions)
        layer, why = next(((name, fault) for name, fault in faults if fault), ("", ""))
        if why:
            yield _contradiction(
                Reason.LAYOUT_UNSUPPORTED,
                "regions",
                layer,
                f"layer {layer} of rank {shard.rank}: {why}",
                "Report it: the connector of that engine described memory that cannot exist.",
            )


def _shards(metadata: EngineMetadata) -> Iterator[Finding]:
    for shard in metadata.shards:
        if shard.engine_id != metadata.engine_id:
            yield _contradiction(
                Reason.ENGINE_ID_INCONSISTENT,
                "engine_id",
                shard.engine_id,
                f"rank {shard.rank} says that it belongs to {shard.engine_id},"
                f" its engine says {metadata.engine_id}",
                "Start every rank of an engine with the same engine_id.",
            )
    ranks = Counter(shard.rank for shard in metadata.shards)
    shape = metadata.shape
    if shape.pipeline * shape.tensor > MAX_RANKS:
        yield _contradiction(
            Reason.LAYOUT_UNSUPPORTED,
            "pipeline, tensor",
            f"{shape.pipeline} x {shape.tensor}",
            f"pipeline {shape.pipeline} x tensor {shape.tensor} is more than {MAX_RANKS} ranks",
            f"Use at most {MAX_RANKS} ranks an engine.",
        )
        return
    expected = {(pp, tp) for pp in range(shape.pipeline) for tp in range(shape.tensor)}
    twice = sorted(rank for rank, count in ranks.items() if count > 1)
    for rank in (*twice, *sorted(set(ranks) - expected)):
        yield _contradiction(
            Reason.ENGINE_ID_INCONSISTENT,
            "rank",
            str(rank),
            f"rank {rank} is published twice or lies outside of pipeline {shape.pipeline}"
            f" x tensor {shape.tensor}",
            "Start every engine with an engine_id of its own.",
        )
    for rank in sorted(expected - set(ranks)):
        yield _contradiction(
            Reason.SHARD_MISSING,
            "rank",
            str(rank),
            f"rank {rank} of {metadata.engine_id} has published no memory",
            "Look for that rank's worker in the engine's log.",
        )


def _layers(metadata: EngineMetadata) -> Iterator[Finding]:
    stated = {layer.name for layer in metadata.shape.layers or ()}
    held = {region.layer for shard in metadata.shards for region in shard.regions}
    for name in sorted(stated ^ held):
        where = "no shard holds it" if name in stated else "the shape does not name it"
        yield _contradiction(
            Reason.LAYER_MISMATCH,
            "layers",
            name,
            f"layer {name} of {metadata.engine_id}: {where}",
            "Use the same connector version in every rank of the engine.",
        )


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


def _in_regions(metadata: EngineMetadata) -> Iterator[Finding]:
    """Yield where the regions contradict the shape, or each other."""
    shape = metadata.shape
    layers = {layer.name: layer for layer in shape.layers or ()}
    stages: dict[str, int] = {}
    for shard in metadata.shards:
        arrays: dict[str, list[geometry.Region]] = defaultdict(list)
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
    shard: ShardMetadata, layer: LayerShape, regions: list[geometry.Region], shape: EngineShape
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
    groups = shape.groups or ()
    group = groups[layer.group] if layer.group < len(groups) else None
    for region in regions:
        heads, size = stated.get(region.part, (layer.kv_heads, region.token_bytes))
        if region.token_bytes != size:
            yield _differs("token_bytes", where, str(size), str(region.token_bytes))
        if region.group != layer.group:
            yield _differs("group", where, str(layer.group), str(region.group))
        if group is not None and region.block_tokens != group.kernel_tokens:
            both = f"kernel blocks of {group.kernel_tokens}", f"{region.block_tokens} tokens"
            yield _differs("block_tokens", where, *both)
        held = (region.head_start, region.head_stop)
        with suppress(ValueError):  # a rule of compat or the check of the ranks refuses it
            expected = rank_pairs.head_interval(heads, shape.tensor, shard.rank[1])
            if held != expected:
                share = f"{heads} heads over {shape.tensor} ranks, here {list(expected)}"
                yield _differs("heads", where, share, f"{list(held)}")


def _differs(field: str, where: str, stated: str, found: str) -> Finding:
    message = f"{field} of {where}: the engine states {stated}, and also {found}"
    return _contradiction(Reason.LAYOUT_UNSUPPORTED, field, stated, message, REPORT)


def _contradiction(reason: Reason, field: str, value: str, message: str, remedy: str) -> Finding:
    """Return a refusal of what one engine states about itself. No rule of compat is behind it."""
    return Finding(reason, Verdict.REFUSED, field, value, "", message, remedy)
