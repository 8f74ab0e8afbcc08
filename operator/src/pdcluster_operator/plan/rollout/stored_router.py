"""The pod template of routers, as it was rendered once.

Routers are rendered anew when the user changes what they are made from, or when their engines mount
another connector. Another builder or another default alone replaces no router. So each Deployment
carries, in an annotation, its template and the part of the spec that it was rendered from.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pdcluster_operator.api.labels import API_VERSION, KIND, RENDERED_ANNOTATION
from pdcluster_operator.api.spec.parse import parse_cluster
from pdcluster_operator.api.spec.types import Cluster
from pdcluster_operator.plan.builders.router import (
    build_router_template,
    router_selector,
)
from pdcluster_operator.plan.connectors import mounted_connector
from pdcluster_operator.plan.rollout.revisions import is_pod_template
from pdcluster_operator.plan.types import Manifest, Observed

PARTS = ("router", "requestTimeoutSeconds")
"""What routers are made from in the spec."""


@dataclass(frozen=True, slots=True)
class RouterTemplate:
    """What a router was rendered to.

    Attributes:
        spec: the fields of ``PARTS`` as the user wrote them.
        template: the pod template, before it is bound to engines.
    """

    spec: Mapping[str, Any]
    template: Mapping[str, Any]

    def text(self) -> str:
        """Return it for the annotation."""
        document = {"spec": self.spec, "template": self.template}
        return json.dumps(document, sort_keys=True, separators=(",", ":"))


def stored_templates(observed: Observed) -> dict[str, str]:
    """Return the annotation of each router's Deployment, by the Deployment's name."""
    return {
        child["metadata"]["name"]: text
        for child in observed.children
        if child.get("kind") == "Deployment"
        and (text := (child["metadata"].get("annotations") or {}).get(RENDERED_ANNOTATION))
    }


def router_template(
    cluster: Cluster, given: Manifest, key: str, connector: str, stored: str
) -> RouterTemplate:
    """Return the stored template if it still means what the spec means, else a new one.

    Both specs are rendered by the builder of today to find out.

    Args:
        given: the spec as the user wrote it.
        key: the pairing key.
        connector: name of the ConfigMap that the engines mount.
        stored: the annotation; empty if there is none.
    """
    spec = {part: given[part] for part in PARTS if part in given}
    today = RouterTemplate(spec, build_router_template(cluster, key, connector))
    then = _read(stored, router_selector(cluster, key))
    if then is None or then.template == today.template:
        return today
    if mounted_connector(cluster.name, then.template) != mounted_connector(
        cluster.name, today.template
    ):
        return today
    if then.spec == spec:
        return then
    others = {name: value for name, value in given.items() if name not in PARTS}
    named = {"name": cluster.name, "namespace": cluster.namespace, "uid": cluster.uid}
    parsed = parse_cluster(
        {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "metadata": named,
            "spec": {**others, **then.spec},
        }
    )
    if parsed.errors:
        return today
    meant = build_router_template(parsed.cluster, key, connector)
    return then if meant == today.template else today


def _read(text: str, selector: Mapping[str, str]) -> RouterTemplate | None:
    """Return what an annotation says; None if it is not one that this operator would write.

    Args:
        selector: labels by which the Deployment finds its pods.
    """
    try:
        document = json.loads(text) if text else None
    except (ValueError, RecursionError):
        return None
    if not isinstance(document, dict):
        return None
    spec, template = document.get("spec"), document.get("template")
    if not isinstance(spec, dict) or not is_pod_template(template):
        return None
    fits = selector.items() <= template["metadata"]["labels"].items()
    return RouterTemplate(spec, template) if fits else None
