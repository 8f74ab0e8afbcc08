"""A prefill engine for tests; see :mod:`pdcluster_connector.testing.engines`."""

from __future__ import annotations

import itertools
import secrets
import time
from typing import Any

from pdcluster_connector.nixl_io.serving_agent import ServingAgent
from pdcluster_connector.protocol.ticket import Ticket
from pdcluster_connector.protocol.ticket_keys import TicketKeys
from pdcluster_connector.protocol.transfer_params import kv_transfer_params
from pdcluster_connector.sidechannel.lease_desk import LeaseDesk
from pdcluster_connector.sidechannel.server import SideChannelServer
from pdcluster_connector.testing.engine_size import FREED, KEYS, PROBE_BYTES, Size, digest_of
from pdcluster_connector.testing.nixl import Fabric


class PrefillEngine:
    """A prefill engine whose KV is labels. ``keys`` None makes tickets that are not signed.

    ``port`` is the side channel's; 0 takes any. ``free`` are its free blocks; block 0 is never
    used, as in vLLM.
    """

    def __init__(
        self,
        fabric: Fabric,
        engine_id: str = "test.prefill.0/0000000000000001",
        size: Size | None = None,
        *,
        keys: TicketKeys | None = KEYS,
        lease_seconds: float = 10.0,
        port: int = 0,
    ) -> None:
        self.fabric, self.engine_id, self.size = fabric, engine_id, size or Size()
        self.caches = self.size.caches()
        self.agents = [
            ServingAgent(
                lambda rank=cache.shard.rank: fabric.agent(f"{engine_id}-{rank[0]}-{rank[1]}"),
                cache.memory,
                probe_bytes=PROBE_BYTES,
            )
            for cache in self.caches
        ]
        self.leases = LeaseDesk(lease_seconds)
        self.server = SideChannelServer(
            "127.0.0.1",
            port,
            engine_id,
            self.size.shape(),
            shards=[
                agent.metadata(engine_id, cache.shard.rank, cache.shard.regions)
                for agent, cache in zip(self.agents, self.caches, strict=True)
            ],
            leases=self.leases,
            lease_seconds=lease_seconds,
        )
        self.server.start()
        self.free = list(range(1, self.size.num_blocks))
        self.held: dict[str, list[int]] = {}
        self._keys, self._lease_seconds = keys, lease_seconds
        self._numbers = itertools.count()

    def compute(self, seed: int, tokens: int, *, port: int | None = None) -> dict[str, Any]:
        """Compute the KV of request ``seed``; returns the ``kv_transfer_params`` for decode.

        ``port``: of a :class:`~pdcluster_connector.testing.relay.Relay` before the side channel.

        Raises:
            IndexError: there are not enough free blocks.
        """
        request_id, token = f"p{next(self._numbers)}", secrets.randbits(63) + 1
        blocks = [self.free.pop() for _ in range(self.size.blocks_of(tokens))]
        self.leases.arm(request_id, token)
        self.step()
        for cache in self.caches:
            cache.write(seed, blocks, tokens)
        self.held[request_id] = blocks
        _, slot = self.leases.place(request_id) or (0, None)
        self.leases.grant(request_id)
        ticket = Ticket(
            engine_id=self.engine_id,
            host="127.0.0.1",
            port=self.server.port if port is None else port,
            request_id=request_id,
            token=token,
            blocks=(tuple(blocks),),
            block_size=self.size.block_tokens,
            tokens=tokens,
            prompt_digest=digest_of(seed),
            expires_at=time.time() + self._lease_seconds,
            tensor=self.size.tensor,
            pipeline=self.size.pipeline,
            fence_slot=-1 if slot is None else slot,
            lease_seconds=self._lease_seconds,
        )
        return kv_transfer_params(ticket, self._keys)

    def step(self) -> None:
        """Write lease words on all ranks; then free and overwrite the blocks of ended leases."""
        changes = self.leases.take()
        for agent in self.agents:
            agent.lease_words.write(changes.words)
        for request_id in changes.released + changes.expired:
            blocks = self.held.pop(request_id)
            for cache in self.caches:
                cache.bytes[:, blocks] = FREED
            self.free.extend(blocks)

    def kill(self) -> None:
        """End the process: nobody is told, and its memory is gone."""
        self.fabric.kill(f"{self.engine_id}-")
        self.server.stop()

    def close(self) -> None:
        """Stop in order."""
        self.server.stop()
        for agent in self.agents:
            agent.close()
