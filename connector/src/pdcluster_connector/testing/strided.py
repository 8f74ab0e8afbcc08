"""Strided descriptor lists, as NIXL checks and counts them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pdcluster_connector.compat.shape import Memory
from pdcluster_connector.nixl_io.interface import MemoryRange, NixlError, NixlErrorKind
from pdcluster_connector.plan.descriptors import Rows


def elements(rows: Rows) -> Rows:
    """Return (address, length) of every element of strided rows, row after row."""
    counts = rows[:, 4].astype(np.int64)
    first = np.repeat(np.cumsum(counts) - counts, counts)
    steps = (np.arange(counts.sum()) - first).astype(np.uint64)
    address, length, stride = (np.repeat(rows[:, column], counts) for column in (0, 1, 3))
    return np.stack([address + steps * stride, length], axis=1)


def check_inside(whole: Rows, ranges: Sequence[MemoryRange], memory: Memory) -> None:
    """Raise NixlError unless each (address, length) lies in one registered range."""
    start = whole[:, 0]
    stop = start + whole[:, 1]
    covered = np.zeros(len(whole), bool)
    for item in ranges:
        if item.memory is memory:
            covered |= (start >= item.address) & (stop <= item.address + item.length)
    if not covered.all():
        raise NixlError(NixlErrorKind.INVALID, "memory that is not registered")
