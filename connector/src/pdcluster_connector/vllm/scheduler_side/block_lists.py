"""The block ids of prompts that compute, made an array step by step.

vLLM names blocks by Python numbers that lie scattered in memory. To read those of a million tokens
in four groups takes 5 to 30 ms. Each step of a chunked prefill names its new blocks, so that is
when they are read. At the end vLLM's own list decides: what was read counts only if the list holds
the very same ids, which Python sees quickly, for they are the same objects.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from vllm.v1.core.sched.output import SchedulerOutput

logger = logging.getLogger(__name__)


class _Group:
    """What steps have named of one request in one KV cache group."""

    __slots__ = ("array", "listed")

    def __init__(self) -> None:
        self.listed: list[int] = []
        self.array = array("i")

    def add(self, ids: list[int]) -> None:
        self.array.fromlist(ids)  # all or nothing
        self.listed += ids


class BlockLists:
    """Not thread-safe: lives on the scheduler's thread.

    ``select`` picks the groups that take part in transfers.
    """

    def __init__(self, select: Callable[[Sequence[list[int]]], tuple[list[int], ...]]) -> None:
        self._select = select
        self._read: dict[str, list[_Group]] = {}

    def begin(self, request_id: str) -> None:
        """Read this request's blocks from now on."""
        self._read.setdefault(request_id, [])

    def forget(self, request_id: str) -> None:
        """Read them no more."""
        self._read.pop(request_id, None)

    def read(self, output: SchedulerOutput) -> None:
        """Read the blocks that vLLM gives requests in this step. Never raises."""
        if not self._read:
            return
        try:
            for new in output.scheduled_new_reqs:
                self._add(new.req_id, new.block_ids, anew=True)
            cached = output.scheduled_cached_reqs
            for request_id, ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
                self._add(request_id, ids, anew=request_id in cached.resumed_req_ids)
        except Exception:  # then they are read at the end
            logger.exception("the blocks of a step could not be read")
            self._read.clear()

    def _add(self, request_id: str, ids: tuple[list[int], ...] | None, *, anew: bool) -> None:
        groups = self._read.get(request_id)
        if groups is None or ids is None:
            return
        selected = self._select(ids)
        if anew or not groups:
            groups[:] = [_Group() for _ in selected]
        for group, more in zip(groups, selected, strict=True):
            group.add(more)

    def ids(self, request_id: str, group: int, held: Sequence[int]) -> Sequence[int] | NDArray[Any]:
        """Return ``held``, vLLM's list of a request's blocks in one group, or an array of it."""
        groups = self._read.get(request_id)
        if not groups or not isinstance(held, list):
            return held
        read = groups[group]
        if len(read.listed) > len(held):
            del read.listed[len(held) :]
        count = len(read.listed)
        if not count or read.listed != (held if count == len(held) else held[:count]):
            return held  # e.g. blocks that a window has left
        known = np.frombuffer(read.array, np.int32, count)
        return np.concatenate([known, np.asarray(held[count:], np.int32)])
