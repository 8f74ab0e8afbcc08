"""Prefill and decode workers over the in-memory NIXL, for the tests of this folder."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from pdcluster_connector.compat.reasons import Reason
from pdcluster_connector.compat.shape import EngineShape, GroupShape, LayerKind
from pdcluster_connector.nixl_io.probe_memory import ProbeMemory
from pdcluster_connector.nixl_io.serving_agent import ServingAgent
from pdcluster_connector.plan.block_pairs import GroupBlocks
from pdcluster_connector.plan.geometry import Shard
from pdcluster_connector.protocol.failure import Failure
from pdcluster_connector.protocol.messages import EngineMetadata
from pdcluster_connector.protocol.receive_order import ReceiveOrder
from pdcluster_connector.protocol.ticket import Ticket
from pdcluster_connector.testing.caches import LabelledCache
from pdcluster_connector.testing.nixl import Fabric
from pdcluster_connector.transfer.measures import ReceiveResults
from pdcluster_connector.transfer.options import ReceiverOptions
from pdcluster_connector.transfer.receive_machine import Acknowledged, Signal
from pdcluster_connector.transfer.receiver import Receiver

PROBE_BYTES = 64 * 1024


class FakePeers:
    """A peer book that answers from a table, at once or when the test says so."""

    def __init__(self) -> None:
        self.on_gone: Callable[[str, Failure], None] | None = None
        self.table: dict[str, EngineMetadata | Failure] = {}
        self.hold = False
        self.held: list[tuple[str, Callable[[EngineMetadata | Failure], None]]] = []
        self.asked: list[str] = []
        self.forgotten: list[str] = []
        self.silent = False

    @property
    def silence(self) -> FakePeers:
        return self

    def is_long(self, _: tuple[str, int]) -> bool:
        return self.silent

    def connect(
        self,
        engine_id: str,
        host: str,
        port: int,
        deadline: Callable[[], float],
        done: Callable[[EngineMetadata | Failure], None],
        since: float | None = None,
    ) -> None:
        assert (host, port) == ("127.0.0.1", 5600)
        assert deadline() > 0
        self.asked.append(engine_id)
        if self.hold:
            self.held.append((engine_id, done))
        else:
            done(self.answer(engine_id))

    def __contains__(self, engine_id: str) -> bool:
        return engine_id in self.table

    def forget(self, engine_id: str, failure: Failure) -> None:
        self.forgotten.append(engine_id)

    def release(self) -> None:
        self.hold, held, self.held = False, self.held, []
        for engine_id, done in held:
            done(self.answer(engine_id))

    def answer(self, engine_id: str) -> EngineMetadata | Failure:
        unknown = Failure(Reason.SIDE_CHANNEL_UNREACHABLE, f"no {engine_id}")
        return self.table.get(engine_id, unknown)


class Prefill:
    """A prefill engine of ``tensor`` ranks in each of ``pipeline`` stages, with numpy caches."""

    def __init__(
        self,
        fabric: Fabric,
        engine_id: str = "prefill/1",
        tensor: int = 1,
        pipeline: int = 1,
        probe_memory: ProbeMemory | None = None,
        make_cache: type = LabelledCache,
        probe_bytes: int = PROBE_BYTES,
        **cache,
    ):
        self.engine_id = engine_id
        self.caches = [
            make_cache(rank=rank, tensor=tensor, stage=stage, pipeline=pipeline, **cache)
            for stage in range(pipeline)
            for rank in range(tensor)
        ]
        self.agents = [
            ServingAgent(
                lambda rank=rank: fabric.agent(f"{engine_id}-{rank}"),
                cache.memory,
                probe_bytes=probe_bytes,
                probe_memory=probe_memory,
            )
            for rank, cache in enumerate(self.caches)
        ]
        self.tensor = tensor
        self.metadata = EngineMetadata(
            protocol=1,
            engine_id=engine_id,
            shape=EngineShape(
                block_size=self.caches[0].block_tokens, kernel_blocks_per_block=1, tensor=tensor
            ),
            shards=tuple(
                agent.metadata(engine_id, cache.shard.rank, cache.shard.regions)
                for agent, cache in zip(self.agents, self.caches, strict=True)
            ),
        )

    def write_word(self, slot: int, word: int) -> None:
        """Write a lease word on every rank, as the order of one step does."""
        for agent in self.agents:
            agent.write_lease_words({slot: word})

    def give_up(self, seed: int, blocks: Sequence[int], tokens: int, word: int = 0) -> None:
        """End the lease of request ``seed``, and compute another request in its blocks."""
        self.write_word(seed, word)
        for cache in self.caches:
            cache.write(seed + 1, blocks, tokens)

    def ticket(self, seed: int, blocks: Sequence[int], tokens: int, /, **changes) -> Ticket:
        """Compute the KV of request ``seed`` and hand it over."""
        for cache in self.caches:
            cache.write(seed, blocks, tokens)
        self.write_word(seed, seed)
        fields = {
            "engine_id": self.engine_id,
            "host": "127.0.0.1",
            "port": 5600,
            "request_id": f"p-{seed}",
            "token": seed,
            "blocks": (tuple(blocks),),
            "block_size": self.caches[0].block_tokens,
            "tokens": tokens,
            "prompt_digest": bytes(16),
            "expires_at": 0.0,
            "fence_slot": seed,
        }
        return Ticket(**(fields | changes))


class Decode:
    """One rank of a decode engine, with its receiver."""

    def __init__(
        self,
        fabric: Fabric,
        peers: FakePeers,
        *,
        rank: int = 0,
        tensor: int = 1,
        stage: int = 0,
        pipeline: int = 1,
        options: ReceiverOptions | None = None,
        probe_memory: ProbeMemory | None = None,
        make_cache: type = LabelledCache,
        prepare_thread: Callable[[], None] = lambda: None,
        **cache,
    ) -> None:
        self.cache = make_cache(rank=rank, tensor=tensor, stage=stage, pipeline=pipeline, **cache)
        self.fatal: list[str] = []
        self.receiver = Receiver(
            shard=self.cache.shard,
            groups=[GroupShape(LayerKind.FULL_ATTENTION, self.cache.block_tokens)],
            memory=self.cache.memory,
            make_agent=lambda: fabric.agent(f"decode-{stage}-{rank}"),
            peers=peers,
            probe_memory=probe_memory,
            prepare_thread=prepare_thread,
            options=options
            or ReceiverOptions(
                drain_deadline_seconds=4.0,
                probe_seconds=2.5,
                check_seconds=2.5,
                fatal=self.fatal.append,
            ),
        )
        self.receiver.start()
        self.reported: list[str] = []
        self.once = set[str]()

    def request(
        self,
        request_id: str,
        ticket: Ticket,
        blocks: Sequence[int],
        *,
        start: int = 0,
        stop: int | None = None,
        lease: float = 100.0,
        claimed: bool = True,
    ) -> ReceiveOrder:
        return ReceiveOrder(
            request_id=request_id,
            ticket=ticket,
            blocks=(GroupBlocks(list(blocks)),),
            start=start,
            stop=ticket.tokens if stop is None else stop,
            seconds=lease,
            claimed=claimed,
        )

    def receive(self, *orders: ReceiveOrder) -> None:
        self.receiver.receive(orders, time.monotonic())

    def abandon(self, *request_ids: str) -> None:
        self.receiver.pass_on((request_id, Signal.ABANDONED) for request_id in request_ids)

    def acknowledge(self, *request_ids: str, until: float) -> None:
        self.receiver.pass_on((request_id, Acknowledged(until)) for request_id in request_ids)

    def take(self) -> ReceiveResults:
        results = self.receiver.results()
        self.reported.extend(results.finished)
        assert self.once.isdisjoint(results.finished), "reported twice"
        self.once |= results.finished
        assert set(results.failed) | set(results.received) == results.finished
        assert not set(results.failed) & set(results.received)
        return results

    def wait(self, *request_ids: str, timeout: float = 120.0) -> ReceiveResults:
        """Take results until all of ``request_ids`` are in; returns them merged."""
        merged = ReceiveResults()
        until = time.monotonic() + timeout
        while not merged.finished >= set(request_ids):
            assert time.monotonic() < until, f"only {merged.finished} of {request_ids}"
            results = self.take()
            merged.finished |= results.finished
            merged.failed |= results.failed
            merged.abandoned |= results.abandoned
            merged.received |= results.received
            for phase, seconds in results.phase_seconds.items():
                merged.phase_seconds.setdefault(phase, []).extend(seconds)
            time.sleep(0.002)
        return merged

    def nothing(self, seconds: float = 0.05) -> None:
        """Check that nothing is reported for a while."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            assert not self.take().finished
            time.sleep(0.001)


def receiver_of(executor: Any, kind: type[Receiver] = Receiver) -> Any:
    """A receiver, not started, whose thread runs the turns of ``executor``."""
    fabric, peers, shard = Fabric(), FakePeers(), Shard((0, 0), ())
    made: Any = kind(
        shard=shard, groups=(), memory=(), make_agent=partial(fabric.agent, "x"), peers=peers
    )  # type: ignore[arg-type]
    made._executor = executor
    return made


def eventually(condition: Callable[[], bool], timeout: float = 120.0) -> None:
    until = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < until, "it did not happen"
        time.sleep(0.002)
