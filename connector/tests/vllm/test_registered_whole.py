"""Blocks that hold their own scales, as vLLM's own specs, backends and views make them.

Registered, judged, planned, copied, and found again where vLLM's own code looks for them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

import torch
import vllm
from registered_caches import BLOCKS, NAMES, Attention, caches, copy, vllm_config
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.models.deepseek_v2 import DeepseekV32IndexerCache
from vllm.utils.torch_utils import nvfp4_kv_cache_full_dim, nvfp4_split_data_scale
from vllm.v1.attention.backends.mla.flashmla_sparse import FlashMLASparseBackend
from vllm.v1.attention.backends.mla.indexer import DeepseekV32IndexerBackend
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend, TritonAttentionImpl
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    UniformTypeKVCacheSpecs,
    get_kv_quant_mode,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from pdcluster_connector.compat.check import check, refused
from pdcluster_connector.compat.findings import Finding
from pdcluster_connector.compat.shape import LayerKind
from pdcluster_connector.compat.supported import WHOLE
from pdcluster_connector.plan.block_pairs import EngineBlocks, GroupBlocks, groups_of
from pdcluster_connector.plan.peer_plan import plan_peer
from pdcluster_connector.plan.request_descriptors import plan_request
from pdcluster_connector.vllm.joined_shape import join_shapes
from pdcluster_connector.vllm.kv_caches import layers as described
from pdcluster_connector.vllm.kv_caches.registration import Registration, register

pytestmark = pytest.mark.vllm

LAYOUTS = [KVCacheLayout[name] for name in ("LBHNC", "BLHNC", "LBNHC", "BLNHC")]
HEADS, HEAD, BLOCK = 4, 32, 64
PREFILL, DECODE, HIT, TOKENS = (4, 1, 3), (2, 5, 1), 64, 150


def latent(dtype: str = "fp8_ds_mla", block: int = BLOCK) -> Any:
    """What an MLA layer of DeepSeek V3.2 asks for, by its own method."""
    layer = SimpleNamespace(
        kv_cache_dtype=dtype, head_size=576, sliding_window=None, indexer=object(),
        non_causal_multi_token_decode=False,
    )  # fmt: skip
    settings = SimpleNamespace(
        cache_config=SimpleNamespace(block_size=block),
        model_config=SimpleNamespace(dtype=torch.bfloat16),
    )
    return FlashMLASparseBackend.customize_spec(MLAAttention.get_kv_cache_spec(layer, settings))


def keys(block: int = BLOCK, width: int = 132) -> Any:
    """What its indexer asks for: 128 elements and one scale, all as bytes."""
    layer = SimpleNamespace(
        cache_config=SimpleNamespace(block_size=block), head_dim=width, dtype=torch.uint8
    )
    return DeepseekV32IndexerCache.get_kv_cache_spec(layer, SimpleNamespace())


def per_token(dtype: str = "fp8_per_token_head", heads: int = HEADS, block: int = BLOCK) -> Any:
    element = torch.int8 if dtype.startswith("int8") else torch.uint8
    return TritonAttentionBackend.customize_spec(
        FullAttentionSpec(
            block_size=block, num_kv_heads=heads, head_size=HEAD, dtype=element,
            kv_quant_mode=get_kv_quant_mode(dtype),
        )
    )  # fmt: skip


def packed(dtype: str = "nvfp4", heads: int = HEADS, block: int = BLOCK) -> Any:
    """As FlashInferBackend.customize_spec makes it, whose module needs flashinfer."""
    return FullAttentionSpec(
        block_size=block, num_kv_heads=heads, head_size=HEAD, dtype=torch.uint8,
        kv_quant_mode=get_kv_quant_mode(dtype), num_head_slots=2 * heads,
        state_content_bytes=nvfp4_kv_cache_full_dim(HEAD),
    )  # fmt: skip


def triton(spec: Any) -> TritonAttentionImpl:
    """vLLM's own code of the layer, without the kernels that it would run on a GPU."""
    impl = object.__new__(TritonAttentionImpl)
    impl._kv_quant_mode = spec.kv_quant_mode
    impl.fp8_dtype = torch.float8_e4m3fn
    return impl


def layer(spec: Any, dtype: str, backend: str = "", scales: Any = (1.0, 1.0)) -> Any:
    """The module of a layer: an indexer's cache names no type and has no scale."""
    if dtype == "uint8":
        return SimpleNamespace(get_attn_backend=lambda: DeepseekV32IndexerBackend)
    (known,) = [one for one in sorted(WHOLE[dtype]) if one != "FLASHINFER_MLA_SPARSE_SM120"]
    made: Any = Attention(backend or known, None, dtype, scales)
    if dtype.endswith("per_token_head"):
        made.impl = triton(spec)
    return made


@dataclass(frozen=True)
class Rank:
    views: dict[str, Any]
    made: Registration
    modules: dict[str, Any]


def engine(
    specs: tuple[Any, Any], dtypes: tuple[str, str], *, tensor: int = 1, rank: int = 0,
    layout: KVCacheLayout = KVCacheLayout.LBHNC, seed: int = 1, kernel: int = 0, backend: str = "",
    scales: Any = (1.0, 1.0),
) -> Rank:  # fmt: skip
    """One rank of two layers, whose memory is random."""
    block = specs[0].block_size
    views, modules = {}, {}
    for name, spec, dtype in zip(NAMES, specs, dtypes, strict=True):
        own, _ = caches(layout, kernel or block, spec)
        views[name] = own[name]
        modules[name] = layer(spec, dtype, backend if dtype != "uint8" else "", scales)
        raw = torch.empty(0, dtype=torch.uint8).set_(own[name].untyped_storage())
        raw.random_(0, 255, generator=torch.Generator().manual_seed(seed))
    group: Any = specs[0]
    if specs[0] != specs[1]:
        group = UniformTypeKVCacheSpecs.from_specs(dict(zip(NAMES, specs, strict=True)))
    config = vllm_config(tensor=tensor, total_heads=HEADS, cache_dtype=dtypes[0], block=block)
    config.compilation_config.static_forward_context = modules
    cache_config = KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec(NAMES, group)])
    return Rank(views, register(views, cache_config, config, (0, rank), "digest"), modules)


def clash(prefill: Rank, decode: Rank) -> Finding | None:
    found = refused(check(prefill.made.shape, decode.made.shape))
    other = refused(check(decode.made.shape, prefill.made.shape))
    assert (found and found.rule) == (other and other.rule)
    return found


def transfer(prefill: list[Rank], decode: list[Rank]) -> None:
    """The tokens [HIT, TOKENS): all of the blocks but the first, into other blocks."""
    assert clash(prefill[0], decode[0]) is None
    sides = [
        EngineBlocks(groups_of(ranks[0].made.shape), [GroupBlocks(blocks)])
        for ranks, blocks in ((prefill, PREFILL), (decode, DECODE))
    ]
    for rank in decode:
        plan = plan_peer(rank.made.shard, [one.made.shard for one in prefill])
        for part in plan_request(plan, *sides, start=HIT, stop=TOKENS, tokens=TOKENS):
            copy(plan, part)


def block(view: Any, number: int) -> np.ndarray:
    """[kernel block of it, byte], of all heads and tokens, through vLLM's own view."""
    ratio = view.shape[0] // BLOCKS
    bytes_ = view[number * ratio : (number + 1) * ratio].contiguous().view(torch.uint8)
    return bytes_.numpy().reshape(ratio, -1)


def check_blocks(prefill: Rank, decode: Rank, before: dict[str, list[np.ndarray]]) -> None:
    pairs = dict(zip(DECODE[1:], PREFILL[1:], strict=True))
    for name, view in decode.views.items():
        for number in range(BLOCKS):
            source = pairs.get(number)
            held = before[name][number] if source is None else block(prefill.views[name], source)
            assert np.array_equal(block(view, number), held), (name, number)


def contents(rank: Rank) -> dict[str, list[np.ndarray]]:
    return {
        name: [block(view, n).copy() for n in range(BLOCKS)] for name, view in rank.views.items()
    }


V32, NVIDIA, TOKEN = ("fp8_ds_mla", "uint8"), ("nvfp4", "nvfp4"), "fp8_per_token_head"
MODELS: dict[str, Callable[..., tuple[tuple[Any, Any], tuple[str, str]]]] = {
    "DeepSeek V3.2": lambda _, size=BLOCK: ((latent(block=size), keys(size)), V32),
    "nvfp4": lambda heads, size=BLOCK: ((packed(heads=heads, block=size),) * 2, NVIDIA),
    "fp8_per_token_head": lambda heads, size=BLOCK: (
        (per_token(TOKEN, heads, size),) * 2,
        (TOKEN, TOKEN),
    ),
    "int8_per_token_head": lambda heads, size=BLOCK: (
        (per_token("int8_per_token_head", heads, size),) * 2,
        ("int8_per_token_head",) * 2,
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("tensor", [1, 2])
def test_whole_blocks_arrive(name: str, tensor: int, layout: KVCacheLayout) -> None:
    model = MODELS[name](HEADS // tensor)
    sides = [
        [engine(*model, tensor=tensor, rank=r, layout=layout, seed=s + r) for r in range(tensor)]
        for s in (10, 20)
    ]
    for rank in (*sides[0], *sides[1]):
        assert rank.made.shape.token_sliceable is False
        assert all(region.token_stride is None for region in rank.made.shard.regions)
        assert all(one.whole for one in rank.made.shape.layers or ())
    before = [contents(rank) for rank in sides[1]]
    transfer(*sides)
    for prefill, decode, old in zip(*sides, before, strict=True):
        check_blocks(prefill, decode, old)


def test_deepseek_v3_2_is_carried_between_any_numbers_of_ranks() -> None:
    """Every rank holds all of the latents and of the indexer's keys."""
    model = MODELS["DeepSeek V3.2"](1)
    for sizes in ((1, 2), (4, 2)):
        ours = [engine(*model, tensor=sizes[0], rank=rank) for rank in range(sizes[0])]
        theirs = [engine(*model, tensor=sizes[1], rank=rank, seed=9) for rank in range(sizes[1])]
        shape = ours[0].made.shape
        assert [(one.kind, one.token_bytes, one.dtype) for one in shape.layers or ()] == [
            (LayerKind.MLA, 656, ""), (LayerKind.MLA, 132, "uint8")
        ]  # fmt: skip
        before = [contents(rank) for rank in theirs]
        transfer(ours, theirs)
        for rank, old in zip(theirs, before, strict=True):
            check_blocks(ours[0], rank, old)


def test_kernel_blocks_of_the_indexer_are_moved_as_such() -> None:
    """vLLM cuts a block of 128 into kernel blocks of 64, each with its scales."""
    model = ((latent(block=128), keys(128)), V32)
    ours, theirs = (engine(*model, kernel=64, seed=seed) for seed in (3, 4))
    assert ours.made.shape.kernel_blocks_per_block == 2
    before = contents(theirs)
    sides = [
        EngineBlocks(groups_of(ours.made.shape), [GroupBlocks(blocks)])
        for blocks in (PREFILL[:1], DECODE[:1])
    ]
    plan = plan_peer(theirs.made.shard, [ours.made.shard])
    for part in plan_request(plan, *sides, start=64, stop=100, tokens=100):
        copy(plan, part)
    for name, view in theirs.views.items():
        now = block(view, DECODE[0])
        assert np.array_equal(now[1], block(ours.views[name], PREFILL[0])[1])
        assert np.array_equal(now[0], before[name][DECODE[0]][0]), "the prefix hit"


def test_scales_of_each_token_and_head_survive_the_first_use_of_the_cache() -> None:
    """vLLM's backend sets all of them to 1.0 when it first uses the cache, and only then."""
    spec = per_token()
    ours, theirs = (engine((spec, spec), (TOKEN, TOKEN), seed=seed) for seed in (5, 6))
    numbers = torch.rand((BLOCKS, BLOCK, HEADS), generator=torch.Generator().manual_seed(7)) + 2
    for name in NAMES:
        for cache, sign in (("_k_scale_cache", 1), ("_v_scale_cache", -1)):
            written = getattr(ours.modules[name].impl, cache)
            assert bool((written == 1.0).all()), "registration has let the backend do so"
            written.copy_(numbers * sign)
    transfer([ours], [theirs])
    for name in NAMES:
        impl = theirs.modules[name].impl
        views = [
            rank.modules[name].impl._pth_key_value_caches(rank.views[name])
            for rank in (ours, theirs)
        ]
        impl._ensure_scale_caches(theirs.views[name])  # as every step does
        for from_, to in zip(PREFILL[1:], DECODE[1:], strict=True):
            assert torch.equal(impl._k_scale_cache[to], numbers[from_])
            assert torch.equal(impl._v_scale_cache[to], -numbers[from_])
            for sent, got in zip(*views, strict=True):
                assert torch.equal(sent[from_].view(torch.uint8), got[to].view(torch.uint8))


def test_a_layer_that_shares_the_cache_of_another_sets_no_scale_later() -> None:
    """As in Gemma 3n and 4: it has a backend of its own, and vLLM hands over its cache again."""
    spec, shared = per_token(), "model.layers.2.attn"
    made = engine((spec, spec), (TOKEN, TOKEN))
    modules = {name: layer(spec, TOKEN) for name in (*NAMES, shared)}
    views = made.views | {shared: made.views[NAMES[0]]}
    again = register(
        views, KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec(NAMES, spec)]),
        _settings(modules), (0, 0), "digest",
    ).shape  # fmt: skip
    assert [one.name for one in again.layers or ()] == NAMES
    scales = modules[NAMES[0]].impl._k_scale_cache
    scales.fill_(2.0)  # as they are received
    modules[shared].impl._pth_key_value_caches(views[shared])  # its first step
    assert bool((scales == 2.0).all())


def test_a_backend_whose_scales_are_set_at_another_time_is_refused() -> None:
    spec = per_token()
    made = engine((spec, spec), (TOKEN, TOKEN))
    for name in NAMES:
        made.modules[name].impl = SimpleNamespace()  # as a later vLLM might have it
    again = register(
        made.views, KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec(NAMES, spec)]),
        _settings(made.modules), (0, 0), "digest",
    ).shape  # fmt: skip
    found = refused(check(again, again))
    assert found is not None
    assert found.rule == "LayoutUnsupported/quantized"


def _settings(modules: dict[str, Any]) -> Any:
    config = vllm_config(total_heads=HEADS, cache_dtype=TOKEN)
    config.compilation_config.static_forward_context = modules
    return config


def test_nvfp4_is_found_where_vllm_s_own_views_look_for_it() -> None:
    """Values of K of all heads, their scales, and the same of V: no head's bytes lie together."""
    spec = packed()
    ours, theirs = (engine((spec, spec), NVIDIA, seed=seed) for seed in (5, 6))
    transfer([ours], [theirs])

    def sides(view: Any, number: int) -> list[Any]:
        slots, tokens, width = view.shape[1:]
        half = view[number].reshape(2, 1, slots // 2, tokens, width)
        return [part for side in half for part in nvfp4_split_data_scale(side)]

    for name in NAMES:
        for from_, to in zip(PREFILL[1:], DECODE[1:], strict=True):
            for sent, got in zip(
                sides(ours.views[name], from_), sides(theirs.views[name], to), strict=True
            ):
                assert torch.equal(sent.view(torch.uint8), got.view(torch.uint8))


@pytest.mark.parametrize("name", MODELS)
def test_each_difference_is_refused_by_its_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make = MODELS[name]
    ours = engine(*make(HEADS))
    assert clash(ours, ours) is None
    (specs, dtypes), smaller = make(HEADS), engine(*make(HEADS, 32))
    found = clash(ours, smaller)
    assert found is not None
    assert found.rule.startswith("BlockInteriorOpaque/")
    assert "block size" in found.message
    if len({one.num_kv_heads for one in specs} | {1}) > 1:
        found = clash(ours, engine(*make(HEADS // 2), tensor=2))
        assert found is not None
        assert (found.rule, found.field) == ("BlockInteriorOpaque/whole", "tensor")
        found = clash(ours, engine(*make(HEADS), layout=KVCacheLayout.LBNHC))
        assert found is not None
        assert "outermost axis" in found.message
        hidden = engine(*make(HEADS), layout=KVCacheLayout.BHLNC)
        found = clash(hidden, hidden)
        assert found is not None
        assert found.reason == "LayoutUnsupported"
    other = engine(specs, dtypes, backend="FLEX_ATTENTION")
    found = clash(other, other)
    assert found is not None
    assert found.rule == "LayoutUnsupported/quantized"
    with monkeypatch.context() as patch:
        patch.setattr(vllm, "__version__", "0.99.1")
        found = clash(ours, engine(specs, dtypes))
        assert found is not None
        assert "version of vLLM of layer" in found.message
        assert "0.99.1" in found.message
    with monkeypatch.context() as patch:
        patch.setattr(described, "_device", lambda: "cuda 9 0")
        found = clash(ours, engine(specs, dtypes))
        assert found is not None
        assert "kind of device of layer" in found.message
        assert found.rule == "BlockInteriorOpaque/whole"


def test_another_width_of_the_indexer_s_keys_is_another_layer() -> None:
    """mxfp4 keeps 64 bytes of values and 4 of scales."""
    ours = engine((latent(), keys()), V32)
    found = clash(ours, engine((latent(), keys(width=68)), V32))
    assert found is not None
    assert found.rule == "BlockInteriorOpaque/whole"
    assert "bytes of a slot of layer model.layers.1.attn" in found.message


def test_the_one_scale_of_an_nvfp4_layer_must_be_equal() -> None:
    spec = packed()
    ours, other = (engine((spec, spec), NVIDIA, scales=s) for s in ((0.5, 0.25), (0.5, 0.3)))
    found = clash(ours, other)
    assert found is not None
    assert found.rule == "KVScalesMismatch"
    several = engine((spec, spec), NVIDIA, scales=([0.5, 0.6], [0.5, 0.6]))
    found = clash(several, several)
    assert found is not None
    assert found.rule == "LayoutUnsupported/scales"


def test_ranks_that_keep_such_blocks_in_different_ways_have_none_to_share(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = MODELS["nvfp4"](HEADS // 2)
    shapes = [engine(*model, tensor=2).made.shape]
    monkeypatch.setattr(described, "_device", lambda: "cuda 9 0")
    shapes.append(engine(*model, tensor=2, rank=1).made.shape)
    joined = join_shapes({(0, rank): shape for rank, shape in enumerate(shapes)})
    found = refused(check(joined, joined))
    assert found is not None
    assert found.rule == "LayoutUnsupported/quantized"
