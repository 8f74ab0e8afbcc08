"""Names of what belongs to a cluster: their limits, and whose they are."""

from __future__ import annotations

from typing import Any

import pytest

from pdcluster_operator.api.findings import under
from pdcluster_operator.api.object_names import (
    EngineName,
    connector_name,
    engine_labels,
    engine_of,
    is_connector_name,
    is_group_of,
    name_errors,
    namespace_errors,
    role_selector,
    start_group_name,
)
from pdcluster_operator.api.spec.types import Role

DIGEST = "0123456789abcdef" * 4


def test_the_longest_name_of_a_cluster_leaves_room_for_kubernetes_own_words() -> None:
    longest = "c" * 34
    assert list(name_errors(longest)) == []
    [(message, remedy)] = name_errors(longest + "c")
    assert message.startswith("has 35 characters; 34 are allowed")
    assert "at most 34" in remedy
    assert len(list(name_errors("C" * 35))) == 2, "both at once"
    assert list(name_errors(12)) == [("must be text", "Write it in quotes.")]
    assert list(namespace_errors("n" * 63)) == []
    for namespace in (7, "", "n" * 64, "a/b", "-a", "A"):
        assert len(list(namespace_errors(namespace))) == 1
    name = EngineName("ns", longest, Role.PREFILL, "abcde", 999)
    assert len(name.stateful_set) == 52, "Kubernetes makes a label of 63 characters of it"


def test_where_the_pods_of_an_engine_are() -> None:
    name = EngineName("ns", "tiny", Role.DECODE, "abcde", 2)
    assert name.logical == "ns.tiny.decode.abcde.2"
    assert (name.pod(), name.pod(1)) == ("tiny-decode-abcde-2-0", "tiny-decode-abcde-2-1")
    assert name.host(1) == "tiny-decode-abcde-2-1.tiny-decode-abcde-2.ns.svc"
    assert name.api_url == "http://tiny-decode-abcde-2-0.tiny-decode-abcde-2.ns.svc:8000"


def test_a_connectors_name_is_known() -> None:
    shared = connector_name(DIGEST)
    assert shared == "pdcluster-connector-0123456789abcdef"
    assert is_connector_name(shared)
    for name in (shared + "0", shared[:-1], f"x-{shared}", shared[:-1] + "g"):
        assert not is_connector_name(name)


def test_the_groups_of_an_engine_are_its_own_and_those_of_a_start() -> None:
    name = EngineName("ns", "tiny", Role.DECODE, "abcde", 2)
    assert is_group_of(name, "tiny-decode-abcde-2")
    assert is_group_of(name, start_group_name("tiny", "xyz"))
    for other in ("tiny-decode-abcde-20", "tiny-decode-abcde-1", "other-start-xyz", "tiny-start"):
        assert not is_group_of(name, other)


NAME = EngineName("ns", "tiny", Role.DECODE, "abcde", 2)
LABELS = engine_labels(NAME, "key")
ENGINE, ROLE, REVISION, CLUSTER = (
    f"pdcluster.dev/{word}" for word in ("engine", "role", "revision", "cluster")
)


def test_an_engine_is_known_by_its_labels() -> None:
    assert engine_of({"metadata": {"namespace": "ns", "labels": LABELS}}) == NAME
    found = engine_of({"metadata": {"labels": LABELS}})
    assert found is not None
    assert found.namespace == "default"


@pytest.mark.parametrize(
    "other", [{ROLE: None}, {ROLE: "router"}, {ROLE: ["decode"]}, {REVISION: None}, {REVISION: "x"}]
)
def test_labels_that_select_nothing_decide_nothing(other: dict[str, Any]) -> None:
    """Whoever changes them on a pod does not take it from its StatefulSet."""
    assert engine_of({"metadata": {"namespace": "ns", "labels": {**LABELS, **other}}}) == NAME


@pytest.mark.parametrize(
    "manifest",
    [
        {},
        {"metadata": None},
        {"metadata": {}},
        {"metadata": {"labels": None}},
        {"metadata": {"labels": [ENGINE]}},
        *(
            {"metadata": {"labels": {**LABELS, **other}}}
            for other in (
                {ENGINE: None}, {ENGINE: 7}, {ENGINE: "tiny"}, {ENGINE: "tiny-x"},
                {ENGINE: "tiny-"}, {ENGINE: "tiny-1.5"}, {ENGINE: "tiny-router-x-1"},
                {ENGINE: "other-decode-abcde-2"}, {CLUSTER: None}, {CLUSTER: "other"},
            )
        ),
    ],
)  # fmt: skip
def test_labels_of_any_shape_are_read(manifest: dict[str, Any]) -> None:
    assert engine_of(manifest) is None


def test_an_autoscaler_counts_the_leading_pods_of_one_role() -> None:
    assert role_selector("tiny", Role.PREFILL) == (
        "pdcluster.dev/cluster=tiny,pdcluster.dev/role=prefill,apps.kubernetes.io/pod-index=0"
    )


@pytest.mark.parametrize(
    ("path", "inside"),
    [("spec.a", True), ("spec.a.b", True), ("spec.a[0].b", True), ("spec.ab", False),
     ("spec", False)],
)  # fmt: skip
def test_which_fields_are_a_part_of_another(path: str, inside: bool) -> None:
    assert under(path, "spec.a") is inside
