"""A Mamba layer's states as parts of a page.

A page holds the layer's states one after the other. For Mamba2, these are the conv state and the
SSM state. ``VLLM_SSM_CONV_STATE_LAYOUT=DS`` makes the conv state (channels, rows). Its channels
are then those of x by head, and those of B and C by group. So states can be cut for engines of
different tensor sizes. With one group and several ranks, each rank has a copy of the group beside
its heads. Any other state is one part that cannot be cut. Both engines then need the same tensor
parallel size. The comparison of the parts ensures this.
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
from pdcluster_connector.plan.topology import head_interval


def describe_states(
    name: str, cache: torch.Tensor, spec: MambaSpec, group: int, mixer: Any, ranks: tuple[int, int]
) -> tuple[tuple[PartShape, ...], list[Region]]:
    """Describe a layer's states over all tensor ranks, and where this rank has its share.

    Args:
        cache: ``[slot, 1, 1, bytes]`` int8.
        mixer: vLLM's layer.
        ranks: this worker's tensor rank, and how many there are.
    """
    rank, tensor = ranks
    parts: list[PartShape] = []
    regions: list[Region] = []
    offset = 0
    for label, dtype, heads, head_bytes in _arrays(spec, mixer, tensor):
        start, stop = head_interval(heads, tensor, rank)
        text = str(dtype).removeprefix("torch.")
        parts.append(PartShape(label, heads, head_bytes, text))
        regions.append(
            Region(
                layer=name,
                base=cache.data_ptr() + offset,
                num_blocks=cache.shape[0],
                block_stride=cache.stride(0) * cache.element_size(),
                block_tokens=1,
                head_start=start,
                head_stop=stop,
                head_stride=head_bytes,
                token_stride=None,
                token_bytes=head_bytes,
                device=max(cache.get_device(), 0),
                memory=Memory.DRAM if cache.device.type == "cpu" else Memory.VRAM,
                group=group,
                part=label,
            )
        )
        offset += (stop - start) * head_bytes
    return tuple(parts), regions


def _arrays(spec: MambaSpec, mixer: Any, tensor: int) -> list[tuple[str, torch.dtype, int, int]]:
    """Return (name, dtype, heads over all ranks, bytes of a head) in the order of the page."""
    mamba2 = spec.mamba_type is MambaAttentionBackendEnum.MAMBA2 and len(spec.shapes) == 2
    if mamba2 and is_conv_state_dim_first():
        (channels, rows), (heads, head_dim, state) = spec.shapes
        local, rest = divmod(channels - heads * head_dim, 2 * state)
        groups = _groups(local, mixer, tensor)
        if groups > 0 and rest == 0:
            row = rows * spec.dtypes[0].itemsize
            return [
                ("conv.x", spec.dtypes[0], heads * tensor, head_dim * row),
                ("conv.b", spec.dtypes[0], groups, state * row),
                ("conv.c", spec.dtypes[0], groups, state * row),
                ("ssm", spec.dtypes[1], heads * tensor, head_dim * state * spec.dtypes[1].itemsize),
            ]
    order = "DS" if is_conv_state_dim_first() else "SD"
    return [
        (f"state{i}.{order}", dtype, tensor, prod(shape) * dtype.itemsize)
        for i, (shape, dtype) in enumerate(zip(spec.shapes, spec.dtypes, strict=True))
    ]


def _groups(local: int, mixer: Any, tensor: int) -> int:
    """Return the model's B/C groups, for a rank that has ``local`` of them; 0 if not known.

    vLLM divides groups evenly, or copies a model's only group to every rank. A rank with one group
    can be either case. The layer's norm has the model's own count.
    """
    if local != 1 or tensor == 1:
        return local * tensor
    stated = getattr(getattr(mixer, "norm", None), "n_groups", 0)
    return stated if stated in {1, tensor} else 0
