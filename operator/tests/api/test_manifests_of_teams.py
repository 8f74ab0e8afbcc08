"""Manifests as teams write them are answered by the rules that speak of them, and by no others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from said_findings import check_manifest

from pdcluster_operator.api.spec.pod_templates import merge

CORPUS = yaml.safe_load(Path(__file__).with_name("manifests_of_teams.yaml").read_text())
HEAD = {"apiVersion": "pdcluster.dev/v1alpha1", "kind": "PDCluster"}


def rules(manifest: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Return what refuses a manifest and what warns of it, as ``pdcluster lint`` does."""
    unknown = dict.fromkeys(("host_paths", "mounted_certificates", "pod_groups"))
    found = check_manifest(manifest, **unknown)[1]
    refused, warned = (
        sorted({str(one.rule) for one in part}) for part in (found.errors, found.warnings)
    )
    return refused, warned


@pytest.mark.parametrize("team", CORPUS["teams"], ids=lambda one: one["from"])
def test_a_manifest_of_a_team_is_answered(team: dict[str, Any]) -> None:
    manifest = {**HEAD, "metadata": team["metadata"], "spec": team["spec"]}
    assert rules(manifest) == (team["refused"], team["warned"])


@pytest.mark.parametrize("mistake", CORPUS["mistakes"], ids=lambda one: one["name"])
def test_a_mistake_is_told(mistake: dict[str, Any]) -> None:
    given = {key: mistake[key] for key in ("metadata", "spec") if key in mistake}
    found = rules(merge({**HEAD, **CORPUS["broken"]}, given))
    assert found == (mistake["refused"], mistake["warned"])
    assert any(found)


@pytest.mark.parametrize("one", CORPUS["right"], ids=lambda one: one["name"])
def test_what_looks_like_a_mistake_and_is_none(one: dict[str, Any]) -> None:
    assert rules(merge({**HEAD, **CORPUS["broken"]}, {"spec": one["spec"]})) == ([], [])


def test_the_manifest_without_a_mistake_is_accepted() -> None:
    assert rules({**HEAD, **CORPUS["broken"]}) == ([], [])
