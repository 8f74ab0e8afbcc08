"""Joins what the ranks of one engine say of themselves."""

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from pdcluster_connector.compat.reasons import Reason
from pdcluster_connector.compat.shape import EngineShape, GroupShape, LayerShape
from pdcluster_connector.protocol.messages import ShardMetadata
from pdcluster_connector.vllm.step_messages import WorkerHandshake

Rank = tuple[int, int]
"""The (pipeline, tensor) rank of a worker."""

# What depends on the layers that a pipeline stage has.
_OF_A_STAGE = frozenset({"kernel_blocks_per_block", "token_sliceable", "packing", "groups"})


class HandshakeError(RuntimeError):
    """The workers of this engine contradict one another; the engine must not serve."""


def join_shapes(shapes: Mapping[Rank, EngineShape]) -> EngineShape:
    """Join the shapes of an engine's ranks to the engine's: the layers of all stages, in order.

    Raises:
        HandshakeError: two ranks contradict each other, for instance because a node holds other
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
        kernel_blocks_per_block=ratios.pop() if len(ratios) == 1 else None,
        token_sliceable=all(sliceable) if sliceable else None,
        packing="+".join(sorted(packings)) or None,
        layers=_layers(ranks),
        groups=groups,
    )


def _check(shapes: Mapping[Rank, EngineShape]) -> dict[str, Any]:
    """Return the fields that an engine has only once, from the ranks that state them.

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
                    raise HandshakeError(
                        f"rank {rank} has {field} {value}, rank {other} has {theirs}; give every "
                        "rank of an engine the same model files, settings and kind of machine"
                    )
    return known


def _layers(shapes: Sequence[EngineShape]) -> tuple[LayerShape, ...]:
    """Return all layers of an engine's ranks.

    If tensor ranks read a layer with different scales (one for each head), the layer's scale is
    None, because it has no single scale. If they keep blocks of scales in different ways, the layer
    has no way that a peer can share.
    """
    layers: dict[str, LayerShape] = {}
    for shape in shapes:
        for layer in shape.layers or ():
            known = layers.setdefault(layer.name, layer)
            if known.scales != layer.scales:
                layers[layer.name] = replace(known, scales=None)
            if known.whole != layer.whole:
                layers[layer.name] = replace(layers[layer.name], whole="")
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


def join_workers(
    workers: Mapping[tuple[int, int], WorkerHandshake], engine_id: str, ranks: int
) -> tuple[EngineShape, list[ShardMetadata]]:
    """Return the engine's shape and its shards, from what each (pipeline, tensor) rank says.

    Args:
        engine_id: the scheduler's; every rank must have it.
        ranks: how many there must be.

    Raises:
        HandshakeError: a worker has another engine id or other settings, or is missing.
    """
    shards = []
    for rank, worker in sorted(workers.items()):
        if worker.engine_id != engine_id:
            raise HandshakeError(
                f"{Reason.ENGINE_ID_INCONSISTENT}: rank {rank} is {worker.engine_id}, the "
                f"scheduler {engine_id}; give every rank the same engine_id"
            )
        if worker.shard is not None:
            shards.append(worker.shard)
    if len(workers) < ranks:
        raise HandshakeError(
            f"{Reason.SHARD_MISSING}: {len(workers)} of {ranks} ranks published their memory"
        )
    return join_shapes({rank: worker.shape for rank, worker in sorted(workers.items())}), shards
