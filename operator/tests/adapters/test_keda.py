"""A real KEDA sets both numbers: by the operator's advice, and by what engines say of their load.

metrics -> Prometheus -> KEDA's operator -> KEDA's metrics server -> HorizontalPodAutoscaler ->
scale subresource -> operator. No engine runs here. The bounds of spec.autoscaling say what the
advice is, and a page has the samples of engines: e2e/tests/scraped_pair.py asks real ones.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Iterable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from operator_runs import GROUP, Operator, cluster, edit, owned, until
from real_api import RealApi, add_crds, running_api
from running_keda import METRICS, running_keda

from monitoring_files import OPERATIONS, scaled_objects
from prometheus_server import Prometheus

pytestmark = [pytest.mark.cluster, pytest.mark.soak, pytest.mark.timeout(1800)]

EXAMPLE = Path(__file__).parents[3] / "examples" / "autoscaled-keda.yaml"
SERVER = "http://prometheus.monitoring:9090"
ROLES = ("prefill", "decode")
PLACES = {
    "PDCluster": f"{GROUP}/namespaces/{{}}/pdclusters",
    "PrefillScaler": f"{GROUP}/namespaces/{{}}/prefillscalers",
    "ScaledObject": "/apis/keda.sh/v1alpha1/namespaces/{}/scaledobjects",
    "HorizontalPodAutoscaler": "/apis/autoscaling/v2/namespaces/{}/horizontalpodautoscalers",
}


@pytest.fixture(scope="module")
def real() -> Iterator[RealApi]:
    """A control plane with KEDA."""
    with running_api() as api:
        add_crds(api)
        with running_keda(api):
            yield api


class Scaled:
    """A PDCluster whose numbers KEDA sets, with its ScaledObjects `NAME-ROLE`."""

    def __init__(self, real: RealApi, namespace: str, name: str) -> None:
        self.real, self.namespace, self.name = real, namespace, name

    def create(
        self, documents: Iterable[dict[str, Any]], prometheus: str = "", example: str = ""
    ) -> None:
        """Create objects. The API server takes none with an unknown field.

        Args:
            prometheus: where triggers find it here.
            example: how their queries name the namespace, in place of which they name ours.
        """
        for document in documents:
            for trigger in document["spec"].get("triggers", ()):
                asked = trigger["metadata"]
                assert asked["serverAddress"] == SERVER
                assert example in asked["query"]
                asked["serverAddress"] = prometheus
                ours = re.sub('".*"', f'"{self.namespace}"', example)
                asked["query"] = asked["query"].replace(example, ours)
            path = PLACES[document["kind"]].format(self.namespace)
            status, answer = self.real.call("POST", f"{path}?fieldValidation=Strict", document)
            assert status == 201, answer

    def found(self, kind: str, name: str = "") -> Any:
        return self.real.call("GET", f"{PLACES[kind].format(self.namespace)}/{name}")[1]

    def condition(self, kind: str, role: str, name: str) -> tuple[str, str]:
        """The status and the reason of a condition of a role's ScaledObject or autoscaler."""
        hpa = "keda-hpa-" if kind == "HorizontalPodAutoscaler" else ""
        status = self.found(kind, f"{hpa}{self.name}-{role}")["status"]
        found = next(one for one in status["conditions"] if one["type"] == name)
        return found["status"], found["reason"]

    def external(self, role: str) -> str:
        """What KEDA's metrics server says of a role."""
        scaled = f"{self.name}-{role}"
        [metric] = self.found("ScaledObject", scaled)["status"]["externalMetricNames"]
        selector = f"labelSelector=scaledobject.keda.sh/name={scaled}"
        path = f"{METRICS}/namespaces/{self.namespace}/{metric}?{selector}"
        [item] = self.real.call("GET", path)[1]["items"]
        return str(item["value"])

    def numbers(self) -> tuple[int, int]:
        decode = self.found("PDCluster", self.name)["spec"].get("decode", {}).get("replicas", 1)
        return self.found("PrefillScaler", self.name)["spec"]["replicas"], decode

    def said(self) -> tuple[Any, ...]:
        scalers = [
            self.found(kind)["items"] for kind in ("ScaledObject", "HorizontalPodAutoscaler")
        ]
        return self.numbers(), scalers, (self.real.folder / "keda.log").read_text()[-5000:]

    def wait_for(self, prefill: int, decode: int) -> None:
        until(lambda: self.numbers() == (prefill, decode), 120, self.said)


def test_keda_sets_both_numbers_and_keeps_them_while_the_operator_is_down(
    real: RealApi, operator: Operator, namespace: str, tmp_path: Path
) -> None:
    scaled = Scaled(real, namespace, "advised")
    operator.start()
    # As a PodMonitor names it: the pod's own namespace, not that of a PDCluster.
    scraped = {f"127.0.0.1:{operator.metrics}": {"namespace": "pdcluster-system"}}
    with Prometheus(tmp_path, scraped) as prometheus:
        documents = yaml.safe_load_all(EXAMPLE.read_text())
        scaled.create(documents, prometheus.url, 'cluster_namespace="default"')

        def advise(prefill: int, decode: int) -> None:
            """Have the operator advise these numbers, and wait until KEDA has set them."""
            low = {"prefill": {"min": prefill, "max": 4}, "decode": {"min": decode, "max": 8}}
            high = {"prefill": {"max": prefill}, "decode": {"max": decode}}
            bounds = {role: {**low[role], **high[role]} for role in ROLES}
            edit(real, namespace, {"autoscaling": bounds}, "advised")
            scaled.wait_for(prefill, decode)

        advise(2, 3)
        until(lambda: len(owned(real, namespace, "StatefulSet")) == 5, 60, operator.said)
        assert [scaled.external(role) for role in ROLES] == ["2", "3"]
        assert {scaled.condition("ScaledObject", role, "Ready")[0] for role in ROLES} == {"True"}
        advise(1, 1)
        advise(2, 4)

        operator.stop()

        def is_blind(role: str) -> bool:
            """Whether KEDA and the autoscaler have each looked since, and found no value."""
            return (
                scaled.condition("ScaledObject", role, "Ready"),
                scaled.condition("HorizontalPodAutoscaler", role, "ScalingActive"),
            ) == (("False", "TriggerError"), ("False", "FailedGetExternalMetric"))

        for role in ROLES:
            until(partial(is_blind, role), 120, scaled.said)
        assert scaled.numbers() == (2, 4), "without the metric, each number stays"

        # That is the example's doing: KEDA takes 0 by default.
        triggers = scaled.found("ScaledObject", "advised-decode")["spec"]["triggers"]
        assert triggers[0]["metadata"].pop("ignoreNullValues") == "false"
        path = f"{PLACES['ScaledObject'].format(namespace)}/advised-decode"
        patch = {"spec": {"triggers": triggers}}
        assert real.call("PATCH", path, patch, "application/merge-patch+json")[0] == 200
        scaled.wait_for(2, 1)

        operator.start()
        scaled.wait_for(2, 4)


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve a folder's files; gives the address."""
    handler = partial(SimpleHTTPRequestHandler, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def load(waiting: list[int], used: list[list[float]]) -> str:
    """Return what Prometheus has of engines: prompts that wait, and how full each KV cache is."""
    ours = 'pdcluster_dev_cluster="llama",pdcluster_dev_role'
    lines = [
        f'vllm:num_requests_waiting{{{ours}="prefill",pdcluster_dev_engine="p{number}"}} {prompts}'
        for number, prompts in enumerate(waiting)
    ]
    for number, caches in enumerate(used):
        engine = f'{ours}="decode",pdcluster_dev_engine="d{number}"'
        lines.append(f"vllm:num_requests_waiting{{{engine}}} 100")
        lines += [
            f'vllm:kv_cache_usage_perc{{{engine},engine="{rank}"}} {part}'
            for rank, part in enumerate(caches)
        ]
    return "\n".join([*lines, 'vllm:kv_cache_usage_perc{pdcluster_dev_role="prefill"} 1', ""])


def test_keda_follows_the_load_of_both_roles_as_operations_md_says(
    real: RealApi, operator: Operator, namespace: str, tmp_path: Path
) -> None:
    scaled = Scaled(real, namespace, "llama")
    operator.start()
    page = tmp_path / "page"
    page.mkdir()
    (page / "metrics").write_text(load([0], [[0.1]]))
    with (
        served(page) as address,
        Prometheus(tmp_path, {address: {"namespace": namespace}}) as prometheus,
    ):
        scaler = cluster("llama") | {"kind": "PrefillScaler", "spec": {}}
        scaled.create([cluster("llama"), scaler])
        scaled.create(scaled_objects(OPERATIONS), prometheus.url, 'namespace="llm"')
        until(lambda: scaled.external("decode") == "100m", 60, scaled.said)
        assert scaled.numbers() == (1, 1)
        # Nine prompts, and two decode engines: one has two KV caches, of which 0.8 is the fuller.
        (page / "metrics").write_text(load([5, 4], [[0.5, 0.8], [0.9]]))
        scaled.wait_for(3, 3)
        (page / "metrics").write_text(load([16], [[0.7]] * 5))
        scaled.wait_for(4, 5)
