"""What the launcher of one node does about the other nodes of its engine, until the engine ends.

How they speak with each other stands in :mod:`.rendezvous`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Final

from pdcluster_connector.launcher.arguments import EngineCommand, engine_command
from pdcluster_connector.launcher.engine.readiness import Readiness
from pdcluster_connector.launcher.identity import Identity
from pdcluster_connector.launcher.multi_node.rendezvous import Followers, Leader, Rendezvous
from pdcluster_connector.launcher.options import Options

_FOLLOWERS_POLL: Final = 1.0


async def join(
    leader: Leader, options: Options, readiness: Readiness
) -> tuple[Rendezvous, EngineCommand]:
    """Wait for the leader; return its answer, and the command line of this node's part.

    ``readiness`` gets the identity of the engine.

    Raises:
        OSError: the leader's answer has no engine id.
    """
    met = await leader.meet(readiness.waiting)
    logical, _, incarnation = met.engine_id.partition("/")
    try:
        readiness.identity = Identity(logical, incarnation)
        return met, engine_command(options.vllm, engine_id=met.engine_id, role=options.role)
    except ValueError as error:
        raise OSError(f"{leader.address} gave a bad engine id: {error}") from None


async def watch_leader(
    leader: Leader,
    met: Rendezvous,
    readiness: Readiness,
    *,
    node: int,
    lose: Callable[[str], None],
    stopping: Callable[[], bool],
) -> None:
    """Keep ``readiness`` up to date with the leader's, and end this node with the leader.

    Args:
        node: number of this node.
        lose: kills the engine, and says why.
        stopping: whether the engine was told to stop anyway.
    """

    def heard(answer: Rendezvous) -> None:
        if answer.ready:
            readiness.healthy(f"node {node} of the engine")
        else:
            readiness.unhealthy("the engine's leader is not ready")

    why = await leader.watch(met, heard)
    if not stopping():
        lose(why)


async def watch_followers(
    followers: Followers,
    *,
    drain: Callable[[], Awaitable[None]],
    lose: Callable[[str], None],
    stopping: Callable[[], bool],
) -> None:
    """End the engine when it cannot go on with its followers. Runs until cancelled.

    Args:
        drain: lets the engine finish its work.
        lose: kills the engine, and says why.
        stopping: whether the engine was told to stop anyway.
    """
    while True:
        if loss := followers.loss(time.monotonic()):
            lose(loss)
        elif (rank := followers.leaving) is not None and not stopping():
            await drain()
            if not stopping():  # else the engine is being stopped, and need not be killed
                lose(f"node {rank} of this engine was told to stop")
        await asyncio.sleep(_FOLLOWERS_POLL)
