"""A Mamba layer's states as parts of a page.

A page holds the layer's states one after the other: for Mamba2 the conv state and the SSM
state. With the conv state as (channels, rows), which ``VLLM_SSM_CONV_STATE_LAYOUT=DS`` asks
for, its channels are those of x by head, of B and of C by group, so engines of different tensor
sizes correspond. Any other state is one part that cannot be cut: both engines then need the
same tensor parallel size, which the comparison of the parts ensures.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import MambaSpec

from pdcluster_connector.compat.shape import Memory, PartShape
from pdcluster_connector.plan.geometry import Region


def describe_states(
    name: str, cache: torch.Tensor, spec: MambaSpec, group: int, parallel: Any, rank: int
) -> tuple[tuple[PartShape, ...], list[Region]]:
    """Describe a layer's states over all tensor ranks, and where this rank has its share.

    Args:
        cache: ``[slot, 1, 1, bytes]`` int8.
        rank: this worker's tensor rank.
    """
    tensor = parallel.tensor_parallel_size
    parts: list[PartShape] = []
    regions: list[Region] = []
    offset = 0
    for label, dtype, local, head_bytes in _arrays(spec):
        text = str(dtype).removeprefix("torch.")
        parts.append(PartShape(label, local * tensor, head_bytes, text))
        regions.append(
            Region(
                layer=name,
                base=cache.data_ptr() + offset,
                num_blocks=cache.shape[0],
                block_stride=cache.stride(0) * cache.element_size(),
                block_tokens=1,
                head_start=rank * local,
                head_stop=(rank + 1) * local,
                head_stride=head_bytes,
                token_stride=None,
                token_bytes=head_bytes,
                device=max(cache.get_device(), 0),
                memory=Memory.DRAM if cache.device.type == "cpu" else Memory.VRAM,
                group=group,
                part=label,
            )
        )
        offset += local * head_bytes
    return tuple(parts), regions


def _arrays(spec: MambaSpec) -> list[tuple[str, torch.dtype, int, int]]:
    """Return (name, dtype, heads of this rank, bytes of a head) in the order of the page."""
    if spec.mamba_type is MambaAttentionBackendEnum.MAMBA2 and is_conv_state_dim_first():
        (channels, rows), (heads, head_dim, state) = spec.shapes
        groups, rest = divmod(channels - heads * head_dim, 2 * state)
        if groups > 0 and rest == 0:
            row = rows * spec.dtypes[0].itemsize
            return [
                ("conv.x", spec.dtypes[0], heads, head_dim * row),
                ("conv.b", spec.dtypes[0], groups, state * row),
                ("conv.c", spec.dtypes[0], groups, state * row),
                ("ssm", spec.dtypes[1], heads, head_dim * state * spec.dtypes[1].itemsize),
            ]
    order = "DS" if is_conv_state_dim_first() else "SD"
    return [
        (f"state{i}.{order}", dtype, 1, prod(shape) * dtype.itemsize)
        for i, (shape, dtype) in enumerate(zip(spec.shapes, spec.dtypes, strict=True))
    ]
