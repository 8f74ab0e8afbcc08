"""kopf's watches of PDClusters and PrefillScalers, on a real API server."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from api_gate import Gate
from operator_runs import (
    CHILDREN,
    GROUP,
    Operator,
    at_rest,
    cluster,
    create,
    delete,
    edit,
    get,
    owned,
    until,
)
from real_api import CRD_FILES, CRDS, RealApi
from test_dead_watch import running_here
from test_watch_gap import forget_history

from loopback import free_ports
from pdcluster_operator.adapters.operator_process import OperatorProcess

pytestmark = pytest.mark.cluster

MANY = 1000


class KopfRun(Operator):
    """The operator as `kopf run` starts it."""

    def __init__(self, real: RealApi, namespace: str) -> None:
        super().__init__(real, "kopf")
        [self.liveness] = free_ports(1)
        self._command = [
            sys.executable,
            "-m",
            "kopf",
            "run",
            "-m",
            "pdcluster_operator.handlers",
            f"--namespace={namespace}",
            f"--liveness=http://127.0.0.1:{self.liveness}/alive",
        ]
        self._environment |= {
            "PDCLUSTER_AUTHORITY": f"{namespace}/authority",
            "PDCLUSTER_HOST_PATH_MODELS": "true",
            "PDCLUSTER_HOST": "127.0.0.1",
            "PDCLUSTER_HEALTH_PORT": str(self.health),
            "PDCLUSTER_METRICS_PORT": str(self.metrics),
        }

    def alive(self) -> Any:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.liveness}/alive") as answer:
            return json.load(answer)


@pytest.fixture
def gate(real: RealApi) -> Iterator[Gate]:
    gate = Gate(real)
    yield gate
    gate.close()


def at(operator: Operator, gate: Gate, real: RealApi) -> Operator:
    operator._environment["KUBECONFIG"] = str(gate.kubeconfig(real))
    return operator


def made(real: RealApi, namespace: str, number: int = 2) -> Any:
    return lambda: len(owned(real, namespace, "StatefulSet")) == number


def crd(kind: str) -> dict[str, Any]:
    [file] = [
        one for one in CRD_FILES if f"_{kind}." in one.name or one.name.endswith(f"{kind}.yaml")
    ]
    return yaml.safe_load(Path(file).read_text())


def test_kopf_run_starts_a_working_operator(real, namespace):
    operator = KopfRun(real, namespace).start()
    try:
        create(real, namespace, cluster())
        until(made(real, namespace), 60, operator.said)
        live = get(real, namespace)
        assert "finalizers" not in live["metadata"]
        assert "annotations" not in live["metadata"]
        assert operator.alive() == {}, "no probe fails"
        edit(real, namespace, {"decode": {"replicas": 2}})
        until(made(real, namespace, 3), 60, operator.said)
        at_rest(real, operator)
        delete(real, namespace)
        until(lambda: not owned(real, namespace), 60, lambda: owned(real, namespace))
    finally:
        assert operator.stop() == 0, operator.said()
    assert "Traceback" not in operator.log.read_text()


async def test_a_handler_that_raises_loses_nothing(real, namespace, monkeypatch, caplog):
    """kopf logs the error and goes on; the next LIST brings what was lost."""
    whole, failures = OperatorProcess.see, itertools.count()

    def see(process: OperatorProcess, event: Any, manifest: Any) -> None:
        if next(failures) < 5:
            raise RuntimeError("of a kind that nobody thought of")
        whole(process, event, manifest)

    monkeypatch.setattr(OperatorProcess, "see", see)
    async with running_here(real, namespace, monkeypatch) as page:
        await asyncio.to_thread(create, real, namespace, cluster())
        await asyncio.to_thread(until, made(real, namespace), 60, page)
        for replicas in (2, 1, 2):
            await asyncio.to_thread(edit, real, namespace, {"decode": {"replicas": replicas}})
            await asyncio.to_thread(until, made(real, namespace, 1 + replicas), 60, page)
        # Lists come each second here, and kopf may report a change after two of them.
        await asyncio.to_thread(until, lambda: page() == (200, "ok\n"), 30, page)
    assert next(failures) > 5
    assert "nobody thought of" in caplog.text


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["prefillscalers", "pdclusters"])
def test_a_crd_that_vanishes_and_comes_back(real, operator, namespace, kind):
    """Once the kind is back, the operator works again, perhaps after a restart; nothing is lost."""
    manifest = crd(kind)
    operator.start()
    create(real, namespace, cluster())
    until(made(real, namespace), 60, operator.said)

    def served(there: bool) -> bool:
        operator.start_if_ended()
        path = f"{GROUP}/namespaces/{namespace}/{kind}"
        return (real.call("GET", path)[0] == 200) is there

    assert real.call("DELETE", f"{CRDS}/{manifest['metadata']['name']}")[0] == 200
    try:
        until(lambda: served(False), 60, operator.said)
    finally:
        assert real.call("POST", CRDS, manifest)[0] == 201
    until(lambda: served(True), 60, operator.said)
    if kind == "pdclusters":
        until(lambda: create(real, namespace, cluster()), 60, operator.said)
    edit(real, namespace, {"decode": {"replicas": 2}})

    def back() -> bool:
        operator.start_if_ended()
        owners = {get(real, namespace)["metadata"]["uid"]}
        found = real.call("GET", CHILDREN["StatefulSet"].format(namespace))[1]["items"]
        owned_by = {one["metadata"]["ownerReferences"][0]["uid"] for one in found}
        return len(found) == 3 and owned_by == owners

    until(back, 90, operator.said)


@pytest.mark.timeout(600)
def test_a_cluster_that_is_deleted_in_a_gap_of_kopfs_watch_is_forgotten(
    real, gate, operator, namespace
):
    """kopf lists again, and does not report what its list lacks: a LIST of ours does."""
    at(operator, gate, real).start()
    try:
        for name in ("kept", "gone"):
            create(real, namespace, cluster(name))
        until(made(real, namespace, 4), 60, operator.said)
        at_rest(real, operator)
        gate.shut()
        delete(real, namespace, "gone")
        edit(real, namespace, {"decode": {"replicas": 2}}, "kept")
        forget_history(real)
        gate.open()
        until(lambda: operator.metric("pdcluster_clusters") == 1.0, 90, operator.said)
        until(made(real, namespace, 3), 60, operator.said)
        assert operator.process.poll() is None, "the same process"
    finally:
        gate.open()


@pytest.mark.timeout(600)
def test_kopf_outlives_an_api_server_that_is_away_or_refuses(real, gate, operator, namespace):
    """By default, kopf gives up after a minute: the process would end again and again."""
    at(operator, gate, real).start()
    create(real, namespace, cluster())
    until(made(real, namespace), 60, operator.said)
    for away, replicas in ((gate.shut, 2), (gate.refuse, 1)):
        away()
        edit(real, namespace, {"decode": {"replicas": replicas}})
        with pytest.raises(AssertionError):
            until(lambda: operator.process.poll() is not None, 25, lambda: "it runs")
        gate.open()
        until(made(real, namespace, 1 + replicas), 60, operator.said)
    assert operator.process.poll() is None


@pytest.mark.timeout(600)
def test_a_thousand_pdclusters_are_known_soon_and_cost_little_memory(real, operator, namespace):
    """All but one belong to another operator, so that nothing but their watch is measured."""
    operator.start()
    before = memory(operator)
    for number in range(MANY - 1):
        create(real, namespace, cluster(f"c-{number}", operatorClass="other"))
    until(lambda: operator.metric("pdcluster_clusters") == MANY - 1, 10, operator.said)
    create(real, namespace, cluster())
    until(made(real, namespace), 20, operator.said)
    grown = (memory(operator) - before) / MANY
    assert grown < 60, f"{grown} KiB for each"
    operator.stop()
    operator.start()
    until(lambda: operator.metric("pdcluster_clusters") == MANY, 10, operator.said)
    at_rest(real, operator)
    for number in range(MANY - 1):
        delete(real, namespace, f"c-{number}")
    until(lambda: operator.metric("pdcluster_clusters") == 1, 20, operator.said)


def memory(operator: Operator) -> float:
    """Return the memory of the process, in KiB."""
    assert operator.process is not None
    pages = int(Path(f"/proc/{operator.process.pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1024
