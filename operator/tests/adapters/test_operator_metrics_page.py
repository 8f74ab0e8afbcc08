"""docs/metrics.md tells of every metric of the operator, and of nothing that is not there."""

from __future__ import annotations

import re

from metrics_page import PAGE, check_section, documented
from pdcluster_operator.adapters.metrics import Metrics

EXPRESSIONS = re.compile(r"```promql\n(.*?)```", re.DOTALL)
USED = re.compile(r"\b(?:pdcluster_(?:kv|webhook|reconcile|api|queue|clusters)\w*|vllm:\w+)")


def test_metrics_page_tells_of_the_operators_metrics():
    metrics = [each for each in vars(Metrics()).values() if hasattr(each, "describe")]
    assert len(metrics) > 5
    check_section("operator", metrics, set())


def test_metrics_page_asks_only_for_metrics_that_it_describes():
    expressions = EXPRESSIONS.findall(PAGE.read_text())
    assert len(expressions) > 5
    known = documented()
    for expression in expressions:
        names = USED.findall(expression)
        assert names, expression
        for name in names:
            assert re.sub(r"_(bucket|sum|count)$", "", name) in known, name
