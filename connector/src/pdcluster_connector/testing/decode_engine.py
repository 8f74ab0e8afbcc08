"""A decode engine for tests; see :mod:`pdcluster_connector.testing.engines`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pdcluster_connector.compat.reasons import Reason
from pdcluster_connector.plan.held_blocks import EngineBlocks, GroupBlocks
from pdcluster_connector.protocol.failure import Failure
from pdcluster_connector.protocol.ticket import Ticket
from pdcluster_connector.protocol.ticket_keys import TicketKeys
from pdcluster_connector.protocol.transfer_params import ticket_of
from pdcluster_connector.sidechannel.lease_client import LeaseClient
from pdcluster_connector.sidechannel.peers import CONCERNS_ALL_RANKS, PeerBook
from pdcluster_connector.testing.engine_size import FREED, KEYS, Size, digest_of
from pdcluster_connector.testing.nixl import Fabric
from pdcluster_connector.transfer.job import ReceiveRequest, ReceiverOptions
from pdcluster_connector.transfer.receiver import Receiver
from pdcluster_connector.vllm.scheduler_side.decode_leases import DecodeLeases


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

    @property
    def believed(self) -> bool:
        """Whether the engine would go on with the bytes that came."""
        return self.ended and self.failure is None


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
        self._leases = LeaseClient(engine_id)
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
                memory=cache.memory,
                make_agent=lambda rank=rank: fabric.agent(f"{engine_id}-{rank[0]}-{rank[1]}"),
                peers=peers,
                options=options
                or ReceiverOptions(
                    drain_deadline_seconds=2.0, probe_seconds=1.0, fatal=self.fatal.append
                ),
            )
            receiver.start()
            self.receivers[rank] = receiver
        self._peers[0].listen(self._tell_ranks)

    def _tell_ranks(self, engine_id: str, failure: Failure) -> None:
        """Tell the other ranks what the first one found, which vLLM's scheduler does otherwise."""
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
        self.tickets.use(ticket)
        seconds, claimed = self.tickets.park(ticket, request_id)
        request = ReceiveRequest(
            request_id=request_id,
            ticket=ticket,
            decode_blocks=EngineBlocks(
                self.size.shape().groups or (), [GroupBlocks(list(fetch.blocks))]
            ),
            start=0,
            stop=min(fetch.tokens, ticket.tokens),
            deadline=time.monotonic() + seconds,
            claimed=claimed,
        )
        for receiver in self.receivers.values():
            receiver.receive([request])

    def abort(self, request_id: str) -> None:
        """Give a request up; it ends when nothing of it can write any more."""
        for receiver in self.receivers.values():
            receiver.abandon([request_id])

    def step(self) -> None:
        """Renew leases, tell the ranks what became of them, and take in what has ended."""
        self.tickets.renew_all()
        renewed, lost = self.tickets.take_news()
        now = time.monotonic()
        until = {request_id: now + seconds for request_id, seconds in renewed.items()}
        for rank, receiver in self.receivers.items():
            receiver.acknowledge(until)
            receiver.refuse(lost)
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
        """End the process: nobody is told, and its transfers stop."""
        self.fabric.kill(f"{self.engine_id}-")
        self.close()

    def close(self) -> None:
        """Stop in order; what is under way fails."""
        for receiver in self.receivers.values():
            receiver.close()
        for peers in self._peers:
            peers.close()
        self._leases.close(0.0)
