"""What is measured of one operator process: how it creates, reacts, rests and starts again."""

from __future__ import annotations

import asyncio
import math
import random
import re
import statistics
import time
from collections import Counter
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any

import psutil
from operator_runs import CHILDREN, GROUP, Operator, cluster
from real_api import RealApi

from bench_operator import account
from bench_operator.calls import answered
from bench_operator.watching import events
from pdcluster_operator.adapters.api_server.client import MERGE, KubeClient
from pdcluster_operator.runtime.interfaces import Conflict

SIDE_BY_SIDE = 32
QUIET_SECONDS = 10.0
CHANGES = 100
LONGEST_REACTION = 600.0
MEGABYTE = 1e6


class DecodeEngines:
    """How many decode engines each PDCluster has. A change adds one."""

    def __init__(self) -> None:
        self._added: Counter[str] = Counter()

    def one_more(self, name: str) -> dict[str, Any]:
        """Return the patch that adds an engine to the PDCluster ``name``."""
        self._added[name] += 1
        return {"spec": {"decode": {"replicas": 1 + self._added[name]}}}


def pdcluster(name: str, *, tls: bool) -> dict[str, Any]:
    """Return a PDCluster, with the default for TLS or without TLS."""
    return cluster(name, transfer={"device": "CPU"} | ({} if tls else {"tls": "Disabled"}))


def used(operator: Operator) -> float:
    """Return the seconds of a processor that the process has taken so far."""
    assert operator.process is not None
    times = psutil.Process(operator.process.pid).cpu_times()
    return times.user + times.system


def memory(operator: Operator) -> tuple[float, float]:
    """Return the process's memory (RSS) now and at its highest, in MB."""
    assert operator.process is not None
    text = Path(f"/proc/{operator.process.pid}/status").read_text()
    now, peak = (re.search(rf"{name}:\s+(\d+) kB", text) for name in ("VmRSS", "VmHWM"))
    assert now
    assert peak
    return int(now[1]) * 1024 / MEGABYTE, int(peak[1]) * 1024 / MEGABYTE


def reads(operator: Operator) -> dict[str, int]:
    """Count the GETs of the process so far, by resource and code."""
    page = operator.page("/metrics", operator.metrics)[1]
    found = re.findall(
        r'pdcluster_api_calls_total\{code="(\d+)",method="GET",resource="([^"]+)"\} (\S+)', page
    )
    return {f"{resource} {code}": int(float(number)) for code, resource, number in found}


async def create(
    client: KubeClient, namespace: str, count: int, name: str = "c", *, tls: bool
) -> None:
    """Create PDClusters."""
    bound = asyncio.Semaphore(SIDE_BY_SIDE)
    path = f"{GROUP}/namespaces/{namespace}/pdclusters"

    async def one(number: int) -> None:
        async with bound:
            with suppress(Conflict):  # it was created, and the answer was late
                await answered(client, "POST", path, body=pdcluster(f"{name}-{number}", tls=tls))

    await asyncio.gather(*map(one, range(count)))


async def until_ready(folder: Path, namespace: str, count: int, seconds: float) -> None:
    """Wait until so many PDClusters are Ready.

    A watch sees each of them once for each change. To list thousands again and again is work that
    the API server would have to do beside the operator's.

    Args:
        folder: of the control plane; holds ``admin.kubeconfig``.

    Raises:
        TimeoutError: they were not.
    """
    ready: set[str] = set()
    try:
        watch = events(folder, f"{GROUP}/namespaces/{namespace}/pdclusters")
        async with asyncio.timeout(seconds), aclosing(watch):
            async for event in watch:
                there = event["type"] != "DELETED" and is_ready(event["object"])
                (ready.add if there else ready.discard)(event["object"]["metadata"]["name"])
                if len(ready) >= count:
                    return
    except TimeoutError as error:
        text = f"{len(ready)} of {count} PDClusters are Ready after {seconds} s"
        raise TimeoutError(text) from error


def is_ready(cluster: dict[str, Any]) -> bool:
    """Whether a PDCluster says that it is Ready."""
    conditions = (cluster.get("status") or {}).get("conditions") or ()
    return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)


async def until_quiet(real: RealApi, seconds: float) -> int:
    """Wait until the operator writes nothing but Leases; return how many lines the log has.

    Raises:
        TimeoutError: it still writes.
    """
    ends = time.monotonic() + seconds
    seen = real.written
    while True:
        await asyncio.sleep(QUIET_SECONDS)
        news = real.writes(seen)
        seen += len(news)
        if not [line for line in news if not _is_rest(line)]:
            return seen
        if time.monotonic() > ends:
            raise TimeoutError(f"after {seconds} s it writes {account.by_resource(news)}")


def _is_rest(line: account.Line) -> bool:
    return line["user"]["username"] != "operator" or line["objectRef"]["resource"] == "leases"


async def rest(real: RealApi, operator: Operator, seconds: float) -> dict[str, Any]:
    """Return what the process takes and writes while nothing happens."""
    before, seen, began = used(operator), real.written, time.monotonic()
    await asyncio.sleep(seconds)
    core = (used(operator) - before) / (time.monotonic() - began)
    news = [line for line in real.writes(seen) if line["user"]["username"] == "operator"]
    return {"core": round(core, 4), "writes": account.by_resource(news), "seconds": seconds}


async def reactions(
    folder: Path,
    client: KubeClient,
    namespace: str,
    count: int,
    engines: DecodeEngines,
    changes: int = CHANGES,
) -> dict[str, float]:
    """Return how many seconds a change of a PDCluster needs to become a StatefulSet.

    Each change adds a decode engine to another cluster, after the last change had its effect.

    Raises:
        TimeoutError: a change had no effect.
    """
    made: dict[str, asyncio.Event] = {}
    known = asyncio.Event()

    async def look() -> None:
        path = CHILDREN["StatefulSet"].format(namespace)
        async for event in events(folder, path, "pdcluster.dev/cluster"):
            name = event["object"]["metadata"]["labels"]["pdcluster.dev/cluster"]
            known.set()
            if event["type"] == "ADDED" and name in made:
                made[name].set()

    looking = asyncio.create_task(look())
    took = []
    try:
        await known.wait()
        await asyncio.sleep(3.0)  # the watch begins with what is there
        for number in random.Random(0).sample(range(count), min(changes, count)):
            path = f"{GROUP}/namespaces/{namespace}/pdclusters/c-{number}"
            done = made[f"c-{number}"] = asyncio.Event()
            body = engines.one_more(f"c-{number}")
            began = time.monotonic()
            await answered(client, "PATCH", path, body=body, content=MERGE)
            await asyncio.wait_for(done.wait(), LONGEST_REACTION)
            took.append(time.monotonic() - began)
    finally:
        looking.cancel()
    took.sort()
    return {
        "p50": round(statistics.median(took), 3),
        "p99": round(took[math.ceil(0.99 * len(took)) - 1], 3),  # the nearest rank
        "most": round(took[-1], 3),
        "changes": len(took),
    }
