"""The pods that serve a PDCluster, and how this machine reaches their ports.

On a cluster, ports are forwarded through the API server; in a run of ``pdcluster up``, pods have
addresses of this machine.
"""

import os
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, Self

from pdcluster_connector.protocol.api_key import VARIABLE as ENGINES_VARIABLE, problem
from pdcluster_operator.adapters.api_server.client import KubeClient
from pdcluster_operator.adapters.api_server.kinds import BY_NAME
from pdcluster_operator.adapters.api_server.port_forward import PortForward
from pdcluster_operator.api.object_names import (
    CLUSTER_LABEL,
    POD_INDEX_LABEL,
    engine_of,
    labels_of,
    router_name,
)
from pdcluster_operator.api.spec.parse import parse_cluster
from pdcluster_operator.api.spec.types import Cluster, Role
from pdcluster_operator.cli.commands import in_context
from pdcluster_operator.cli.connection import read_named
from pdcluster_operator.cli.exits import Exit, UserError
from pdcluster_operator.plan.observed.pods import is_pod_ready
from pdcluster_operator.runtime.interfaces import Key

KEY_VARIABLE = "PDCLUSTER_API_KEY"
LEADER = "0"
ANSWERS = " answers "
"""In the text of a request that was answered, whatever the answer is."""


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod that is ready: its name, its address, and its engine's id (empty for a router)."""

    name: str
    address: str
    engine: str = ""


@dataclass(frozen=True, slots=True)
class Serving:
    """What serves now. Engines of several pods are named by their first pod.

    Attributes:
        key: the API key that requests need; None if they need none.
        local: it is one of ``pdcluster up``.
        context: of the kubeconfig, if the person named one.
    """

    cluster: Cluster
    routers: tuple[Pod, ...]
    prefill: tuple[Pod, ...]
    decode: tuple[Pod, ...]
    key: str | None
    local: bool = False
    context: str | None = None

    def router(self) -> Pod:
        """Return a router that is ready."""
        name = self.cluster.name
        if self.cluster.spec.router.pods == 0:
            raise UserError(
                f'PDCluster "{name}" has no router of the operator (spec.router), so no '
                "prompt can be sent to it; with another router, ask that one",
                Exit.REQUEST_FAILED,
            )
        if not self.routers:
            raise self.not_ready("router")
        return self.routers[0]

    def not_ready(self, what: str) -> UserError:
        """Return the error that nothing of a kind is ready, with the command that says why."""
        name = self.cluster.name
        where = "--local" if self.local else f"-n {self.cluster.namespace}"
        look = in_context(f"pdcluster status {name} {where}", self.context)
        said = f'no {what} of PDCluster "{name}" is ready; `{look}` says why'
        return UserError(said, Exit.NOT_READY)


async def find_serving(client: KubeClient, key: Key, *, local: bool = False) -> Serving:
    """Read a PDCluster and its pods.

    Raises:
        UserError: there is no such PDCluster, its spec cannot be read, or the API key is missing.
        ApiError: the API server refuses.
    """
    live = await read_named(client, key)
    parsed = parse_cluster(live)
    if parsed.errors:
        raise UserError(f"the spec cannot be read: {parsed.errors[0]}", Exit.MANIFEST)
    selector = {"labelSelector": f"{CLUSTER_LABEL}={key.name}"}
    listed = await client.call("GET", BY_NAME["Pod"].path(key.namespace), query=selector)
    service = await client.read(BY_NAME["Service"].path(key.namespace, router_name(key.name)))
    selected = ((service or {}).get("spec") or {}).get("selector") or {}
    pods = [
        pod
        for pod in listed.get("items") or ()
        if labels_of(pod).get(CLUSTER_LABEL) == key.name
        and is_pod_ready(pod)
        and "deletionTimestamp" not in pod["metadata"]
    ]
    engines: dict[Role, list[Pod]] = {role: [] for role in Role}
    routers = []
    for pod in sorted(pods, key=lambda one: str(one["metadata"]["name"])):
        engine = engine_of(pod)
        if engine is None:
            if _matches(selected, labels_of(pod)):
                routers.append(_pod(pod))
        elif labels_of(pod).get(POD_INDEX_LABEL, LEADER) == LEADER:
            engines[engine.role].append(_pod(pod, engine.logical))
    return Serving(
        parsed.cluster,
        tuple(routers),
        tuple(engines[Role.PREFILL]),
        tuple(engines[Role.DECODE]),
        api_key(parsed.cluster, os.environ),
        local,
        client.context,
    )


def _pod(pod: Mapping[str, Any], engine: str = "") -> Pod:
    return Pod(pod["metadata"]["name"], (pod.get("status") or {}).get("podIP") or "", engine)


def _matches(selector: Mapping[str, Any], labels: Mapping[str, Any]) -> bool:
    return bool(selector) and all(labels.get(name) == value for name, value in selector.items())


def api_key(cluster: Cluster, environment: Mapping[str, str]) -> str | None:
    """Return the API key that a PDCluster asks for, from a variable; None if it asks for none.

    The Secret is not read: few people may, and none needs to for this.
    """
    reference = cluster.spec.router.api_key_secret_ref
    if reference is None:
        return None
    key = environment.get(KEY_VARIABLE) or environment.get(ENGINES_VARIABLE)
    if key is None:
        raise UserError(
            f'PDCluster "{cluster.name}" asks for an API key (spec.router.apiKeySecretRef): set '
            f"{KEY_VARIABLE} to the value of key {reference.key!r} of Secret {reference.name!r}",
            Exit.USAGE,
        )
    if wrong := problem(key):
        raise UserError(wrong.replace(ENGINES_VARIABLE, KEY_VARIABLE), Exit.USAGE)
    return key


class Reach:
    """Base URLs of ports of pods. Use as an async context manager.

    Args:
        local: whether pods have addresses of this machine.
    """

    def __init__(self, client: KubeClient, namespace: str, *, local: bool) -> None:
        self._client, self._namespace, self._local = client, namespace, local
        self._open: dict[tuple[str, int], PortForward] = {}
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def url(self, pod: Pod, port: int) -> str:
        """Return where a port of a pod answers on this machine."""
        if self._local:
            return f"http://{pod.address}:{port}"
        forward = self._open.get((pod.name, port))
        if forward is None:
            forward = PortForward(self._client, self._namespace, pod.name, port)
            self._open[pod.name, port] = await self._stack.enter_async_context(forward)
        return forward.url

    def problem(self) -> str:
        """Return why a pod was not reached, in one sentence; empty if all were."""
        return next((one.problem for one in self._open.values() if one.problem), "")

    def explain(self, text: str) -> str:
        """Return what a failed request says, with its pod in the place of a forwarded port."""
        for (pod, port), forward in self._open.items():
            if text.startswith(f"{forward.url}/"):
                if forward.problem and ANSWERS not in text:
                    return forward.problem
                return text.replace(forward.url, f"port {port} of pod {pod}, ", 1)
        return text
