"""Which prefill shard a decode shard takes each (layer, head interval) from."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from pdcluster_connector.compat.reasons import Reason
from pdcluster_connector.plan import PlanError
from pdcluster_connector.plan.geometry import Region, Shard


@dataclass(frozen=True, slots=True)
class Assignment:
    """Heads [head_start, head_stop) of one layer come from ``prefill`` into ``decode``.

    ``source`` is the index of the prefill shard in the list that was given.
    """

    source: int
    prefill: Region
    decode: Region
    head_start: int
    head_stop: int


def head_interval(kv_heads: int, tensor: int, rank: int) -> tuple[int, int]:
    """Return the global KV heads of one tensor rank, as vLLM spreads them.

    Raises:
        ValueError: neither number divides the other, or there is no such rank.
    """
    small, large = sorted((kv_heads, tensor))
    if small < 1 or large % small or not 0 <= rank < tensor:
        raise ValueError(f"{kv_heads} KV heads over {tensor} tensor ranks, rank {rank}")
    start = rank * kv_heads // tensor
    return start, start + max(1, kv_heads // tensor)


def node_of_data_rank(data_rank: int, data: int, nodes: int) -> int:
    """Return the node that a data-parallel rank of ``data`` runs on: vLLM spreads them evenly."""
    return data_rank * nodes // data


def assign_sources(decode: Shard, prefill: Sequence[Shard]) -> list[Assignment]:
    """Find one source for every head of every layer of a decode shard.

    Layers are matched by name (and part) over all prefill shards, so pipeline sizes may differ.
    Where several shards hold a head (tensor parallel size above the number of KV heads; MLA),
    decode ranks that share the head take turns.

    Raises:
        PlanError: LayerMismatch, ShardMissing or EngineIdInconsistent.
    """
    holders = _holders(prefill)
    assignments = []
    for key, region in _by_array(decode, "decode").items():
        name = " part ".join(filter(None, key))
        if key not in holders:
            raise PlanError(Reason.LAYER_MISMATCH, f"no prefill shard has layer {name}")
        assignments += _cut(region, holders[key], name, turn=decode.rank[1])
    return assignments


def _by_array(shard: Shard, side: str) -> dict[tuple[str, str], Region]:
    regions = {(region.layer, region.part): region for region in shard.regions}
    if len(regions) != len(shard.regions):
        message = f"{side} rank {shard.rank} names a layer twice"
        raise PlanError(Reason.LAYER_MISMATCH, message)
    return regions


def _holders(prefill: Sequence[Shard]) -> dict[tuple[str, str], list[tuple[int, Region]]]:
    """Return the shards that hold heads of each layer, by their index, in the order of ranks."""
    if len({shard.rank for shard in prefill}) != len(prefill):
        raise PlanError(Reason.ENGINE_ID_INCONSISTENT, "two prefill shards have the same rank")
    holders: dict[tuple[str, str], list[tuple[int, Region]]] = {}
    for source, shard in sorted(enumerate(prefill), key=lambda item: item[1].rank):
        for key, region in _by_array(shard, "prefill").items():
            holders.setdefault(key, []).append((source, region))
    return holders


def _cut(
    region: Region, holders: Sequence[tuple[int, Region]], name: str, *, turn: int
) -> list[Assignment]:
    """Cut the heads of a region of decode into intervals with one source each."""
    edges = {edge for _, held in holders for edge in (held.head_start, held.head_stop)}
    inner = {edge for edge in edges if region.head_start < edge < region.head_stop}
    made: list[Assignment] = []
    for low, high in pairwise(sorted(inner | {region.head_start, region.head_stop})):
        able = [item for item in holders if item[1].head_start <= low and high <= item[1].head_stop]
        if not able:
            message = f"no prefill shard holds KV head {low} of layer {name}"
            raise PlanError(Reason.SHARD_MISSING, message)
        source, held = able[turn % len(able)]
        if made and made[-1].source == source:
            made[-1] = replace(made[-1], head_stop=high)
        else:
            made.append(Assignment(source, held, region, low, high))
    return made
