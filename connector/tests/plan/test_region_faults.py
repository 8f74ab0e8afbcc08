"""Faults of a region that no peer can send, because the wire's types refuse them first."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from pdcluster_connector.plan.geometry import Region, region_extent, region_fault

SOUND = Region("l", 4096, 4, 1024, 16, 0, 1, 1024, 64, 64)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"head_start": -1, "head_stop": 0}, "head_start is -1"),
        ({"num_blocks": 2**31, "block_stride": 1024}, "num_blocks is 2147483648"),
        ({"num_blocks": 0}, "num_blocks is 0"),
    ],
    ids=str,
)
def test_a_size_out_of_range_is_named(changes: dict[str, int], why: str) -> None:
    assert region_fault(SOUND) is None
    assert region_fault(replace(SOUND, **changes)) == why


def test_a_region_may_begin_at_the_first_address_and_not_before_it() -> None:
    assert region_fault(replace(SOUND, base=0)) is None
    fault = region_fault(replace(SOUND, base=-1))
    assert fault is not None
    assert fault.startswith("addresses [-1, ")


def test_a_region_may_end_at_the_last_address_and_not_behind_it() -> None:
    extent = region_extent(SOUND)
    assert extent is not None
    last = replace(SOUND, base=2**63 - extent)
    assert region_fault(last) is None
    assert region_fault(replace(last, base=last.base + 1)) is not None


def test_a_region_takes_256_tib_and_no_more() -> None:
    """Its blocks may lie far apart, and all offsets in it have 48 bits."""
    most = replace(SOUND, num_blocks=2, block_stride=2**48 - 1024, base=0)
    assert region_extent(most) == 2**48
    assert region_fault(most) is None
    fault = region_fault(replace(most, block_stride=2**48 - 1023))
    assert fault == f"addresses [0, {2**48 + 1}) do not exist"
