"""docs/metrics.md tells of every metric of the operator, and of nothing that is not there."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jsonschema
import yaml

from metrics_page import PAGE, check_section, documented
from pdcluster_operator.adapters.metrics import Metrics
from pdcluster_operator.api.rules.validate import check_manifest

ROOT = Path(__file__).resolve().parents[3]
SNIPPETS = re.compile(r"```yaml\n(.*?)```", re.DOTALL)
EXPRESSIONS = re.compile(r"```promql\n(.*?)```", re.DOTALL)
USED = re.compile(
    r"\b(?:pdcluster_(?:kv|webhook|reconcile|api|queue|clusters|local|not|unlisted)\w*|vllm:\w+)"
)


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


def test_metrics_page_shows_a_spec_and_values_that_are_accepted():
    spec, values = map(yaml.safe_load, SNIPPETS.findall(PAGE.read_text()))
    manifest = yaml.safe_load((ROOT / "examples" / "tiny-cpu.yaml").read_text())
    cluster, findings = check_manifest({**manifest, "spec": {**manifest["spec"], **spec["spec"]}})
    assert findings.errors == ()
    assert cluster.spec.monitoring.scrape_from
    schema = json.loads((ROOT / "charts" / "pdcluster" / "values.schema.json").read_text())
    jsonschema.validate(values, schema)
    assert values["monitoring"]["engines"]["podMonitor"]["enabled"] is True
