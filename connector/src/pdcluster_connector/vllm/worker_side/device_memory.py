"""Memory of a GPU for probes: a probe takes the way that KV takes (``nixl_io/probe_memory.py``)."""

# ruff: noqa: D102 - the methods are documented in Buffer and ProbeMemory

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from pdcluster_connector.compat.shape import Memory
from pdcluster_connector.nixl_io.probe_memory import Buffer, Bytes, HostMemory, ProbeMemory
from pdcluster_connector.plan.geometry import MemoryRange


class DeviceBuffer(Buffer):
    """Memory on a device; ``stream`` is the one of its copies, of torch's ``module``."""

    def __init__(self, device: torch.device, nbytes: int, module: Any, stream: Any) -> None:
        self._module, self._stream = module, stream
        with self._streaming():
            self._bytes = torch.zeros(nbytes, dtype=torch.uint8, device=device)

    @contextmanager
    def _streaming(self) -> Iterator[None]:
        """Hand work to the stream, and wait until it is done."""
        with self._module.stream(self._stream):
            yield
        self._stream.synchronize()

    @property
    def memory(self) -> MemoryRange:
        whole = self._bytes
        device = max(whole.get_device(), 0)
        return MemoryRange(whole.data_ptr(), whole.numel(), device, Memory.VRAM)

    def write(self, data: Bytes) -> None:
        with self._streaming():
            self._bytes[: len(data)].copy_(torch.from_numpy(data))

    def read(self, start: int, length: int) -> Bytes:
        with self._streaming():
            found: Bytes = self._bytes[start : start + length].cpu().numpy()
        return found

    def clear(self, start: int, length: int) -> None:
        with self._streaming():
            self._bytes[start : start + length].zero_()


class DeviceMemory(ProbeMemory):
    """Makes buffers on a device. Their copies run on a stream of their own.

    A copy on vLLM's stream would wait for the engine steps that are queued there.
    """

    def __init__(self, device: torch.device) -> None:
        self._module = torch.get_device_module(device)
        self._device = device
        self._stream = self._module.Stream(device)

    def allocate(self, nbytes: int) -> DeviceBuffer:
        return DeviceBuffer(self._device, nbytes, self._module, self._stream)

    def synchronize(self) -> None:
        self._module.synchronize(self._device)


def probe_memory_of(device: torch.device | None) -> ProbeMemory:
    """Return where probes lie for KV on ``device``. None: this rank has no KV."""
    return HostMemory() if device is None or device.type == "cpu" else DeviceMemory(device)
