"""Host memory for vLLM's OffloadingConnector on CPU engines, which its own worker does not serve.

Which blocks are copied, when and whereto is decided by vLLM's own scheduler side and by its own
part in the workers. Only the copy is here: vLLM's runs on a CUDA stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec


class HostTierSpec(CPUOffloadingSpec):
    """vLLM's specification with the worker of this module."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if self._worker is None:
            assert self.blocks_per_chunk == 1
            self._worker = HostTierWorker(kv_caches, self.num_chunks)
        return self._worker


class HostTierWorker(OffloadingWorker):
    """Copies at once, and says in the next step that it has."""

    def __init__(self, kv_caches: CanonicalKVCaches, chunks: int) -> None:
        self._caches = [one.tensor for one in kv_caches.tensors]
        self._kept = [torch.zeros((chunks, one.shape[1]), dtype=torch.int8) for one in self._caches]
        self._groups = kv_caches.group_data_refs
        self._ended: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        for cache, kept, block, chunk in self._pages(src_spec, dst_spec):
            kept[chunk] = cache[block]
        return self._end(job_id)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        for cache, kept, block, chunk in self._pages(dst_spec, src_spec):
            cache[block] = kept[chunk]
        return self._end(job_id)

    def _pages(self, device: Any, host: Any) -> Any:
        places: Sequence[int] = np.cumsum([0, *device.group_sizes]).tolist()
        for group, refs in enumerate(self._groups):
            span = slice(places[group], places[group + 1])
            pairs = zip(device.block_ids[span], host.block_ids[span], strict=True)
            for block, chunk in pairs:
                for ref in refs:
                    cache, kept = self._caches[ref.tensor_idx], self._kept[ref.tensor_idx]
                    yield cache, kept, int(block), int(chunk)

    def _end(self, job_id: int) -> bool:
        self._ended.append(TransferResult(job_id, success=True, transfer_size=1, transfer_time=1.0))
        return True

    def get_finished(self) -> list[TransferResult]:
        ended, self._ended = self._ended, []
        return ended

    def wait(self, job_ids: set[int]) -> None:
        """Nothing is under way."""
