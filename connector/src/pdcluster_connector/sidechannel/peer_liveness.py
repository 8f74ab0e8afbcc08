"""Whether a peer still lives: it is asked again and again until it is gone.

The first rank of an engine asks its peers every second. The other ranks hear of it through the
scheduler (vllm.step_messages) and ask rarely. So the questions that a prefill engine gets grow with
the number of decode engines, not with the number of their ranks.
"""

from __future__ import annotations

import asyncio
import random

import aiohttp

from pdcluster_connector.protocol.failure import Failure
from pdcluster_connector.sidechannel.handshake import (
    TryAgain,
    ask_health,
    restarted,
    unreachable,
)
from pdcluster_connector.sidechannel.tls import Tls

POLL_SECONDS = 1.0
# Of the other ranks. No connection is kept between two questions: servers close it after 15 s.
RARE_POLL_SECONDS = (16.0, 24.0)
# A peer is gone after two questions without an answer, three seconds in all. One is not enough: it
# also times out if this loop itself was held up.
HEALTH_SECONDS = (2.0, 1.0)


async def why_gone(
    session: aiohttp.ClientSession,
    engine_id: str,
    host: str,
    port: int,
    tls: Tls | None,
    *,
    often: bool,
) -> Failure:
    """Return why the peer is gone, once it is.

    Args:
        often: ask every second, as the first rank does.
    """
    while True:
        rarely = random.uniform(*RARE_POLL_SECONDS)  # noqa: S311
        await asyncio.sleep(POLL_SECONDS if often else rarely)
        reply = await ask_health(session, engine_id, host, port, HEALTH_SECONDS[0], tls)
        if isinstance(reply, TryAgain):  # the second time over a fresh connection
            reply = await ask_health(session, engine_id, host, port, HEALTH_SECONDS[1], tls)
        if isinstance(reply, TryAgain):
            return unreachable(reply)
        if isinstance(reply, Failure):
            return reply
        if reply.engine_id != engine_id:
            return restarted(engine_id, reply.engine_id, f"{host}:{port}")
