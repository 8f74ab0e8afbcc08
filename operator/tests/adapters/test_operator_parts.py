"""Small parts of the operator's process that need no API server."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import socket
import sys
from contextlib import AsyncExitStack, suppress
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import aiohttp
import click
import jsonschema
import pytest
from kubernetes.aio import client as kubernetes
from operator_runs import cluster

from loopback import free_ports
from pdcluster_operator import handlers
from pdcluster_operator.adapters import (
    connector_bundle,
    operator_process,
)
from pdcluster_operator.adapters.api_server import kubeconfig
from pdcluster_operator.adapters.api_server.kinds import (
    BY_NAME,
    PDCLUSTER,
    WATCHED,
    slim,
)
from pdcluster_operator.adapters.metrics import (
    MOST_SHOWN,
    Metrics,
    PageOptions,
    resource_of,
    serve_pages,
)
from pdcluster_operator.adapters.operator_process import (
    OperatorOptions,
    OperatorProcess,
    own_identity,
)
from pdcluster_operator.adapters.own_secrets import WebhookPlace
from pdcluster_operator.adapters.webhook_process import (
    WebhookOptions,
    WebhookProcess,
    ask_review,
)
from pdcluster_operator.api.conditions import ConditionType
from pdcluster_operator.api.object_names import connector_name
from pdcluster_operator.api.schema.crd import crd
from pdcluster_operator.cli import operator as command
from pdcluster_operator.cli.operator import JsonLines
from pdcluster_operator.plan.children import MANAGED_KINDS


def test_every_kind_that_the_planner_makes_is_watched():
    assert {kind.name for kind in WATCHED} == MANAGED_KINDS | {
        "ConfigMap",
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


def loop_with(*, shares=(), reasons=(), unlisted=(), depth=0, clusters=(), statuses=()):
    """What metrics read of a control loop."""
    return SimpleNamespace(
        queue=SimpleNamespace(depth=depth),
        store=SimpleNamespace(keys=lambda: clusters),
        local_prefill_shares=lambda: dict(shares),
        not_ready=lambda: dict(reasons),
        statuses=lambda: dict(statuses),
        unlisted=unlisted,
    )


def test_the_share_of_a_cluster_that_is_gone_is_gone():
    metrics, shares = Metrics(), {("ns", "a"): 0.25, ("ns", "b"): 0.0}
    metrics.loop = loop_with(shares=shares)
    line = 'pdcluster_local_prefill_share{cluster="a",cluster_namespace="ns"} 0.25'
    assert line in metrics.text().decode()
    assert 'cluster="b"' in metrics.text().decode()
    del shares["ns", "a"]
    assert 'cluster="a"' not in metrics.text().decode()
    assert 'cluster="b"' in metrics.text().decode()


def test_metrics_name_the_namespaces_that_could_not_be_listed():
    metrics, unlisted = Metrics(), {"b"}
    metrics.loop = loop_with(unlisted=unlisted)
    assert 'pdcluster_unlisted_namespace{cluster_namespace="b"} 1.0' in metrics.text().decode()
    unlisted.clear()
    assert "pdcluster_unlisted_namespace{" not in metrics.text().decode()


def test_metrics_name_a_bounded_number_of_clusters():
    """The worst shares, and the first names; the number of all of them is shown beside."""
    shares = {("ns", f"c{number}"): number / 1000 for number in range(1000)}
    reasons = {("ns", f"c{number:03}"): "LinkFailed" for number in range(1000)}
    metrics = Metrics()
    metrics.loop = loop_with(shares=shares, reasons=reasons)
    lines = metrics.text().decode().splitlines()
    shown = {line for line in lines if line.startswith("pdcluster_local_prefill_share{")}
    assert len(shown) == MOST_SHOWN
    assert 'pdcluster_local_prefill_share{cluster="c999",cluster_namespace="ns"} 0.999' in shown
    assert not any("c799" in line for line in shown)
    named = [line for line in lines if line.startswith("pdcluster_not_ready{")]
    assert len(named) == MOST_SHOWN
    assert (
        'pdcluster_not_ready{cluster="c199",cluster_namespace="ns",reason="LinkFailed"} 1.0'
        in named
    )
    assert "pdcluster_not_ready_clusters 1000.0" in lines
    reasons.clear()
    lines = metrics.text().decode().splitlines()
    assert not [line for line in lines if line.startswith("pdcluster_not_ready{")]
    assert "pdcluster_not_ready_clusters 0.0" in lines


def status_of(available, reason="Serving", **fields):
    condition = {"type": "Available", "status": available, "reason": reason}
    return {"conditions": [condition], **fields}


def test_metrics_tell_conditions_and_engines_of_a_cluster():
    metrics, statuses = Metrics(), {("ns", "a"): status_of("True", prefill="1/3", decode="2/2")}
    metrics.loop = loop_with(statuses=statuses)
    named = 'cluster="a",cluster_namespace="ns"'

    def engines(role, state):
        return f'pdcluster_engines{{{named},role="{role}",state="{state}"}}'

    text = metrics.text().decode()
    assert f"{engines('prefill', 'ready')} 1.0" in text
    assert f"{engines('prefill', 'waiting')} 2.0" in text
    assert f"{engines('decode', 'ready')} 2.0" in text
    available = f'{{{named},condition="Available",reason="Serving",status="True"}} 1.0'
    assert f"pdcluster_condition{available}" in text
    unknown = f'{{{named},condition="Ready",reason="NotSeenYet",status="Unknown"}} 1.0'
    assert f"pdcluster_condition{unknown}" in text
    statuses["ns", "a"] = status_of("False", "NoVerifiedPair", prefill="many")
    text = metrics.text().decode()
    assert "pdcluster_engines{" not in text
    assert f"pdcluster_condition{available}" not in text
    statuses.clear()
    assert "pdcluster_condition{" not in metrics.text().decode()


def test_metrics_tell_first_of_clusters_that_are_not_ready():
    statuses = {("ns", f"c{number:03}"): status_of("True") for number in range(1000)}
    metrics = Metrics()
    metrics.loop = loop_with(statuses=statuses, reasons={("ns", "c999"): "LinkFailed"})
    lines = metrics.text().decode().splitlines()
    named = [line for line in lines if line.startswith('pdcluster_condition{cluster="c')]
    assert len(named) == len(ConditionType) * MOST_SHOWN
    assert any('cluster="c999"' in line for line in named)
    assert not any('cluster="c199"' in line for line in named)


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


def test_of_a_connector_only_hashes_are_kept():
    content = {"binaryData": {"connector.pyz": "A" * 400_000}, "immutable": True}
    kept = slim({"metadata": {"name": connector_name("a" * 64)}, **content}, BY_NAME["ConfigMap"])
    assert len(json.dumps(kept)) < 1000
    users = slim({"metadata": {"name": "a"}, "data": content["binaryData"]}, BY_NAME["ConfigMap"])
    assert users["data"] == content["binaryData"], "what can change is kept as it is"


def test_a_log_line_is_one_json_object():
    record = logging.LogRecord("a.b", logging.WARNING, "f", 1, "two\nlines %s", ("x",), None)
    line = JsonLines().format(record)
    assert "\n" not in line
    assert json.loads(line)["message"] == "two\nlines x"
    assert json.loads(line)["level"] == "warning"


async def test_a_part_that_fails_ends_the_process(monkeypatch, caplog):
    async def failing():
        raise RuntimeError("the watch is lost")

    async def lasting():
        await asyncio.sleep(3600)

    signals = []
    monkeypatch.setattr(operator_process.signal, "raise_signal", signals.append)
    process = OperatorProcess(OperatorOptions())
    process._go_on(process._stack, lasting())
    process._go_on(process._stack, failing())
    await asyncio.sleep(0.01)
    assert signals == [signal.SIGTERM]
    assert str(process.error) == "the watch is lost"
    assert caplog.messages == ["the operator cannot go on: the watch is lost"]
    await process.stop()


@pytest.mark.parametrize("seconds", [0.0, 1.0], ids=["while ports are opened", "after that"])
async def test_what_the_operator_waits_for_at_its_start_ends_with_it(monkeypatch, seconds):
    async def configuration():
        return kubernetes.Configuration(host="http://127.0.0.1:1")

    monkeypatch.setattr(kubeconfig, "find_configuration", configuration)
    health, metrics = free_ports(2)
    options = OperatorOptions(
        authority=("a", "b"), host="127.0.0.1", health_port=health, metrics_port=metrics
    )
    stop = asyncio.Event()
    asyncio.get_running_loop().call_later(seconds, stop.set)
    async with asyncio.timeout(120):
        await handlers.run_operator(options, stop)
        # The process that builds the connector may just have been forked: until it begins with its
        # program, it has the ports, too.
        with suppress(ConnectionRefusedError):
            while True:
                socket.create_connection(("127.0.0.1", health)).close()
                await asyncio.sleep(0.01)


async def test_the_error_of_a_start_is_raised_as_it_is():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        options = OperatorOptions(host="127.0.0.1", health_port=port, metrics_port=0)
        with pytest.raises(OSError, match="in use"):
            await handlers.run_operator(options, asyncio.Event())


def test_kopf_run_has_the_options_of_the_command(monkeypatch):
    assert handlers.options_of_kopf_run({"HOME": "/"}) == OperatorOptions()
    environment = {
        "PDCLUSTER_AUTHORITY": "system/ca",
        "PDCLUSTER_HOST_PATH_MODELS": "true",
        "PDCLUSTER_HOST_PATH_PREFIXES": "/srv:/data/models",
        "PDCLUSTER_HEALTH_PORT": "1",
        "PDCLUSTER_SWEEP_SECONDS": "30",
        "PDCLUSTER_ENGINE_CERTIFICATE": "/c",
        "PDCLUSTER_OPERATOR_CLASS": "blue",
    }
    with click.Context(click.Command("run")) as context:
        context.params["namespaces"] = ("a", "b")
        found = handlers.options_of_kopf_run(environment)
    assert found == OperatorOptions(
        namespaces=("a", "b"),
        authority=("system", "ca"),
        host_path_models=True,
        host_path_prefixes=("/srv", "/data/models"),
        health_port=1,
        sweep_seconds=30.0,
        engine_certificate=Path("/c"),
        operator_class="blue",
    )
    with pytest.raises(ValueError, match=r"^PDCLUSTER_HEALTH_PORT=many: Expected `int`"):
        handlers.options_of_kopf_run({"PDCLUSTER_HEALTH_PORT": "many"})
    with pytest.raises(ValueError, match=r"^PDCLUSTER_AUTHORITY=ca: Expected `array` of length 2"):
        handlers.options_of_kopf_run({"PDCLUSTER_AUTHORITY": "ca"})


@pytest.mark.parametrize("option", [field.name for field in fields(OperatorOptions)])
def test_kopf_run_ignores_what_kubernetes_sets_for_a_service(option):
    # The kubelet's service links: `envvars.go` makes the same names of a Service's name.
    service = f"PDCLUSTER_{option.upper()}".removesuffix("_PORT").removesuffix("_HOST")
    environment = {
        f"{service}_SERVICE_HOST": "10.0.0.1",
        f"{service}_SERVICE_PORT": "8080",
        f"{service}_SERVICE_PORT_HTTP": "8080",
        f"{service}_PORT": "tcp://10.0.0.1:8080",
        f"{service}_PORT_8080_TCP": "tcp://10.0.0.1:8080",
        f"{service}_PORT_8080_TCP_PROTO": "tcp",
        f"{service}_PORT_8080_TCP_PORT": "8080",
        f"{service}_PORT_8080_TCP_ADDR": "10.0.0.1",
    }
    assert handlers.options_of_kopf_run(environment) == OperatorOptions()


def test_kopf_run_ignores_no_value_of_a_user():
    found = handlers.options_of_kopf_run({"PDCLUSTER_OPERATOR_CLASS": "team://blue"})
    assert found.operator_class == "team://blue", "without it, it would work on others' PDClusters"
    with pytest.raises(ValueError, match=r"^PDCLUSTER_HEALTH_PORT=http://:9000"):
        handlers.options_of_kopf_run({"PDCLUSTER_HEALTH_PORT": "http://:9000"})


def test_kopf_run_watches_the_namespaces_that_the_reflectors_watch():
    found = handlers.options_of_kopf_run({"KOPF_RUN_NAMESPACE": "llm"})
    assert found.namespaces == ("llm",), "kopf takes it from this variable, too"
    with click.Context(click.Command("run")) as context:
        context.params["namespaces"] = ("team-1", "team-*")
        with pytest.raises(ValueError, match=r"^--namespace team-\*: name each namespace"):
            handlers.options_of_kopf_run({})


async def test_the_page_of_readiness_says_what_is_wrong():
    health, metrics = free_ports(2)
    said = [None]

    async def readiness():
        return said[-1]

    async with AsyncExitStack() as stack, aiohttp.ClientSession() as http:
        await serve_pages(
            stack,
            PageOptions(host="127.0.0.1", health_port=health, metrics_port=metrics),
            readiness,
            Metrics(),
        )
        for wrong, status, text in ((None, 200, "ok\n"), ("not listed", 503, "not listed\n")):
            said.append(wrong)
            async with http.get(f"http://127.0.0.1:{health}/readyz") as page:
                assert (page.status, await page.text()) == (status, text)
        async with http.get(f"http://127.0.0.1:{health}/healthz") as page:
            assert (page.status, await page.text()) == (200, "ok\n")


def test_the_connector_fits_into_a_configmap_with_much_room():
    """API servers take 1 MiB of data."""
    assert len(connector_bundle.build_connector().data) < 512 << 10


def test_a_connector_that_cannot_be_packed_is_said_in_its_last_words(monkeypatch):
    monkeypatch.setattr(connector_bundle, "MODULE", "no_such_module")
    with pytest.raises(connector_bundle.BundleError, match=r"packed: .*No module named"):
        connector_bundle.build_connector()


def test_a_log_line_of_an_error_has_its_traceback():
    try:
        raise ValueError("why")
    except ValueError:
        record = logging.LogRecord("a.b", logging.ERROR, "f", 1, "it ended", (), sys.exc_info())
    record.created = 1_800_000_000.5
    line = json.loads(JsonLines().format(record))
    assert line.pop("error").endswith("ValueError: why")
    assert line == {
        "time": "2027-01-15T08:00:00.500+00:00",
        "level": "error",
        "logger": "a.b",
        "message": "it ended",
    }


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["run", "--webhook-configuration=a"],
        ["run", "--webhook-secret=a/b", "--webhook-service=a/b"],
        ["run", "--webhook-configuration=a", "--webhook-secret=b", "--webhook-service=a/b"],
        ["webhook"],
        ["run", "--log-level=loud"],
        ["run", "--authority-secret=a"],
        ["run", "--authority-secret=/a"],
        ["run", "--authority-secret=a/"],
        ["run", "--authority-secret=a/b/c"],
        ["run", "--allow-host-path=models"],
        ["run", "--allow-host-path="],
        ["run", "--allow-host-path=/./"],
        ["webhook", "--certificate-folder=/a", "--allow-host-path=/srv/../etc"],
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
    assert options.namespaces == ["a", "b"]
    assert options.webhook_service == ("system", "pdcluster-webhook")
    assert command.parser().parse_args(["webhook", "--certificate-folder=/certificate"])


@pytest.fixture
def started(monkeypatch):
    """What the two processes were started with, instead of being started."""
    taken = []

    async def start(options, stop):
        taken.append(options)

    monkeypatch.setattr(handlers, "run_operator", start)
    monkeypatch.setattr(handlers, "run_webhook", start)
    monkeypatch.setattr(command, "set_up_logs", lambda *_: None)
    return taken


def test_each_option_of_run_reaches_the_operator(started):
    assert command.main(["run"]) == 0
    words = [
        "--namespace=a", "--namespace=b", "--authority-secret=c/d", "--webhook-configuration=e",
        "--webhook-service=f/g", "--webhook-secret=h/i", "--launcher-poll-seconds=2.5",
        "--operator-class=blue", "--sweep-seconds=30", "--keep-connector-seconds=40",
        "--engine-certificate-folder=/j", "--allow-host-path-models", "--health-port=1",
        "--metrics-port=2", "--host=127.0.0.1", "--allow-host-path=/k", "--allow-host-path=/l/m",
    ]  # fmt: skip
    assert command.main(["run", *words]) == 0
    assert started == [
        OperatorOptions(),
        OperatorOptions(
            namespaces=("a", "b"),
            authority=("c", "d"),
            host_path_models=True,
            host_path_prefixes=("/k", "/l/m"),
            webhook=WebhookPlace("e", ("f", "g"), ("h", "i")),
            host="127.0.0.1",
            health_port=1,
            metrics_port=2,
            sweep_seconds=30.0,
            launcher_poll_seconds=2.5,
            operator_class="blue",
            engine_certificate=Path("/j"),
            keep_connector_seconds=40.0,
        ),
    ]


def test_each_option_of_webhook_reaches_the_webhook(started):
    folder = "--certificate-folder=/a"
    assert command.main(["webhook", folder]) == 0
    words = [
        "--port=3", "--admit-mounted-certificates", "--allow-host-path-models", "--health-port=1",
        "--metrics-port=2", "--host=127.0.0.1", "--allow-host-path=/k",
    ]  # fmt: skip
    assert command.main(["webhook", folder, *words]) == 0
    assert started == [
        WebhookOptions(Path("/a")),
        WebhookOptions(
            Path("/a"),
            host_path_models=True,
            host_path_prefixes=("/k",),
            mounted_certificates=True,
            host="127.0.0.1",
            port=3,
            health_port=1,
            metrics_port=2,
        ),
    ]


def test_a_process_that_fails_ends_with_1_and_says_why(started, monkeypatch, caplog):
    async def fail(options, stop):
        raise RuntimeError("port 8081 is in use")

    monkeypatch.setattr(handlers, "run_operator", fail)
    assert command.main(["run"]) == 1
    assert caplog.messages == ["stopped: port 8081 is in use"]
    assert started == []


def metric(metrics, name):
    return [line for line in metrics.text().decode().splitlines() if line.startswith(f"{name}{{")]


def test_the_webhook_counts_what_it_judges_and_never_its_own_check(caplog):
    caplog.set_level(logging.INFO)
    good = cluster("good")
    bad = cluster("bad", engine={"extraArgs": ["--port", "1", "--port", "2"]})
    metrics = Metrics()
    process = WebhookProcess(WebhookOptions(Path("unused"), host_path_models=True))
    metrics, judge = process.metrics, process.judge
    assert judge(good, None, "CREATE").errors == ()
    assert judge(None, bad, "DELETE").errors == ()
    assert caplog.messages == []
    assert judge(bad, None, "CREATE").errors
    assert judge({**bad, "metadata": {"name": "ready?"}}, None, "CREATE").errors
    assert judge({**bad, "metadata": None}, good, "UPDATE").errors
    name = "pdcluster_webhook_reviews_total"
    assert metric(metrics, name) == [
        f'{name}{{operation="CREATE",outcome="allowed"}} 1.0',
        f'{name}{{operation="DELETE",outcome="allowed"}} 1.0',
        f'{name}{{operation="CREATE",outcome="refused"}} 1.0',
        f'{name}{{operation="UPDATE",outcome="refused"}} 1.0',
    ]
    refusals = "pdcluster_webhook_refusals_total"
    assert f'{refusals}{{rule="OwnedFlag"}} 2.0' in metric(metrics, refusals), "once a review"
    assert len(caplog.messages) == 2
    assert caplog.messages[0].startswith("CREATE of None/bad refused: 2 fields are not")


def test_the_webhook_admits_what_its_operator_does():
    host, mounted = (
        cluster("host"),
        cluster("mounted", transfer={"device": "CPU", "tls": "Mounted"}),
    )

    def rules(manifest, **allowed):
        process = WebhookProcess(WebhookOptions(Path("unused"), **allowed))
        return {str(one.rule) for one in process.judge(manifest, None, "X").errors}

    assert "HostPathNotAdmitted" in rules(host)
    assert "HostPathNotAdmitted" not in rules(host, host_path_models=True)
    assert "MountedNotSupported" in rules(mounted, host_path_models=True)
    assert "MountedNotSupported" not in rules(
        mounted, host_path_models=True, mounted_certificates=True
    )


def test_the_metrics_count_each_reconcile_and_each_call():
    metrics = Metrics()
    metrics.loop = loop_with(depth=3, clusters=range(5))
    for failed in (False, False, True):
        metrics.reconciled(0.3, failed)
    metrics.called("PATCH", "/api/v1/pods", 409, 0.3)
    text = metrics.text().decode().splitlines()
    for line in (
        'pdcluster_reconciles_total{outcome="done"} 2.0',
        'pdcluster_reconciles_total{outcome="failed"} 1.0',
        'pdcluster_reconcile_seconds_bucket{le="0.25"} 0.0',
        'pdcluster_reconcile_seconds_bucket{le="0.5"} 3.0',
        "pdcluster_queue_depth 3.0",
        "pdcluster_clusters 5.0",
        'pdcluster_api_calls_total{code="409",method="PATCH",resource="pods"} 1.0',
        'pdcluster_api_seconds_bucket{le="0.25",method="PATCH"} 0.0',
        'pdcluster_api_seconds_bucket{le="0.5",method="PATCH"} 1.0',
    ):
        assert line in text
    buckets = [line for line in text if line.startswith("pdcluster_reconcile_seconds_bucket")]
    assert [line.split('"')[1] for line in buckets] == [
        "0.002", "0.005", "0.01", "0.025", "0.05", "0.1", "0.25", "0.5", "1.0", "2.5", "5.0",
        "10.0", "30.0", "+Inf",
    ]  # fmt: skip


async def test_a_server_that_does_not_answer_is_not_ready():
    assert "not answered" in (await ask_review(1) or "")


@pytest.mark.parametrize(
    ("context", "namespace"), [(None, "ours"), ("ours", "ours"), ("bare", "default")]
)
def test_a_command_works_in_the_namespace_of_its_context(monkeypatch, context, namespace):
    contexts = [
        {"name": "bare", "context": {"cluster": "c"}},
        {"name": "ours", "context": {"cluster": "c", "namespace": "ours"}},
    ]
    monkeypatch.setattr(
        kubeconfig.config, "list_kube_config_contexts", lambda _: (contexts, contexts[1])
    )
    assert kubeconfig.namespace_of_context(context) == namespace


def test_without_a_kubeconfig_a_command_works_in_the_namespace_of_its_pod(monkeypatch, tmp_path):
    def nothing(_):
        raise kubeconfig.config.ConfigException("no configuration was found")

    monkeypatch.setattr(kubeconfig.config, "list_kube_config_contexts", nothing)
    monkeypatch.setattr(kubeconfig, "ACCOUNT", tmp_path)
    monkeypatch.delenv("POD_NAMESPACE", raising=False)
    assert (kubeconfig.own_namespace(), kubeconfig.namespace_of_context(None)) == (None, "default")
    (tmp_path / "namespace").write_text(" of-the-account\n")
    assert kubeconfig.own_namespace() == kubeconfig.namespace_of_context(None) == "of-the-account"
    monkeypatch.setenv("POD_NAMESPACE", "of-the-pod")
    assert kubeconfig.own_namespace() == "of-the-pod"


@pytest.mark.parametrize(
    ("service", "host"), [("10.96.0.1", "0.0.0.0"), ("fd00:10:96::1", "::"), (None, "0.0.0.0")]
)
def test_routers_bind_to_the_family_of_the_clusters_services(monkeypatch, service, host):
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    if service:
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", service)
    assert kubeconfig.every_address() == host


def test_a_pod_holds_leases_under_its_name_and_others_under_names_that_differ(monkeypatch):
    monkeypatch.setenv("POD_NAME", "operator-7d")
    assert own_identity() == own_identity() == "operator-7d"
    monkeypatch.delenv("POD_NAME")
    assert own_identity() != own_identity()


async def test_leases_and_watches_do_not_wait_behind_other_calls(monkeypatch):
    """A client pauses after a 429, and an API server that takes three seconds has bursts.

    Behind a burst, Leases were lost half of the time. If a webhook answers 429 to every write into
    a namespace, 72 calls wait there in turn, and a watch among them waited for up to four minutes.
    """
    made = {}

    class EnoughError(Exception):
        pass

    def api(client, *_):
        made["api"] = client

    def leases(client, *_, **__):
        made["leases"] = client
        return SimpleNamespace(holds=lambda _: True)

    def reflectors(client, *_):
        made["watches"] = client
        raise EnoughError

    async def configuration():
        return kubernetes.Configuration()

    monkeypatch.setattr("pdcluster_operator.adapters.api_server.kube_api.KubeApi", api)
    monkeypatch.setattr(operator_process, "NamespaceLeases", leases)
    monkeypatch.setattr(operator_process, "Reflectors", reflectors)
    monkeypatch.setattr(kubeconfig, "find_configuration", configuration)
    health, metrics = free_ports(2)
    options = OperatorOptions(host="127.0.0.1", health_port=health, metrics_port=metrics)
    with pytest.raises(EnoughError):
        await OperatorProcess(options).start()
    assert len({*map(id, made.values())}) == 3
