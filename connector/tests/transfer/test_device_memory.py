"""KV on a device: probes lie there too, and nothing is reported while the device still writes."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace
from turn_by_turn import Bench

from pdcluster_connector.compat.shape import Memory
from pdcluster_connector.nixl_io.probe_memory import HostBuffer
from pdcluster_connector.nixl_io.serving_agent import WARM_UP_BYTES
from pdcluster_connector.plan.geometry import MemoryRange
from pdcluster_connector.testing.nixl import Behaviour, Fabric, InMemoryAgent, Transfer
from pdcluster_connector.transfer.options import ReceiverOptions

DRAIN_SECONDS = 5.0


class DeviceBuffer(HostBuffer):
    """Host memory that says it is a device's."""

    @property
    def memory(self) -> MemoryRange:
        return replace(super().memory, memory=Memory.VRAM)


class Device:
    """A device as far as probes see it. It carries out what closed agents left to it.

    Transfers are then like those of cuda_ipc: the end of their agent does not stop them.
    """

    lost = False

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric
        self._left: list[Transfer] = []
        make = fabric.agent

        def agent(name: str) -> InMemoryAgent:
            made = make(name)
            made.close = lambda: self._close(made)
            return made

        fabric.agent = agent

    def _close(self, agent: InMemoryAgent) -> None:
        with self._fabric.lock:
            self._left += [one for one in self._fabric.flying if one.agent == agent.name]
            InMemoryAgent.close(agent)

    def finish(self) -> None:
        """Make the copies that were still to be made when their agents were closed."""
        transfers, self._left = self._left, []
        with self._fabric.lock:
            self._fabric.flying.extend(transfers)
            for transfer in transfers:
                self._fabric.land(transfer)

    def allocate(self, nbytes: int) -> DeviceBuffer:
        return DeviceBuffer(nbytes)

    def synchronize(self) -> None:
        if self.lost:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        self.finish()


@pytest.fixture
def bench() -> Bench:
    return Bench(ReceiverOptions(drain_deadline_seconds=DRAIN_SECONDS), Device)


def test_probes_go_from_device_memory_to_device_memory(bench: Bench) -> None:
    prefill = bench.prefill("p/1")
    behave = bench.fabric.behave
    reads: list[tuple[int, Memory, Memory]] = []

    def memory_at(agent: str, address: int) -> Memory:
        ranges = bench.fabric.agents[agent].ranges
        [found] = [item for item in ranges if item.span[0] <= address < item.span[1]]
        return found.memory

    def note(transfer: Transfer) -> Behaviour:
        for to, source, length in transfer.copies:
            ends = memory_at(transfer.agent, to), memory_at(transfer.peer, source)
            reads.append((length, *ends))
        return behave(transfer)

    bench.fabric.behave = note
    result = bench.probe(prefill).result(0)
    assert result.failure is None
    device = Memory.VRAM
    assert reads == [(WARM_UP_BYTES, device, device), (result.nbytes, device, device)]


def test_lease_words_stay_in_host_memory(bench: Bench) -> None:
    prefill = bench.prefill("p/1")
    assert bench.send(prefill) in bench.take().received
    agent = bench.connections.agent._nixl
    kinds = [item.memory for item in agent.ranges]
    assert kinds.count(Memory.VRAM) == 2, "the slots of warm-ups and of probes"
    words = bench.connections.fence_words.memory
    assert words in agent.ranges
    assert words.memory is Memory.DRAM


def test_no_failure_is_reported_before_the_device_has_ended_its_copies(bench: Bench) -> None:
    """The end of the agent does not stop a copy that was handed to the device (cuda_ipc)."""
    prefill = bench.prefill("p/1")
    assert bench.send(prefill) in bench.take().received
    bench.hanging.add("p/1")
    request_id = bench.send(prefill, blocks=2)
    bench.abandon(request_id)
    bench.turns()
    assert not bench.take().finished
    bench.pass_time(DRAIN_SECONDS + 60)
    bench.pass_time(60)
    assert bench.take().abandoned == {request_id}
    bench.cache.bytes[:] = 0xEE  # the blocks are another request's now
    bench._probe_memory.finish()
    assert (bench.cache.bytes == 0xEE).all(), "the device wrote into blocks that were given back"


def test_a_device_that_cannot_be_asked_ends_the_worker() -> None:
    """Whether it still writes is unknown, so no block may be given back."""
    fatal: list[tuple[str, int]] = []
    options = ReceiverOptions(
        drain_deadline_seconds=DRAIN_SECONDS,
        fatal=lambda message: fatal.append((message, len(bench.executor.ended))),
    )
    bench = Bench(options, Device)
    prefill = bench.prefill("p/1")
    bench.send(prefill)
    bench.take()
    bench.hanging.add("p/1")
    bench.abandon(bench.send(prefill))
    bench._probe_memory.lost = True
    bench.pass_time(DRAIN_SECONDS + 60)
    message, ended = fatal[0]
    assert "illegal memory access" in message
    assert not ended


def test_bytes_of_a_slot_are_zero_before_each_probe() -> None:
    device = Device(Fabric())
    buffer = device.allocate(16)
    buffer.write(np.arange(16, dtype=np.uint8))
    buffer.clear(4, 4)
    assert buffer.read(0, 16).tolist() == [0, 1, 2, 3, 0, 0, 0, 0, *range(8, 16)]
