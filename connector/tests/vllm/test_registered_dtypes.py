"""Quantised caches: each layer's element type and scales, and which engines go together."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from registered_caches import BLOCK, BLOCKS, HEAD, HEADS, NAMES, Attention, page_views, vllm_config
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MLAAttentionSpec,
    UniformTypeKVCacheSpecs,
)

from pdcluster_connector.compat.check import check, refused
from pdcluster_connector.compat.shape import EngineShape
from pdcluster_connector.vllm.joined_shape import join_shapes
from pdcluster_connector.vllm.kv_caches.registration import register

pytestmark = pytest.mark.vllm


def spec(dtype: torch.dtype = torch.uint8, **more: Any) -> FullAttentionSpec:
    return FullAttentionSpec(
        block_size=BLOCK, num_kv_heads=HEADS, head_size=HEAD, dtype=dtype, **more
    )


def engine(
    cache_dtype: str, specs: tuple[Any, Any] | None = None, backend: str = "CPU_ATTN",
    rank: int = 0, **attention: Any,
) -> EngineShape:  # fmt: skip
    """Shape of an engine of two layers; ``attention`` changes the second layer's."""
    first, second = specs or (spec(), spec())
    views = {
        name: page_views(one, [name])[0][name]
        for name, one in zip(NAMES, (first, second), strict=True)
    }
    group = (
        first
        if first == second
        else UniformTypeKVCacheSpecs(BLOCK, kv_cache_specs={NAMES[0]: first, NAMES[1]: second})
    )
    config = KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec(NAMES, group)])
    settings = vllm_config(cache_dtype=cache_dtype, backend=backend)
    layer = Attention(backend, "vec", **{"kv_cache_dtype": cache_dtype, **attention})
    settings.compilation_config.static_forward_context[NAMES[1]] = layer
    return register(views, config, settings, (0, rank), "digest").shape


def rule(prefill: EngineShape, decode: EngineShape) -> str:
    found = refused(check(prefill, decode))
    return found.rule if found is not None else ""


@pytest.mark.parametrize(
    ("named", "dtype"),
    [("fp8", "fp8_e4m3"), ("fp8_e4m3", "fp8_e4m3"), ("fp8_e5m2", "fp8_e5m2")],
)
def test_fp8_has_one_name_and_the_scales_of_its_layers(named: str, dtype: str) -> None:
    made = engine(named, scales=(0.25, 0.5))
    assert made.kv_dtype == dtype
    assert made.layers is not None
    assert [(layer.dtype, layer.scales) for layer in made.layers] == [
        ("", "k=1.0,v=1.0"), ("", "k=0.25,v=0.5")
    ]  # fmt: skip
    assert made.layers[0].token_bytes == 2 * HEAD, "one byte an element"
    assert rule(made, engine(named, scales=([0.25], [0.5]))) == ""
    assert rule(made, engine(named, scales=(0.25, 0.3))) == "KVScalesMismatch"
    assert rule(made, engine("auto", (spec(torch.float32),) * 2)) == "KVDtypeMismatch"


def test_where_fp8_means_other_numbers_it_has_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = engine("fp8")
    monkeypatch.setattr(type(current_platform), "is_fp8_fnuz", classmethod(lambda _: True))
    theirs = engine("fp8")
    assert theirs.kv_dtype == "fp8_e4m3fnuz"
    assert rule(theirs, theirs) == ""
    assert rule(ours, theirs) == "KVDtypeMismatch"


def test_a_layer_left_out_of_the_quantisation_has_the_model_s_type() -> None:
    mixed = (spec(), spec(torch.float32))
    made = engine("fp8", mixed, kv_cache_dtype="auto")
    assert made.layers is not None
    assert [(layer.dtype, layer.scales) for layer in made.layers] == [
        ("", "k=1.0,v=1.0"), ("float32", "")
    ]  # fmt: skip
    assert rule(made, made) == ""
    assert rule(made, engine("fp8")) == "KVDtypeMismatch/layer"


def test_a_scale_for_each_head_is_refused() -> None:
    made = engine("fp8", scales=([0.25, 0.5], [0.25, 0.5]))
    assert rule(made, made) == "LayoutUnsupported/scales"


def test_a_scale_for_each_head_is_refused_where_each_rank_has_one_head() -> None:
    ranks = [engine("fp8", rank=0, scales=([0.25], [0.5])), engine("fp8", scales=([0.5], [0.5]))]
    layers = join_shapes({(0, rank): shape for rank, shape in enumerate(ranks)}).layers
    assert layers is not None
    assert [layer.scales for layer in layers] == ["k=1.0,v=1.0", None]
    assert join_shapes({(0, 0): ranks[0], (0, 1): ranks[0]}).layers == ranks[0].layers
    (found, *_) = check(*[EngineShape(kv_dtype="fp8_e4m3", layers=layers)] * 2)
    assert found.rule == "LayoutUnsupported/scales"
    assert NAMES[1] in found.message


PER_TOKEN_HEAD = spec(torch.int8, state_content_bytes=2 * HEAD + 8)  # as Triton's pages are


@pytest.mark.parametrize(
    ("named", "one"),
    [
        ("int8_per_token_head", spec(torch.int8)),  # as CPU_ATTN takes it
        ("int8_per_token_head", PER_TOKEN_HEAD),
        ("nvfp4", spec(num_head_slots=2 * HEADS, state_content_bytes=18)),
        ("fp8_inc", spec(torch.float8_e4m3fn)),
    ],
)
def test_pages_that_are_not_known_are_refused_by_their_type_s_name(named: str, one: Any) -> None:
    made = engine(named, (one, one))
    assert made.kv_dtype == named
    (found, *_) = check(made, made)
    assert found.rule == "LayoutUnsupported/quantized"
    assert named in found.message


def test_an_indexer_s_bytes_beside_an_unquantised_cache_are_refused_with_the_layer() -> None:
    """DeepSeek's sparse attention keeps a cache whose module names no type."""
    latent, keys = (
        MLAAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=96, dtype=dtype)
        for dtype in (torch.float32, torch.uint8)
    )
    made = engine("auto", (latent, keys), backend="FLASHMLA_SPARSE", kv_cache_dtype=None)
    found = refused(check(made, made))
    assert found is not None
    assert found.rule == "LayoutUnsupported/quantized"
    assert f"uint8 ({NAMES[1]})" in found.message


def test_packed_fp8_also_depends_on_what_the_kernels_compute_with() -> None:
    assert engine("fp8").packing == "CPU_ATTN/vec/float32"
    assert engine("auto", (spec(torch.float32),) * 2).packing == "CPU_ATTN/vec"
    assert engine("fp8", backend="FLASH_ATTN").packing is None
