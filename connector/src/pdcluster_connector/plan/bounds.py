"""Checks that a region's numbers describe memory in which nothing overlaps.

A peer states its regions itself, and this engine's own come from strides; an address is only
computed from a region that passed here, so that every descriptor lies inside its region.
"""

from __future__ import annotations

from pdcluster_connector.compat.reasons import Reason
from pdcluster_connector.plan.errors import PlanError
from pdcluster_connector.plan.geometry import Region

ADDRESS_LIMIT = 2**63
SIZE_LIMIT = 2**31


def check_region(region: Region, side: str) -> None:
    """Refuse a region in which two (block, head, token) would share bytes.

    Raises:
        PlanError: LayoutUnsupported, with the field and its value.
    """
    heads = region.head_stop - region.head_start
    for field, value in (
        ("num_blocks", region.num_blocks),
        ("block_tokens", region.block_tokens),
        ("token_bytes", region.token_bytes),
        ("heads", heads),
    ):
        if not 1 <= value < SIZE_LIMIT:
            raise _bad(region, side, f"{field} is {value}")
    if region.head_start < 0:
        raise _bad(region, side, f"head_start is {region.head_start}")
    strides = f"block_stride {region.block_stride}, head_stride {region.head_stride}"
    if region.token_stride is not None:
        strides += f", token_stride {region.token_stride}"
    extent = region_extent(region)
    if extent is None:
        raise _bad(region, side, f"{strides}: blocks, heads and tokens overlap")
    end = region.base + extent
    if region.base < 0 or end > ADDRESS_LIMIT:
        raise _bad(region, side, f"addresses [{region.base}, {end}) do not exist")


def region_extent(region: Region) -> int | None:
    """Return the bytes from the region's first to behind its last; None if its cells overlap.

    The axes may be nested in any order: vLLM's ``LHBNC`` has the blocks inside of a head.
    """
    axes = [
        (region.block_stride, region.num_blocks),
        (region.head_stride, region.head_stop - region.head_start),
    ]
    if region.token_stride is None:
        extent = region.block_tokens * region.token_bytes
    else:
        extent = region.token_bytes
        axes.append((region.token_stride, region.block_tokens))
    for stride, count in sorted(axis for axis in axes if axis[1] > 1):
        if stride < extent:
            return None
        extent += stride * (count - 1)
    return extent


def _bad(region: Region, side: str, message: str) -> PlanError:
    return PlanError(Reason.LAYOUT_UNSUPPORTED, f"{side} layer {region.layer}: {message}")
