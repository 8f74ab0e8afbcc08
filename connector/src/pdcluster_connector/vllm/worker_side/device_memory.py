"""Memory of a GPU for probes: a probe takes the way that KV takes (``nixl_io/probe_memory.py``)."""

from __future__ import annotations

from typing import Any

import torch

from pdcluster_connector.compat.shape import Memory
from pdcluster_connector.nixl_io.interface import MemoryRange
from pdcluster_connector.nixl_io.probe_memory import Bytes, HostMemory, ProbeMemory


def probe_memory_of(device: torch.device | None) -> ProbeMemory:
    """Return where probes lie for KV on ``device``. None: this rank has no KV."""
    return HostMemory() if device is None or device.type == "cpu" else DeviceMemory(device)


class DeviceMemory:
    """Makes buffers on a device. Their copies run on a stream of their own.

    A copy on vLLM's stream would wait for the engine steps that are queued there.
    """

    def __init__(self, device: torch.device) -> None:
        self._module = torch.get_device_module(device)
        self._device = device
        self._stream = self._module.Stream(device)

    def allocate(self, nbytes: int) -> DeviceBuffer:
        """Return a new buffer of zeros."""
        return DeviceBuffer(self._device, nbytes, self._module, self._stream)

    def synchronize(self) -> None:
        """Return when all that was handed to the device is done, by whatever stream."""
        self._module.synchronize(self._device)


class DeviceBuffer:
    """Memory on a device; ``stream`` is the one of its copies, of torch's ``module``."""

    def __init__(self, device: torch.device, nbytes: int, module: Any, stream: Any) -> None:
        self._module, self._stream = module, stream
        with self._module.stream(self._stream):
            self._bytes = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        self._stream.synchronize()

    @property
    def memory(self) -> MemoryRange:
        """Return the range to register."""
        whole = self._bytes
        device = max(whole.get_device(), 0)
        return MemoryRange(whole.data_ptr(), whole.numel(), device, Memory.VRAM)

    def write(self, data: Bytes) -> None:
        """Fill the buffer from its start. When this returns, peers can read the bytes."""
        with self._module.stream(self._stream):
            self._bytes[: len(data)].copy_(torch.from_numpy(data))
        self._stream.synchronize()

    def read(self, start: int, length: int) -> Bytes:
        """Return these bytes in host memory."""
        with self._module.stream(self._stream):
            found: Bytes = self._bytes[start : start + length].cpu().numpy()
        self._stream.synchronize()
        return found

    def clear(self, start: int, length: int) -> None:
        """Write zeros. When this returns, they are there."""
        with self._module.stream(self._stream):
            self._bytes[start : start + length].zero_()
        self._stream.synchronize()
