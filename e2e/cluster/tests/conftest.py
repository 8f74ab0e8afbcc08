"""Tests of the test cluster itself: they need root, and minutes at the very first run."""

from __future__ import annotations

import pytest

from cluster import binaries, lifecycle
from cluster.places import Places
from cluster.session import Cluster, connect


def pytest_collection_finish(session):
    """Build here what is missing: it takes minutes once, and a test may not take that long."""
    wanted = any(item.get_closest_marker("cluster") for item in session.items)
    if wanted and not session.config.option.collectonly and not lifecycle.users_own():
        binaries.provide(binaries.NODE_PROGRAMS, Places.of_user())


@pytest.fixture(scope="session")
def cluster() -> Cluster:
    """The cluster; one that was up before the tests stays up after them."""
    if lifecycle.users_own():
        pytest.skip("KUBECONFIG names another cluster; these are tests of our own")
    places = Places.of_user()
    before = lifecycle.healthy(places)
    yield connect()
    if not before:
        lifecycle.down(places)
