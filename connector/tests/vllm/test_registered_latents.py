"""MLA between backends: vLLM's own tensors and writer, registered, planned, copied and read again.

``CPUMLAImpl.do_kv_cache_update`` is the writer that runs without a GPU. vLLM's sources are asked
whether the other backends have the common writer.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

import torch
from registered_caches import NAMES, Attention, copy, vllm_config
from vllm.model_executor.layers.attention.mla_attention import MLACommonImpl
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLAImpl
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MLAAttentionSpec,
    create_kv_cache_views,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm_sources import installed

from pdcluster_connector.compat.check import check, refused
from pdcluster_connector.compat.supported import LATENT_BY_TOKEN
from pdcluster_connector.plan.block_pairs import EngineBlocks, GroupBlocks, groups_of
from pdcluster_connector.plan.peer_plan import plan_peer
from pdcluster_connector.plan.request_descriptors import plan_request
from pdcluster_connector.vllm.kv_caches.registration import Registration, register

pytestmark = pytest.mark.vllm

LATENT, ROTARY, BLOCKS, TOKENS, HIT = 48, 16, 24, 333, 128


def engine(
    backend: str, block: int, kernel: int, order: str, seed: int
) -> tuple[list[torch.Tensor], Registration]:
    """Two layers; of BLOCKS logical blocks. ``seed``: what is in them before any request."""
    spec = MLAAttentionSpec(
        block_size=block, num_kv_heads=1, head_size=LATENT + ROTARY, dtype=torch.float32
    )
    layout, page = KVCacheLayout[order], spec.page_size_bytes
    strides = (page, 2 * page) if layout.is_block_outermost else (page * BLOCKS, page)
    placed = KVCacheTensor(
        size=page * BLOCKS * 2, layers=NAMES, layer_stride=strides[0], block_stride=strides[1]
    )
    raw = torch.zeros(placed.size, dtype=torch.int8)
    views = create_kv_cache_views(raw, spec, BLOCKS, layout, placed, kernel)
    config = KVCacheConfig(BLOCKS, [placed], [KVCacheGroupSpec(NAMES, spec)])
    settings = vllm_config(backend=backend, isa=None, block=block, total_heads=1)
    for name in NAMES:
        settings.compilation_config.static_forward_context[name] = Attention(backend)
    made = register(dict(zip(NAMES, views, strict=True)), config, settings, (0, 0), "m")
    for view in views:
        view.copy_(torch.randn(view.shape, generator=torch.Generator().manual_seed(seed)))
    return views, made


def slots(blocks: list[int], block: int) -> torch.Tensor:
    """vLLM's slot of each token of the request."""
    return torch.tensor([blocks[t // block] * block + t % block for t in range(TOKENS)])


def written(views: list[torch.Tensor], blocks: list[int], block: int) -> list[torch.Tensor]:
    """Let vLLM write a prompt into dense caches; return what each layer should hold."""
    content = []
    writer: Any = None  # it keeps nothing of itself
    for layer, view in enumerate(views):
        rows = torch.randn(TOKENS, LATENT + ROTARY, generator=torch.Generator().manual_seed(layer))
        CPUMLAImpl.do_kv_cache_update(
            writer, rows[:, :LATENT], rows[:, None, LATENT:], view.squeeze(1),
            slots(blocks, block), "auto", torch.ones(1),
        )  # fmt: skip
        content.append(rows)
    return content


def held(views: list[torch.Tensor], blocks: list[int], block: int) -> list[torch.Tensor]:
    """[token, latent and rotary] of the request, where attention looks for it."""
    kernel = views[0].shape[2]
    at = slots(blocks, block)
    return [view[at // kernel, 0, at % kernel] for view in views]


@pytest.mark.parametrize("order", ["LBHNC", "BLHNC"])
@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        (("FLASH_ATTN_MLA", 16, 16), ("FLASHMLA", 64, 64)),
        (("FLASH_ATTN_MLA", 16, 16), ("FLASHINFER_MLA", 64, 64)),
        (("FLASHMLA", 64, 64), ("FLASH_ATTN_MLA", 16, 16)),
        (("FLASH_ATTN_MLA", 64, 64), ("CUTLASS_MLA", 128, 128)),
        (("TRITON_MLA", 64, 16), ("FLASHINFER_MLA", 64, 32)),
    ],
)
def test_each_latent_is_found_again(
    prefill: tuple[str, int, int], decode: tuple[str, int, int], order: str
) -> None:
    if prefill[1] != prefill[2]:
        order = "LBHNC"  # vLLM splits only dense blocks into kernel blocks
    theirs, source = engine(*prefill, "LBHNC", seed=5)
    ours, target = engine(*decode, order, seed=9)
    assert check(source.shape, target.shape) == ()
    dice = np.random.default_rng(3)
    lists = [(1 + dice.permutation(BLOCKS - 1))[: -(-TOKENS // s)].tolist()
             for s in (prefill[1], decode[1])]  # fmt: skip
    content = written(theirs, lists[0], prefill[1])
    before, everything = held(ours, lists[1], decode[1]), [view.clone() for view in ours]
    sides = [
        EngineBlocks(groups_of(made.shape), [GroupBlocks(tuple(blocks))])
        for made, blocks in ((source, lists[0]), (target, lists[1]))
    ]
    plan = plan_peer(target.shard, [source.shard])
    for part in plan_request(plan, *sides, start=HIT, stop=TOKENS, tokens=TOKENS):
        copy(plan, part)
    for now, old, wanted in zip(held(ours, lists[1], decode[1]), before, content, strict=True):
        assert torch.equal(now[HIT:], wanted[HIT:])
        assert torch.equal(now[:HIT], old[:HIT])
    # Nothing outside of the request's own kernel blocks has changed.
    ratio = decode[1] // decode[2]
    mine = {block * ratio + i for block in lists[1] for i in range(ratio)}
    for view, old in zip(ours, everything, strict=True):
        others = [block for block in range(view.shape[0]) if block not in mine]
        assert torch.equal(view[others], old[others])


@pytest.mark.parametrize("backend", ["ROCM_AITER_MLA", "AMX_MLA", "FLASHMLA_SPARSE"])
def test_a_backend_that_may_write_otherwise_is_refused_beside_another(backend: str) -> None:
    shapes = [engine(name, 64, 64, "LBHNC", seed=5)[1].shape for name in ("FLASHMLA", backend)]
    for pair in (shapes, shapes[::-1]):
        found = refused(check(*pair))
        assert found is not None
        assert found.rule == "BlockInteriorOpaque/interior"
        assert "engine.attentionBackend" in found.remedy
    assert check(shapes[1], shapes[1]) == ()


@pytest.mark.parametrize("name", sorted(LATENT_BY_TOKEN - {"CPU_MLA"}))
def test_such_a_backend_has_vllms_common_writer(name: str) -> None:
    """By its source: most of these modules cannot be imported without a GPU."""
    module = AttentionBackendEnum[name].value.rpartition(".")[0]
    text = installed().text(module)
    assert text is not None
    assert f'return "{name}"' in text
    assert re.search(r"class \w+Impl\(MLACommonImpl\[", text)
    assert "def do_kv_cache_update" not in text
    assert "do_kv_cache_update" not in vars(MLACommonImpl)
    assert "def do_kv_cache_update" in (
        installed().text("vllm.v1.attention.backends.mla.amx_mla") or ""
    )
