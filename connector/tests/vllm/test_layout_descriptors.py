"""How many descriptors a prompt of 8,192 tokens takes on a decode rank, by layout and block size.

vLLM's own specs and strides, our registration and our planner. The numbers are those of
docs/benchmarks.md.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from registered_caches import Attention, vllm_config
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MLAAttentionSpec,
    compute_layout_strides,
    create_kv_cache_views,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from pdcluster_connector.plan.geometry import Shard
from pdcluster_connector.plan.peer_plan import descriptors, plan_peer
from pdcluster_connector.vllm.kv_caches.registration import register

pytestmark = pytest.mark.vllm

TOKENS, BLOCKS = 8192, 2
# layers, KV heads, size of a head; MLA has a latent of 576 values instead of heads.
LLAMA_70B, LLAMA_8B, DEEPSEEK_V3 = (80, 8, 128), (32, 8, 128), (61, 0, 576)


def shards(model: tuple[int, int, int], tensor: int, layout: str, block: int) -> list[Shard]:
    """The ranks of an engine whose caches vLLM itself lays out, in two blocks of each layer."""
    layers, heads, size = model
    order = KVCacheLayout[layout]
    names = [f"model.layers.{number}.attn" for number in range(layers)]
    sizes: dict[str, Any] = {"block_size": block, "head_size": size, "dtype": torch.bfloat16}
    spec: Any = MLAAttentionSpec(num_kv_heads=1, **sizes)
    if heads:
        spec = FullAttentionSpec(num_kv_heads=heads // tensor, **sizes)
    backend = "FLASH_ATTN" if heads else "FLASH_ATTN_MLA"
    config = vllm_config(tensor=tensor, total_heads=heads or 1, backend=backend, block=block)
    config.model_config.dtype = torch.bfloat16
    config.compilation_config = SimpleNamespace(
        static_forward_context={name: Attention(backend) for name in names}
    )
    layer, stride, *_ = compute_layout_strides(spec, BLOCKS, layers, order)
    nbytes = spec.page_size_bytes * BLOCKS * layers
    placed = KVCacheTensor(size=nbytes, layers=names, layer_stride=layer, block_stride=stride)
    raw = torch.empty(nbytes, dtype=torch.int8)  # nothing reads it
    views = create_kv_cache_views(raw, spec, BLOCKS, order, placed, block)
    held = KVCacheConfig(BLOCKS, [placed], [KVCacheGroupSpec(names, spec)])
    caches = dict(zip(names, views, strict=True))
    return [register(caches, held, config, (0, rank), "m").shard for rank in range(tensor)]


@pytest.mark.parametrize(
    ("model", "tensors", "layout", "block", "taken"),
    [
        (LLAMA_70B, (4, 2), "LBHNC", 16, 81_920),
        (LLAMA_70B, (4, 2), "LBHNC", 64, 20_480),
        (LLAMA_70B, (4, 2), "LBHNC", 128, 10_240),
        (LLAMA_70B, (4, 2), "BLHNC", 16, 81_920),
        (LLAMA_70B, (4, 2), "BHLNC", 16, 1024),
        (LLAMA_70B, (4, 2), "BHLNC", 64, 256),
        (LLAMA_70B, (8, 8), "LBHNC", 16, 40_960),
        (LLAMA_70B, (8, 8), "BLHNC", 16, 512),
        (LLAMA_8B, (1, 1), "LBHNC", 16, 16_384),
        (LLAMA_8B, (1, 1), "BLHNC", 16, 512),
        (LLAMA_8B, (1, 1), "BHLNC", 16, 512),
        (DEEPSEEK_V3, (8, 8), "LBHNC", 16, 31_232),
        (DEEPSEEK_V3, (8, 8), "LBHNC", 64, 7808),
        (DEEPSEEK_V3, (8, 8), "BLHNC", 64, 128),
        (DEEPSEEK_V3, (8, 8), "BHLNC", 64, 128),
    ],
)
def test_descriptors_by_layout(
    model: tuple[int, int, int], tensors: tuple[int, int], layout: str, block: int, taken: int
) -> None:
    prefill, decode = (shards(model, tensor, layout, block) for tensor in tensors)
    assert descriptors(plan_peer(decode[0], prefill), TOKENS)[0] == taken
