"""The engines of these tests: what they publish, and how to wait for answers."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from pdcluster_connector.compat.shape import EngineShape, LayerKind, LayerShape, Memory
from pdcluster_connector.nixl_io.reading_agent import ProbeResult
from pdcluster_connector.plan.geometry import MemoryRange, Region
from pdcluster_connector.protocol import messages as m
from pdcluster_connector.protocol.failure import Failure
from pdcluster_connector.sidechannel.peers import PeerBook
from pdcluster_connector.sidechannel.server import SideChannelServer

LAYERS = tuple(
    LayerShape(f"model.layers.{i}.self_attn.attn", LayerKind.FULL_ATTENTION, 0, 2, 64)
    for i in range(4)
)
SHAPE = EngineShape(
    model="0123456789abcdef",
    kv_dtype="float32",
    block_size=16,
    kernel_blocks_per_block=1,
    prefix_caching=True,
    memory=Memory.DRAM,
    token_sliceable=True,
    packing="none",
    layers=LAYERS,
)
PREFILL = "ns.c.prefill.r.0/00000000000000aa"
DECODE = "ns.c.decode.r.0/00000000000000dd"


def shards_of(engine_id: str) -> tuple[m.ShardMetadata, ...]:
    regions = tuple(
        Region(layer.name, 1 << 30, 64, 2048, 16, 0, 2, 1024, 64, 64) for layer in LAYERS
    )
    probe = MemoryRange(1 << 20, 65536)
    return (m.ShardMetadata(engine_id, (0, 0), "agent-0", b"blob" * 500, regions, probe),)


def probed(failure: Failure | None = None, notice: str = "") -> ProbeResult:
    """What a probe gave that read 64 KiB with 2 GiB/s."""
    return ProbeResult(failure, 1 << 16, 2.0**-15, notice)


class HeardServer(SideChannelServer):
    """A side channel that keeps what it answered: (what was asked, status), in order."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.answered: list[tuple[str, int]] = []
        for what in ("handshake", "lease", "health"):
            heard = partial(self._hear, what, getattr(self, what))
            setattr(self, what, heard)

    def statuses(self, what: str) -> list[int]:
        return [status for asked, status in self.answered if asked == what]

    def _hear(self, what: str, answer_to: Callable[..., Any], *asked: Any) -> Any:
        answer = answer_to(*asked)
        self.answered.append((what, answer.status))
        return answer


class Answer:
    """Collects what a ``done`` callback is given; more than one call is a fault."""

    def __init__(self) -> None:
        self.values: list[m.EngineMetadata | Failure] = []
        self.at = 0.0
        self._came = threading.Event()

    def __call__(self, value: m.EngineMetadata | Failure) -> None:
        self.at = time.monotonic()
        self.values.append(value)
        self._came.set()

    def wait(self, seconds: float = 150.0) -> m.EngineMetadata | Failure:
        assert self._came.wait(seconds), "no answer"
        assert len(self.values) == 1
        return self.values[0]


def connect(book: PeerBook, port: int, engine_id: str = PREFILL, seconds: float = 120.0) -> Answer:
    answer = Answer()
    ends = time.monotonic() + seconds
    book.connect(engine_id, "127.0.0.1", port, lambda: ends, answer)
    return answer


class HeldQuestions:
    """Holds a book's questions whether peers live, while the test replaces what they would find."""

    def __init__(self, book: PeerBook, monkeypatch: pytest.MonkeyPatch) -> None:
        self._go = threading.Event()
        self._ask = book._health
        monkeypatch.setattr(book, "_health", self._asked)

    def go(self) -> None:
        self._go.set()

    async def _asked(self, *question: Any) -> Any:
        await asyncio.to_thread(self._go.wait, 120.0)
        return await self._ask(*question)


def until(condition: Callable[[], object], seconds: float = 120.0) -> float:
    """Wait for a condition; return how long it took, or fail."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < seconds, "it did not happen in time"
        time.sleep(0.005)
    return time.monotonic() - start
