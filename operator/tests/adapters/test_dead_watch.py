"""The operator's process with a watch that is connected and reports nothing."""

from __future__ import annotations

import asyncio
import urllib.error
import urllib.request
from typing import Any

import pytest
from operator_runs import cluster, create, owned, until

from loopback import free_ports
from pdcluster_operator.adapters import operator_process
from pdcluster_operator.adapters.api_server import watch_health, watches
from pdcluster_operator.adapters.api_server.client import find_configuration
from pdcluster_operator.adapters.operator_process import OperatorOptions, run_operator

pytestmark = pytest.mark.cluster


async def test_health_turns_bad_and_sweeps_do_the_work_meanwhile(real, namespace, monkeypatch):
    async def silent(*_: Any, stop: asyncio.Event, **__: Any) -> None:
        await stop.wait()

    monkeypatch.setattr(watches, "watch", silent)
    monkeypatch.setattr(watch_health, "LATE_SECONDS", 2.0)
    configuration = await find_configuration(str(real.folder / "operator.kubeconfig"))

    async def found() -> Any:
        return configuration

    monkeypatch.setattr(operator_process, "find_configuration", found)
    health, metrics = free_ports(2)
    options = OperatorOptions(
        namespaces=(namespace,),
        host_path_models=True,
        host="127.0.0.1",
        health_port=health,
        metrics_port=metrics,
        sweep_seconds=1.0,
    )
    stop = asyncio.Event()
    running = asyncio.create_task(run_operator(options, stop))

    def page() -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{health}/healthz", timeout=10) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError:
            return 0, ""

    def bad() -> bool:
        status, text = page()
        return status == 503 and "is dead" in text and f"{namespace}/" in text

    try:
        await asyncio.to_thread(until, lambda: page()[0] == 200, 60, page)
        create(real, namespace, cluster())
        await asyncio.to_thread(until, bad, 60, page)
        await asyncio.to_thread(
            until, lambda: len(owned(real, namespace, "StatefulSet")) == 2, 60, page
        )
    finally:
        stop.set()
        await running
