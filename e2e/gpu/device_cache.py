"""KV caches in the memory of a device, in vLLM's two orders; each byte shows where it belongs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pdcluster_connector.compat.shape import Memory
from pdcluster_connector.plan.geometry import MemoryRange, Region, Shard
from pdcluster_connector.plan.slices import sliced
from pdcluster_connector.testing.caches import labels

LAYER_OUTERMOST, BLOCK_OUTERMOST = "LBHNC", "BHLNC"


class DeviceCache:
    """One rank's KV cache on a device, with what ``LabelledCache`` has of it.

    ``bytes`` is a view of shape (layer, block, head, token, byte), whatever the ``layout``.
    """

    def __init__(
        self,
        *,
        device: str,
        layout: str = LAYER_OUTERMOST,
        rank: int = 0,
        tensor: int = 1,
        stage: int = 0,
        pipeline: int = 1,
        kv_heads: int = 2,
        layers: int = 2,
        num_blocks: int = 32,
        block_tokens: int = 16,
        token_bytes: int = 8,
    ) -> None:
        assert pipeline == 1, "one stage"
        first = rank * kv_heads // tensor
        self.heads = range(first, first + max(1, kv_heads // tensor))
        self.block_tokens, self.token_bytes, self.layers = block_tokens, token_bytes, range(layers)
        heads, rest = len(self.heads), (block_tokens, token_bytes)
        if layout == LAYER_OUTERMOST:
            memory = torch.zeros((layers, num_blocks, heads, *rest), dtype=torch.uint8)
            order = (0, 1, 2, 3, 4)
        else:
            memory = torch.zeros((num_blocks, heads, layers, *rest), dtype=torch.uint8)
            order = (2, 0, 1, 3, 4)
        self.whole = memory.to(device)
        self.bytes = self.whole.permute(order)
        layer_stride, block_stride, head_stride, *_ = self.bytes.stride()
        base, kind = self.whole.data_ptr(), Memory.DRAM if device == "cpu" else Memory.VRAM
        index = max(self.whole.get_device(), 0)
        self.shard = Shard(
            rank=(stage, rank),
            regions=tuple(
                Region(
                    layer=f"model.layers.{layer}.self_attn.attn",
                    base=base + layer * layer_stride,
                    num_blocks=num_blocks,
                    block_stride=block_stride,
                    block_tokens=block_tokens,
                    head_start=self.heads.start,
                    head_stop=self.heads.stop,
                    head_stride=head_stride,
                    token_stride=None,
                    token_bytes=token_bytes,
                    device=index,
                    memory=kind,
                )
                for layer in self.layers
            ),
        )
        slices = sliced((base, base + self.whole.numel()), self.shard.regions)
        self.memory = [MemoryRange(start, stop - start, index, kind) for start, stop in slices]

    def write(self, seed: int, blocks: Sequence[int], tokens: int) -> None:
        """Fill ``blocks`` with request ``seed``'s KV of its first ``tokens`` tokens."""
        for layer in self.layers:
            for index, block in enumerate(blocks):
                first = index * self.block_tokens
                count = min(self.block_tokens, tokens - first)
                if count > 0:
                    cells = self._cells(seed, layer, range(first, first + count))
                    self.bytes[layer, block, :, :count] = torch.from_numpy(cells).to(
                        self.bytes.device
                    )
        if self.bytes.is_cuda:
            torch.cuda.synchronize()

    def wrong_tokens(self, seed: int, blocks: Sequence[int], start: int, stop: int) -> list[int]:
        """Return the tokens of [start, stop) that do not hold request ``seed``'s KV."""
        held = self.bytes[:, list(blocks)].cpu().numpy()
        wrong: set[int] = set()
        for layer in self.layers:
            expected = self._cells(seed, layer, range(start, stop))
            found = np.concatenate(list(held[layer]), axis=1)[:, start:stop]
            wrong.update((start + np.flatnonzero((found != expected).any(axis=(0, 2)))).tolist())
        return sorted(wrong)

    def fill_random(self, seed: int) -> None:
        """Fill the whole cache with bytes that only ``seed`` decides, on the device."""
        generator = torch.Generator(self.whole.device).manual_seed(seed)
        self.whole.random_(generator=generator)
        if self.whole.is_cuda:
            torch.cuda.synchronize()

    def _cells(self, seed: int, layer: int, tokens: range) -> NDArray[np.uint8]:
        return labels(seed, layer, self.heads, tokens, token_bytes=self.token_bytes)


def probe_memory(device: str) -> Any:
    """Return what a worker of ours takes on that device for its probes."""
    from pdcluster_connector.vllm.worker_side.device_memory import probe_memory_of

    return probe_memory_of(torch.device(device))
