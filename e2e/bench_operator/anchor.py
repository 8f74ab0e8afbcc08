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
MOST_CLUSTERS = 200
"""More would say the same. Their objects would be half of what the API server has to hold."""
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

    def _bodies(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(text.replace(self._name, name)) for text in self._texts]


def _is_owned(body: dict[str, Any]) -> bool:
    """The connector's ConfigMap is the whole namespace's: it is written once, not for a cluster."""
    return "ownerReferences" in body["metadata"]


def _bare(body: dict[str, Any]) -> dict[str, Any]:
    """Return a body without its owner, which exists in the operator's namespace only."""
    unneeded = ("ownerReferences", "uid", "resourceVersion", "namespace")
    metadata = {key: value for key, value in body["metadata"].items() if key not in unneeded}
    return {**body, "metadata": metadata}
