"""Which prefill shard a decode shard takes each (layer, head interval) from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from pdcluster_connector.compat.reasons import Reason
from pdcluster_connector.plan.errors import PlanError
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


class Holder(NamedTuple):
    """A prefill shard, by its index, that holds the heads [first, stop) of a layer."""

    source: int
    first: int
    stop: int


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
    chosen: dict[tuple[int, int, tuple[Holder, ...]], list[Holder] | int] = {}
    assignments = []
    for key, region in _by_array(decode, "decode").items():
        name = " part ".join(filter(None, key))
        held = holders.get(key)
        if held is None:
            raise PlanError(Reason.LAYER_MISMATCH, f"no prefill shard has layer {name}")
        wanted = (region.head_start, region.head_stop, tuple(holder for holder, _ in held))
        if wanted not in chosen:
            chosen[wanted] = _choose(*wanted, turn=decode.rank[1])
        choice = chosen[wanted]
        if isinstance(choice, int):
            message = f"no prefill shard holds KV head {choice} of layer {name}"
            raise PlanError(Reason.SHARD_MISSING, message)
        regions = {holder.source: prefill_region for holder, prefill_region in held}
        assignments += [
            Assignment(source, regions[source], region, start, stop)
            for source, start, stop in choice
        ]
    return assignments


def _by_array(shard: Shard, side: str) -> dict[tuple[str, str], Region]:
    regions = {(region.layer, region.part): region for region in shard.regions}
    if len(regions) != len(shard.regions):
        message = f"{side} rank {shard.rank} names a layer twice"
        raise PlanError(Reason.LAYER_MISMATCH, message)
    return regions


def _holders(prefill: Sequence[Shard]) -> dict[tuple[str, str], list[tuple[Holder, Region]]]:
    """Return which shards hold which heads of each layer, in the order of their ranks."""
    if len({shard.rank for shard in prefill}) != len(prefill):
        raise PlanError(Reason.ENGINE_ID_INCONSISTENT, "two prefill shards have the same rank")
    holders: dict[tuple[str, str], list[tuple[Holder, Region]]] = {}
    for source, shard in sorted(enumerate(prefill), key=lambda item: item[1].rank):
        for key, region in _by_array(shard, "prefill").items():
            holder = Holder(source, region.head_start, region.head_stop)
            holders.setdefault(key, []).append((holder, region))
    return holders


def _choose(start: int, stop: int, held: tuple[Holder, ...], turn: int) -> list[Holder] | int:
    """Cut [start, stop) into intervals with one source each, or return a head without one."""
    edges = {edge for _, low, high in held for edge in (low, high) if start < edge < stop}
    edges |= {start, stop}
    cuts = sorted(edges)
    choice: list[Holder] = []
    for low, high in pairwise(cuts):
        able = [source for source, first, last in held if first <= low and high <= last]
        if not able:
            return low
        source = able[turn % len(able)]
        if choice and choice[-1].source == source:
            choice[-1] = Holder(source, choice[-1].first, high)
        else:
            choice.append(Holder(source, low, high))
    return choice
