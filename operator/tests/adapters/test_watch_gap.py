"""What happens while no watch is connected, and is forgotten by the API server, is found out."""

from __future__ import annotations

import base64
import json
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from api_gate import Gate
from operator_runs import CHILDREN, Operator, cluster, create, delete, get, owned, until
from real_api import RealApi

pytestmark = pytest.mark.cluster


@pytest.fixture
def gate(real: RealApi) -> Iterator[Gate]:
    gate = Gate(real)
    yield gate
    gate.close()


def etcd(real: RealApi, path: str, body: dict[str, Any]) -> dict[str, Any]:
    url = f"http://127.0.0.1:{real._etcd}/v3/kv/{path}"
    request = urllib.request.Request(url, json.dumps(body).encode(), method="POST")
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.loads(answer.read())


def forget_history(real: RealApi) -> None:
    """Compact etcd, and empty the API server's watch cache: older versions are gone."""
    revision = etcd(real, "range", {"key": base64.b64encode(b"a").decode()})["header"]["revision"]
    etcd(real, "compaction", {"revision": revision, "physical": True})
    real.kill_api_server()
    real.start_api_server()


@pytest.mark.timeout(300)
def test_after_a_gap_children_come_back_and_what_was_deleted_stays_so(real, gate, namespace):
    operator = Operator(
        real, "run", f"--namespace={namespace}", "--allow-host-path-models", "--sweep-seconds=900"
    )
    operator._environment["KUBECONFIG"] = str(gate.kubeconfig(real))
    operator.start()
    try:
        for name in ("kept", "gone"):
            create(real, namespace, cluster(name))
        until(lambda: len(owned(real, namespace, "StatefulSet")) == 4, 60, operator.said)
        [engine] = [
            one for one in owned(real, namespace, "StatefulSet") if one.startswith("StatefulSet/ke")
            and "-decode-" in one
        ]  # fmt: skip
        time.sleep(2)  # the watches have reported everything
        gate.shut()
        path = f"{CHILDREN['StatefulSet'].format(namespace)}/{engine.partition('/')[2]}"
        uid = real.call("GET", path)[1]["metadata"]["uid"]
        assert real.call("DELETE", path)[0] == 200
        delete(real, namespace, "gone")
        until(
            lambda: not [one for one in owned(real, namespace) if "/gone-" in one],
            60,
            lambda: owned(real, namespace),
        )
        forget_history(real)
        gate.open()

        def back() -> bool:
            operator.start_if_ended()
            status, found = real.call("GET", path)
            return status == 200 and found["metadata"]["uid"] != uid

        until(back, 90, operator.said)
        time.sleep(8)  # what is gone does not come back

        def healthy() -> bool:
            operator.start_if_ended()
            return operator.page("/healthz")[0] == 200

        until(healthy, 60, operator.said)
        assert get(real, namespace, "gone").get("code") == 404
        assert not [one for one in owned(real, namespace) if "/gone-" in one]
    finally:
        operator.stop()
