"""Monitors of engines and routers find the pods that the operator makes, and only those."""

from __future__ import annotations

import re

import pytest
import yaml
from chart_helm import CHART, HelmError, of_kind

pytestmark = pytest.mark.helm

PLAN = CHART.parents[1] / "operator" / "tests" / "plan" / "golden"
ON = {
    "engines": "monitoring.engines.podMonitor.enabled=true",
    "routers": "monitoring.routers.podMonitor.enabled=true",
}


def monitors(helm, *settings, **options):
    words = [word for setting in settings for word in ("--set", setting)]
    objects = helm.objects(*words, **options)
    return {
        monitor["metadata"]["labels"]["app.kubernetes.io/component"]: monitor["spec"]
        for monitor in of_kind(objects, "PodMonitor")
    }


def pods(name):
    """What the operator makes: (component, number in its set, labels, names of ports)."""
    for document in yaml.safe_load_all((PLAN / f"{name}.yaml").read_text()):
        child = document.get("apply", {})
        if child.get("kind") not in ("StatefulSet", "Deployment"):
            continue
        template = child["spec"]["template"]
        labels = template["metadata"]["labels"]
        ports = {port["name"] for c in template["spec"]["containers"] for port in c["ports"]}
        for number in range(child["spec"]["replicas"]):
            own = {"apps.kubernetes.io/pod-index": str(number)}
            if child["kind"] == "Deployment":
                own = {}
            yield labels["app.kubernetes.io/component"], number, {**labels, **own}, ports


def selects(selector, labels):
    """As Kubernetes reads a selector."""
    if not selector["matchLabels"].items() <= labels.items():
        return False
    for wanted in selector["matchExpressions"]:
        key, values = wanted["key"], wanted.get("values")
        assert wanted["operator"] in ("In", "Exists")
        if key not in labels or (values and labels[key] not in values):
            return False
    return True


@pytest.mark.parametrize("plan", ["tiny-cpu", "two-nodes", "data-parallel"])
def test_each_engine_and_each_router_has_one_monitor(helm, plan):
    found = monitors(helm, *ON.values())
    assert sorted(found) == ["engines", "routers"]
    for component, number, labels, ports in pods(plan):
        names = [name for name, spec in found.items() if selects(spec["selector"], labels)]
        if component == "router":
            assert names == ["routers"]
        else:
            # An engine's other pods have no API, hence no metrics.
            assert names == (["engines"] if number == 0 else [])
        for name in names:
            spec = found[name]
            assert spec["podMetricsEndpoints"][0]["port"] in ports
            assert set(spec["podTargetLabels"]) <= set(labels)


def relabelled(labels, port):
    """The labels that scrape.yaml gives a port of a pod; None if it drops it."""
    known = {re.sub(r"\W", "_", f"__meta_kubernetes_pod_label_{k}"): v for k, v in labels.items()}
    known["__meta_kubernetes_pod_container_port_name"] = port
    known |= {"__meta_kubernetes_namespace": "ns", "__meta_kubernetes_pod_name": "p"}
    path = CHART / "files" / "prometheus" / "scrape.yaml"
    [job] = yaml.safe_load(path.read_text())["scrape_configs"]
    for rule in job["relabel_configs"]:
        read = ";".join(known.get(name, "") for name in rule.get("source_labels", ()))
        action, regex = rule.get("action", "replace"), rule.get("regex", "(.*)")
        if action == "labelmap":
            found = {re.fullmatch(regex, name): value for name, value in known.items()}
            known |= {match[1]: value for match, value in found.items() if match}
        elif action == "replace":
            known[rule["target_label"]] = read
        elif (action == "drop") == bool(re.fullmatch(regex, read)):
            return None
    return {name: value for name, value in known.items() if not name.startswith("__")}


@pytest.mark.parametrize("plan", ["tiny-cpu", "two-nodes", "data-parallel"])
def test_a_prometheus_without_its_operator_finds_the_same_pods_and_labels(helm, plan):
    found = monitors(helm, *ON.values())
    for _, _, labels, ports in pods(plan):
        monitored = [spec for spec in found.values() if selects(spec["selector"], labels)]
        given = relabelled(labels, "metrics")
        assert (given is not None) == bool(monitored)
        assert not any(relabelled(labels, port) for port in ports - {"metrics"})
        for spec in monitored:
            wanted = {re.sub(r"\W", "_", name): labels[name] for name in spec["podTargetLabels"]}
            assert given == {**wanted, "namespace": "ns", "pod": "p"}


def test_the_operators_own_pods_are_not_taken_for_engines(helm):
    found = monitors(helm, *ON.values())
    for deployment in of_kind(helm.objects(), "Deployment"):
        labels = deployment["spec"]["template"]["metadata"]["labels"]
        assert not [name for name, spec in found.items() if selects(spec["selector"], labels)]


def test_monitors_look_into_the_watched_namespaces(helm):
    both = monitors(helm, *ON.values(), "watchNamespaces={team-a,team-b}")
    assert both["engines"]["namespaceSelector"] == {"matchNames": ["team-a", "team-b"]}
    assert monitors(helm, ON["routers"])["routers"]["namespaceSelector"] == {"any": True}


def test_each_monitor_has_its_own_switch(helm):
    assert monitors(helm) == {}
    for name, setting in ON.items():
        assert list(monitors(helm, setting)) == [name]


@pytest.mark.parametrize("wrong", ["engines.enabled=true", "engines.podMonitor.interval=often"])
def test_a_wrong_value_is_refused(helm, wrong):
    with pytest.raises(HelmError):
        helm.render("--set", f"monitoring.{wrong}")
