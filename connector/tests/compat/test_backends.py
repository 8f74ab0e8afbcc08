"""What is known of a backend's blocks by its name alone."""

from __future__ import annotations

import pytest

from pdcluster_connector.compat.supported import token_sliceable


@pytest.mark.parametrize(
    ("backend", "sliceable"),
    [("FLASH_ATTN", True), ("CPU_ATTN", False), ("A_NEW_BACKEND", None), (None, None)],
)
def test_a_backend_that_is_not_known_proves_nothing(backend: str | None, sliceable: bool) -> None:
    assert token_sliceable(backend) is sliceable
