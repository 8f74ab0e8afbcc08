"""Kubernetes' own autoscaler sets the number of engines of each role, through a scale subresource.

No metrics are served here: the autoscaler scales to its bounds without any.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from operator_runs import GROUP, Operator, cluster, condition, create, edit, get, owned, until
from real_api import CRDS, running_api
from rights import CERTIFICATE_RULES, WATCHED_RULES

from conftest import allow

pytestmark = pytest.mark.cluster

CRD_FOLDER = Path(__file__).parents[3] / "crds"
HALF = {"type": "Utilization", "averageUtilization": 50}
CPU = {"type": "Resource", "resource": {"name": "cpu", "target": HALF}}


def autoscaler(kind: str, least: int, most: int) -> dict[str, Any]:
    return {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": {"name": kind.lower()},
        "spec": {
            "scaleTargetRef": {
                "apiVersion": "pdcluster.dev/v1alpha1",
                "kind": kind,
                "name": "tiny",
            },
            "minReplicas": least,
            "maxReplicas": most,
            "metrics": [CPU],
        },
    }


def create_scaler(real, namespace) -> str:
    """Create the PrefillScaler of `tiny` with one engine; the path of the namespace's scalers."""
    scalers = f"{GROUP}/namespaces/{namespace}/prefillscalers"
    body = {
        "apiVersion": "pdcluster.dev/v1alpha1",
        "kind": "PrefillScaler",
        "metadata": {"name": "tiny"},
        "spec": {"replicas": 1},
    }
    assert real.call("POST", scalers, body)[0] == 201
    return scalers


@pytest.mark.timeout(600)
def test_autoscalers_scale_both_roles_and_read_what_exists(real, operator, namespace):
    operator.start()
    create(real, namespace, cluster())
    until(lambda: len(owned(real, namespace, "StatefulSet")) == 2, 60, operator.said)
    scalers = create_scaler(real, namespace)

    def engines(role: str) -> list[str]:
        return [one for one in owned(real, namespace, "StatefulSet") if f"-{role}-" in one]

    def scale(path: str) -> tuple[int, int]:
        found = real.call("GET", f"{path}/tiny/scale")[1]
        return found["spec"]["replicas"], found["status"].get("replicas", 0)

    def said() -> tuple[Any, ...]:
        return owned(real, namespace), real.call("GET", path)[1], operator.said()

    path = f"/apis/autoscaling/v2/namespaces/{namespace}/horizontalpodautoscalers"
    assert real.call("POST", path, autoscaler("PDCluster", 3, 4))[0] == 201
    assert real.call("POST", path, autoscaler("PrefillScaler", 2, 4))[0] == 201
    clusters = f"{GROUP}/namespaces/{namespace}/pdclusters"
    until(lambda: scale(clusters) == (3, 3) and len(engines("decode")) == 3, 90, said)
    until(lambda: scale(scalers) == (2, 2) and len(engines("prefill")) == 2, 90, said)
    assert "prefill" not in get(real, namespace)["spec"] or (
        get(real, namespace)["spec"]["prefill"].get("replicas", 1) == 1
    ), "nobody writes the number into the PDCluster"
    for kind, role in (("pdclusters", "decode"), ("prefillscalers", "prefill")):
        found = real.call("GET", f"{GROUP}/namespaces/{namespace}/{kind}/tiny/scale")[1]
        assert f"pdcluster.dev/role={role}" in found["status"]["selector"]
    # Above the most, it scales down.
    change = {"spec": {"replicas": 9}}
    merge = "application/merge-patch+json"
    assert real.call("PATCH", f"{scalers}/tiny/scale", change, merge)[0] == 200
    until(lambda: scale(scalers)[0] == 4, 90, said)
    # The scaler's own bounds follow the decode engines.
    bounds = {"spec": {"minPercentOfDecode": 120, "maxPercentOfDecode": 100}}
    status, answer = real.call("PATCH", f"{scalers}/tiny", bounds, merge)
    assert status == 422, answer
    bounds = {"spec": {"maxPercentOfDecode": 100}}
    assert real.call("PATCH", f"{scalers}/tiny", bounds, merge)[0] == 200
    until(lambda: len(engines("prefill")) == 3, 90, said)
    # The status is written after the children.
    until(lambda: "asks for 4" in condition(real, namespace, "PrefillReady")["message"], 60, said)
    # Without the scaler, the PDCluster's own number holds.
    assert real.call("DELETE", f"{scalers}/tiny")[0] == 200
    until(lambda: len(engines("prefill")) == 1, 90, said)


def test_a_file_without_the_number_leaves_it_to_the_autoscaler(real, namespace):
    """As a Deployment does: the first apply gives 1, and later ones leave what a scale has set."""
    path = f"{GROUP}/namespaces/{namespace}/prefillscalers/tiny"
    applied = f"{path}?fieldManager=me"
    body = {
        "apiVersion": "pdcluster.dev/v1alpha1",
        "kind": "PrefillScaler",
        "metadata": {"name": "tiny"},
        "spec": {},
    }
    status, found = real.call("PATCH", applied, body, "application/apply-patch+yaml")
    assert (status, found["spec"]) == (201, {"replicas": 1})
    change = {"spec": {"replicas": 4}}
    assert real.call("PATCH", f"{path}/scale", change, "application/merge-patch+json")[0] == 200
    body["spec"] = {"maxPercentOfDecode": 300}
    status, found = real.call("PATCH", applied, body, "application/apply-patch+yaml")
    assert (status, found["spec"]) == (200, {"replicas": 4, "maxPercentOfDecode": 300})
    # `kubectl apply` without --server-side sends what differs from the file before.
    body["spec"] = {"maxPercentOfDecode": 200}
    status, found = real.call("PATCH", path, body, "application/merge-patch+json")
    assert (status, found["spec"]["replicas"]) == (200, 4)


@pytest.mark.timeout(600)
def test_the_operator_itself_sets_the_numbers_of_both_roles(real, operator, namespace):
    """With spec.autoscaling. No engine runs here, so the bounds alone say what is needed."""
    scalers = create_scaler(real, namespace)
    bounds = {"prefill": {"min": 2, "max": 3}, "decode": {"min": 3, "max": 4}}
    operator.start()
    create(real, namespace, cluster(autoscaling={**bounds, "itlMs": 40, "mode": "Apply"}))

    def numbers() -> tuple[int, int, int]:
        wanted = get(real, namespace)["spec"]
        prefill = real.call("GET", f"{scalers}/tiny")[1]["spec"]["replicas"]
        engines = len(owned(real, namespace, "StatefulSet"))
        return prefill, wanted["decode"]["replicas"], engines

    until(lambda: numbers() == (2, 3, 5), 120, operator.said)
    found = until(lambda: get(real, namespace)["status"].get("scaling"), 60, operator.said)
    assert (found["prefill"], found["decode"], found["limit"]) == (2, 3, "Unknown")
    until(
        lambda: condition(real, namespace, "ScalingTargetsMet")["reason"] == "NotMeasured",
        60,
        operator.said,
    )
    # What somebody else has written meanwhile stays: the operator's write is for what it has seen.
    managers = {one["manager"] for one in get(real, namespace)["metadata"]["managedFields"]}
    assert "pdcluster-operator-scale" in managers


@pytest.mark.timeout(600)
def test_an_operator_works_where_the_kind_is_not_installed():
    """A chart that was upgraded without its CRDs."""
    with running_api() as api:
        path = CRD_FOLDER / "pdcluster.dev_pdclusters.yaml"
        assert api.call("POST", CRDS, yaml.safe_load(path.read_text()))[0] == 201
        until(lambda: api.call("GET", f"{GROUP}/pdclusters")[0] == 200, 60, lambda: "no kind")
        name = {"metadata": {"name": "alone"}}
        assert api.call("POST", "/api/v1/namespaces", name)[0] == 201
        allow(api, "alone", [*WATCHED_RULES, CERTIFICATE_RULES[0]])
        operator = Operator(
            api, "run", "--namespace=alone", "--allow-host-path-models", "--sweep-seconds=2"
        )
        try:
            operator.start()
            create(api, "alone", cluster())
            until(lambda: len(owned(api, "alone", "StatefulSet")) == 2, 60, operator.said)
            edit(api, "alone", {"prefill": {"replicas": 2}})
            until(lambda: len(owned(api, "alone", "StatefulSet")) == 3, 60, operator.said)
            assert operator.page("/healthz")[0] == 200
        finally:
            operator.stop()
