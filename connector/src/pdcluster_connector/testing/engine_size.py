"""What both engines for tests share: their size, keys and digests."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

from pdcluster_connector.compat.shape import (
    EngineShape,
    GroupShape,
    LayerKind,
    LayerShape,
    Memory,
)
from pdcluster_connector.protocol.ticket_keys import parse_keys
from pdcluster_connector.testing.caches import LabelledCache

KEYS = parse_keys(b"00" * 32)  # no secret: the engines of a test share it
PROBE_BYTES = 4096
FREED = 0xEE  # what a freed block holds: it belongs to no request


@dataclass(frozen=True, slots=True)
class Size:
    """How large an engine is: parallel sizes, and its KV cache."""

    tensor: int = 1
    pipeline: int = 1
    kv_heads: int = 2
    layers: int = 2
    num_blocks: int = 64
    block_tokens: int = 4
    token_bytes: int = 4

    def caches(self) -> list[LabelledCache]:
        """Return one cache for each rank."""
        return [
            LabelledCache(
                rank=rank,
                tensor=self.tensor,
                stage=stage,
                pipeline=self.pipeline,
                kv_heads=self.kv_heads,
                layers=self.layers,
                num_blocks=self.num_blocks,
                block_tokens=self.block_tokens,
                token_bytes=self.token_bytes,
            )
            for stage in range(self.pipeline)
            for rank in range(self.tensor)
        ]

    def shape(self) -> EngineShape:
        """Return what the handshake tells about such an engine."""
        return EngineShape(
            model="a-model-for-tests",
            kv_dtype="float32",
            block_size=self.block_tokens,
            kernel_blocks_per_block=1,
            prefix_caching=True,
            tensor=self.tensor,
            pipeline=self.pipeline,
            memory=Memory.DRAM,
            token_sliceable=False,
            packing="none",
            layers=tuple(
                LayerShape(
                    f"model.layers.{layer}.self_attn.attn",
                    LayerKind.FULL_ATTENTION,
                    0,
                    self.kv_heads,
                    self.token_bytes,
                )
                for layer in range(self.layers)
            ),
            groups=(GroupShape(LayerKind.FULL_ATTENTION, self.block_tokens),),
        )

    def blocks_of(self, tokens: int) -> int:
        """Return how many blocks hold ``tokens``."""
        return -(-tokens // self.block_tokens)


def digest_of(seed: int) -> bytes:
    """Return the prompt digest of request ``seed``."""
    return blake2b(str(seed).encode(), digest_size=16).digest()
