"""The order of KV in memory that the connector asks for, as vLLM itself resolves it."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.config import CacheConfig, KVTransferConfig
from vllm.platforms import cpu
from vllm.v1.attention import backends as backends_of_vllm
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts, resolve_kv_cache_layout
from vllm.v1.kv_cache_layout import KVCacheLayout

from pdcluster_connector.compat.supported import CHOSEN_BLOCK, LAYOUTS, LAYOUTS_OF, MOST_BLOCK

pytestmark = pytest.mark.vllm

OURS = {
    "kv_connector": "PDClusterConnector",
    "kv_connector_module_path": "pdcluster_connector.vllm.connector",
    "kv_role": "kv_producer",
}


def resolved(
    *backends: Any, transfer: dict[str, Any] | None = OURS, mla: bool = False, **engine: Any
) -> KVCacheLayout:
    """The layout of an engine whose layers have these attention backends."""
    config = SimpleNamespace(
        cache_config=CacheConfig(),
        model_config=SimpleNamespace(use_mla=mla, **engine),
        attention_config=SimpleNamespace(hisparse_config=None),
        kv_transfer_config=None if transfer is None else KVTransferConfig(**transfer),
    )
    names = [layout.name for layout in get_supported_kv_cache_layouts(backends)]
    return resolve_kv_cache_layout(config, [names])  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def nothing_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_KV_CACHE_LAYOUT", raising=False)


def test_a_gpu_backend_keeps_a_heads_tokens_together() -> None:
    assert resolved(FlashAttentionBackend, transfer=None) is KVCacheLayout.LBNHC, "vLLM's own"
    assert resolved(FlashAttentionBackend) is KVCacheLayout.LBHNC


def test_nothing_is_asked_for_mla() -> None:
    assert resolved(FlashAttentionBackend, mla=True) is KVCacheLayout.LBNHC


@pytest.mark.parametrize("named", ["LBNHC", "NHD", "BLHNC"])
def test_the_users_word_wins(monkeypatch: pytest.MonkeyPatch, named: str) -> None:
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", named)
    assert resolved(FlashAttentionBackend) is KVCacheLayout["LBNHC" if named == "NHD" else named]


def test_a_backend_with_one_order_keeps_it() -> None:
    class TokenMajor(FlashAttentionBackend):
        @classmethod
        def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
            return (KVCacheLayout.LBNHC,)

    assert resolved(TokenMajor) is KVCacheLayout.LBNHC
    assert resolved(CPUAttentionBackend) is KVCacheLayout.LBHNC


def test_beside_the_stock_connector() -> None:
    stock = {"kv_connector": "NixlConnector", "kv_role": "kv_producer"}
    both = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"connectors": [OURS, stock]},
    }
    # MultiConnector refuses connectors that ask for different ones.
    assert resolved(FlashAttentionBackend, transfer=both) is KVCacheLayout.LBHNC


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_the_option_asks_for_is_what_vllm_takes(layout: str) -> None:
    asks = {**OURS, "kv_connector_extra_config": {"kv_layout": layout}}
    assert resolved(FlashAttentionBackend, transfer=asks) is KVCacheLayout[layout]
    assert resolved(FlashAttentionBackend, transfer=asks, mla=True) is KVCacheLayout[layout]
    assert resolved(CPUAttentionBackend, transfer=asks) is KVCacheLayout.LBHNC, "refused by peers"


def test_beside_offloading_another_layout_ends_the_engine() -> None:
    """Why admission refuses engine.kvOffload with one."""
    asks = {**OURS, "kv_connector_extra_config": {"kv_layout": "BHLNC"}}
    offloading = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
    both = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [asks, offloading]},
    }
    with pytest.raises(ValueError, match="KV cache layout mismatch"):
        resolved(FlashAttentionBackend, transfer=both)


def backends() -> Iterator[tuple[str, Any]]:
    """Attention backends of this vLLM that can be imported without their device."""
    for member in AttentionBackendEnum:
        with contextlib.suppress(ImportError, ValueError, AttributeError, RuntimeError):
            yield member.name, member.get_class()


def test_the_table_of_backends_is_vllms_own() -> None:
    told = {}
    for name, backend in backends():
        has = backend.supported_kv_cache_layouts()
        told[name] = (
            LAYOUTS if has is None else tuple(n for n in LAYOUTS if KVCacheLayout[n] in has)
        )
    assert told.keys() >= {"CPU_ATTN", "FLASH_ATTN", "TRITON_ATTN", "FLEX_ATTENTION", "CPU_MLA"}
    assert told.pop("CPU_MLA") == LAYOUTS, "what it claims; its engine dies in the others"
    assert told == {name: LAYOUTS_OF.get(name, LAYOUTS) for name in told}
    named = {member.name for member in AttentionBackendEnum}
    assert named >= LAYOUTS_OF.keys()


def test_the_tables_of_block_sizes_are_vllms_own() -> None:
    """On CPUs, the platform chooses."""
    chosen, most = {}, {}
    for name, backend in backends():
        sizes = backend.get_supported_kernel_block_sizes()
        chosen[name] = backend.get_preferred_block_size(16)
        most[name] = max(sizes) if all(isinstance(size, int) for size in sizes) else None
    of_one_model = ("_DSV4", "_DSV41", "_MSA", "_M3_SPARSE")
    left_out = {"AMX_MLA", "CPU_ATTN", *(one for one in chosen if one.endswith(of_one_model))}
    assert chosen.keys() >= {"FLASHMLA", "TOKENSPEED_MLA", "FLASH_ATTN", "TRITON_MLA", "B12X"}
    for name in chosen.keys() - left_out:
        assert (name, chosen[name]) == (name, CHOSEN_BLOCK.get(name, 16))
        assert (name, most[name]) == (name, MOST_BLOCK.get(name))
    named = {member.name for member in AttentionBackendEnum}
    assert named >= CHOSEN_BLOCK.keys() | MOST_BLOCK.keys()


def test_the_block_sizes_of_cpus() -> None:
    text = Path(cpu.__file__).read_text()
    assert CHOSEN_BLOCK["CPU_ATTN"] == CHOSEN_BLOCK["AMX_MLA"] == 128
    usual = (
        "elif not cache_config.user_specified_block_size:\n            cache_config.block_size = "
    )
    assert f"{usual}128\n" in text
    assert CHOSEN_BLOCK.get("CPU_MLA", 16) == MOST_BLOCK["CPU_MLA"] == 16
    assert "            cache_config.block_size = 16\n        elif is_deepseek_v4:" in text


SOURCES = {
    "FLASHINFER": ("flashinfer", "[16, 32, 64]"),
    "FLASHINFER_MLA": ("mla/flashinfer_mla", "[32, 64]"),
    "CUTLASS_MLA": ("mla/cutlass_mla", "[128]"),
    "FLASH_ATTN_MLA": ("mla/flashattn_mla", "[MultipleOf(16)]"),
}


@pytest.mark.parametrize("name", SOURCES)
def test_the_block_sizes_of_backends_that_need_their_device(name: str) -> None:
    """vLLM chooses 16 if a backend takes it, or else the least that it takes."""
    module, sizes = SOURCES[name]
    text = (Path(backends_of_vllm.__path__[0]) / f"{module}.py").read_text()
    assert f"        return {sizes}\n" in text
    taken = [int(number) for number in re.findall(r"\d+", sizes)]
    assert CHOSEN_BLOCK.get(name, 16) == (16 if 16 in taken else min(taken))
    assert MOST_BLOCK.get(name) == (None if "Multiple" in sizes else max(taken))
