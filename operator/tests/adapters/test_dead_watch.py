"""Watches that report nothing: lists find what they miss, and the process stays healthy."""

from __future__ import annotations

import asyncio
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import yaml
from operator_runs import GROUP, cluster, create, edit, owned, until
from real_api import CRD_FILES, CRDS, RealApi

from loopback import free_ports
from pdcluster_operator.adapters.api_server import kubeconfig
from pdcluster_operator.adapters.api_server.client import KubeClient
from pdcluster_operator.adapters.api_server.kubeconfig import find_configuration
from pdcluster_operator.adapters.operator_process import OperatorOptions
from pdcluster_operator.handlers import run_operator

pytestmark = pytest.mark.cluster

Page = Callable[[], tuple[int, str]]


@asynccontextmanager
async def running_here(
    real: RealApi, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Page]:
    """The operator in this process, that lists each second. Gives what `/healthz` answers."""
    configuration = await find_configuration(str(real.folder / "operator.kubeconfig"))

    async def found() -> Any:
        return configuration

    monkeypatch.setattr(kubeconfig, "find_configuration", found)
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

    def page(path: str = "/healthz") -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{health}{path}", timeout=10) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError:
            return 0, ""

    try:
        await asyncio.to_thread(until, lambda: page("/readyz")[0] == 200, 60, page)
        yield page
    finally:
        stop.set()
        await running


async def test_lists_do_the_work_of_a_watch_that_reports_nothing(real, namespace, monkeypatch):
    async def silent(_client: Any, _path: str, query: dict[str, str]) -> AsyncIterator[bytes]:
        await asyncio.sleep(float(query["timeoutSeconds"]))
        for nothing in ():
            yield nothing

    monkeypatch.setattr(KubeClient, "lines", silent)
    async with running_here(real, namespace, monkeypatch) as page:
        create(real, namespace, cluster())
        for replicas in (1, 2):
            edit(real, namespace, {"decode": {"replicas": replicas}})
            await asyncio.to_thread(
                until,
                lambda count=replicas + 1: len(owned(real, namespace, "StatefulSet")) == count,
                60,
                page,
            )
        assert await asyncio.to_thread(page) == (200, "ok\n")


async def test_health_stays_good_when_a_kind_is_installed_later(real, namespace, monkeypatch):
    """As with a chart that was upgraded without its CRDs, or when PodGroups are turned on."""
    [file] = [one for one in CRD_FILES if "prefillscalers" in one.name]
    crd = yaml.safe_load(file.read_text())
    scalers = f"{GROUP}/namespaces/{namespace}/prefillscalers"

    def gone() -> bool:
        return real.call("GET", scalers)[0] == 404

    assert real.call("DELETE", f"{CRDS}/{crd['metadata']['name']}")[0] == 200
    await asyncio.to_thread(until, gone, 60, lambda: "the kind is still served")
    try:
        async with running_here(real, namespace, monkeypatch) as page:
            await asyncio.sleep(1.0)  # the watch has asked for the kind
            assert real.call("POST", CRDS, crd)[0] == 201
            body = {
                "apiVersion": "pdcluster.dev/v1alpha1",
                "kind": "PrefillScaler",
                "metadata": {"name": "tiny"},
                "spec": {"replicas": 1},
            }
            made = lambda: real.call("POST", scalers, body)[0] == 201  # noqa: E731
            await asyncio.to_thread(until, made, 60, lambda: "the kind is not served")
            end = time.monotonic() + 10.0
            while time.monotonic() < end:
                assert (await asyncio.to_thread(page))[0] == 200, page()
                await asyncio.sleep(0.5)
    finally:
        real.call("POST", CRDS, crd)
