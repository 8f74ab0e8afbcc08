"""Which versions of vLLM and NIXL are supported, and the one name of an element type."""

from __future__ import annotations

import pytest

from pdcluster_connector.compat.supported import (
    CARRIED_DTYPES,
    SUPPORTED,
    dtype_name,
    supported,
    text_of,
)


@pytest.mark.parametrize("name", sorted(SUPPORTED))
def test_a_range_holds_its_first_release_and_not_its_last(name: str) -> None:
    low, high = SUPPORTED[name]
    assert supported(name, low)
    assert not supported(name, high)
    assert not supported(name, (high[0] + 1, 0))
    assert not supported(name, (low[0], low[1] - 1))
    assert supported(name, (low[0], low[1] + 1))


def test_a_release_is_written_as_its_project_does() -> None:
    assert text_of((0, 32)) == "0.32"


@pytest.mark.parametrize(
    ("name", "one"),
    [
        ("fp8", "fp8_e4m3"),
        ("float", "float32"),
        ("half", "float16"),
        ("bfloat16", "bfloat16"),
        ("fp8_e5m2", "fp8_e5m2"),
        ("nvfp4", "nvfp4"),
    ],
)
def test_an_element_type_has_one_name(name: str, one: str) -> None:
    assert dtype_name(name) == one


def test_what_a_cache_can_be_made_of() -> None:
    """Another byte order of fp8 has other numbers in the same bytes, so it has its own name."""
    assert sorted(CARRIED_DTYPES) == [
        "bfloat16", "float16", "float32", "fp8_e4m3", "fp8_e4m3fnuz", "fp8_e5m2",
    ]  # fmt: skip
