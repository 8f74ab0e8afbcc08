"""docs/metrics.md tells of every metric of the connector, and of nothing that is not there."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from metrics_page import check_section
from pdcluster_connector.vllm.connector import PDClusterConnector

pytestmark = pytest.mark.vllm

COMMON = ["model_name", "engine"]


def test_metrics_page_tells_of_the_connectors_metrics() -> None:
    made = []

    def kept(metric: type) -> object:
        def make(**options: object) -> object:
            made.append(metric(registry=CollectorRegistry(), **options))
            return made[-1]

        return make

    PDClusterConnector.build_prom_metrics(
        SimpleNamespace(kv_transfer_config=None),
        {Gauge: kept(Gauge), Counter: kept(Counter), Histogram: kept(Histogram)},
        COMMON,
        {0: ["m", "0"]},
    )
    assert len(made) > 5
    check_section("connector", made, set(COMMON))
