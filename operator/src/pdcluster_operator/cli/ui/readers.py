"""Reads PDClusters: from an API server, or from the local mode of the same process."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Protocol

import aiohttp
from aiohttp.http_exceptions import HttpProcessingError

from pdcluster_operator.adapters.api_server.client import OK, KubeClient, NotFound
from pdcluster_operator.adapters.api_server.kinds import EVENT, LEASE, PDCLUSTER, POD
from pdcluster_operator.adapters.api_server.port_forward import PortForward
from pdcluster_operator.api.object_names import (
    CLUSTER_LABEL,
    ENGINE_METRICS_PORT,
    EngineName,
    engine_of,
    url_host,
)
from pdcluster_operator.cli.status_facts import Objects
from pdcluster_operator.cli.ui import series
from pdcluster_operator.plan.namespace_lease import lease_name
from pdcluster_operator.plan.observed.pods import is_pod_ready, metadata_of, status_of, text_of
from pdcluster_operator.runtime.interfaces import ApiError, Key

MOST_CLUSTERS = 500
MOST_PODS = 1000
MOST_EVENTS = 200
MOST_PAGES = 32
"""So many engines are asked for their metrics."""
AT_ONCE = 8
PAGE_SECONDS = 3.0
MOST_LINES = 20_000
MOST_BYTES = 4 << 20
WARNINGS = "regarding.kind=Pod,type=Warning"

Reading = series.Reading
Readings = dict[tuple[str, str], Reading]
"""By role and logical id of the engine."""
Page = Callable[[Mapping[str, Any]], AsyncGenerator[bytes, None]]
"""Returns the lines of a pod's metrics."""


class Unanswered(Exception):  # noqa: N818 - says what holds
    """An engine's metrics were not read; the message says why."""


class Reader(Protocol):
    """What the page is made from. ``period``: so many seconds lie between two looks."""

    period: float

    async def clusters(self) -> tuple[list[dict[str, Any]], bool]:
        """Return the PDClusters, and whether there are more of them."""

    async def objects(self, key: Key) -> tuple[Objects | None, list[str]]:
        """Return the objects of one PDCluster, and what could not be read.

        There are none if there is no PDCluster of this name.
        """

    async def readings(self, pods: Sequence[Mapping[str, Any]]) -> tuple[Readings, str]:
        """Return the metrics of engines, and why some are missing."""


class KubeReader:
    """Reads an API server. What this account may not read is missing, and a note says so.

    Args:
        namespace: that of the list; None for all, or, without the right, for ``own``.
        own: the namespace of the kubeconfig's context.
        on_this_machine: whether pods are processes of this machine. Their metrics are then read at
            their addresses, and else as `kubectl port-forward` does.
    """

    def __init__(
        self, client: KubeClient, namespace: str | None, own: str, *, on_this_machine: bool = False
    ) -> None:
        self._client, self._namespace, self._own = client, namespace, own
        self._local = on_this_machine
        self._page: Page = page_of_process if on_this_machine else self._page_by_forward
        self.period = 2.0 if on_this_machine else 5.0

    async def clusters(self) -> tuple[list[dict[str, Any]], bool]:
        """See :class:`Reader`."""
        query = {"limit": str(MOST_CLUSTERS)}
        try:
            page = await self._client.call("GET", PDCLUSTER.path(self._namespace), query=query)
        except ApiError as error:
            if error.reason != "Forbidden" or self._namespace is not None:
                raise
            page = await self._client.call("GET", PDCLUSTER.path(self._own), query=query)
        return list(page.get("items") or ()), bool(metadata_of(page).get("continue"))

    async def objects(self, key: Key) -> tuple[Objects | None, list[str]]:
        """See :class:`Reader`."""
        cluster = await self._client.read(PDCLUSTER.path(key.namespace, key.name))
        notes: list[str] = []
        if cluster is None:
            return None, notes
        ours = {"labelSelector": f"{CLUSTER_LABEL}={key.name}", "limit": str(MOST_PODS)}
        about = f"regarding.kind=PDCluster,regarding.name={key.name}"
        pods, events, warnings = await asyncio.gather(
            self._some(POD.path(key.namespace), ours, "pods", notes),
            self._some(EVENT.path(key.namespace), _selected(about), "events", notes),
            self._some(EVENT.path(key.namespace), _selected(WARNINGS), "events", notes),
        )
        names = {text_of(metadata_of(pod).get("name")) for pod in pods}
        events += [one for one in warnings if (one.get("regarding") or {}).get("name") in names]
        lease, known = await self._lease(key.namespace, cluster)
        now, context = self._client.now(), self._client.context
        found = Objects(cluster, pods, lease, known, events, now, self._local, context)
        return found, list(dict.fromkeys(notes))

    async def readings(self, pods: Sequence[Mapping[str, Any]]) -> tuple[Readings, str]:
        """See :class:`Reader`."""
        return await gathered(pods, self._page)

    async def _lease(
        self, namespace: str, cluster: Mapping[str, Any]
    ) -> tuple[dict[str, Any] | None, bool]:
        """Return the operator's Lease of a namespace, and whether this account may read it."""
        name = lease_name(text_of((cluster.get("spec") or {}).get("operatorClass")))
        try:
            return await self._client.read(LEASE.path(namespace, name)), True
        except ApiError:
            return None, False

    async def _some(
        self, path: str, query: Mapping[str, str], what: str, notes: list[str]
    ) -> list[dict[str, Any]]:
        try:
            return list((await self._client.call("GET", path, query=query)).get("items") or ())
        except NotFound:
            return []
        except ApiError as error:
            notes.append(f"The {what} cannot be read: {error}")
            return []

    async def _page_by_forward(self, pod: Mapping[str, Any]) -> AsyncGenerator[bytes, None]:
        metadata = metadata_of(pod)
        where = text_of(metadata.get("namespace")), text_of(metadata.get("name"))
        async with PortForward(self._client, *where, ENGINE_METRICS_PORT) as forward:
            try:
                async with aclosing(_lines(f"{forward.url}/metrics")) as lines:
                    async for line in lines:
                        yield line
            except Unanswered as error:
                raise Unanswered(forward.problem or str(error)) from error


async def page_of_process(pod: Mapping[str, Any]) -> AsyncGenerator[bytes, None]:
    """Yield the lines of the metrics of a pod that is a process of this machine.

    Raises:
        Unanswered: it does not answer.
    """
    address = text_of(status_of(pod).get("podIP"))
    if not address:
        raise Unanswered("its pod has no address yet")
    async with aclosing(
        _lines(f"http://{url_host(address)}:{ENGINE_METRICS_PORT}/metrics")
    ) as all_:
        async for line in all_:
            yield line


async def _lines(url: str) -> AsyncGenerator[bytes, None]:
    try:
        async with aiohttp.ClientSession() as http, http.get(url, allow_redirects=False) as answer:
            if answer.status != OK:
                raise ValueError(f"it answers {answer.status}")
            async for line in answer.content:
                yield line
    except (ValueError, aiohttp.ClientError, HttpProcessingError, OSError) as error:
        raise Unanswered(str(error) or type(error).__name__) from error


async def gathered(pods: Sequence[Mapping[str, Any]], page: Page) -> tuple[Readings, str]:
    """Read the metrics of engines side by side; return why the first one of them did not answer.

    The first pod of an engine has the metrics of all.
    """
    slots = asyncio.Semaphore(AT_ONCE)
    problems: list[str] = []

    async def read(engine: EngineName, pod: Mapping[str, Any]) -> tuple[tuple[str, str], Reading]:
        lines: list[str] = []
        size = 0
        try:
            async with slots, asyncio.timeout(PAGE_SECONDS), aclosing(page(pod)) as answer:
                async for line in answer:
                    size += len(line)
                    text = line.decode(errors="replace").rstrip()
                    if size > MOST_BYTES or len(lines) > MOST_LINES:
                        raise Unanswered(f"a page of more than {MOST_BYTES >> 20} MiB")
                    if series.is_read(text):
                        lines.append(text)
        except TimeoutError:
            problems.append(f"{engine.stateful_set}: no answer within {PAGE_SECONDS:.0f} s")
        except Unanswered as error:
            problems.append(f"{engine.stateful_set}: {error}")
        return (engine.role.value, engine.logical), series.reading_of(lines)

    leaders = {engine: pod for pod in pods if (engine := engine_of(pod)) and _leads(pod, engine)}
    asked = [(engine, pod) for engine, pod in leaders.items() if is_pod_ready(pod)][:MOST_PAGES]
    pages = await asyncio.gather(*(read(engine, pod) for engine, pod in asked))
    return {engine: reading for engine, reading in pages if reading}, next(iter(problems), "")


def _leads(pod: Mapping[str, Any], engine: EngineName) -> bool:
    return text_of(metadata_of(pod).get("name")) == engine.pod()


def _selected(fields: str) -> dict[str, str]:
    return {"fieldSelector": fields, "limit": str(MOST_EVENTS)}
