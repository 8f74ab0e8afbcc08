"""Kubernetes' own autoscaler follows the operator's advice, by the metric that the operator shows.

The path is that of examples/autoscaled-hpa.yaml: operator -> /metrics -> external.metrics.k8s.io ->
HorizontalPodAutoscaler -> scale subresource -> operator. In place of Prometheus and its adapter, a
small server reads the operator's page at each question. No engine runs here: the bounds of
spec.autoscaling say what is needed.
"""

from __future__ import annotations

import json
import re
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
import yaml
from operator_runs import GROUP, Operator, cluster, create, edit, get, owned, until
from real_api import RealApi

pytestmark = pytest.mark.cluster

EXAMPLE = Path(__file__).parents[3] / "examples" / "autoscaled-hpa.yaml"
API = "external.metrics.k8s.io/v1beta1"
METRIC = "pdcluster_advised_engines"
SERVICES = "/api/v1/namespaces/default/services"
REGISTRATIONS = "/apis/apiregistration.k8s.io/v1/apiservices"


def values(page: str, wanted: dict[str, str]) -> list[dict[str, Any]]:
    """The samples of the operator's page that have these labels."""
    found = []
    for labels, value in re.findall(rf"^{METRIC}\{{(.*)\}} (\S+)$", page, re.MULTILINE):
        own = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        if wanted.items() <= own.items():
            moment = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            found.append(
                {
                    "metricName": METRIC,
                    "metricLabels": own,
                    "timestamp": moment,
                    "value": str(int(float(value))),
                }
            )
    return found


@contextmanager
def external_metrics(real: RealApi, operator: Operator) -> Iterator[None]:
    """Serve the operator's metric as a metrics API, and register it with the API server."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            parts = urlsplit(self.path)
            selector = parse_qs(parts.query).get("labelSelector", [""])[0]
            resource = {"name": METRIC, "namespaced": True, "kind": "ExternalMetricValueList"}
            answer: dict[str, Any] = {
                "kind": "APIResourceList",
                "apiVersion": "v1",
                "groupVersion": API,
                "resources": [resource | {"verbs": ["get"]}],
            }
            if parts.path.endswith(f"/{METRIC}"):
                page = operator.page("/metrics", operator.metrics)[1]
                wanted = dict(one.split("=") for one in selector.split(","))
                items = values(page, wanted)
                answer = {"kind": "ExternalMetricValueList", "apiVersion": API, "items": items}
            body = json.dumps(answer | {"metadata": {}}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    keys = real.folder / "keys"
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(keys / "apiserver.crt", keys / "apiserver.key")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    port = server.server_address[1]
    group, version = API.split("/")
    name = {"metadata": {"name": "advised-engines"}}
    service = {"apiVersion": "v1", "kind": "Service", **name}
    service["spec"] = {"type": "ExternalName", "externalName": "localhost"}
    registration = {
        "apiVersion": "apiregistration.k8s.io/v1",
        "kind": "APIService",
        "metadata": {"name": f"{version}.{group}"},
        "spec": {
            "group": group,
            "version": version,
            "insecureSkipTLSVerify": True,
            "groupPriorityMinimum": 100,
            "versionPriority": 100,
            "service": {"name": "advised-engines", "namespace": "default", "port": port},
        },
    }
    try:
        assert real.call("POST", SERVICES, service)[0] == 201
        assert real.call("POST", REGISTRATIONS, registration)[0] == 201
        until(lambda: real.call("GET", f"/apis/{API}")[0] == 200, 60, lambda: "not served")
        yield
    finally:
        real.call("DELETE", f"{REGISTRATIONS}/{version}.{group}")
        real.call("DELETE", f"{SERVICES}/advised-engines")
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.timeout(600)
def test_autoscalers_set_the_numbers_that_the_operator_advises(real, operator, namespace):
    scalers = f"{GROUP}/namespaces/{namespace}/prefillscalers"
    text = EXAMPLE.read_text().replace("external-", "tiny-").replace(": external", ": tiny")
    documents = [one for one in yaml.safe_load_all(text) if one["kind"] != "PDCluster"]
    bounds = {"prefill": {"min": 2, "max": 4}, "decode": {"min": 3, "max": 8}}
    advice = {"itlMs": 40, "mode": "Advise"}
    operator.start()
    create(real, namespace, cluster(autoscaling={**bounds, **advice}))
    paths = {
        "PrefillScaler": scalers,
        "HorizontalPodAutoscaler": (
            f"/apis/autoscaling/v2/namespaces/{namespace}/horizontalpodautoscalers"
        ),
    }
    assert len(documents) == 3
    with external_metrics(real, operator):
        for document in documents:
            assert real.call("POST", paths[document["kind"]], document)[0] == 201

        def numbers() -> tuple[int, int, int]:
            decode = get(real, namespace)["spec"].get("decode", {}).get("replicas", 1)
            prefill = real.call("GET", f"{scalers}/tiny")[1]["spec"]["replicas"]
            return prefill, decode, len(owned(real, namespace, "StatefulSet"))

        def said() -> tuple[Any, ...]:
            found = real.call("GET", paths["HorizontalPodAutoscaler"])[1]
            return numbers(), found, operator.said()

        until(lambda: numbers() == (2, 3, 5), 120, said)
        # Other advice is followed, too.
        wider = {"prefill": {"min": 1, "max": 4}, "decode": {"min": 4, "max": 8}}
        edit(real, namespace, {"autoscaling": {**wider, **advice}})
        until(lambda: numbers()[1:] == (4, 6), 180, said)
