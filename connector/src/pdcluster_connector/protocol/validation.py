"""Finds contradictions inside one engine's metadata, before anything is planned from it.

The rules of :mod:`pdcluster_connector.compat` compare two engines. This module judges one engine:
its shards must be complete, agree on the engine id, and describe memory that can exist.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from pdcluster_connector.compat.reasons import Reason
from pdcluster_connector.compat.rules import Finding
from pdcluster_connector.plan.bounds import region_fault
from pdcluster_connector.protocol.messages import EngineMetadata, ShardMetadata
from pdcluster_connector.protocol.shape_against_regions import compare, contradiction

MAX_RANKS = 4096


def validate_metadata(metadata: EngineMetadata) -> tuple[Finding, ...]:
    """Return all contradictions in ``metadata``; empty if a plan can be made from it."""
    return tuple(_findings(metadata))


def _findings(metadata: EngineMetadata) -> Iterator[Finding]:
    yield from _shards(metadata)
    if metadata.shape.layers is not None:
        yield from _layers(metadata)
        yield from compare(metadata)
    for shard in metadata.shards:
        yield from _memory(shard)


def _shards(metadata: EngineMetadata) -> Iterator[Finding]:
    for shard in metadata.shards:
        if shard.engine_id != metadata.engine_id:
            yield contradiction(
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
        yield contradiction(
            Reason.LAYOUT_UNSUPPORTED,
            "pipeline, tensor",
            f"{shape.pipeline} x {shape.tensor}",
            f"pipeline {shape.pipeline} x tensor {shape.tensor} is more than {MAX_RANKS} ranks",
            f"Use at most {MAX_RANKS} ranks an engine.",
        )
        return
    expected = {(pp, tp) for pp in range(shape.pipeline) for tp in range(shape.tensor)}
    twice = sorted(rank for rank, count in ranks.items() if count > 1)
    for rank in (*twice, *sorted(set(ranks) - expected))[:8]:
        yield contradiction(
            Reason.ENGINE_ID_INCONSISTENT,
            "rank",
            str(rank),
            f"rank {rank} is published twice or lies outside of pipeline {shape.pipeline}"
            f" x tensor {shape.tensor}",
            "Start every engine with an engine_id of its own.",
        )
    for rank in sorted(expected - set(ranks))[:8]:
        yield contradiction(
            Reason.SHARD_MISSING,
            "rank",
            str(rank),
            f"rank {rank} of {metadata.engine_id} has published no memory",
            "Look for that rank's worker in the engine's log.",
        )


def _layers(metadata: EngineMetadata) -> Iterator[Finding]:
    stated = {layer.name for layer in metadata.shape.layers or ()}
    held = {region.layer for shard in metadata.shards for region in shard.regions}
    for name in sorted(stated ^ held)[:8]:
        where = "no shard holds it" if name in stated else "the shape does not name it"
        yield contradiction(
            Reason.LAYER_MISMATCH,
            "layers",
            name,
            f"layer {name} of {metadata.engine_id}: {where}",
            "Use the same connector version in every rank of the engine.",
        )


def _memory(shard: ShardMetadata) -> Iterator[Finding]:
    wrong = next(((region, why) for region in shard.regions if (why := region_fault(region))), None)
    if wrong is not None:
        region, why = wrong
        yield contradiction(
            Reason.LAYOUT_UNSUPPORTED,
            "regions",
            region.layer,
            f"layer {region.layer} of rank {shard.rank}: {why}",
            "Report it: the connector of that engine described memory that cannot exist.",
        )
