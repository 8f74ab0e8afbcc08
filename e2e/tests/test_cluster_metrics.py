"""Only a scraper that the spec names may read metrics, here one of another namespace."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from cluster_install import Installation
from cluster_run import ClusterRun
from kv_load import moved, text

from cluster.report import ClusterError
from images.for_cluster import load_engine_image, template
from pdcluster_operator.api.object_names import (
    ENGINE_METRICS_PORT,
    HTTP_PORT,
    LAUNCHER_PORT,
    ROUTER_METRICS_PORT,
    SIDE_CHANNEL_PORT,
)
from pdcluster_operator.api.spec.pod_templates import merge

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

MONITORING = "e2e-monitoring"
SCRAPER = [
    {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": MONITORING}},
        "podSelector": {"matchLabels": {"app": "prometheus"}},
    }
]
RECEIVED = "pdcluster_kv_received_bytes_total{"
# Asks for all pages at once: who is not let in waits for the whole timeout.
GET = """
import concurrent.futures, json, sys, urllib.request

def page(url):
    try:
        return urllib.request.urlopen(url, timeout=4).read().decode()
    except OSError as error:
        # A status would be an answer: the port must not be reached at all.
        if "timed out" in str(error) or "refused" in str(error):
            return ""
        raise

with concurrent.futures.ThreadPoolExecutor(16) as threads:
    print(json.dumps(list(threads.map(page, sys.argv[1:]))))
"""


class Clients:
    """A Prometheus and a stranger, in a namespace without a PDCluster."""

    def __init__(self, run: ClusterRun) -> None:
        self._run = run

    def kubectl(self, *words: str, stdin: str | None = None) -> str:
        return self._run.cluster.kubectl("--namespace", MONITORING, *words, stdin=stdin)

    def start(self, image: str, name: str) -> None:
        idle = ["python3", "-c", "import time; time.sleep(3600)"]
        container = {"name": "engine", "image": image, "command": idle}
        spec = {"terminationGracePeriodSeconds": 0, "containers": [container]}
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "labels": {"app": name}},
            "spec": merge(template("prefill").get("spec", {}), spec),
        }
        self.kubectl("apply", "--filename=-", stdin=json.dumps(pod))
        self.kubectl("wait", "--for=condition=Ready", f"pod/{name}", "--timeout=120s")

    def get(self, client: str, *asked: tuple[str, int]) -> list[str]:
        """What GETs of /metrics at (role, port) are answered; empty where nobody answers."""
        addresses = {role: self._run.pods(role)[0]["status"]["podIP"] for role, _ in asked}
        urls = [f"http://{addresses[role]}:{port}/metrics" for role, port in asked]
        return list(json.loads(self.kubectl("exec", client, "--", "python3", "-c", GET, *urls)))


@pytest.fixture
def clients(tiny: ClusterRun, operator: Installation) -> Iterator[Clients]:
    tiny.wait_ready()
    delete = ("delete", "namespace", MONITORING, "--ignore-not-found")
    tiny.cluster.kubectl(*delete)
    tiny.cluster.make_namespace(MONITORING)
    made = Clients(tiny)
    image = load_engine_image(tiny.cluster)
    for name in ("prometheus", "stranger"):
        made.start(image, name)
    yield made
    scrape_from(tiny, [])
    tiny.cluster.kubectl(*delete, "--wait=false")


def scrape_from(run: ClusterRun, peers: list[dict[str, object]]) -> None:
    patch = json.dumps({"spec": {"monitoring": {"scrapeFrom": peers}}})
    run.kubectl("patch", "pdc", run.name, "--type=merge", f"--patch={patch}")


def test_a_scraper_that_the_spec_names_reads_metrics_and_nothing_else(
    tiny: ClusterRun, clients: Clients
) -> None:
    moved(tiny, text(60, 7000))
    metrics = {
        "prefill": ENGINE_METRICS_PORT,
        "decode": ENGINE_METRICS_PORT,
        "router": ROUTER_METRICS_PORT,
    }
    every = list(metrics.items())
    for client in ("prometheus", "stranger"):
        assert clients.get(client, *every) == ["", "", ""], "nobody is let in by default"

    restarts = {role: tiny.restarts(role) for role in metrics}
    scrape_from(tiny, SCRAPER)
    closed = [("decode", port) for port in (HTTP_PORT, LAUNCHER_PORT, SIDE_CHANNEL_PORT)]
    answers: list[str] = []

    def let_in() -> bool:
        """Each pod's policy is enforced in its own time. It may end what is under way."""
        try:
            answers[:] = clients.get("prometheus", *every, *closed)
        except ClusterError as error:
            print(error)
            return False
        return all(answers[: len(every)])

    def shut_out() -> bool:
        try:
            return clients.get("prometheus", *every) == ["", "", ""]
        except ClusterError as error:
            print(error)
            return False

    took = tiny.wait("answers to the scraper", let_in, 120)
    print(f"the scraper is let in after {took:.1f} s")
    pages = dict(zip(metrics, answers, strict=False))
    assert RECEIVED in pages["decode"]
    assert "pdcluster_kv_leases_held{" in pages["prefill"]
    assert "vllm:generation_tokens_total{" in pages["decode"]
    assert "vllm_router_" in pages["router"]
    assert answers[len(every) :] == ["", "", ""], "an engine's API stays closed"
    assert clients.get("stranger", *every) == ["", "", ""], "no other pod of the namespace"
    assert {role: tiny.restarts(role) for role in metrics} == restarts

    scrape_from(tiny, [])
    tiny.wait("refusal", shut_out, 120)
    moved(tiny, text(60, 7001))


def test_clients_learn_neither_addresses_nor_engine_ids(tiny: ClusterRun) -> None:
    tiny.wait_ready()
    pods = [*tiny.pods("prefill"), *tiny.pods("decode")]
    secret = [pod["status"]["podIP"] for pod in pods] + [pod["metadata"]["name"] for pod in pods]
    secret += [tiny.engine_id(role) for role in ("prefill", "decode")]
    reply = tiny.complete(text(60, 7002))
    assert reply.kv_path["outcome"] == "transferred"
    assert {"prefill", "decode", "message"}.isdisjoint(reply.kv_path)
    streamed = tiny.complete(text(60, 7003), stream=True)
    assert streamed.status == 200
    assert streamed.text.count("data: {") > 1
    for answer in (reply, streamed):
        assert not [name for name in secret if name in answer.text]
        assert "_addr_" not in answer.text
