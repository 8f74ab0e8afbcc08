"""A real KEDA sets the numbers that the operator advises, as examples/autoscaled-keda.yaml says.

operator -> /metrics -> Prometheus -> KEDA's operator -> KEDA's metrics server ->
HorizontalPodAutoscaler -> scale subresource -> operator. No engine runs here: the bounds of
spec.autoscaling say what is needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from operator_runs import GROUP, Operator, edit, get, owned, until
from real_api import RealApi, add_crds, running_api
from running_keda import METRICS, running_keda

from prometheus_server import Prometheus

pytestmark = [pytest.mark.cluster, pytest.mark.soak, pytest.mark.timeout(1800)]

EXAMPLE = Path(__file__).parents[3] / "examples" / "autoscaled-keda.yaml"
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


def condition(document: dict[str, Any], kind: str) -> tuple[str, str]:
    """The status and the reason of a condition."""
    found = next(one for one in document["status"]["conditions"] if one["type"] == kind)
    return found["status"], found["reason"]


def test_keda_sets_both_numbers_and_keeps_them_while_the_operator_is_down(
    real: RealApi, operator: Operator, namespace: str, tmp_path: Path
) -> None:
    operator.start()
    # As a PodMonitor names it: the pod's own namespace, not that of a PDCluster.
    scraped = {f"127.0.0.1:{operator.metrics}": {"namespace": "pdcluster-system"}}
    with Prometheus(tmp_path, scraped) as prometheus:
        text = EXAMPLE.read_text()
        for example, here in (
            ("http://prometheus.monitoring:9090", prometheus.url),
            ('cluster_namespace="default"', f'cluster_namespace="{namespace}"'),
        ):
            assert text.count(example) == len(ROLES)
            text = text.replace(example, here)
        for document in yaml.safe_load_all(text):
            path = PLACES[document["kind"]].format(namespace)
            status, answer = real.call("POST", path, document)
            assert status == 201, answer

        def found(kind: str, name: str = "") -> Any:
            return real.call("GET", f"{PLACES[kind].format(namespace)}/{name}")[1]

        def numbers() -> tuple[int, int]:
            decode = get(real, namespace, "advised")["spec"].get("decode", {}).get("replicas", 1)
            return found("PrefillScaler", "advised")["spec"]["replicas"], decode

        def said() -> tuple[Any, ...]:
            scalers = [found(kind)["items"] for kind in ("ScaledObject", "HorizontalPodAutoscaler")]
            return numbers(), scalers, (real.folder / "keda.log").read_text()[-5000:]

        def advise(prefill: int, decode: int) -> None:
            """Have the operator advise these numbers, and wait until KEDA has set them."""
            low = {"prefill": {"min": prefill, "max": 4}, "decode": {"min": decode, "max": 8}}
            high = {"prefill": {"max": prefill}, "decode": {"max": decode}}
            bounds = {role: {**low[role], **high[role]} for role in ROLES}
            edit(real, namespace, {"autoscaling": bounds}, "advised")
            until(lambda: numbers() == (prefill, decode), 120, said)

        advise(2, 3)
        until(lambda: len(owned(real, namespace, "StatefulSet")) == 5, 60, operator.said)
        for role, number in zip(ROLES, (2, 3), strict=True):
            scaled = found("ScaledObject", f"advised-{role}")
            assert condition(scaled, "Ready")[0] == "True"
            [metric] = scaled["status"]["externalMetricNames"]
            selector = f"labelSelector=scaledobject.keda.sh/name=advised-{role}"
            path = f"{METRICS}/namespaces/{namespace}/{metric}?{selector}"
            [item] = real.call("GET", path)[1]["items"]
            assert item["value"] == str(number)
        advise(1, 1)
        advise(2, 4)

        operator.stop()

        def is_blind(role: str) -> bool:
            """Whether KEDA and the autoscaler have each looked since, and found no value."""
            scaled = found("ScaledObject", f"advised-{role}")
            autoscaler = found("HorizontalPodAutoscaler", f"keda-hpa-advised-{role}")
            return condition(scaled, "Ready") == ("False", "TriggerError") and condition(
                autoscaler, "ScalingActive"
            ) == ("False", "FailedGetExternalMetric")

        for role in ROLES:
            until(partial(is_blind, role), 120, said)
        assert numbers() == (2, 4), "without the metric, each number stays"

        # That is the example's doing: KEDA takes 0 by default.
        triggers = found("ScaledObject", "advised-decode")["spec"]["triggers"]
        assert triggers[0]["metadata"].pop("ignoreNullValues") == "false"
        path = f"{PLACES['ScaledObject'].format(namespace)}/advised-decode"
        patch = {"spec": {"triggers": triggers}}
        assert real.call("PATCH", path, patch, "application/merge-patch+json")[0] == 200
        until(lambda: numbers() == (2, 1), 120, said)

        operator.start()
        until(lambda: numbers() == (2, 4), 120, said)
