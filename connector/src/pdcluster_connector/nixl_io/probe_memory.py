"""The memory of probes: what peers read from, and what their probes are read into.

A probe has to take the way that KV takes. UCX chooses its transports by the kind of memory, so the
bytes of a probe lie where KV lies. :class:`HostMemory` is for KV in host memory; the vllm adapter
has one for KV on a device. Lease words stay in host memory: the engine step writes them.
"""

import mmap
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pdcluster_connector.plan.geometry import MemoryRange

# ruff: noqa: D102 - what implements Buffer and ProbeMemory is documented there

Bytes = NDArray[np.uint8]


class Buffer(Protocol):
    """Some bytes of memory to register. Offsets and lengths are in bytes."""

    @property
    def memory(self) -> MemoryRange:
        """Return the range to register."""

    def write(self, data: Bytes) -> None:
        """Fill the buffer from its start. When this returns, peers can read the bytes."""

    def read(self, start: int, length: int) -> Bytes:
        """Return these bytes in host memory."""

    def clear(self, start: int, length: int) -> None:
        """Write zeros. When this returns, they are there."""


class ProbeMemory(Protocol):
    """Makes buffers in the memory that KV lives in."""

    def allocate(self, nbytes: int) -> Buffer:
        """Return a new buffer of zeros."""

    def synchronize(self) -> None:
        """Return when nothing that was handed to the device still writes.

        The end of a NIXL agent stops what runs over the network. Nothing promises that it ends
        copies that were handed to a GPU: UCX destroys their stream and does not wait. On an H100,
        it took as long as the copies did, and this call then 0.1 ms [make gpu].
        """


class HostBuffer(Buffer):
    """Host memory; the kernel gives zeros, and only when they are used. A read is a view."""

    def __init__(self, nbytes: int) -> None:
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self.bytes = np.frombuffer(mmap.mmap(-1, nbytes, flags=private), np.uint8)

    @property
    def memory(self) -> MemoryRange:
        return MemoryRange(self.bytes.ctypes.data, self.bytes.nbytes)

    def write(self, data: Bytes) -> None:
        self.bytes[: len(data)] = data

    def read(self, start: int, length: int) -> Bytes:
        found: Bytes = self.bytes[start : start + length]
        return found

    def clear(self, start: int, length: int) -> None:
        self.bytes[start : start + length] = 0


class HostMemory(ProbeMemory):
    """For KV in host memory."""

    def allocate(self, nbytes: int) -> HostBuffer:
        return HostBuffer(nbytes)

    def synchronize(self) -> None:
        """Return at once: all writes to host memory end with the agent."""
