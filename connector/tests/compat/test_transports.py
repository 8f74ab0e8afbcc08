"""Which NIXL backends carry KV, and the options that can be set."""

from __future__ import annotations

import pytest

from pdcluster_connector.compat.supported import why_not, wrong_option


@pytest.mark.parametrize(
    ("backend", "why"),
    [
        ("UCX", None),
        ("GDS", "moves data between memory and storage, never between two engines"),
        ("Mooncake", "is not known to carry KV in this version"),
        ("ucx", "is not known to carry KV in this version"),
    ],
)
def test_a_backend_carries_kv_or_it_is_said_why_not(backend: str, why: str | None) -> None:
    assert why_not(backend) == why


@pytest.mark.parametrize(
    ("name", "good", "bad", "why"),
    [
        ("num_workers", (1, 64), (0, 65, "2", 2.0, True, None), "a whole number from 1 to 64"),
        (
            "split_batch_size",
            (1, 2**20),
            (0, 2**20 + 1, False, []),
            "a whole number from 1 to 1048576",
        ),
        ("device_list", ("m", "m" * 1024), ("", "m" * 1025, 1, None), "a text of 1 to 1024 "),
    ],
)
def test_an_option_has_bounds(
    name: str, good: tuple[object, ...], bad: tuple[object, ...], why: str
) -> None:
    for value in good:
        assert wrong_option("UCX", name, value) is None
    for value in bad:
        assert why in str(wrong_option("UCX", name, value)), value


def test_options_that_nixl_ignores_are_refused_with_those_it_has() -> None:
    """One of them would hide that a peer is gone."""
    why = wrong_option("UCX", "ucx_error_handling_mode", "none")
    assert why is not None
    assert why.startswith("is not an option of UCX; the options are device_list, engine_config, ")
    why = wrong_option("UCX", "ucx_devices", "mlx5_0:1")  # a device that does not exist passes
    assert why == (
        "is not an option of UCX; the options are device_list, engine_config, num_workers,"
        " split_batch_size"
    )
    assert wrong_option("GDS", "num_workers", 1) == (
        "is not an option of GDS; the options are none"
    )
