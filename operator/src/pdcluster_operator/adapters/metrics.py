"""What the operator and its webhook show: metrics for Prometheus, and health for the kubelet."""

import re
from collections.abc import Awaitable, Callable, Container, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from heapq import nlargest, nsmallest

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from pdcluster_connector import listening
from pdcluster_operator.api.conditions import ConditionType, StatusReason, find_condition
from pdcluster_operator.api.spec.pod_templates import as_mapping
from pdcluster_operator.api.spec.types import Role
from pdcluster_operator.runtime.control_loop import ControlLoop

LATENCY = (0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_RESOURCE = re.compile(
    r"/apis?/(?:[^/]+/)?v[^/]+(?:/namespaces/[^/]+)?/([a-z]+)(?:/[^/]+(/status)?)?$"
)
_READY_OF_ALL = re.compile(r"([0-9]{1,6})/([0-9]{1,6})")
MOST_SHOWN = 200
"""PDClusters that a metric names at most, so that no crowd fills the memory of Prometheus."""


class Metrics:
    """All metrics of one process, in a registry of its own.

    Attributes:
        loop: the control loop that is read at every scrape; None in the webhook's process.
    """

    def __init__(self) -> None:
        self.loop: ControlLoop | None = None
        self.registry = registry = CollectorRegistry()

        def counter(name: str, about: str, *labels: str) -> Counter:
            return Counter(name, about, labels, registry=registry)

        def gauge(name: str, about: str, *labels: str) -> Gauge:
            return Gauge(name, about, labels, registry=registry)

        def seconds(name: str, about: str, *labels: str) -> Histogram:
            return Histogram(name, about, labels, buckets=LATENCY, registry=registry)

        cluster = "cluster_namespace", "cluster"
        self.reconciles = counter(
            "pdcluster_reconciles", "Reconciles by outcome: done or failed.", "outcome"
        )
        self.reconcile_seconds = seconds(
            "pdcluster_reconcile_seconds", "Seconds that one reconcile took."
        )
        self.queue_depth = gauge("pdcluster_queue_depth", "Clusters that wait for a worker.")
        self.clusters = gauge("pdcluster_clusters", "PDClusters that are known.")
        self.local_prefill_share = gauge(
            "pdcluster_local_prefill_share",
            "Share, 0 to 1, of a PDCluster's latest prompts that decode computed instead of "
            f"prefill. The {MOST_SHOWN} PDClusters with the largest shares are shown.",
            *cluster,
        )
        self.not_ready_clusters = gauge(
            "pdcluster_not_ready_clusters", "PDClusters whose condition Ready is not True."
        )
        self.not_ready = gauge(
            "pdcluster_not_ready",
            "1 for a PDCluster whose condition Ready is not True, with its reason. "
            f"The first {MOST_SHOWN} by name are shown.",
            *cluster,
            "reason",
        )
        shown = f"{MOST_SHOWN} PDClusters are shown at most, those first that are not Ready."
        self.condition = gauge(
            "pdcluster_condition",
            f"1 for the status and the reason that each condition of a PDCluster has. {shown}",
            *cluster,
            *("condition", "status", "reason"),
        )
        self.engines = gauge(
            "pdcluster_engines",
            f"Engines of a PDCluster, by role and by whether they are ready or waiting. {shown}",
            *cluster,
            *("role", "state"),
        )
        self.advised = gauge(
            "pdcluster_advised_engines",
            "Engines that a PDCluster with spec.autoscaling needs, by role. An autoscaler can set "
            f"its replicas to this number. {shown}",
            *cluster,
            "role",
        )
        self.unlisted = gauge(
            "pdcluster_unlisted_namespace",
            "1 for a watched namespace whose objects could not be listed so far. "
            "Nothing is done for its PDClusters.",
            "cluster_namespace",
        )
        calls = "Calls to the API server; code 0 is no answer."
        self.api_calls = counter("pdcluster_api_calls", calls, "method", "resource", "code")
        took = "Seconds that one call to the API server took."
        self.api_seconds = seconds("pdcluster_api_seconds", took, "method")
        reviews = "Admission reviews by operation and outcome: allowed or refused."
        self.reviews = counter("pdcluster_webhook_reviews", reviews, "operation", "outcome")
        refusals = "Rules for which the webhook refused a manifest."
        self.refusals = counter("pdcluster_webhook_refusals", refusals, "rule")
        self.certificate_expiry = gauge(
            "pdcluster_webhook_certificate_expiry_seconds",
            "When the webhook's certificate expires, in seconds since the epoch.",
        )

    def reconciled(self, seconds: float, failed: bool) -> None:
        """Count one reconcile."""
        self.reconciles.labels("failed" if failed else "done").inc()
        self.reconcile_seconds.observe(seconds)

    def called(self, method: str, path: str, status: int, seconds: float) -> None:
        """Count one call to the API server; see ``api_server.client.Seen``."""
        self.api_calls.labels(method, resource_of(path), str(status)).inc()
        self.api_seconds.labels(method).observe(seconds)

    def text(self) -> bytes:
        """Return everything in Prometheus' text format."""
        if self.loop is not None:
            self._read(self.loop)
        return generate_latest(self.registry)

    def _read(self, loop: ControlLoop) -> None:
        self.queue_depth.set(loop.queue.depth)
        self.clusters.set(len(loop.store.keys()))
        self.local_prefill_share.clear()  # of clusters that are gone, too
        shares = loop.local_prefill_shares()
        for name in nlargest(MOST_SHOWN, shares, key=shares.__getitem__):
            self.local_prefill_share.labels(*name).set(shares[name])
        self.not_ready.clear()
        reasons = loop.not_ready()
        self.not_ready_clusters.set(len(reasons))
        for name in nsmallest(MOST_SHOWN, reasons):
            self.not_ready.labels(*name, reasons[name]).set(1)
        self._read_statuses(loop.statuses(), reasons)
        self.unlisted.clear()
        for namespace in nsmallest(MOST_SHOWN, loop.unlisted):
            self.unlisted.labels(namespace).set(1)

    def _read_statuses(
        self, statuses: Mapping[tuple[str, str], object], not_ready: Container[tuple[str, str]]
    ) -> None:
        self.condition.clear()
        self.engines.clear()
        self.advised.clear()
        for name in nsmallest(MOST_SHOWN, statuses, key=lambda name: (name not in not_ready, name)):
            status = statuses[name]
            for kind in ConditionType:
                found = find_condition(status, kind)
                reason = found.get("reason") or StatusReason.NOT_SEEN_YET
                self.condition.labels(*name, kind, found.get("status") or "Unknown", reason).set(1)
            for role in Role:
                needed = as_mapping(as_mapping(status).get("scaling")).get(role.value)
                if isinstance(needed, int):
                    self.advised.labels(*name, role.value).set(needed)
                if counts := _READY_OF_ALL.fullmatch(str(as_mapping(status).get(role.value))):
                    ready, wanted = int(counts[1]), int(counts[2])
                    self.engines.labels(*name, role.value, "ready").set(ready)
                    self.engines.labels(*name, role.value, "waiting").set(wanted - ready)


def resource_of(path: str) -> str:
    """Return the plural of a URL path, with its subresource: a label with few values."""
    match = _RESOURCE.fullmatch(path)
    return f"{match[1]}{match[2] or ''}" if match else "other"


@dataclass(frozen=True, slots=True, kw_only=True)
class PageOptions:
    """Where a process serves its pages: an address and two ports."""

    host: str = "0.0.0.0"  # noqa: S104 - a pod's own network
    health_port: int = 8081
    metrics_port: int = 8080


async def serve_pages(
    stack: AsyncExitStack,
    options: PageOptions,
    readiness: Callable[[], Awaitable[str | None]],
    metrics: Metrics,
) -> None:
    """Serve ``/healthz`` and ``/readyz`` on one port and ``/metrics`` on another.

    Args:
        stack: the servers end with it.
        readiness: returns why the process is not ready; None when it is.
    """

    async def healthz(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def readyz(_: web.Request) -> web.Response:
        wrong = await readiness()
        return web.Response(status=200 if wrong is None else 503, text=f"{wrong or 'ok'}\n")

    async def exposition(_: web.Request) -> web.Response:
        return web.Response(
            body=metrics.text(), headers={"Content-Type": "text/plain; version=0.0.4"}
        )

    listening.allow_many_connections()  # each launcher holds one while it has no news
    health, numbers = web.Application(), web.Application()
    health.router.add_get("/healthz", healthz)
    health.router.add_get("/readyz", readyz)
    numbers.router.add_get("/metrics", exposition)
    for app, port in ((health, options.health_port), (numbers, options.metrics_port)):
        listener = stack.enter_context(listening.open_port(options.host, port))
        guard = await listening.serve(app, listener)
        stack.push_async_callback(guard.close)
