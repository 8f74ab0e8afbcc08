"""The router before the engines of one pairing key: vLLM's own ``vllm-router``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pdcluster_operator.api.enums import RouterPolicy
from pdcluster_operator.api.labels import (
    CLUSTER_LABEL,
    PAIRING_LABEL,
    ROUTER_METRICS_PORT,
    ROUTER_PORT,
    EngineName,
    cluster_labels,
    router_deployment_name,
    service_account_name,
)
from pdcluster_operator.api.pod_templates import ROUTER_CONTAINER
from pdcluster_operator.api.types import Cluster
from pdcluster_operator.plan.merge import merge

from .metadata import child_metadata

ROUTER_COMPONENT = "router"
POLICIES = {
    RouterPolicy.ROUND_ROBIN: "round_robin",
    RouterPolicy.RANDOM: "random",
    RouterPolicy.CACHE_AWARE: "cache_aware",
    RouterPolicy.POWER_OF_TWO: "power_of_two",
    RouterPolicy.CONSISTENT_HASH: "consistent_hash",
}
NOBODY = 65_532
# The router listens only once every engine answers, and gives up after this long.
WORKER_STARTUP_SECONDS = 86_400


def build_router_deployment(
    cluster: Cluster,
    pairing_key: str,
    prefill: Sequence[EngineName],
    decode: Sequence[EngineName],
) -> dict[str, Any] | None:
    """Return the Deployment; None without routers, or without engines of both roles."""
    router = cluster.spec.router
    if router.replicas == 0 or not prefill or not decode:
        return None
    labels = router_labels(cluster, pairing_key)
    template = {
        "metadata": {"labels": labels},
        "spec": {
            "serviceAccountName": service_account_name(cluster.name),
            "automountServiceAccountToken": False,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": NOBODY,
                "runAsGroup": NOBODY,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "enableServiceLinks": False,
            # vllm-router sets up no signal handler while it waits for engines, and the kernel
            # drops a SIGTERM that process 1 does not handle: here the pause process is process 1.
            "shareProcessNamespace": True,
            "terminationGracePeriodSeconds": 30,
            "containers": [_container(cluster, prefill, decode)],
        },
    }
    merged = merge(merge(template, router.pod_template or {}), {"metadata": {"labels": labels}})
    name = router_deployment_name(cluster.name, pairing_key)
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": child_metadata(cluster, name, labels),
        "spec": {
            "replicas": router.replicas,
            "selector": {"matchLabels": router_selector(cluster, pairing_key)},
            "template": merged,
        },
    }


def router_selector(cluster: Cluster, pairing_key: str) -> dict[str, str]:
    """Return the immutable labels that find a router's pods."""
    return {
        CLUSTER_LABEL: cluster.name,
        "app.kubernetes.io/component": ROUTER_COMPONENT,
        PAIRING_LABEL: pairing_key,
    }


def router_labels(cluster: Cluster, pairing_key: str) -> dict[str, str]:
    """Return all labels of a router and its pods."""
    return cluster_labels(cluster.name, ROUTER_COMPONENT) | {PAIRING_LABEL: pairing_key}


def _container(
    cluster: Cluster, prefill: Sequence[EngineName], decode: Sequence[EngineName]
) -> dict[str, Any]:
    args = ["--vllm-pd-disaggregation"]
    for engine in prefill:
        args += ["--prefill", engine.api_url]
    for engine in decode:
        args += ["--decode", engine.api_url]
    args += [
        "--host", "0.0.0.0",  # noqa: S104 (a pod's own network)
        "--port", str(ROUTER_PORT),
        "--policy", POLICIES[cluster.spec.router.policy],
        "--worker-startup-timeout-secs", str(WORKER_STARTUP_SECONDS),
        "--worker-startup-check-interval", "1",
        "--health-check-interval-secs", "5",
        "--prometheus-host", "0.0.0.0",  # noqa: S104 (a pod's own network)
        "--prometheus-port", str(ROUTER_METRICS_PORT),
    ]  # fmt: skip
    return {
        "name": ROUTER_CONTAINER,
        "image": cluster.spec.router.image,
        "command": ["vllm-router"],
        "args": args,
        "ports": [
            {"name": "http", "containerPort": ROUTER_PORT, "protocol": "TCP"},
            {"name": "metrics", "containerPort": ROUTER_METRICS_PORT, "protocol": "TCP"},
        ],
        "readinessProbe": {
            "httpGet": {"path": "/readiness", "port": "http"},
            "periodSeconds": 2,
            "timeoutSeconds": 2,
            "failureThreshold": 3,
        },
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        },
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
