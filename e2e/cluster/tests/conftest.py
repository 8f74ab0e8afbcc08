"""Tests of the test cluster itself."""

from __future__ import annotations

import pytest

from cluster import lifecycle
from cluster.session import Cluster


@pytest.fixture(scope="session")
def cluster(request: pytest.FixtureRequest) -> Cluster:
    if lifecycle.users_own():
        pytest.skip("KUBECONFIG names another cluster; these are tests of our own")
    return request.getfixturevalue("cluster")
