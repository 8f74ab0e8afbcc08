"""The element type of a layer's cache, and the scales with which vLLM reads it.

vLLM keeps fp8 KV as bytes and the scales on the attention layer. There is one number for K and one
for V, from the checkpoint, or 1.0. vLLM sets them when it loads the weights and never changes them.
The model's digest covers only a sample of the weights, which may miss a scale. So the scales are
compared by value. Some layers may not be quantised, so each layer is asked, and not the engine.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from vllm.platforms import current_platform

from pdcluster_connector.compat.supported import SCALED, dtype_name

_UNNAMED: Final = frozenset({"auto", "", None})


def engine_dtype(vllm_config: Any) -> str:
    """Return the element type of the engine's attention caches; single layers may differ."""
    return _name(vllm_config.cache_config.cache_dtype, vllm_config.model_config.dtype)


def layer_dtype(attention: Any, spec: Any) -> str:
    """Return the element type of one layer's cache.

    Args:
        attention: vLLM's attention layer. If it names no type (an indexer's cache), the spec does.
        spec: its KV cache spec.
    """
    return _name(getattr(attention, "kv_cache_dtype", None), spec.dtype)


def layer_scales(attention: Any, dtype: str) -> str | None:
    """Return a layer's scales as in :class:`~pdcluster_connector.compat.shape.LayerShape`.

    Empty for a type without scales; None if there is not exactly one number for K and one for V.
    """
    if dtype not in SCALED:
        return ""
    scales = [getattr(attention, name, None) for name in ("_k_scale", "_v_scale")]
    if not all(isinstance(scale, torch.Tensor) and scale.numel() == 1 for scale in scales):
        return None
    return ",".join(f"{side}={scale.item()}" for side, scale in zip("kv", scales, strict=True))


def _name(named: str | None, dtype: torch.dtype) -> str:
    if named in _UNNAMED:
        return str(dtype).removeprefix("torch.")
    name = dtype_name(str(named))
    if name == "fp8_e4m3" and current_platform.is_fp8_fnuz():
        return "fp8_e4m3fnuz"
    return name
