"""The chart and the images on a real cluster."""

from __future__ import annotations

import pytest

from cluster import binaries, lifecycle
from cluster.places import Places
from cluster.session import Cluster, connect


def pytest_configure(config):
    config.addinivalue_line("markers", "cluster: needs a real Kubernetes, and starts one")


def pytest_collection_finish(session):
    """Build here what is missing: it takes minutes once, and a test may not take that long."""
    if session.items and not session.config.option.collectonly:
        binaries.provide(binaries.HELM_PROGRAMS, Places.of_user())
        if not lifecycle.users_own():
            binaries.provide(binaries.NODE_PROGRAMS, Places.of_user())


@pytest.fixture(scope="session")
def cluster() -> Cluster:
    """The user's cluster, or ours; one that was up before the tests stays up after them."""
    places = Places.of_user()
    stays = bool(lifecycle.users_own()) or lifecycle.healthy(places)
    yield connect()
    if not stays:
        lifecycle.down(places)
