"""Who may reach which port, read from the policies as Kubernetes reads them."""

from __future__ import annotations

import pytest
from simulated_cluster import manifest

from pdcluster_operator.api.spec.parse import parse_cluster
from pdcluster_operator.plan.builders.protection import (
    build_engines_policy,
    build_router_policy,
    operator_namespace_in,
)

ANYBODY = "anybody"
PROMETHEUS = {
    "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}},
    "podSelector": {"matchLabels": {"app": "prometheus"}},
}


def policies(**spec):
    cluster = parse_cluster(manifest(**spec)).cluster
    return build_engines_policy(cluster, "pdcluster-system"), build_router_policy(cluster)


def let_in(policy, port):
    """The peers that a policy lets in to a port; a rule without "from" is for anybody."""
    found = []
    for rule in policy["spec"]["ingress"]:
        if "ports" not in rule or port in [entry["port"] for entry in rule["ports"]]:
            found += rule.get("from", [ANYBODY])
    return found


@pytest.mark.parametrize("namespace", ["pdcluster-system", None])
def test_a_policy_of_engines_tells_where_their_operator_runs(namespace):
    cluster = parse_cluster(manifest()).cluster
    assert operator_namespace_in(build_engines_policy(cluster, namespace)) == namespace
    router = build_router_policy(cluster)
    assert router is not None
    assert operator_namespace_in(router) is None


def test_by_default_nobody_scrapes():
    engines, router = policies()
    own, *others = let_in(engines, 5591)
    assert "podSelector" in own
    assert others == []
    assert let_in(router, 29000) == []
    assert let_in(router, 8000) == [ANYBODY]


@pytest.mark.parametrize("peers", [[PROMETHEUS], [PROMETHEUS, {"ipBlock": {"cidr": "10.0.0.0/8"}}]])
def test_scrapers_reach_metrics_and_nothing_else(peers):
    before, after = policies(), policies(monitoring={"scrapeFrom": peers})
    for policy, metrics, others in (
        (0, 5591, (8000, 5590, 5600, 22)),
        (1, 29000, (8000, 22)),
    ):
        assert let_in(after[policy], metrics) == [*let_in(before[policy], metrics), *peers]
        for port in others:
            assert let_in(after[policy], port) == let_in(before[policy], port)


BOTH = [PROMETHEUS, {"ipBlock": {"cidr": "10.0.0.0/8"}}]


@pytest.mark.parametrize("peers", [[PROMETHEUS], BOTH, [*BOTH, {"podSelector": {}}]])
def test_every_client_that_is_named_is_let_in_and_nobody_else(peers):
    _, router = policies(router={"allowFrom": peers})
    assert let_in(router, 8000) == peers
    assert let_in(router, 29000) == []
    engines, _ = policies(router={"replicas": 0, "allowFrom": peers})
    own, *others = let_in(engines, 8000)
    assert "podSelector" in own
    assert others == peers


def test_an_engines_api_is_for_the_router_while_there_is_one():
    engines, _ = policies()
    own, router = let_in(engines, 8000)
    assert router["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "router"
    engines, router_policy = policies(router={"replicas": 0})
    assert let_in(engines, 8000) == [own, ANYBODY]
    assert router_policy is None
