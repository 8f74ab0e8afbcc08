"""One Kubernetes, one installed chart and one PDCluster for all tests that are marked `cluster`."""

from __future__ import annotations

import pytest
from cluster_access import Proxy
from cluster_images import missing_variables
from cluster_install import Installation
from cluster_run import ClusterRun, manifest, running

from cluster import binaries, lifecycle
from cluster.places import Places
from cluster.session import Cluster, connect
from images.operator_image import operator_image


def pytest_configure(config):
    config.addinivalue_line("markers", "cluster: needs a real Kubernetes, and starts one")


def pytest_collection_modifyitems(config, items):
    """They need root, and minutes at their first run: `-m cluster` asks for them."""
    if "cluster" not in config.option.markexpr:
        left_out = [item for item in items if item.get_closest_marker("cluster")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


def pytest_collection_finish(session):
    """Build here what is missing: it takes minutes once, and a test may not take that long."""
    wanted = any(item.get_closest_marker("cluster") for item in session.items)
    if wanted and not session.config.option.collectonly and not lifecycle.users_own():
        places = Places.of_user()
        binaries.provide((*binaries.NODE_PROGRAMS, *binaries.HELM_PROGRAMS), places)
        operator_image()


@pytest.fixture(scope="session")
def cluster() -> Cluster:
    """The user's cluster, or ours; one that was up before the tests stays up after them."""
    if missing := missing_variables():
        pytest.fail(f"KUBECONFIG names another cluster, which needs {', '.join(missing)} too")
    places = Places.of_user()
    before = lifecycle.users_own() or lifecycle.healthy(places)
    yield connect()
    if not before:
        lifecycle.down(places)


@pytest.fixture(scope="session")
def proxy(cluster: Cluster) -> Proxy:
    with Proxy(cluster) as proxy:
        yield proxy


@pytest.fixture(scope="session")
def operator(cluster: Cluster, proxy: Proxy) -> Installation:
    installation = Installation(cluster, proxy)
    installation.install()
    return installation


@pytest.fixture(scope="session")
def tiny(cluster: Cluster, proxy: Proxy, operator: Installation) -> ClusterRun:
    """The example, Ready when first asked for; a test that breaks it waits until it is again."""
    with running(cluster, proxy, manifest("tiny"), "tiny") as run:
        run.wait_ready()
        yield run
