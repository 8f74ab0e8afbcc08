"""Asks an API server what :mod:`.cluster_checks` judges. It writes nothing."""

import asyncio
from collections.abc import Mapping
from typing import Any

from pdcluster_connector import __version__
from pdcluster_operator.adapters.api_server.client import KubeClient, NotFound
from pdcluster_operator.adapters.api_server.kinds import PDCLUSTER
from pdcluster_operator.api.spec.resources import parse_quantity
from pdcluster_operator.api.spec.types import Cluster
from pdcluster_operator.cli.cluster_checks import ClusterFacts, Node, claims_of
from pdcluster_operator.runtime.interfaces import ApiError

MOST_NODES, MOST = "5000", "500"
SECONDS, MOST_REVIEW_SECONDS = 15.0, 30.0
OURS = {"labelSelector": "app.kubernetes.io/part-of=pdcluster"}
FORBIDDEN = ("Forbidden", "Http403")
QUESTIONS: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "version": ("/version", {}),
    "nodes": ("/api/v1/nodes", {"limit": MOST_NODES}),
    "namespace": ("/api/v1/namespaces/{namespace}", {}),
    "crd": (
        "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/pdclusters.pdcluster.dev",
        {},
    ),
    "deployments": ("/apis/apps/v1/deployments", OURS),
    "daemonsets": ("/apis/apps/v1/daemonsets", {"limit": MOST}),
    "groups": ("/apis", {}),
    "podgroups": ("/apis/scheduling.k8s.io/v1beta1", {}),
    "deviceclasses": ("/apis/resource.k8s.io/v1/deviceclasses", {"limit": MOST}),
}
OWN = ("create pdcluster.dev/pdclusters", "patch pdcluster.dev/pdclusters", "list core/pods",
       "get core/pods/log", "create core/pods/portforward")  # fmt: skip
OPERATOR = ("list pdcluster.dev/pdclusters", "patch pdcluster.dev/pdclusters/status",
            "patch apps/statefulsets", "patch apps/deployments", "patch core/services",
            "patch core/configmaps", "patch core/serviceaccounts", "create core/secrets",
            "list core/pods", "patch networking.k8s.io/networkpolicies",
            "patch policy/poddisruptionbudgets", "patch batch/jobs",
            "create coordination.k8s.io/leases")  # fmt: skip
"""Rights, each a verb and group/resource, maybe with a subresource."""


async def gather(
    client: KubeClient, namespace: str, cluster: Cluster | None, operator_class: str | None
) -> ClusterFacts:
    """Ask everything side by side, each question for ``SECONDS`` at most.

    Raises:
        ApiError: the API server does not answer at all. What it forbids is unknown.
    """
    try:
        await client.call("GET", "/version")
    except ApiError as error:
        if error.reason not in FORBIDDEN:
            raise
    claims: Mapping[str, tuple[str, Mapping[str, str]]] = {
        f"claim {name}": (f"/api/v1/namespaces/{{namespace}}/persistentvolumeclaims/{name}", {})
        for name in claims_of(cluster)
    }
    asked = {**QUESTIONS, **claims}
    calls = (_read(client, path.format(namespace=namespace), q) for path, q in asked.values())
    answers = dict(zip(asked, await asyncio.gather(*calls), strict=True))
    accounts = _accounts(answers["deployments"])
    own, held, review = await asyncio.gather(
        _rights(client, namespace, OWN),
        _rights(client, namespace, OPERATOR if accounts else (), *accounts[:1]),
        _review(client, namespace, operator_class),
    )
    nodes = answers.pop("nodes")
    return ClusterFacts(
        namespace=namespace,
        nodes=tuple(map(_node, nodes["items"])) if isinstance(nodes, Mapping) else str(nodes),
        answers=answers,
        own=own,
        operator=held,
        review=review,
        version=__version__,
    )


async def _read(
    client: KubeClient, path: str, query: Mapping[str, str]
) -> Mapping[str, Any] | str | None:
    try:
        async with asyncio.timeout(SECONDS):
            return await client.call("GET", path, query=query)
    except TimeoutError:
        return f"no answer in {SECONDS:.0f} s"
    except ApiError as error:
        return None if isinstance(error, NotFound) else str(error)


def _accounts(deployments: Mapping[str, Any] | str | None) -> list[str]:
    """Return the users that operators are, as Kubernetes names them."""
    found = deployments["items"] if isinstance(deployments, Mapping) else ()
    return [
        f"system:serviceaccount:{one['metadata']['namespace']}:"
        f"{one['spec']['template']['spec'].get('serviceAccountName', 'default')}"
        for one in found
        if one["metadata"]["labels"].get("app.kubernetes.io/component") == "operator"
    ]


async def _rights(
    client: KubeClient, namespace: str, rights: tuple[str, ...], user: str | None = None
) -> dict[str, bool | None]:
    kind = "SubjectAccessReview" if user else "SelfSubjectAccessReview"
    path = f"/apis/authorization.k8s.io/v1/{kind.lower()}s"

    async def ask(right: str) -> bool | None:
        verb, _, what = right.partition(" ")
        group, resource, part = [*what.split("/"), ""][:3]
        asked = {"namespace": namespace, "verb": verb, "resource": resource}
        asked["group"] = "" if group == "core" else group
        if part:
            asked["subresource"] = part
        spec = {"resourceAttributes": asked, **({"user": user} if user else {})}
        body = {"apiVersion": "authorization.k8s.io/v1", "kind": kind, "spec": spec}
        try:
            async with asyncio.timeout(SECONDS):
                answer = await client.call("POST", path, body=body)
        except (TimeoutError, ApiError):
            return None
        return bool((answer.get("status") or {}).get("allowed"))

    return dict(zip(rights, await asyncio.gather(*map(ask, rights)), strict=True))


def refused_manifest(operator_class: str | None) -> dict[str, Any]:
    """Return a PDCluster that the CRD's own rules take, and the webhook refuses (OwnedFlag)."""
    source = {"huggingFace": {"repo": "pdcluster/doctor"}}
    spec: dict[str, Any] = {
        "model": {"source": source},
        "engine": {"extraArgs": ["--port", "1"]},
        **({"operatorClass": operator_class} if operator_class else {}),
    }
    named = {"apiVersion": PDCLUSTER.api_version, "kind": PDCLUSTER.name}
    return {**named, "metadata": {"name": "doctor-dry-run"}, "spec": spec}


async def _review(client: KubeClient, namespace: str, operator_class: str | None) -> str:
    """Return what the API server says to a dry run of that; empty if it would take it."""
    path, body = PDCLUSTER.path(namespace), refused_manifest(operator_class)
    try:
        async with asyncio.timeout(MOST_REVIEW_SECONDS):
            await client.call("POST", path, query={"dryRun": "All"}, body=body)
    except TimeoutError:
        return f"no answer in {MOST_REVIEW_SECONDS:.0f} s"
    except ApiError as error:
        return str(error)
    return ""


def _node(manifest: Mapping[str, Any]) -> Node:
    """Return what a node has for pods. A node that takes no pods, or is not ready, has nothing."""
    status = manifest.get("status") or {}
    ready = any(
        one.get("type") == "Ready" and one.get("status") == "True"
        for one in status.get("conditions") or ()
    )
    allocatable = {
        str(name): int(parse_quantity(str(amount)) or 0)
        for name, amount in (status.get("allocatable") or {}).items()
        if "/" in str(name)
    }
    usable = ready and not (manifest.get("spec") or {}).get("unschedulable")
    return Node(str(manifest["metadata"]["name"]), allocatable, usable)
