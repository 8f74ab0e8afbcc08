"""The API `metrics.k8s.io` in a cluster of the tests: how much CPU the pods of each role use.

Kubernetes' autoscaler reads it. The numbers are the test's own, so that it says when the load is
high. The pods are real ones: each request is answered with those that its selector finds.
"""

from __future__ import annotations

import base64
import json
import ssl
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from cluster_run import ClusterRun

from authority import Authority
from cluster import network
from pdcluster_operator.api.object_names import ROLE_LABEL

GROUP, VERSION = "metrics.k8s.io", "v1beta1"
API = f"/apis/{GROUP}/{VERSION}"
SERVICE = "pod-metrics"
# The API server reads this when it looks for what may have to be deleted with a namespace.
RESOURCES = {
    "kind": "APIResourceList",
    "apiVersion": "v1",
    "groupVersion": f"{GROUP}/{VERSION}",
    "resources": [{"name": "pods", "namespaced": True, "kind": "PodMetrics", "verbs": ["list"]}],
}


class PodMetrics:
    """Answers the requests of the API server.

    ``millicores`` holds what each pod of a role uses; it may be replaced at any time.
    """

    def __init__(self, run: ClusterRun, millicores: Mapping[str, int]) -> None:
        self._run, self.millicores = run, millicores

    def answer(self, path: str) -> dict[str, Any] | None:
        """Return the document of a path with its query; None if there is none."""
        if path.partition("?")[0] == API:
            return RESOURCES
        namespaces = f"{API}/namespaces/"
        if not path.startswith(namespaces):
            return None
        found = self._run.proxy.get(f"/api/v1/namespaces/{path.removeprefix(namespaces)}")
        items = [self._metrics(pod) for pod in (found or {}).get("items", ())]
        return {"kind": "PodMetricsList", "apiVersion": f"{GROUP}/{VERSION}", "items": items}

    def _metrics(self, pod: Mapping[str, Any]) -> dict[str, Any]:
        metadata = pod["metadata"]
        used = self.millicores.get(metadata["labels"].get(ROLE_LABEL, ""), 0)
        return {
            "metadata": {"name": metadata["name"], "namespace": metadata["namespace"]},
            "timestamp": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "window": "1s",
            "containers": [{"name": "engine", "usage": {"cpu": f"{used}m", "memory": "1Gi"}}],
        }


@contextmanager
def pod_metrics(
    run: ClusterRun, folder: Path, millicores: Mapping[str, int]
) -> Iterator[PodMetrics]:
    """Register the API with our own cluster, behind a Service in the namespace of ``run``."""
    authority = Authority()
    files = authority.files(folder, "x", name=f"{SERVICE}.{run.namespace}.svc")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.certificate, files.key)
    metrics = PodMetrics(run, millicores)
    server = ThreadingHTTPServer((network.HOST, 0), _handler(metrics))
    # Each handler shakes hands in its own thread, so that no client keeps others waiting.
    server.socket = context.wrap_socket(
        server.socket, server_side=True, do_handshake_on_connect=False
    )
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        for manifest in _manifests(run.namespace, server.server_address[1], files.ca.read_bytes()):
            run.apply(manifest)
        name = f"apiservice/{VERSION}.{GROUP}"
        run.cluster.kubectl("wait", "--for=condition=Available", name, "--timeout=120s")
        yield metrics
    finally:
        unregister(run)
        server.shutdown()
        thread.join()
        server.server_close()


def unregister(run: ClusterRun) -> None:
    """While the API is registered and does not answer, no namespace can be deleted."""
    run.cluster.kubectl("delete", "apiservice", f"{VERSION}.{GROUP}", "--ignore-not-found")


def _manifests(namespace: str, port: int, authority: bytes) -> list[dict[str, Any]]:
    return [
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": SERVICE},
            "spec": {"ports": [{"name": "https", "port": 443, "targetPort": port}]},
        },
        {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {"name": SERVICE, "labels": {"kubernetes.io/service-name": SERVICE}},
            "addressType": "IPv4",
            "ports": [{"name": "https", "port": port}],
            "endpoints": [{"addresses": [network.HOST], "conditions": {"ready": True}}],
        },
        {
            "apiVersion": "apiregistration.k8s.io/v1",
            "kind": "APIService",
            "metadata": {"name": f"{VERSION}.{GROUP}"},
            "spec": {
                "group": GROUP,
                "version": VERSION,
                "groupPriorityMinimum": 100,
                "versionPriority": 100,
                "caBundle": base64.b64encode(authority).decode(),
                "service": {"name": SERVICE, "namespace": namespace, "port": 443},
            },
        },
    ]


def _handler(metrics: PodMetrics) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            document = metrics.answer(self.path)
            words = json.dumps(document or {}).encode()
            self.send_response(200 if document is not None else 404)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(words)))
            self.end_headers()
            self.wfile.write(words)

        def log_message(self, *_: object) -> None:
            """Say nothing: pytest shows what a test prints."""

    return Handler
