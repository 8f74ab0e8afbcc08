"""How many descriptors a prompt of 8,192 tokens takes on a decode rank, by layout and block size.

vLLM's own specs and strides, our registration and our planner. The numbers are those of
docs/benchmarks.md.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

pytest.importorskip("vllm")

import torch
from registered_caches import Attention, vllm_config
from vllm.v1.core.kv_cache_utils import (
    _get_kv_cache_groups_uniform_page_size,
    get_kv_cache_config_from_groups,
)
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    create_kv_cache_views,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from pdcluster_connector.plan.peer_plan import descriptors, plan_peer
from pdcluster_connector.vllm.kv_caches.registration import Registration, register

pytestmark = pytest.mark.vllm

TOKENS, BLOCKS = 8192, 2


class Model(NamedTuple):
    """Layers, KV heads, and the size of a head; MLA has a latent instead of heads.

    ``window``: of sliding-window layers, and how many of so many layers have one.
    """

    layers: int
    heads: int
    size: int
    window: int = 0
    windowed: tuple[int, int] = (0, 1)


LLAMA_70B, LLAMA_8B, DEEPSEEK_V3 = Model(80, 8, 128), Model(32, 8, 128), Model(61, 0, 576)
GPT_OSS_120B = Model(36, 8, 64, 128, (1, 2))
GEMMA_3_27B = Model(62, 16, 128, 1024, (5, 6))


def registered(model: Model, tensor: int, layout: str, block: int) -> list[Registration]:
    """The ranks of an engine whose caches vLLM itself groups and lays out, in two blocks."""
    sizes: dict[str, Any] = {
        "block_size": block,
        "head_size": model.size,
        "dtype": torch.bfloat16,
        "num_kv_heads": max(1, model.heads // tensor),
    }
    some, of = model.windowed
    specs: dict[str, Any] = {}
    for number in range(model.layers):
        spec: Any = FullAttentionSpec(**sizes) if model.heads else MLAAttentionSpec(**sizes)
        if number % of < some:
            spec = SlidingWindowSpec(**sizes, sliding_window=model.window)
        specs[f"model.layers.{number}.attn"] = spec
    backend = "FLASH_ATTN" if model.heads else "FLASH_ATTN_MLA"
    config = vllm_config(tensor=tensor, total_heads=model.heads or 1, backend=backend, block=block)
    config.model_config.dtype = torch.bfloat16
    config.compilation_config = SimpleNamespace(
        static_forward_context={name: Attention(backend) for name in specs}
    )
    order = KVCacheLayout[layout]
    config.cache_config.get_resolved_kv_cache_layout = lambda: order
    config.cache_config.num_gpu_blocks_override = BLOCKS
    config.cache_config.prefix_cache_retention_interval = None
    config.attention_config = SimpleNamespace(hisparse_config=None)
    groups = _get_kv_cache_groups_uniform_page_size(specs)
    held = get_kv_cache_config_from_groups(config, groups, 1 << 40)
    raw = torch.empty(held.kv_cache_tensors[0].size, dtype=torch.int8)  # nothing reads it
    caches = {}
    for placed in held.kv_cache_tensors:
        spec = specs[placed.layers[0]]
        views = create_kv_cache_views(raw, spec, BLOCKS, order, placed, block)
        caches |= dict(zip(placed.layers, views, strict=True))
    return [register(caches, held, config, (0, rank), "m") for rank in range(tensor)]


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
        (GPT_OSS_120B, (2, 1), "LBHNC", 16, 18_720),
        (GPT_OSS_120B, (2, 1), "BHLNC", 16, 1040),
        (GEMMA_3_27B, (4, 2), "LBHNC", 16, 16_896),
        (GEMMA_3_27B, (4, 2), "BHLNC", 16, 1792),
    ],
)
def test_descriptors_by_layout(
    model: Model, tensors: tuple[int, int], layout: str, block: int, taken: int
) -> None:
    prefill, decode = (registered(model, tensor, layout, block) for tensor in tensors)
    plan = plan_peer(decode[0].shard, [rank.shard for rank in prefill])
    assert descriptors(plan, TOKENS, prefill[0].shape.groups or ())[0] == taken
