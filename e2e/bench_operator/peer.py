"""A peer beside us: LWS with its DisaggregatedSet, on the same plane and counted in the same way.

LWS runs with its webhooks, as its chart installs it. A DisaggregatedSet here has one engine of each
role, as a PDCluster of the benchmark has. It makes fewer objects, because it has no router, no
certificates, no network policy and no check that KV moves.
Source: https://github.com/kubernetes-sigs/lws
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import yaml
from other_operators import controllers, hooks_at, install
from real_api import RealApi

from bench_operator import account, measure
from bench_operator.calls import answered
from bench_operator.plane import BENCH, SAMPLE
from cluster import binaries
from cluster.places import Places
from loopback import free_ports
from pdcluster_operator.adapters.api_server.client import KubeClient
from pdcluster_operator.adapters.api_server.kubeconfig import find_configuration
from pdcluster_operator.runtime.interfaces import Conflict

GROUP = "/apis/disaggregatedset.x-k8s.io/v1"
REST_SECONDS = 60.0
LONGEST = 3600.0
NOT_A_CHILD = {"disaggregatedsets", "leases", "events"}


def disaggregated_set(name: str) -> dict[str, Any]:
    """Return the smallest one: one prefill and one decode pod."""
    container = {"name": "engine", "image": "pause"}
    pod = {"spec": {"containers": [container]}}

    def role(name: str) -> dict[str, Any]:
        template = {"size": 1, "workerTemplate": pod}
        return {"name": name, "spec": {"replicas": 1, "leaderWorkerTemplate": template}}

    return {
        "apiVersion": "disaggregatedset.x-k8s.io/v1",
        "kind": "DisaggregatedSet",
        "metadata": {"name": name},
        "spec": {"roles": [role("prefill"), role("decode")]},
    }


@contextlib.contextmanager
def running_lws(real: RealApi) -> Iterator[psutil.Process]:
    """Install LWS on a control plane and run its controllers as a process."""
    program = binaries.provide([binaries.LWS], Places.of_user())[binaries.LWS.name]
    sources = binaries.sources(binaries.LWS) / "config"
    for file in (sources / "crd" / "bases").glob("*.yaml"):
        install(real, yaml.safe_load(file.read_text()))
    port, health = free_ports(2)
    log = real.folder / "lws.log"
    configuration = _configuration(real.folder, port, health)
    kubeconfig = real.folder / "operator.kubeconfig"
    with controllers(program, configuration, kubeconfig, log, port) as process:
        authority = (real.folder / "keys" / "ca.crt").read_bytes()
        for hooks in yaml.safe_load_all((sources / "webhook" / "manifests.yaml").read_text()):
            install(real, hooks_at(hooks, port, authority))
        yield process


def _configuration(folder: Path, port: int, health: int) -> Path:
    keys = folder / "lws-keys"
    keys.mkdir()
    shutil.copy(folder / "keys" / "apiserver.crt", keys / "tls.crt")
    shutil.copy(folder / "keys" / "apiserver.key", keys / "tls.key")
    document = {
        "apiVersion": "config.lws.x-k8s.io/v1alpha1",
        "kind": "Configuration",
        "leaderElection": {"leaderElect": False},
        "internalCertManagement": {"enable": False},
        "webhook": {"host": "127.0.0.1", "port": port, "certDir": str(keys)},
        "metrics": {"bindAddress": "0"},
        "health": {"healthProbeBindAddress": f"127.0.0.1:{health}"},
    }
    path = folder / "lws.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


async def run(real: RealApi, count: int) -> dict[str, Any]:
    """Return what is measured with ``count`` DisaggregatedSets, in the words of our own numbers."""
    configuration = await find_configuration(str(real.folder / "admin.kubeconfig"))
    with running_lws(real) as process:
        async with KubeClient(configuration) as client:
            await _create(client, SAMPLE, 1)
            await _until_ready(client, SAMPLE, 1)
            await measure.until_quiet(real, LONGEST)
            seen, cpu, began = real.written, _used(process), time.time()
            await _create(client, BENCH, count)
            await _until_ready(client, BENCH, count)
            ready = time.time() - began
            await measure.until_quiet(real, LONGEST)
            cpu = _used(process) - cpu
            lines = account.of_operator(real.writes(seen), BENCH)
            children = [line for line in lines if line["objectRef"]["resource"] not in NOT_A_CHILD]
            _, last = account.span([line for line in children if _creates(line)])
            rested = _used(process)
            await asyncio.sleep(REST_SECONDS)
            return {
                "peer": f"LWS {binaries.pinned_version(binaries.LWS)}",
                "clusters": count,
                "clusters_per_second": round(count / (last - began), 2),
                "seconds_until_all_are_ready": round(ready, 1),
                "writes_of_one": round(len(lines) / count, 2),
                "writes": account.by_resource(lines),
                "processor_milliseconds_of_one": round(1000 * cpu / count),
                "rest_core": round((_used(process) - rested) / REST_SECONDS, 4),
                "rss_megabytes": round(process.memory_info().rss / measure.MEGABYTE),
            }


def _creates(line: account.Line) -> bool:
    return line["verb"] in ("create", "patch") and not line["objectRef"].get("subresource")


def _used(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


async def _create(client: KubeClient, namespace: str, count: int) -> None:
    bound = asyncio.Semaphore(measure.SIDE_BY_SIDE)
    path = f"{GROUP}/namespaces/{namespace}/disaggregatedsets"

    async def one(number: int) -> None:
        async with bound:
            with contextlib.suppress(Conflict):  # it was created, and the answer was late
                await answered(client, "POST", path, body=disaggregated_set(f"c-{number}"))

    await asyncio.gather(*map(one, range(count)))


async def _until_ready(client: KubeClient, namespace: str, count: int) -> None:
    """Wait for both roles. A DisaggregatedSet does not say in its own status that it is ready."""
    path = f"/apis/leaderworkerset.x-k8s.io/v1/namespaces/{namespace}/leaderworkersets"
    ends = time.monotonic() + LONGEST
    while (
        ready := sum(map(_is_ready, (await answered(client, "GET", path))["items"]))
    ) < 2 * count:
        if time.monotonic() > ends:
            raise TimeoutError(f"{ready} of {2 * count} LeaderWorkerSets are ready")
        await asyncio.sleep(max(0.2, count / 100))


def _is_ready(group: dict[str, Any]) -> bool:
    return (group.get("status") or {}).get("readyReplicas") == 1
