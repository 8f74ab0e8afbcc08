"""The anchor: the operator's own requests for one cluster, sent again by nobody but a client.

What they take says how fast this machine's API server is at that moment.
"""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

from operator_runs import CHILDREN
from real_api import RealApi

from bench_operator.account import is_child, is_dry_run, name_of
from bench_operator.calls import answered
from bench_operator.plane import RAW, SAMPLE
from pdcluster_operator.adapters.api_server.client import APPLY, KubeClient

SIDE_BY_SIDE = 32
MOST_CLUSTERS = 1000
"""A short anchor is too fast: it ends before its pods are made, and these need processors, too."""
SETTLE_SECONDS = 900.0
"""So long may the pods of one half take to become ready."""
RUN_PODS = ("StatefulSet", "Deployment")
PATHS = {**CHILDREN, "Secret": "/api/v1/namespaces/{}/secrets"}


class Anchor:
    """The children of one cluster as the operator wrote them."""

    def __init__(self, real: RealApi, name: str) -> None:
        bodies: dict[tuple[str, str], dict[str, Any]] = {}
        for line in real.writes():
            ours = line["objectRef"].get("namespace") == SAMPLE
            if (
                ours
                and is_child(line)
                and not is_dry_run(line)
                and _is_owned(line["requestObject"])
            ):
                bodies[name_of(line)] = _bare(line["requestObject"])
        self._name = name
        self._texts = [json.dumps(body) for body in bodies.values()]
        self._made = 0

    @property
    def children(self) -> int:
        """How many objects a cluster has."""
        return len(self._texts)

    async def objects_per_second(self, client: KubeClient, clusters: int) -> float:
        """Apply the children of so many more clusters, side by side."""
        bound = asyncio.Semaphore(SIDE_BY_SIDE)

        async def apply(body: dict[str, Any]) -> None:
            path = f"{PATHS[body['kind']].format(RAW)}/{body['metadata']['name']}"
            query = {"fieldManager": "raw", "force": "true"}
            async with bound:
                await answered(client, "PATCH", path, query=query, body=body, content=APPLY)

        began = time.monotonic()
        numbers = range(self._made, self._made + clusters)
        bodies = [body for number in numbers for body in self._bodies(f"raw-{number}")]
        self._made += clusters
        await asyncio.gather(*map(apply, bodies))
        return len(bodies) / (time.monotonic() - began)

    async def until_settled(self, client: KubeClient) -> None:
        """Wait until all pods of the anchor are ready: what follows does not share with them.

        Raises:
            TimeoutError: they are not.
        """
        expected = self._made * sum(map(_pods, map(json.loads, self._texts)))
        ends = time.monotonic() + SETTLE_SECONDS
        while (ready := await _ready_pods(client)) < expected:
            if time.monotonic() > ends:
                raise TimeoutError(f"{ready} of {expected} pods of the anchor are ready")
            await asyncio.sleep(5.0)

    def _bodies(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(text.replace(self._name, name)) for text in self._texts]


def _pods(body: dict[str, Any]) -> int:
    return int(body["spec"].get("replicas", 1)) if body["kind"] in RUN_PODS else 0


async def _ready_pods(client: KubeClient) -> int:
    """Count the anchor's pods that are ready, as the objects say that make them."""
    found = 0
    for kind in RUN_PODS:
        for item in (await answered(client, "GET", PATHS[kind].format(RAW)))["items"]:
            found += item["status"].get("readyReplicas", 0)
    return found


def _is_owned(body: dict[str, Any]) -> bool:
    """The connector's ConfigMap is the whole namespace's: it is written once, not for a cluster."""
    return "ownerReferences" in body["metadata"]


def _bare(body: dict[str, Any]) -> dict[str, Any]:
    """Return a body without its owner, which exists in the operator's namespace only."""
    unneeded = ("ownerReferences", "uid", "resourceVersion", "namespace")
    metadata = {key: value for key, value in body["metadata"].items() if key not in unneeded}
    return {**body, "metadata": metadata}
