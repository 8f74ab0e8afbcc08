"""Shared by all end-to-end tests: one cluster, and programs built before the first test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cluster import binaries, lifecycle
from cluster.places import Places
from cluster.session import Cluster, connect
from images.operator_image import operator_image


def pytest_collection_modifyitems(config, items):
    """Run these tests only with `-m cluster` or `-m soak`: they need root and take minutes."""
    if not any(mark in config.option.markexpr for mark in ("cluster", "soak")):
        left_out = [item for item in items if item.get_closest_marker("cluster")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


def pytest_collection_finish(session):
    """Build what is missing. It takes minutes once, and a test may not take that long."""
    wanted = any(item.get_closest_marker("cluster") for item in session.items)
    if wanted and not session.config.option.collectonly and not lifecycle.users_own():
        binaries.provide(binaries.PROGRAMS, Places.of_user())
        operator_image()


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """The user's cluster, or ours. A cluster that was up before the tests stays up after them."""
    places = Places.of_user()
    stays = bool(lifecycle.users_own()) or lifecycle.healthy(places)
    yield connect()
    if not stays:
        lifecycle.down(places)
