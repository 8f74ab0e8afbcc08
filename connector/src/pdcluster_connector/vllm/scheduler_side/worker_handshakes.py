"""What the workers of one engine say of themselves, checked against each other and joined."""

from __future__ import annotations

from collections.abc import Mapping

from pdcluster_connector.compat.reasons import Reason
from pdcluster_connector.compat.shape import EngineShape
from pdcluster_connector.plan.geometry import Shard
from pdcluster_connector.protocol.messages import Malformed, decode_shard
from pdcluster_connector.vllm.joined_shape import decode_shape, join_shapes
from pdcluster_connector.vllm.step_messages import WorkerHandshake


class HandshakeError(RuntimeError):
    """The workers of this engine contradict one another; the engine must not serve."""


def join_workers(
    workers: Mapping[tuple[int, int], WorkerHandshake], engine_id: str, ranks: int
) -> tuple[EngineShape, list[Shard]]:
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
            shard = decode_shard(worker.shard)
            if isinstance(shard, Malformed):
                raise HandshakeError(f"rank {rank} published {shard.message}")
            shards.append(shard)
    if len(workers) < ranks:
        raise HandshakeError(
            f"{Reason.SHARD_MISSING}: {len(workers)} of {ranks} ranks published their memory"
        )
    try:
        shape = join_shapes({rank: decode_shape(w.shape) for rank, w in sorted(workers.items())})
    except ValueError as error:
        raise HandshakeError(str(error)) from None
    return shape, shards
