"""The API key that clients must send. Pods read it from the user's Secret; it is in no manifest.

Engines ask for it by ``vllm/api_guard.py`` of the connector. Routers ask by its
``launcher/router_gate.py``, which ``router_deployment.py`` has started in front of the router.
"""

from __future__ import annotations

from typing import Any

from pdcluster_connector.protocol.api_key import VARIABLE
from pdcluster_operator.api.spec.types import Cluster

# vLLM's own check asks for the key only on paths that begin with /v1.
ENGINE_MIDDLEWARE = "pdcluster_connector.vllm.api_guard.RequireKey"


def api_key_env(cluster: Cluster) -> list[dict[str, Any]]:
    """Return the variable that engines and routers find the key in; nothing without a key."""
    ref = cluster.spec.router.api_key_secret_ref
    if ref is None:
        return []
    source = {"secretKeyRef": {"name": ref.name, "key": ref.key}}
    return [{"name": VARIABLE, "valueFrom": source}]


def api_key_args(cluster: Cluster) -> list[str]:
    """Return what makes vLLM ask for the key on every path."""
    if cluster.spec.router.api_key_secret_ref is None:
        return []
    return ["--middleware", ENGINE_MIDDLEWARE]
