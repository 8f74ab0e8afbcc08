"""Small parts of the operator's process that need no API server."""

from __future__ import annotations

import asyncio
import copy
import gc
import json
import logging

import jsonschema
import pytest
from kubernetes.aio import client as kubernetes

from loopback import free_ports
from pdcluster_operator.adapters import operator_process
from pdcluster_operator.adapters.admission.webhook_process import ask_review
from pdcluster_operator.adapters.api_server.client import NotFound
from pdcluster_operator.adapters.api_server.kinds import (
    BY_NAME,
    PDCLUSTER,
    WATCHED,
    as_kept,
    slim,
)
from pdcluster_operator.adapters.api_server.sweep import Sweeper
from pdcluster_operator.adapters.api_server.watch_health import WatchHealth
from pdcluster_operator.adapters.logs import JsonLines
from pdcluster_operator.adapters.metrics import Metrics, resource_of
from pdcluster_operator.adapters.operator_process import (
    OperatorOptions,
    collect_rarely,
    run_operator,
)
from pdcluster_operator.api.object_names import connector_name
from pdcluster_operator.api.schema.crd import crd
from pdcluster_operator.cli import operator as command
from pdcluster_operator.plan.deletions import MANAGED_KINDS
from pdcluster_operator.runtime.control_loop import ControlLoop
from pdcluster_operator.runtime.store import Store


def test_every_kind_that_the_planner_makes_is_watched():
    assert {kind.name for kind in WATCHED} == MANAGED_KINDS | {
        "PDCluster",
        "PrefillScaler",
        "Pod",
    }
    assert all(kind.selector for kind in WATCHED if kind.group != "pdcluster.dev")


@pytest.mark.parametrize(
    ("kind", "place", "path"),
    [
        ("Pod", ("a", "b"), "/api/v1/namespaces/a/pods/b"),
        ("Pod", (), "/api/v1/pods"),
        ("StatefulSet", ("a",), "/apis/apps/v1/namespaces/a/statefulsets"),
        (
            "ValidatingWebhookConfiguration",
            (None, "b"),
            "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations/b",
        ),
    ],
)
def test_paths(kind, place, path):
    assert BY_NAME[kind].path(*place) == path


@pytest.mark.parametrize(
    ("path", "resource"),
    [
        ("/api/v1/namespaces/a/pods/b", "pods"),
        ("/api/v1/pods", "pods"),
        ("/apis/pdcluster.dev/v1alpha1/namespaces/a/pdclusters/b/status", "pdclusters/status"),
        ("/apis/apps/v1/statefulsets", "statefulsets"),
        ("/version", "other"),
    ],
)
def test_metrics_name_resources_and_no_objects(path, resource):
    assert resource_of(path) == resource
    metrics = Metrics()
    metrics.called("GET", path, 200, 0.1)
    expected = f'pdcluster_api_calls_total{{code="200",method="GET",resource="{resource}"}} 1.0'
    assert expected in metrics.text().decode()


def test_the_share_of_a_cluster_that_is_gone_is_gone():
    metrics, shares = Metrics(), {("ns", "a"): 0.25, ("ns", "b"): 0.0}
    metrics.measure(lambda: 0, lambda: 0, lambda: shares)
    line = 'pdcluster_local_prefill_share{cluster="a",cluster_namespace="ns"} 0.25'
    assert line in metrics.text().decode()
    assert 'cluster="b"' in metrics.text().decode()
    del shares["ns", "a"]
    assert 'cluster="a"' not in metrics.text().decode()
    assert 'cluster="b"' in metrics.text().decode()


def test_what_is_kept_of_an_object_has_its_kind_and_no_bookkeeping():
    listed = {"metadata": {"name": "a", "managedFields": [1]}, "spec": {}, "status": {}}
    kept = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}}
    assert slim(listed, BY_NAME["Pod"]) == kept, "what is empty is not kept"
    assert slim(listed, BY_NAME["Service"])["spec"] == {}


def test_a_status_that_nobody_wrote_is_none():
    schema = crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["status"]
    jsonschema.validate(schema["default"], schema)
    for condition in schema["default"]["conditions"]:
        assert condition["status"] == "Unknown"
        assert condition["reason"] == "NotSeenYet"
    new = {"metadata": {"name": "a"}, "spec": {}, "status": schema["default"]}
    assert "status" not in slim(new, PDCLUSTER)
    judged = {**new, "status": {**schema["default"], "observedGeneration": 1}}
    assert slim(judged, PDCLUSTER)["status"] == judged["status"]


def test_an_object_that_is_kept_already_is_not_made_again():
    store, kind = Store(), BY_NAME["Service"]
    metadata = {"namespace": "ns", "name": "a", "uid": "u", "resourceVersion": "7"}
    listed = {"metadata": metadata, "spec": {}}
    first = as_kept(listed, kind, store.same)
    store.put(first)
    held = store.held(first)
    assert held == first
    assert as_kept(copy.deepcopy(listed), kind, store.same) is held
    for other in ({"resourceVersion": "8"}, {"uid": "v"}, {"name": "b"}, {"namespace": "other"}):
        changed = {"metadata": metadata | other, "spec": {}}
        assert as_kept(changed, kind, store.same)["metadata"] == metadata | other
    assert as_kept(listed, BY_NAME["ConfigMap"], store.same)["kind"] == "ConfigMap"
    unversioned = {"metadata": {"name": "c"}, "spec": {}}
    store.put(as_kept(unversioned, kind, store.same))
    assert store.same("Service", unversioned) is None, "nobody knows whether it changed"


def test_of_a_pods_spec_is_kept_what_plans_read_of_it():
    limits = {"memory": "1Gi", "nvidia.com/gpu": 2}
    engine = {"name": "engine", "args": ["long"] * 99, "resources": {"limits": limits}}
    secret = {"secretName": "a-certificates", "items": [{"key": "k", "path": "p"}]}
    spec = {
        "nodeName": "node-1",
        "containers": [engine, {"name": "beside"}],
        "volumes": [
            {"name": "certificate", "secret": secret},
            {"name": "shm", "emptyDir": {}},
            {"name": "connector", "configMap": {"name": connector_name("a" * 64), "items": []}},
            {"name": "settings", "configMap": {"name": "settings"}},
        ],
        "tolerations": [{}],
    }
    kept = slim({"metadata": {"name": "a"}, "spec": spec}, BY_NAME["Pod"])
    assert kept["spec"] == {
        "nodeName": "node-1",
        "containers": [{"resources": {"limits": limits}}],
        "volumes": [
            {"secret": {"secretName": "a-certificates"}},
            {"configMap": {"name": connector_name("a" * 64)}},
        ],
    }


def test_of_an_immutable_configmap_only_hashes_are_kept():
    content = {"binaryData": {"connector.pyz": "A" * 400_000}, "immutable": True}
    kept = slim({"metadata": {"name": "a"}, **content}, BY_NAME["ConfigMap"])
    assert len(json.dumps(kept)) < 1000
    users = slim({"metadata": {"name": "a"}, "data": content["binaryData"]}, BY_NAME["ConfigMap"])
    assert users["data"] == content["binaryData"], "what can change is kept as it is"


def test_a_log_line_is_one_json_object():
    record = logging.LogRecord("a.b", logging.WARNING, "f", 1, "two\nlines %s", ("x",), None)
    line = JsonLines().format(record)
    assert "\n" not in line
    assert json.loads(line)["message"] == "two\nlines x"
    assert json.loads(line)["level"] == "warning"


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["run", "--webhook-configuration=a"],
        ["run", "--webhook-secret=a/b", "--webhook-service=a/b"],
        ["run", "--webhook-configuration=a", "--webhook-secret=b", "--webhook-service=a/b"],
        ["webhook"],
        ["run", "--log-level=loud"],
    ],
)
def test_command_lines_that_cannot_work(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        command.main(arguments)
    assert ended.value.code == 2
    assert "pdcluster-operator" in capsys.readouterr().err


def test_the_charts_command_lines_are_read():
    options = command.parser().parse_args(
        [
            "run",
            "--namespace=a",
            "--namespace=b",
            "--allow-host-path-models",
            "--webhook-configuration=pdcluster",
            "--webhook-service=system/pdcluster-webhook",
            "--webhook-secret=system/pdcluster-webhook-tls",
            "--log-level=info",
            "--log-format=json",
        ]
    )
    assert options.namespace == ["a", "b"]
    assert options.webhook_service == ("system", "pdcluster-webhook")
    assert command.parser().parse_args(["webhook", "--certificate-folder=/certificate"])


async def test_a_server_that_does_not_answer_is_not_ready():
    assert "not answered" in (await ask_review(1) or "")


async def test_a_kind_whose_crd_is_not_installed_is_left_out_if_it_is_optional():
    """A chart without CRDs may be older than the operator."""
    asked = []

    class WithoutScalers:
        async def list(self, kind, namespaces):
            asked.append(kind.name)
            if kind.name == missing:
                raise NotFound("the server could not find the requested resource")
            return []

    loop = ControlLoop(
        api=WithoutScalers(), launchers=None, events=None, connector=None, clock=None
    )
    missing = "PrefillScaler"
    swept: list[str] = []
    sweeper = Sweeper(
        WithoutScalers(), loop, WatchHealth(), (), 300.0, lambda: swept.append("once")
    )
    await sweeper.first()
    assert sweeper.done
    assert set(asked) == {kind.name for kind in WATCHED}
    missing = "PDCluster"
    with pytest.raises(NotFound):
        await sweeper._sweep()
    assert swept == ["once"], "the second one failed"


async def test_leases_do_not_wait_behind_other_calls(monkeypatch):
    """Behind a burst on an API server that takes three seconds, they were lost half of the time."""
    made = {}

    class EnoughError(Exception):
        pass

    def api(client, *_):
        made["api"] = client

    def leases(client):
        made["leases"] = client
        raise EnoughError

    async def configuration():
        return kubernetes.Configuration()

    monkeypatch.setattr(operator_process, "KubeApi", api)
    monkeypatch.setattr(operator_process, "KubeLeases", leases)
    monkeypatch.setattr(operator_process, "find_configuration", configuration)
    health, metrics = free_ports(2)
    options = OperatorOptions(host="127.0.0.1", health_port=health, metrics_port=metrics)
    with pytest.raises(EnoughError):
        await run_operator(options, asyncio.Event())
    assert made["leases"] is not made["api"]


def test_what_is_loaded_is_out_of_the_garbage_collectors_sight():
    stays = [{"number": number} for number in range(1000)]
    before = gc.get_threshold()
    try:
        collect_rarely()
        watched = {id(one) for one in gc.get_objects()}
        assert not watched.intersection(map(id, stays))
        new = [[number] for number in range(10)]
        assert {id(one) for one in gc.get_objects()}.issuperset(map(id, new))
        assert gc.get_threshold() > before
        assert gc.get_threshold()[2] > before[2], "what is old is left to the next sweep"
    finally:
        gc.unfreeze()
        gc.set_threshold(*before)
