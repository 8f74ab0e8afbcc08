"""Dashboards and alerts: shipped when asked for, right by the schema, and about what there is."""

from __future__ import annotations

import json
import re

import pytest
import yaml
from chart_helm import HelmError, of_kind, one
from dev.dashboards import boards
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard, Panel

from metrics_page import PAGE, documented
from monitoring_files import ALERTS, DASHBOARDS, alerts, expressions, panels, selectors
from pdcluster_operator.api.remedies import Severity, table

RULES_ON = ("--set", "monitoring.rules.enabled=true")
DASHBOARDS_ON = ("--set", "monitoring.dashboards.enabled=true")
SELECTED = re.compile(r"(\w+)\s*(?:=|!=|=~|!~)\"")
GROUPED = re.compile(r"\b(?:by|on|ignoring) \(([^)]*)\)")
# Those that Prometheus and the monitors add, and those that every metric of vLLM has.
ADDED = {
    *("namespace", "pdcluster_dev_cluster", "pdcluster_dev_role", "pdcluster_dev_engine"),
    *("le", "model_name", "engine"),
}


def labels_of_metrics() -> set[str]:
    """The labels that the tables of docs/metrics.md name."""
    rows = re.findall(r"^\| `[\w:]+` \|(.*)$", PAGE.read_text(), re.MULTILINE)
    return {label for row in rows for label in re.findall(r"`(\w+)`", row.split("|")[2])}


@pytest.mark.parametrize(("where", "expression"), expressions().items(), ids=expressions())
def test_a_query_asks_for_metrics_and_labels_that_the_page_describes(where, expression):
    names = [selector.partition("{")[0] for selector in selectors(expression)]
    assert names or expression.startswith("up{"), "it asks for something of ours"
    for name in names:
        assert re.sub(r"_(bucket|sum|count)$", "", name) in documented(), name
    used = set(SELECTED.findall(expression))
    used |= {label for group in GROUPED.findall(expression) for label in group.split(", ") if label}
    assert used <= labels_of_metrics() | ADDED


def test_an_alert_says_how_bad_it_is_what_is_wrong_and_what_to_do_next():
    names = [rule["alert"] for rule in alerts()]
    assert len(set(names)) == len(names) > 10
    for rule in alerts():
        assert rule["labels"]["severity"] in ("critical", "warning", "info"), rule["alert"]
        assert re.fullmatch(r"[0-9]+[mh]", rule["for"])
        said = rule["annotations"]
        assert set(said) == {"summary", "description", "runbook_url"}
        assert said["summary"].endswith(".")
        before, _, command = said["description"].partition(" Next: ")
        assert before.endswith(".")
        assert re.match(r"(kubectl|pdcluster) [a-z]+ ", command)


def test_an_alert_leads_to_a_line_of_the_runbook():
    page = (PAGE.parent / "troubleshooting.md").read_text()
    of_reasons = 0
    for rule in alerts():
        path, _, anchor = rule["annotations"]["runbook_url"].partition("#")
        assert path == "docs/troubleshooting.md"
        if "toLower" in anchor:
            of_reasons += 1
            continue
        assert f'<a id="{anchor}"></a>' in page, rule["alert"]
        [entry] = [entry for entry in table().values() if entry.name.lower() == anchor]
        assert entry.severity in (Severity.FAULT, Severity.WAITS)
    assert of_reasons == 5


def test_the_page_tells_of_each_alert_and_of_nothing_else():
    rows = re.findall(r"^\| `(PDCluster\w+)` \| (\w+) \| (\w+) \|", PAGE.read_text(), re.MULTILINE)
    assert rows == [(r["alert"], r["labels"]["severity"], r["for"]) for r in alerts()]


@pytest.mark.parametrize("name", DASHBOARDS)
def test_a_dashboard_is_one_by_the_sdks_schema(name):
    """Read by its models and written again, it is the same: no field is unknown to them."""
    document = json.loads(DASHBOARDS[name].read_text())
    again = json.loads(JSONEncoder().encode(Dashboard.from_json(document)))
    assert again == document
    shown = [panel for panel in panels(name) if panel["type"] != "row"]
    assert len({panel["id"] for panel in shown}) == len(shown)
    for panel in shown:
        assert json.loads(JSONEncoder().encode(Panel.from_json(panel))) == panel
        assert panel["targets"], panel["title"]
        assert panel["datasource"]["uid"] == "${datasource}"
    known = {one["name"] for one in document["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", DASHBOARDS[name].read_text())) - {"__rate_interval"}
    assert used == known


def test_each_dashboard_is_shipped():
    assert set(DASHBOARDS) == set(boards())


pytest_helm = pytest.mark.helm


@pytest_helm
def test_neither_is_there_by_default(helm):
    objects = helm.objects()
    assert of_kind(objects, "PrometheusRule") == []
    assert not [o for o in of_kind(objects, "ConfigMap") if "dashboard" in o["metadata"]["name"]]


@pytest_helm
def test_the_rule_object_has_the_alerts_of_the_file(helm):
    rule = one(
        helm.objects(*RULES_ON, "--set", "monitoring.rules.labels.release=x"), "PrometheusRule"
    )
    assert rule["spec"] == yaml.safe_load(ALERTS.read_text())
    assert rule["metadata"]["labels"]["release"] == "x"


@pytest_helm
def test_logs_are_read_in_one_namespace_which_is_that_of_the_release(helm):
    rendered = one(helm.objects(*RULES_ON, namespace="elsewhere"), "PrometheusRule")["spec"]
    of_chart = [rule for group in rendered["groups"] for rule in group["rules"]]
    for rules, namespace in ((alerts(), "pdcluster-system"), (of_chart, "elsewhere")):
        said = [rule["annotations"]["description"] for rule in rules]
        logs = [text for text in said if "kubectl logs" in text]
        assert not [text for text in logs if " -A" in text], "kubectl logs has no -A"
        ours = [text for text in logs if "component=" in text]
        components = {re.findall(r"component=(\w+)", text)[0] for text in ours}
        assert components == {"operator", "webhook"}
        assert all(f" -n {namespace} " in text for text in ours)


@pytest_helm
@pytest.mark.parametrize("end", ["", "/"])
def test_runbooks_are_where_the_values_say(helm, end):
    url = f"monitoring.rules.runbooks=https://docs.example.org/pd{end}"
    rule = one(helm.objects(*RULES_ON, "--set", url), "PrometheusRule")
    urls = [
        each["annotations"]["runbook_url"]
        for group in rule["spec"]["groups"]
        for each in group["rules"]
    ]
    assert len(urls) == len(alerts())
    assert {url.partition("#")[0] for url in urls} == {
        "https://docs.example.org/pd/troubleshooting.md"
    }


@pytest_helm
def test_dashboards_are_what_grafanas_sidecar_looks_for(helm):
    folder = "monitoring.dashboards.annotations.grafana_folder=vLLM"
    objects = helm.objects(*DASHBOARDS_ON, "--set", folder)
    found = of_kind(objects, "ConfigMap", "dashboards")
    assert {next(iter(one["data"])) for one in found} == {f"{name}.json" for name in DASHBOARDS}
    for config in found:
        assert config["metadata"]["labels"]["grafana_dashboard"] == "1"
        assert config["metadata"]["annotations"] == {"grafana_folder": "vLLM"}
        [(name, text)] = config["data"].items()
        assert json.loads(text) == json.loads(DASHBOARDS[name.removesuffix(".json")].read_text())


@pytest_helm
@pytest.mark.parametrize(
    "wrong", ["rules.runbooks=docs", "rules.enabled=yes", "dashboards.labels.a=1", "alerts=1"]
)
def test_a_wrong_value_is_refused(helm, wrong):
    with pytest.raises(HelmError):
        helm.render("--set", f"monitoring.{wrong}")
