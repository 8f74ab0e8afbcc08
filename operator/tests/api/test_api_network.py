"""Peers of NetworkPolicies: what Kubernetes would drop or refuse is refused by name."""

from __future__ import annotations

import pytest
from said_findings import check_manifest

from pdcluster_operator.api.spec.fields import as_manifest

PATH = "spec.monitoring.scrapeFrom[0]"


def checked(*peers):
    return check_manifest(
        {
            "apiVersion": "pdcluster.dev/v1alpha1",
            "kind": "PDCluster",
            "metadata": {"name": "llama"},
            "spec": {
                "model": {"source": {"hostPath": {"path": "/models/x"}}},
                "monitoring": {"scrapeFrom": list(peers)},
            },
        }
    )


def label(**more):
    return {"key": "team", **more}


GOOD = [
    {"podSelector": {}},
    {"namespaceSelector": {}, "podSelector": {}},
    {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}},
    {
        "namespaceSelector": {"matchLabels": {"a": ""}},
        "podSelector": {
            "matchLabels": {"app.kubernetes.io/name": "prometheus"},
            "matchExpressions": [
                label(operator="In", values=["a", "b"]),
                label(operator="DoesNotExist"),
            ],
        },
    },
    {"ipBlock": {"cidr": "10.0.0.0/8", "except": ["10.1.0.0/16"]}},
    {"ipBlock": {"cidr": "fd00::/8"}},
]


@pytest.mark.parametrize("peer", GOOD, ids=str)
def test_a_peer_comes_through_as_it_was_written(peer):
    cluster, findings = checked(peer)
    assert findings.errors == ()
    assert as_manifest(cluster.spec.monitoring.scrape_from) == [peer]


@pytest.mark.parametrize(
    ("peer", "path", "rule"),
    [
        ({}, "", "PeerUnusable"),
        ({"podSelector": {}, "ipBlock": {"cidr": "10.0.0.0/8"}}, "", "PeerUnusable"),
        # The API server would drop this field, and the selector would then select every pod.
        (
            {"podSelector": {"matchLabel": {"app": "x"}}},
            ".podSelector.matchLabel",
            "UnknownField",
        ),
        ({"podSelectors": {}}, ".podSelectors", "UnknownField"),
        ({"podSelector": {"matchLabels": {"a": 1}}}, ".podSelector.matchLabels.a", "WrongType"),
        ({"podSelector": {"matchLabels": []}}, ".podSelector.matchLabels", "WrongType"),
        (
            {"podSelector": {"matchLabels": {"a": "b c"}}},
            ".podSelector.matchLabels.a",
            "BadFormat",
        ),
        (
            {"podSelector": {"matchLabels": {"a b": "c"}}},
            ".podSelector.matchLabels.a b",
            "BadFormat",
        ),
        (
            {"podSelector": {"matchExpressions": [label(operator="in", values=["x"])]}},
            ".podSelector.matchExpressions[0].operator",
            "NotAllowed",
        ),
        (
            {"podSelector": {"matchExpressions": [label(operator="In")]}},
            ".podSelector.matchExpressions[0].values",
            "PeerUnusable",
        ),
        (
            {"namespaceSelector": {"matchExpressions": [label(operator="Exists", values=["x"])]}},
            ".namespaceSelector.matchExpressions[0].values",
            "PeerUnusable",
        ),
        ({"ipBlock": {"cidr": "10.0.0.0"}}, ".ipBlock.cidr", "BadFormat"),
        ({"ipBlock": {"cidr": "10.0.0.1/8"}}, ".ipBlock.cidr", "BadFormat"),
        ({"ipBlock": {"cidr": "10.0.0.0/33"}}, ".ipBlock.cidr", "BadFormat"),
        (
            {"ipBlock": {"cidr": "10.0.0.0/8", "except": ["192.168.0.0/16"]}},
            ".ipBlock.except[0]",
            "PeerUnusable",
        ),
        (
            {"ipBlock": {"cidr": "10.0.0.0/8", "except": ["10.0.0.0/8"]}},
            ".ipBlock.except[0]",
            "PeerUnusable",
        ),
        (
            {"ipBlock": {"cidr": "10.0.0.0/8", "except": ["10.1.0.1/16"]}},
            ".ipBlock.except[0]",
            "BadFormat",
        ),
        (
            {"ipBlock": {"cidr": "10.0.0.0/8", "except": ["fd00::/16"]}},
            ".ipBlock.except[0]",
            "PeerUnusable",
        ),
        (
            {"ipBlock": {"cidr": "10.1.0.0/16", "except": ["10.1.0.0/24", "10.0.0.0/8"]}},
            ".ipBlock.except[1]",
            "PeerUnusable",
        ),
        (
            {"podSelector": {"matchExpressions": [label(operator="Exists"), label(operator="In")]}},
            ".podSelector.matchExpressions[1].values",
            "PeerUnusable",
        ),
        ({"ipBlock": {}}, ".ipBlock.cidr", "Required"),
    ],
)
def test_what_is_wrong_with_a_peer_is_named(peer, path, rule):
    found = {error.path: error for error in checked(peer)[1].errors}
    assert list(found) == [f"{PATH}{path}"]
    assert found[f"{PATH}{path}"].rule == rule
    assert found[f"{PATH}{path}"].remedy


def test_each_peer_of_a_list_is_judged():
    found = checked({"podSelector": {}}, {}, {"ipBlock": {"cidr": "10.0.0.0/33"}})[1].errors
    assert [error.path for error in found] == [
        "spec.monitoring.scrapeFrom[1]",
        "spec.monitoring.scrapeFrom[2].ipBlock.cidr",
    ]


@pytest.mark.parametrize(
    ("expression", "said"),
    [
        (label(operator="NotIn"), "operator NotIn needs values"),
        (label(operator="DoesNotExist", values=["x"]), "operator DoesNotExist takes no values"),
    ],
)
def test_it_is_said_whether_values_are_missing_or_too_many(expression, said):
    [found] = checked({"podSelector": {"matchExpressions": [expression]}})[1].errors
    assert found.message == said


def test_nobody_scrapes_by_default():
    assert checked()[0].spec.monitoring.scrape_from == ()
