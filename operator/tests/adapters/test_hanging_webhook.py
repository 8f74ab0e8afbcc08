"""An admission webhook for one namespace that answers nobody: other namespaces do not wait."""

from __future__ import annotations

import base64
import socket
from collections.abc import Iterator

import pytest
from operator_runs import Operator, cluster, create, edit, get, owned, until
from real_api import RealApi

from conftest import new_namespace

pytestmark = pytest.mark.cluster

WEBHOOKS = "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations"
LONGEST_HANG = 30
"""Seconds: Kubernetes allows a webhook no more."""
MANY = 40


@pytest.fixture
def silent() -> Iterator[socket.socket]:
    """A server that takes connections and never answers, not even to TLS."""
    with socket.create_server(("127.0.0.1", 0), backlog=4096) as server:
        yield server


@pytest.fixture
def hanging(real: RealApi, silent: socket.socket) -> Iterator[str]:
    """A namespace in which each write but those of Leases hangs for 30 seconds, and is refused."""
    name = new_namespace(real)
    groups = ("", "apps", "policy", "networking.k8s.io", "events.k8s.io")
    rule = {
        "apiGroups": [*groups, "pdcluster.dev"],
        "apiVersions": ["*"],
        "operations": ["CREATE", "UPDATE", "DELETE"],
        "resources": ["*", "pdclusters/status"],
    }
    authority = (real.folder / "keys" / "ca.crt").read_bytes()
    webhook = {
        "name": "silent.example.com",
        "clientConfig": {
            "url": f"https://127.0.0.1:{silent.getsockname()[1]}/",
            "caBundle": base64.b64encode(authority).decode(),
        },
        "rules": [rule],
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": name}},
        # The tests themselves, and the controllers, are not asked about.
        "matchConditions": [
            {"name": "operator", "expression": "request.userInfo.username == 'operator'"}
        ],
        "failurePolicy": "Fail",
        "timeoutSeconds": LONGEST_HANG,
        "sideEffects": "None",
        "admissionReviewVersions": ["v1"],
    }
    body = {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingWebhookConfiguration",
        "metadata": {"name": name},
        "webhooks": [webhook],
    }
    status, answer = real.call("POST", WEBHOOKS, body)
    assert status == 201, answer
    yield name
    assert real.call("DELETE", f"{WEBHOOKS}/{name}")[0] == 200


def asked(silent: socket.socket, calls: list[socket.socket]) -> int:
    """Take the webhook's connections; return how many there were so far."""
    silent.settimeout(0.2)
    try:
        while True:
            calls.append(silent.accept()[0])
    except TimeoutError:
        return len(calls)


@pytest.mark.timeout(600)
def test_a_webhook_that_hangs_in_one_namespace_delays_no_other(
    real: RealApi, namespace: str, hanging: str, silent: socket.socket
) -> None:
    """Without turns, a change elsewhere waits until most of the forty had their thirty seconds."""
    calls: list[socket.socket] = []
    operator = Operator(
        real,
        "run",
        f"--namespace={namespace}",
        f"--namespace={hanging}",
        f"--authority-secret={namespace}/authority",
        "--allow-host-path-models",
    )
    operator.start()
    try:
        for number in range(MANY):
            create(real, hanging, cluster(f"hangs-{number}"))
        until(lambda: asked(silent, calls) >= 20, 60, operator.said)
        create(real, namespace, cluster())

        def engines(count: int) -> bool:
            return len(owned(real, namespace, "StatefulSet")) == count

        until(lambda: engines(2), 15, operator.said)
        until(lambda: get(real, namespace).get("status", {}).get("conditions"), 15, operator.said)
        for replicas in (2, 3, 4):
            assert edit(real, namespace, {"decode": {"replicas": replicas}})[0] == 200
            until(lambda count=replicas + 1: engines(count), 15, operator.said)
        assert not owned(real, hanging, "StatefulSet"), "nothing was let in there meanwhile"
    finally:
        operator.kill()
        for one in calls:
            one.close()
