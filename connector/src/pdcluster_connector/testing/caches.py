"""KV caches in host memory. The value of each byte shows where it belongs.

A byte is a hash of (seed, layer, global head, token, offset in the token's entry). A test can
therefore see a byte that arrived from the wrong layer, head, token or request.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pdcluster_connector.plan.geometry import MemoryRange, Region, Shard
from pdcluster_connector.plan.slices import SLICE_BYTES, sliced


def labels(
    seed: int, layer: int, heads: Sequence[int], tokens: range, *, token_bytes: int
) -> NDArray[np.uint8]:
    """Return what these cells hold: uint8 of shape (head, token, byte)."""
    parts = [
        np.array([seed * 1_000_003 + layer], np.uint64),
        np.asarray(heads, np.uint64)[:, None, None] + np.uint64(1),
        np.arange(tokens.start, tokens.stop, dtype=np.uint64)[:, None],
        np.arange(token_bytes, dtype=np.uint64),
    ]
    value = np.zeros((1, 1, 1), np.uint64)
    for part in parts:
        value = (value ^ part) * np.uint64(0x9E3779B97F4A7C15)
        value ^= value >> np.uint64(29)
    return (value >> np.uint64(56)).astype(np.uint8)


def layer_name(layer: int) -> str:
    """Return the name of a layer, as vLLM gives it."""
    return f"model.layers.{layer}.self_attn.attn"


class LabelledCache:
    """One rank's KV cache, laid out [block, head, token, byte] for each layer.

    Args:
        rank: tensor rank of ``tensor``; heads are spread over ranks, or replicated when there
            are more ranks than heads.
        stage: pipeline rank of ``pipeline``; layers are spread over stages.
        layers: of the whole model.
        slice_bytes: the longest range that is registered.
    """

    def __init__(
        self,
        *,
        rank: int = 0,
        tensor: int = 1,
        stage: int = 0,
        pipeline: int = 1,
        kv_heads: int = 2,
        layers: int = 2,
        num_blocks: int = 32,
        block_tokens: int = 16,
        token_bytes: int = 8,
        slice_bytes: int = SLICE_BYTES,
    ) -> None:
        first = rank * kv_heads // tensor
        self.heads = range(first, first + max(1, kv_heads // tensor))
        self.block_tokens = block_tokens
        self.token_bytes = token_bytes
        self.layers = range(stage * layers // pipeline, (stage + 1) * layers // pipeline)
        shape = (len(self.layers), num_blocks, len(self.heads), block_tokens, token_bytes)
        self.bytes = np.zeros(shape, np.uint8)
        head = block_tokens * token_bytes
        self.shard = Shard(
            rank=(stage, rank),
            regions=tuple(
                Region(
                    layer=layer_name(layer),
                    base=self.bytes[index].ctypes.data,
                    num_blocks=num_blocks,
                    block_stride=head * len(self.heads),
                    block_tokens=block_tokens,
                    head_start=self.heads.start,
                    head_stop=self.heads.stop,
                    head_stride=head,
                    token_stride=None,  # a block's interior can only be moved whole
                    token_bytes=token_bytes,
                )
                for index, layer in enumerate(self.layers)
            ),
        )
        span = self.bytes.ctypes.data, self.bytes.ctypes.data + self.bytes.nbytes
        slices = sliced(span, self.shard.regions, slice_bytes)
        self.memory = [MemoryRange(start, stop - start) for start, stop in slices]

    def write(self, seed: int, blocks: Sequence[int], tokens: int) -> None:
        """Fill ``blocks`` with request ``seed``'s KV of its first ``tokens`` tokens."""
        for place, layer in enumerate(self.layers):
            for index, block in enumerate(blocks):
                first = index * self.block_tokens
                count = min(self.block_tokens, tokens - first)
                if count > 0:
                    self.bytes[place, block, :, :count] = labels(
                        seed,
                        layer,
                        self.heads,
                        range(first, first + count),
                        token_bytes=self.token_bytes,
                    )

    def wrong_tokens(self, seed: int, blocks: Sequence[int], start: int, stop: int) -> list[int]:
        """Return the tokens of [start, stop) that do not hold request ``seed``'s KV."""
        wrong = set()
        for place, layer in enumerate(self.layers):
            tokens = range(start, stop)
            expected = labels(seed, layer, self.heads, tokens, token_bytes=self.token_bytes)
            for token in tokens:
                index, offset = divmod(token, self.block_tokens)
                found = self.bytes[place, blocks[index], :, offset]
                if (found != expected[:, token - start]).any():
                    wrong.add(token)
        return sorted(wrong)
