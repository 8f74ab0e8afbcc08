"""Whole engines without a GPU and without vLLM: all that moves KV is real, the model is not.

A :class:`PrefillEngine` has KV caches, lease words, the lease desk and the side channel; a
:class:`DecodeEngine` has the peer book, its leases, the lease client and a receiver for each
rank. They speak the real handshake, the real tickets and the real lease messages over 127.0.0.1.
The bytes move over the in-memory NIXL (:mod:`pdcluster_connector.testing.nixl`), which fails as a
test asks. A request is a number, its *seed*: every byte of its KV follows from it.

Nothing happens by itself but what the transfer threads and side channels do: call ``step`` of both
engines again and again, as vLLM does. Engines are used by one thread.
"""

import itertools
import secrets
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from hashlib import blake2b
from typing import Any

from pdcluster_connector.compat.reasons import Reason
from pdcluster_connector.compat.shape import EngineShape, GroupShape, LayerKind, LayerShape, Memory
from pdcluster_connector.nixl_io.serving_agent import ServingAgent
from pdcluster_connector.plan.block_pairs import GroupBlocks
from pdcluster_connector.protocol.failure import Failure
from pdcluster_connector.protocol.receive_order import ReceiveOrder
from pdcluster_connector.protocol.ticket import (
    BlockIds,
    Ticket,
    TicketKeys,
    kv_transfer_params,
    ticket_of,
)
from pdcluster_connector.sidechannel import lease_client, lease_desk, server, ticket_key_file
from pdcluster_connector.sidechannel.peers import CONCERNS_ALL_RANKS, PeerBook
from pdcluster_connector.testing.caches import LabelledCache, layer_name
from pdcluster_connector.testing.nixl import Fabric
from pdcluster_connector.transfer.options import ReceiverOptions
from pdcluster_connector.transfer.receive_machine import Acknowledged, Failed, Signal
from pdcluster_connector.transfer.receiver import Receiver
from pdcluster_connector.vllm.scheduler_side.decode_leases import DecodeLeases

KEYS = ticket_key_file.parse_keys(b"00" * 32)  # no secret: the engines of a test share it
PROBE_BYTES = 4096
FREED = 0xEE  # what a freed block holds: it belongs to no request


@dataclass(frozen=True, slots=True)
class Size:
    """How large an engine is: parallel sizes, and its KV cache."""

    tensor: int = 1
    pipeline: int = 1
    kv_heads: int = 2
    layers: int = 2
    num_blocks: int = 64
    block_tokens: int = 4
    token_bytes: int = 4

    def caches(self) -> list[LabelledCache]:
        """Return one cache for each rank."""
        sizes = asdict(self)
        return [
            LabelledCache(rank=rank, stage=stage, **sizes)
            for stage in range(self.pipeline)
            for rank in range(self.tensor)
        ]

    def shape(self) -> EngineShape:
        """Return the shape of such an engine, as the handshake sends it."""
        return EngineShape(
            model="a-model-for-tests",
            kv_dtype="float32",
            block_size=self.block_tokens,
            kernel_blocks_per_block=1,
            prefix_caching=True,
            tensor=self.tensor,
            pipeline=self.pipeline,
            memory=Memory.DRAM,
            token_sliceable=False,
            packing="none",
            layers=tuple(
                LayerShape(name, LayerKind.FULL_ATTENTION, 0, self.kv_heads, self.token_bytes)
                for name in map(layer_name, range(self.layers))
            ),
            groups=(GroupShape(LayerKind.FULL_ATTENTION, self.block_tokens),),
        )

    def blocks_of(self, tokens: int) -> int:
        """Return how many blocks hold ``tokens``."""
        return -(-tokens // self.block_tokens)


def digest_of(seed: int) -> bytes:
    """Return the prompt digest of request ``seed``."""
    return blake2b(str(seed).encode(), digest_size=16).digest()


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
                partial(fabric.agent, f"{engine_id}-{cache.shard.rank[0]}-{cache.shard.rank[1]}"),
                cache.memory,
                probe_bytes=PROBE_BYTES,
            )
            for cache in self.caches
        ]
        self.leases = lease_desk.LeaseDesk(lease_seconds)
        self.server = server.SideChannelServer(
            "127.0.0.1",
            port,
            engine_id,
            self.size.shape(),
            shards=[
                agent.metadata(engine_id, cache.shard.rank, cache.shard.regions)
                for agent, cache in zip(self.agents, self.caches, strict=True)
            ],
            leases=self.leases,
        )
        self.server.start()
        self.free = list(range(1, self.size.num_blocks))
        self.held: dict[str, list[int]] = {}
        self._keys, self._lease_seconds = keys, lease_seconds
        self._numbers = itertools.count()

    def compute(self, seed: int, tokens: int, *, port: int | None = None) -> dict[str, Any]:
        """Compute the KV of request ``seed``; returns the ``kv_transfer_params`` for decode.

        ``port``: of a relay before the side channel.

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
            blocks=(BlockIds(blocks),),
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
            agent.write_lease_words(changes.words)
        for request_id in changes.released + changes.expired:
            blocks = self.held.pop(request_id)
            for cache in self.caches:
                cache.bytes[:, blocks] = FREED
            self.free.extend(blocks)

    def kill(self) -> None:
        """End the process without a message to anybody. Its memory is gone."""
        self.fabric.kill(f"{self.engine_id}-")
        self.server.stop()

    def close(self) -> None:
        """Stop in order."""
        self.server.stop()
        for agent in self.agents:
            agent.close()


@dataclass(slots=True)
class Fetch:
    """One request whose KV a decode engine fetches.

    Attributes:
        seed, tokens: what was asked for.
        blocks: its blocks on the decode engine.
        ticket: None when it was rejected.
        failure: why its KV was not received.
        waits_for: ranks that have not reported yet; it has ended when there are none.
    """

    seed: int
    tokens: int
    blocks: list[int]
    ticket: Ticket | None = None
    failure: Failure | None = None
    waits_for: set[tuple[int, int]] = field(default_factory=set)

    @property
    def ended(self) -> bool:
        """Whether nothing more happens to it."""
        return not self.waits_for


class DecodeEngine:
    """A decode engine of which only the KV path exists. ``keys`` None takes unsigned tickets."""

    def __init__(
        self,
        fabric: Fabric,
        engine_id: str = "test.decode.0/0000000000000001",
        size: Size | None = None,
        *,
        keys: TicketKeys | None = KEYS,
        lease_seconds: float = 10.0,
        options: ReceiverOptions | None = None,
    ) -> None:
        self.fabric, self.engine_id, self.size = fabric, engine_id, size or Size()
        self.caches = self.size.caches()
        self.free = list(range(1, self.size.num_blocks))
        self.fetches: dict[str, Fetch] = {}
        self.fatal: list[str] = []
        self._keys = keys
        self._leases = lease_client.LeaseClient(engine_id)
        self._leases.start()
        self.tickets = DecodeLeases(self._leases, lease_seconds, time.monotonic)
        self._peers: list[PeerBook] = []
        self.receivers: dict[tuple[int, int], Receiver] = {}
        for cache in self.caches:
            rank = cache.shard.rank
            peers = PeerBook(engine_id, self.size.shape(), rank)
            peers.start()
            self._peers.append(peers)
            receiver = Receiver(
                shard=cache.shard,
                groups=self.size.shape().groups or (),
                memory=cache.memory,
                make_agent=partial(fabric.agent, f"{engine_id}-{rank[0]}-{rank[1]}"),
                peers=peers,
                options=options
                or ReceiverOptions(
                    drain_deadline_seconds=2.0, probe_seconds=1.0, fatal=self.fatal.append
                ),
            )
            receiver.start()
            self.receivers[rank] = receiver
        self._peers[0].listen(self._tell_ranks, silence=True)

    def _tell_ranks(self, engine_id: str, failure: Failure) -> None:
        """Pass on to the other ranks what the first one found, as vLLM's scheduler does."""
        if failure.reason in CONCERNS_ALL_RANKS:
            for peers in self._peers[1:]:
                peers.hear(engine_id, failure)

    def fetch(self, request_id: str, params: Mapping[str, Any], seed: int, tokens: int) -> Fetch:
        """Begin to fetch the KV of a prompt of ``tokens`` tokens, as vLLM's scheduler does.

        Raises:
            IndexError: there are not enough free blocks.
        """
        fetch = Fetch(seed, tokens, [])
        ticket = ticket_of(params, self._keys)
        if isinstance(ticket, Failure):
            fetch.failure = Failure(ticket.reason, ticket.message)
        elif ticket is None or ticket.prompt_digest != digest_of(seed):
            fetch.failure = Failure(Reason.TICKET_INVALID, "the ticket is of another prompt")
        elif self.tickets.is_spent(ticket):
            fetch.failure = Failure(Reason.LEASE_LOST, "the ticket was used already")
        else:
            self._park(request_id, fetch, ticket)
        self.fetches[request_id] = fetch
        return fetch

    def _park(self, request_id: str, fetch: Fetch, ticket: Ticket) -> None:
        fetch.ticket = ticket
        fetch.blocks = [self.free.pop() for _ in range(self.size.blocks_of(fetch.tokens))]
        fetch.waits_for = set(self.receivers)
        self.tickets.use(ticket, request_id)
        seconds, claimed = self.tickets.park(ticket, request_id)
        blocks = (GroupBlocks(list(fetch.blocks)),)
        stop = min(fetch.tokens, ticket.tokens)
        order = ReceiveOrder(request_id, ticket, blocks, 0, stop, seconds, claimed)
        for receiver in self.receivers.values():
            receiver.receive([order], time.monotonic())

    def abort(self, request_id: str) -> None:
        """Give a request up; it ends when nothing of it can write any more."""
        for receiver in self.receivers.values():
            receiver.pass_on([(request_id, Signal.ABANDONED)])

    def step(self) -> None:
        """Renew leases, report their state to the ranks, and take in what has ended."""
        self.tickets.renew_all()
        renewed, lost = self.tickets.take_news()
        now = time.monotonic()
        for rank, receiver in self.receivers.items():
            receiver.pass_on((key, Acknowledged(now + left)) for key, left in renewed.items())
            receiver.pass_on((key, Failed(why)) for key, why in lost.items())
            results = receiver.results()
            for request_id in results.finished:
                fetch = self.fetches[request_id]
                fetch.waits_for.remove(rank)  # a second report is an error
                fetch.failure = fetch.failure or results.failed.get(request_id)
                if fetch.ended and fetch.ticket is not None:
                    self.tickets.done(fetch.ticket, request_id)

    def right(self, request_id: str) -> bool:
        """Whether a request's blocks hold its own KV, on every rank."""
        fetch = self.fetches[request_id]
        return all(
            cache.wrong_tokens(fetch.seed, fetch.blocks, 0, fetch.tokens) == []
            for cache in self.caches
        )

    def forget(self, request_id: str) -> None:
        """Free the blocks of a request that has ended."""
        blocks = self.fetches.pop(request_id).blocks
        for cache in self.caches:
            cache.bytes[:, blocks] = FREED
        self.free.extend(blocks)

    def kill(self) -> None:
        """End the process without a message to anybody. Its transfers stop."""
        self.fabric.kill(f"{self.engine_id}-")
        self.close()

    def close(self) -> None:
        """Stop in order; what is under way fails."""
        for receiver in self.receivers.values():
            receiver.close()
        for peers in self._peers:
            peers.close()
        self._leases.close(0.0)
