"""The lists of descriptors of a large peer, which are made once: the plan, and NIXL's part.

The peer's memory is small here. Lists depend on how many blocks there are, not on their size.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

LAYERS = 32
BLOCKS = 10_000
DESCRIPTORS = 2 * LAYERS * BLOCKS  # of both sides
ROUNDS = 20


def measure(rounds: int = ROUNDS) -> dict[str, Any]:
    """Return how many descriptors the lists have, and the median time that they take."""
    from pdcluster_connector.nixl_io.nixl_agent import NixlAgent
    from pdcluster_connector.plan.peer_plan import plan_peer
    from pdcluster_connector.testing.caches import LabelledCache

    caches = [
        LabelledCache(kv_heads=1, layers=LAYERS, num_blocks=BLOCKS, token_bytes=4) for _ in range(2)
    ]
    agents = reading, serving = [NixlAgent(f"bench/{number}") for number in range(2)]
    for agent, cache in zip(agents, caches, strict=True):
        agent.register(cache.memory)
    peer = reading.add_peer(serving.metadata())
    seconds = []
    for _ in range(1 + rounds):
        began = time.perf_counter()
        [source] = plan_peer(caches[0].shard, [caches[1].shard]).sources
        local = reading.prepare(None, source.decode_rows, source.decode_memory)
        remote = reading.prepare(peer, source.prefill_rows, source.prefill_memory)
        seconds.append(time.perf_counter() - began)
        for dlist in (local, remote):
            reading.release_dlist(dlist)
    for agent in agents:
        agent.close()
    milliseconds = round(1e3 * statistics.median(seconds[1:]), 4)
    return {"lists": {"descriptors": DESCRIPTORS, "milliseconds": {"ours": milliseconds}}}
