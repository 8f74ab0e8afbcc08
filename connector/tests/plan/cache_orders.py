"""Regions of layers in one allocation, in any of vLLM's orders of its axes."""

from __future__ import annotations

from pdcluster_connector.plan.geometry import Region


def laid_out(
    order: str, base: int, layers: int, blocks: int, heads: int, tokens: int, size: int,
    *, first_head: int = 0, opaque: bool = False, gap: int = 0,
) -> tuple[tuple[Region, ...], int]:  # fmt: skip
    """Regions of layers in one allocation, and its bytes. ``gap``: unused bytes after a block."""
    counts = {"L": layers, "B": blocks, "H": heads, "N": tokens}
    strides, unit = {}, size
    for axis in reversed(order[:-1]):
        strides[axis] = unit
        unit *= counts[axis]
        if axis == "B" and gap and order.index("B") == 1:
            unit += gap
    regions = tuple(
        Region(
            layer=f"l{layer}", base=base + layer * strides["L"], num_blocks=blocks,
            block_stride=strides["B"], block_tokens=tokens, head_start=first_head,
            head_stop=first_head + heads, head_stride=strides["H"],
            token_stride=None if opaque else strides["N"], token_bytes=size,
        )
        for layer in range(layers)
    )  # fmt: skip
    return regions, unit
