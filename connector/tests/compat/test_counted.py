"""Numbers of things."""

from __future__ import annotations

import pytest

from pdcluster_connector.compat.findings import counted


@pytest.mark.parametrize(("number", "said"), [(0, "0 links"), (1, "1 link"), (2, "2 links")])
def test_one_is_singular_and_nothing_else(number: int, said: str) -> None:
    assert counted(number, "link") == said
