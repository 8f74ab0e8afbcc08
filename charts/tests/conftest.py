"""The chart is tested with the real helm 3 and helm 4."""

from __future__ import annotations

import pytest
from chart_helm import Helm

from cluster import binaries
from cluster.places import Places


def pytest_collection_finish(session):
    """Build here what is missing: it takes minutes once, and a test may not take that long."""
    wanted = any(item.get_closest_marker("helm") for item in session.items)
    if wanted and not session.config.option.collectonly:
        binaries.provide(binaries.HELM_PROGRAMS, Places.of_user())


@pytest.fixture(scope="session", params=(3, 4), ids="helm{}".format)
def helm(request) -> Helm:
    name = f"helm{request.param}"
    programs = [program for program in binaries.HELM_PROGRAMS if program.name == name]
    return Helm(binaries.provide(programs, Places.of_user())[name])
