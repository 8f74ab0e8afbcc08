"""What one element of a layer's cache is: its type, and the scales that it is read with.

vLLM keeps fp8 KV as bytes and its scales on the attention layer: one number for K and one for V
from the checkpoint, or 1.0. They are set when the weights are loaded and do not change
afterwards. The model's digest is of a sample of the weights, in which a scale may be missing, so
scales are compared by value. Layers can be left out of the quantisation, so the layer is asked
and not the engine.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from vllm.platforms import current_platform

from pdcluster_connector.compat.dtypes import SCALED, dtype_name

_UNNAMED: Final = frozenset({"auto", "", None})


def engine_dtype(vllm_config: Any) -> str:
    """Return the element type that the engine's attention caches have unless a layer differs."""
    return _name(vllm_config.cache_config.cache_dtype, vllm_config.model_config.dtype)


def layer_dtype(attention: Any, spec: Any) -> str:
    """Return the element type of one layer's cache.

    Args:
        attention: vLLM's attention layer; what names no type (an indexer's cache) has its spec's.
        spec: its KV cache spec.
    """
    return _name(getattr(attention, "kv_cache_dtype", None), spec.dtype)


def layer_scales(attention: Any, dtype: str) -> str | None:
    """Return a layer's constant scales as :class:`~pdcluster_connector.compat.shape.LayerShape`
    has them: empty for a type without scales, None where there is not one number for K and V each.
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
