"""What rules know of the operator's own containers is what the builders make."""

from __future__ import annotations

import copy

from hypothesis import given
from simulated_cluster import SimulatedCluster
from valid_specs import manifests

from pdcluster_operator.api.rules import whole_pods
from pdcluster_operator.api.spec import parse, pod_templates
from pdcluster_operator.api.spec.types import Role


@given(manifests())
def test_an_outline_is_what_the_builders_make(manifest: dict) -> None:
    for part in ("prefill", "decode", "router"):
        manifest["spec"].get(part, {}).pop("podTemplate", None)
    cluster = parse.parse_cluster(manifest).cluster
    for step in SimulatedCluster(copy.deepcopy(manifest)).plan().steps:
        kind, template = step.manifest["kind"], step.manifest.get("spec", {}).get("template")
        if kind not in ("StatefulSet", "Deployment"):
            continue
        [container] = template["spec"]["containers"]
        labels = template["metadata"]["labels"]
        role = Role(labels["pdcluster.dev/role"]) if kind == "StatefulSet" else None
        outline = whole_pods.outline(cluster, role)
        assert {p["name"]: p["containerPort"] for p in container["ports"]} == outline.ports
        mounts = {mount["mountPath"]: mount["name"] for mount in container.get("volumeMounts", ())}
        assert mounts == outline.mounts
        volumes = {volume["name"] for volume in template["spec"].get("volumes", ())}
        assert volumes == set(outline.mounts.values())
        given_handlers = {*container, *container.get("lifecycle", ())}
        known = {*pod_templates.PROBES, *pod_templates.HOOKS}
        assert given_handlers & known == outline.handlers
