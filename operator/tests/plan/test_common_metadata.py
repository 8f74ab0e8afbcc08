"""Labels and annotations that all objects of a PDCluster have in common."""

from __future__ import annotations

from typing import Any

import pytest
from simulated_cluster import SimulatedCluster, brought_up, manifest

from pdcluster_operator.api.rules.validate import check_manifest

COMMON = {
    "labels": {"team": "search", "policy.example.com/tier": "gold"},
    "annotations": {"example.com/owner": "search@example.com, since 2026"},
}
MADE = {
    "ControllerRevision", "Deployment", "NetworkPolicy", "PodDisruptionBudget", "Secret", "Service",
    "ServiceAccount", "StatefulSet",
}  # fmt: skip


def made(**spec: Any) -> list[dict[str, Any]]:
    steps = SimulatedCluster(manifest(**spec)).plan().steps
    return [step.manifest for step in steps if hasattr(step, "manifest")]


def of_cluster(children: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The namespace's connector is shared with other PDClusters, and no child."""
    return [one for one in children if one["kind"] != "ConfigMap"]


def metadata_in(child: dict[str, Any]) -> list[dict[str, Any]]:
    template = child.get("spec", {}).get("template")
    return [child["metadata"], *([template["metadata"]] if template else [])]


def test_each_object_and_each_pod_has_them_beside_our_own() -> None:
    two = {"prefill": {"replicas": 2}, "decode": {"replicas": 2}, "router": {"replicas": 2}}
    children, before = of_cluster(made(commonMetadata=COMMON, **two)), of_cluster(made(**two))
    assert {one["kind"] for one in children} == MADE
    assert len(children) == len(before)
    for one in children:
        for metadata in metadata_in(one):
            assert COMMON["labels"].items() <= metadata["labels"].items(), one["kind"]
            assert COMMON["annotations"].items() <= metadata["annotations"].items(), one["kind"]
            assert metadata["labels"]["pdcluster.dev/cluster"] == "llama"


def test_what_a_template_says_wins_and_what_is_ours_stays() -> None:
    template = {"metadata": {"labels": {"team": "chat"}, "annotations": {"example.com/owner": "x"}}}
    rdma = {"device": "CPU", "rdma": {"resource": "rdma/ib", "networks": ["roce"]}}
    children = made(commonMetadata=COMMON, transfer=rdma, decode={"podTemplate": template})
    sets = {one["metadata"]["labels"]["pdcluster.dev/role"]: one for one in children
            if one["kind"] == "StatefulSet"}  # fmt: skip
    pod = sets["decode"]["spec"]["template"]["metadata"]
    assert (pod["labels"]["team"], pod["annotations"]["example.com/owner"]) == ("chat", "x")
    assert sets["decode"]["metadata"]["labels"]["team"] == "search"
    assert sets["prefill"]["spec"]["template"]["metadata"]["annotations"] == {
        **COMMON["annotations"], "k8s.v1.cni.cncf.io/networks": "roce",
    }  # fmt: skip


def test_a_change_replaces_engines_and_routers_and_reaches_the_other_objects() -> None:
    world = brought_up()
    sets = {name for kind, name in world.children if kind == "StatefulSet"}
    world.edit(commonMetadata=COMMON)
    for _ in range(8):
        world.step()
        world.others_act()
    world.settle()
    assert world.condition("Ready")["status"] == "True"
    left = {name: one for (kind, name), one in world.children.items() if kind != "ConfigMap"}
    assert sets.isdisjoint(left)
    written_later = ("Secret", "ControllerRevision")  # old revisions stay as they were stored
    for one in left.values():
        for metadata in metadata_in(one):
            if one["kind"] not in written_later:
                assert metadata["labels"].get("team") == "search", one["kind"]
    assert not world.plan().steps


@pytest.mark.parametrize(
    ("kind", "key", "value", "rule"),
    [
        ("labels", "pdcluster.dev/cluster", "x", "NotAllowed"),
        ("annotations", "pdcluster.dev/applied", "x", "NotAllowed"),
        ("labels", "app.kubernetes.io/instance", "x", "NotAllowed"),
        ("labels", "kueue.x-k8s.io/queue-name", "x", "NotAllowed"),
        ("annotations", "kubectl.kubernetes.io/last-applied-configuration", "{}", "NotAllowed"),
        ("labels", "argocd.argoproj.io/instance", "x", "NotAllowed"),
        ("annotations", "argocd.argoproj.io/tracking-id", "x", "NotAllowed"),
        ("annotations", "k8s.v1.cni.cncf.io/networks", "x", "NotAllowed"),
        ("annotations", "-a", "x", "BadFormat"),
        ("annotations", "a/b/c", "x", "BadFormat"),
        ("annotations", "a" * 64, "x", "BadFormat"),
        ("labels", "a" * 64, "x", "BadFormat"),
        ("labels", "a", "no blanks", "BadFormat"),
        ("labels", "a b", "x", "BadFormat"),
        ("annotations", "a", 7, "WrongType"),
        ("labels", "a", 7, "WrongType"),
    ],
)
def test_keys_of_others_and_of_ours_are_refused(kind: str, key: str, value: Any, rule: str) -> None:
    found = check_manifest(manifest(commonMetadata={kind: {key: value}}))[1].errors
    assert [(one.path, str(one.rule)) for one in found] == [
        (f"spec.commonMetadata.{kind}.{key}", rule)
    ]


@pytest.mark.parametrize(
    ("kind", "key", "value"),
    [
        ("labels", "app.kubernetes.io/version", "1.2"),
        ("labels", "argocd.argoproj.io/secret-type", "x"),
        ("annotations", "argocd.argoproj.io/sync-options", "Prune=false"),
        ("annotations", "example.com/" + "a" * 63, "any text, of any kind: {}"),
        ("annotations", "a", "x" * (16 << 10)),
        ("labels", "a", ""),
    ],
)
def test_other_keys_are_the_users(kind: str, key: str, value: str) -> None:
    assert check_manifest(manifest(commonMetadata={kind: {key: value}}))[1].ok


def test_annotations_are_not_without_end() -> None:
    long = {"a": "x" * (16 << 10), "b": "x"}
    [found] = check_manifest(manifest(commonMetadata={"annotations": long}))[1].errors
    assert (found.path, found.rule) == ("spec.commonMetadata.annotations", "TooLarge")
