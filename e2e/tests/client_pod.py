"""A pod of a cluster's namespace that is none of ours."""

from __future__ import annotations

import json
from typing import Any

from images.for_cluster import template
from pdcluster_operator.api.spec.pod_templates import merge


def client(name: str, image: str, **labels: str) -> dict[str, Any]:
    """A pod that waits, so that a test can send requests from it."""
    spec = {
        "terminationGracePeriodSeconds": 0,
        "automountServiceAccountToken": False,
        "containers": [{"name": "client", "image": image, "command": ["sleep", "3600"]}],
    }
    pod: dict[str, Any] = merge({"spec": spec}, _template())
    metadata = {"name": name, "labels": {"client": name, **labels}}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, **pod}


def _template() -> dict[str, Any]:
    text = json.dumps(template("router"))
    return json.loads(text.replace('"name": "router"', '"name": "client"'))  # type: ignore[no-any-return]
