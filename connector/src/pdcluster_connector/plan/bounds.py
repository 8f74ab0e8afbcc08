"""Checks that a region's numbers describe memory that can exist and in which nothing overlaps.

A peer states its regions itself, and this engine's own come from strides. The handshake refuses a
bad region, and the planner computes addresses only from regions that passed here. So every
descriptor lies inside of its region.
"""

from __future__ import annotations

from pdcluster_connector.compat.reasons import Reason
from pdcluster_connector.plan.errors import PlanError
from pdcluster_connector.plan.geometry import Region

ADDRESS_LIMIT = 2**63
EXTENT_LIMIT = 2**48
SIZE_LIMIT = 2**31
STRIDES = ("block_stride", "head_stride", "token_stride")


def check_region(region: Region, side: str) -> None:
    """Refuse a region that :func:`region_fault` finds a fault in.

    Raises:
        PlanError: LayoutUnsupported, with the field and its value.
    """
    fault = region_fault(region)
    if fault is not None:
        message = f"{side} layer {region.layer}: {fault}"
        raise PlanError(Reason.LAYOUT_UNSUPPORTED, message)


def region_fault(region: Region) -> str | None:
    """Return what is wrong with a region, with the values; None for a sound one."""
    for field in ("num_blocks", "block_tokens", "token_bytes", "heads"):
        value = getattr(region, field)
        if not 1 <= value < SIZE_LIMIT:
            return f"{field} is {value}"
    if region.head_start < 0:
        return f"head_start is {region.head_start}"
    found = {name: getattr(region, name) for name in STRIDES}
    strides = {name: stride for name, stride in found.items() if stride is not None}
    shown = ", ".join(f"{name} {stride}" for name, stride in strides.items())
    extent = region_extent(region)
    if extent is None:
        return f"{shown}: blocks, heads and tokens overlap"
    if min(strides.values()) < 1:
        return f"{shown}: a stride is not positive"
    end = region.base + extent
    if region.base < 0 or end > ADDRESS_LIMIT or extent > EXTENT_LIMIT:
        return f"addresses [{region.base}, {end}) do not exist"
    return None


def region_extent(region: Region) -> int | None:
    """Return the bytes from the region's first to behind its last.

    None if blocks, heads or tokens overlap.
    The axes may be nested in any order: vLLM's ``LHBNC`` has the blocks inside of a head.
    """
    extent, axes = region.block_layout
    axes.append((region.block_stride, region.num_blocks))
    for stride, count in sorted(axis for axis in axes if axis[1] > 1):
        if stride < extent:
            return None
        extent += stride * (count - 1)
    return extent
