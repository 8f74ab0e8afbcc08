"""One Kubernetes, one installed chart and one PDCluster for all tests that are marked `cluster`."""

from __future__ import annotations

import pytest
from cluster_access import Proxy
from cluster_install import Installation
from cluster_run import ClusterRun, manifest, running

from cluster.session import Cluster
from images.for_cluster import missing_variables
from pdcluster_operator.adapters.engine_authority import EngineAuthority


@pytest.fixture(scope="session")
def cluster(request: pytest.FixtureRequest) -> Cluster:
    if missing := missing_variables():
        pytest.fail(f"KUBECONFIG names another cluster, which needs {', '.join(missing)} too")
    return request.getfixturevalue("cluster")


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
def authority(operator: Installation) -> EngineAuthority:
    """The operator's CA: with its key a test can make what no stranger could make."""
    return operator.authority()


@pytest.fixture(scope="session")
def tiny(cluster: Cluster, proxy: Proxy, operator: Installation) -> ClusterRun:
    """The example with TLS, Ready at its first use.

    A test that breaks it waits until it is Ready again.
    """
    document = manifest("tiny", transfer={"tls": "Enabled"})
    with running(cluster, proxy, document, "tiny") as run:
        run.wait_ready()
        yield run
