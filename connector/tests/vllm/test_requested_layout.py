"""The order of KV in memory that the connector asks for, as vLLM itself resolves it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.config import CacheConfig, KVTransferConfig
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend
from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts, resolve_kv_cache_layout
from vllm.v1.kv_cache_layout import KVCacheLayout

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
