"""A worker's connections and receives without the transfer thread: turn by turn, with a clock."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial

from transfer_rig import FakePeers, Prefill

from pdcluster_connector.compat.shape import GroupShape, LayerKind
from pdcluster_connector.nixl_io.probe_memory import HostMemory, ProbeMemory
from pdcluster_connector.nixl_io.reading_agent import ProbeResult
from pdcluster_connector.plan.block_pairs import GroupBlocks
from pdcluster_connector.protocol.receive_order import ReceiveOrder
from pdcluster_connector.testing.caches import LabelledCache
from pdcluster_connector.testing.nixl import Behaviour, Fabric, Transfer
from pdcluster_connector.transfer.connections import Connections
from pdcluster_connector.transfer.measures import ReceiveResults
from pdcluster_connector.transfer.options import ReceiverOptions
from pdcluster_connector.transfer.receive_executor import ReceiveExecutor
from pdcluster_connector.transfer.receive_machine import Acknowledged, Signal

CACHE = {"kv_heads": 4, "layers": 2, "num_blocks": 32, "block_tokens": 4, "token_bytes": 4}
PROBE_SECONDS = 10.0
LEASE = 60.0


class Bench:
    """The transfer thread's objects without the thread."""

    def __init__(
        self,
        options: ReceiverOptions | None = None,
        device: Callable[[Fabric], ProbeMemory] | None = None,
    ) -> None:
        self.now = 1000.0
        self.fabric = Fabric()
        self._probe_memory = device(self.fabric) if device else HostMemory()
        self.peers = FakePeers()
        self.cache = LabelledCache(**CACHE)
        self.prefills: list[Prefill] = []  # their memory may be read until the end
        self.hanging: set[str] = set()
        self.fabric.behave = self._behave
        options = options or ReceiverOptions(drain_deadline_seconds=1e6)

        def clock() -> float:
            return self.now

        self.connections = Connections(
            options,
            clock,
            self.cache.shard,
            self.cache.memory,
            partial(self.fabric.agent, "decode"),
            self.peers,
            self._probe_memory,
        )
        groups = [GroupShape(LayerKind.FULL_ATTENTION, CACHE["block_tokens"])]
        self.answers: list[Callable[[], None]] = []
        self.executor = ReceiveExecutor(options, clock, groups, self.connections, self._answer)
        self.sent = 0

    def _answer(self, answer: Callable[[], None]) -> None:
        self.answers.append(answer)

    def _behave(self, transfer: Transfer) -> Behaviour:
        """From an engine of ``hanging``, KV hangs; warm-ups and lease words are well."""
        engine_id = transfer.peer.partition("-")[0]
        small = len(transfer.copies) == 1 and transfer.nbytes in (8, 4096)
        return Behaviour(hang=engine_id in self.hanging and not small)

    def prefill(self, engine_id: str) -> Prefill:
        made = Prefill(self.fabric, engine_id, probe_memory=self._probe_memory, **CACHE)
        self.peers.table[engine_id] = made.metadata
        self.prefills.append(made)
        return made

    def send(self, prefill: Prefill, blocks: int = 1, *, claimed: bool = True) -> str:
        """Hand a request of ``blocks`` blocks of four tokens over; returns its id."""
        self.sent += 1
        request_id = f"r{self.sent}"
        taken, tokens = self._blocks(self.sent, blocks), 4 * blocks
        ticket = prefill.ticket(self.sent, range(self.sent, self.sent + blocks), tokens)
        self.receive(
            ReceiveOrder(request_id, ticket, (GroupBlocks(taken),), 0, tokens, LEASE, claimed)
        )
        self.turns()
        return request_id

    def receive(self, *orders: ReceiveOrder) -> None:
        self.executor.receive([(order, self.executor.clock() + order.seconds) for order in orders])

    def abandon(self, *request_ids: str) -> None:
        self.executor.pass_on((request_id, Signal.ABANDONED) for request_id in request_ids)

    def acknowledge(self, request_ids: Iterable[str], until: float) -> None:
        self.executor.pass_on((request_id, Acknowledged(until)) for request_id in request_ids)

    @staticmethod
    def _blocks(number: int, blocks: int) -> list[int]:
        return [31 - number - index for index in range(blocks)]

    def probe(self, prefill: Prefill) -> Future[ProbeResult]:
        future: Future[ProbeResult] = Future()
        self.connections.probing.probe(prefill.metadata, future)
        self.turns()
        return future

    def turns(self) -> None:
        """Go on until nothing moves any more: at one time, a turn is like a still one before it."""
        still = 0
        for _ in range(100):
            answers, self.answers = self.answers, []
            for answer in answers:
                answer()
            self.executor.tick()
            moved = self.executor.turn() or answers or self.answers
            still = 0 if moved or self._waiting_for_polls() else still + 1
            if still == 3:
                return

    def _waiting_for_polls(self) -> bool:
        return any(one.polls <= one.behaviour.polls for one in self.fabric.flying)

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.turns()

    def take(self) -> ReceiveResults:
        results = ReceiveResults()
        while self.executor.ended:
            job = self.executor.ended.popleft()
            results.add(job.machine, job.nbytes, job.request.ticket.engine_id)
        return results

    def right(self, request_id: str, blocks: int = 1) -> bool:
        number = int(request_id[1:])
        return self.cache.wrong_tokens(number, self._blocks(number, blocks), 0, 4 * blocks) == []

    def written(self, request_id: str) -> bool:
        """Whether anything was written into the request's first block."""
        return bool(self.cache.bytes[:, self._blocks(int(request_id[1:]), 1)].any())
