"""On a real API server: what the pages have gateways make is taken by the gateways' own CRDs.

The operator makes none of it. Here an InferencePool is made of the values that docs/routers.md has
for llm-d's chart, and the HTTPRoute is that of docs/operations.md. No gateway runs.
Sources: https://github.com/kubernetes-sigs/gateway-api and its inference extension
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from operator_runs import CHILDREN, Operator, cluster, create, until
from other_operators import install
from real_api import RealApi, add_crds, running_api

from cluster import binaries

pytestmark = [pytest.mark.cluster, pytest.mark.soak]

ROOT = Path(__file__).parents[3]
CRDS = {
    binaries.INFERENCE: "config/crd/bases/inference.networking.k8s.io_inferencepools.yaml",
    binaries.GATEWAY: "config/crd/standard/gateway.networking.k8s.io_httproutes.yaml",
}
POOLS = "/apis/inference.networking.k8s.io/v1/namespaces/{}/inferencepools"
ROUTES = "/apis/gateway.networking.k8s.io/v1/namespaces/{}/httproutes"


@pytest.fixture(scope="module")
def real() -> Iterator[RealApi]:
    with running_api() as api:
        add_crds(api)
        for program, file in CRDS.items():
            install(api, yaml.safe_load((binaries.sources(program) / file).read_text()))
        yield api


def block(page: str, word: str) -> Any:
    """Return the one block of a page with this word, as YAML."""
    blocks = (ROOT / "docs" / page).read_text().split("```")[1::2]
    [found] = [one for one in blocks if word in one]
    return yaml.safe_load(found.partition("\n")[2])


def pool() -> dict[str, Any]:
    """Return the InferencePool that llm-d's chart makes of the page's values."""
    router = block("routers.md", "modelServers:")["router"]
    servers = router["modelServers"]
    return {
        "apiVersion": "inference.networking.k8s.io/v1",
        "kind": "InferencePool",
        "metadata": {"name": "behind-llm-d"},
        "spec": {
            "selector": {"matchLabels": servers["matchLabels"]},
            "targetPorts": servers["targetPorts"],
            "endpointPickerRef": {
                "name": "epp",
                "port": {"number": 9002},
                **router["inferencePool"],
            },
        },
    }


def strictly(real: RealApi, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    return real.call("POST", f"{path}?fieldValidation=Strict", body)


def test_a_pool_of_the_pages_values_holds_the_first_pod_of_each_engine(
    real: RealApi, operator: Operator, namespace: str
) -> None:
    status, made = strictly(real, POOLS.format(namespace), pool())
    assert status == 201, made
    assert made["spec"]["endpointPickerRef"]["failureMode"] == "FailClose"
    wanted = yaml.safe_load((ROOT / "examples" / "llm-d.yaml").read_text())
    # One engine more, of two pods: only the first of them answers requests.
    wanted["spec"]["decode"] |= {"replicas": 2, "parallelism": {"nodes": 2, "tensor": 2}}
    operator.start()
    create(real, namespace, wanted)
    labels = made["spec"]["selector"]["matchLabels"]
    query = ",".join(f"{name}={value}" for name, value in labels.items())
    path = f"{CHILDREN['Pod'].format(namespace)}?labelSelector={query}"

    def roles() -> list[str]:
        pods = real.call("GET", path)[1]["items"]
        return sorted(pod["metadata"]["labels"]["llm-d.ai/role"] for pod in pods)

    until(
        lambda: roles() == ["decode", "decode", "prefill"], 60, lambda: (roles(), operator.said())
    )
    [port] = {one["number"] for one in made["spec"]["targetPorts"]}
    for pod in real.call("GET", path)[1]["items"]:
        parts = {
            one["name"]: one
            for key in ("initContainers", "containers")
            for one in pod["spec"].get(key, ())
        }
        if pod["metadata"]["labels"]["llm-d.ai/role"] == "decode":
            assert f"--port={port}" in parts["routing-proxy"]["args"]
        else:
            assert port in {one["containerPort"] for one in parts["engine"]["ports"]}


def test_the_pages_route_leads_to_a_port_of_the_routers_service(
    real: RealApi, operator: Operator, namespace: str
) -> None:
    status, made = strictly(real, ROUTES.format(namespace), block("operations.md", "HTTPRoute"))
    assert status == 201, made
    operator.start()
    create(real, namespace, cluster("llama"))
    [backend] = made["spec"]["rules"][0]["backendRefs"]
    path = f"{CHILDREN['Service'].format(namespace)}/{backend['name']}"
    until(lambda: real.call("GET", path)[0] == 200, 60, operator.said)
    ports = real.call("GET", path)[1]["spec"]["ports"]
    assert backend["port"] in {one["port"] for one in ports}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"failureMode": "FailClosed"}, "failureMode"),
        ({"port": None}, "port is required"),
    ],
)
def test_the_pools_crd_judges(
    real: RealApi, namespace: str, change: dict[str, Any], words: str
) -> None:
    wrong = pool()
    wrong["spec"]["endpointPickerRef"] |= change
    status, answer = strictly(real, POOLS.format(namespace), wrong)
    assert status == 422
    assert words in answer["message"]
