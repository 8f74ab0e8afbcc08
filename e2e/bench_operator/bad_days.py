"""What goes wrong for many PDClusters at once, and what the operator then does and writes.

Each bad day changes some PDClusters while something is broken, or just after an outage. It ends
when each PDCluster is as its spec says. The same changes on a quiet day say how many writes they
need.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from operator_runs import CHILDREN, GROUP, Operator, until
from real_api import RealApi

from bench_operator import account, measure
from bench_operator.calls import answered
from bench_operator.launchers import SILENT, may_be_silent
from bench_operator.plane import BENCH, DOOMED
from bench_operator.thresholds import QUIET, REFUSING
from pdcluster_operator.adapters.api_server.client import MERGE, KubeClient

CHANGED = 50
"""PDClusters that are changed on each day, or all if there are fewer."""
REACTIONS = 20
"""Changes one after another, to see how long each takes while something is broken."""
LONGEST = 3600.0
TROUBLE_SECONDS = 60.0
OUTAGE_SECONDS = 10.0
STALL, RUN = 0.3, 0.7
"""A slow disk: etcd stands still for so long, then runs for so long."""
FLOW = "/apis/flowcontrol.apiserver.k8s.io/v1"
NOBODY_GETS_A_SEAT = "refuse-the-operator"

Day = dict[str, Any]


class BadDays:
    """The days of one run, one after another, on one set of PDClusters that are Ready."""

    def __init__(
        self,
        real: RealApi,
        operator: Operator,
        client: KubeClient,
        count: int,
        engines: measure.DecodeEngines,
        *,
        tls: bool,
    ) -> None:
        self._real = real
        self._operator = operator
        self._client = client
        self._count = count
        self._engines = engines
        self._tls = tls
        self._changed = [f"c-{number}" for number in range(min(CHANGED, count))]

    async def run(self, say: Callable[[str], None]) -> dict[str, Day]:
        """Return what each day took and wrote; see ``thresholds.missed_on``."""
        days: dict[str, Day] = {}
        for name, day in (
            (QUIET, partial(self._day, self._calm)),
            ("API server restarted", partial(self._day, self._api_server_restarts)),
            (REFUSING, partial(self._day, self._refused)),
            ("etcd slow", partial(self._day, self._slow_disk)),
            ("half of the launchers silent", partial(self._day, self._silence)),
            ("operator killed", self._killed),
            ("a namespace deleted", self._namespace_deleted),
        ):
            days[name] = await day()
            say(f"{name}: {days[name]}")
        return days

    async def _day(self, trouble: Callable[[], Any]) -> Day:
        seen, began = self._seen(), time.monotonic()
        async with trouble() as more:
            await self._change(self._changed)
        return await self._end(seen, began, more or {})

    async def _end(self, seen: int, began: float, more: Day) -> Day:
        """Wait until all is right and nothing is written, and account for it."""
        await self._until_right()
        took = time.monotonic() - began
        await measure.until_quiet(self._real, LONGEST)
        lines = [
            line
            for line in account.of_operator(self._real.writes(seen), BENCH)
            if line["objectRef"]["resource"] != "leases" and not account.is_dry_run(line)
        ]
        codes = Counter(line.get("responseStatus", {}).get("code", 0) for line in lines)
        wrote = sum(number for code, number in codes.items() if 200 <= code < 300)
        refused = {str(code): number for code, number in codes.items() if not 200 <= code < 300}
        found = {"changed": len(self._changed), "seconds": round(took, 1), "writes": wrote}
        return {**found, "refused": refused, **more}

    async def _change(self, names: list[str]) -> None:
        for name in names:
            body = self._engines.one_more(name)
            path = f"{GROUP}/namespaces/{BENCH}/pdclusters/{name}"
            await answered(self._client, "PATCH", path, body=body, content=MERGE)

    async def _until_right(self) -> None:
        """Wait until each PDCluster is Ready with its newest spec, and has its engines.

        Raises:
            TimeoutError: one is not.
        """
        ends = time.monotonic() + LONGEST
        while wrong := await self._wrong():
            if time.monotonic() > ends:
                raise TimeoutError(f"{len(wrong)} PDClusters are not as specified: {wrong[:5]}")
            await asyncio.sleep(max(0.5, self._count / 200))

    async def _wrong(self) -> list[str]:
        path = CHILDREN["StatefulSet"].format(BENCH)
        query = {"labelSelector": "pdcluster.dev/role=decode"}
        engines = Counter(
            item["metadata"]["labels"]["pdcluster.dev/cluster"]
            for item in (await answered(self._client, "GET", path, query=query))["items"]
        )
        path = f"{GROUP}/namespaces/{BENCH}/pdclusters"
        clusters = (await answered(self._client, "GET", path))["items"]
        return [one["metadata"]["name"] for one in clusters if not _is_right(one, engines)]

    @asynccontextmanager
    async def _calm(self) -> AsyncIterator[None]:
        yield

    @asynccontextmanager
    async def _api_server_restarts(self) -> AsyncIterator[None]:
        self._real.kill_api_server()
        await asyncio.sleep(OUTAGE_SECONDS)
        await asyncio.to_thread(self._real.start_api_server)
        yield

    @asynccontextmanager
    async def _refused(self) -> AsyncIterator[None]:
        """The API server's own priority and fairness gives the operator no seat for a minute."""
        for plural, body in _no_seats().items():
            await answered(self._client, "POST", f"{FLOW}/{plural}", body=body)
        try:
            yield
            await asyncio.sleep(TROUBLE_SECONDS)
        finally:
            for plural in reversed(_no_seats()):
                path = f"{FLOW}/{plural}/{NOBODY_GETS_A_SEAT}"
                await answered(self._client, "DELETE", path)

    @asynccontextmanager
    async def _slow_disk(self) -> AsyncIterator[None]:
        pid = self._real.etcd_pid

        async def stall() -> None:
            try:
                while True:
                    os.kill(pid, signal.SIGSTOP)
                    await asyncio.sleep(STALL)
                    os.kill(pid, signal.SIGCONT)
                    await asyncio.sleep(RUN)
            finally:
                os.kill(pid, signal.SIGCONT)

        stalling = asyncio.create_task(stall())
        try:
            yield
            await asyncio.sleep(TROUBLE_SECONDS)
        finally:
            stalling.cancel()
            await asyncio.wait([stalling])

    @asynccontextmanager
    async def _silence(self) -> AsyncIterator[Day]:
        """The launchers of half of the PDClusters take questions and give no answer."""
        names = (f"{BENCH}.c-{number}" for number in range(self._count))
        more: Day = {"silent": sum(map(may_be_silent, names)), **self._with_reactions}
        mark = self._real.folder / SILENT
        mark.touch()
        try:
            await asyncio.sleep(TROUBLE_SECONDS)
            more["reaction_seconds"] = await self._reactions()
            yield more
        finally:
            mark.unlink()

    async def _killed(self) -> Day:
        """The operator's process ends while all PDClusters are being changed."""
        seen, began = self._seen(), time.monotonic()
        names = [f"c-{number}" for number in range(self._count)]
        await self._change(names[: self._count // 2])
        self._operator.kill()
        await self._change(names[self._count // 2 :])
        await asyncio.to_thread(partial(self._operator.start, seconds=LONGEST))
        return await self._end(seen, began, {"changed": self._count})

    async def _namespace_deleted(self) -> Day:
        """A namespace with half as many PDClusters goes at once; changes elsewhere go on."""
        half = max(1, self._count // 2)
        await measure.create(self._client, DOOMED, half, tls=self._tls)
        await measure.until_ready(self._real.folder, DOOMED, half, LONGEST)
        await measure.until_quiet(self._real, LONGEST)
        seen, began = self._seen(), time.monotonic()
        await answered(self._client, "DELETE", f"/api/v1/namespaces/{DOOMED}")
        more: Day = {**self._with_reactions, "reaction_seconds": await self._reactions()}
        await self._change(self._changed)
        await asyncio.to_thread(until, self._is_gone, LONGEST, self._operator.said)
        written = account.of_operator(self._real.writes(seen), DOOMED)
        there = [line for line in written if line["objectRef"]["resource"] != "leases"]
        more |= {"deleted": half, "writes_there": account.by_resource(there)}
        return await self._end(seen, began, more)

    def _is_gone(self) -> bool:
        return self._real.call("GET", f"/api/v1/namespaces/{DOOMED}")[0] == 404

    async def _reactions(self) -> dict[str, float]:
        return await measure.reactions(
            self._real.folder, self._client, BENCH, self._count, self._engines, REACTIONS
        )

    @property
    def _with_reactions(self) -> Day:
        return {"changed": len(self._changed) + min(REACTIONS, self._count)}

    def _seen(self) -> int:
        return self._real.written


def _is_right(cluster: dict[str, Any], engines: Counter[str]) -> bool:
    status = cluster.get("status") or {}
    current = status.get("observedGeneration") == cluster["metadata"]["generation"]
    wanted = cluster["spec"].get("decode", {}).get("replicas", 1)
    return measure.is_ready(cluster) and current and engines[cluster["metadata"]["name"]] == wanted


def _no_seats() -> dict[str, dict[str, Any]]:
    """Return what refuses every new request of the user `operator`, by plural."""
    version, metadata = FLOW.removeprefix("/apis/"), {"name": NOBODY_GETS_A_SEAT}
    everything = {
        "verbs": ["*"],
        "apiGroups": ["*"],
        "resources": ["*"],
        "clusterScope": True,
        "namespaces": ["*"],
    }
    return {
        "prioritylevelconfigurations": {
            "apiVersion": version,
            "kind": "PriorityLevelConfiguration",
            "metadata": metadata,
            "spec": {
                "type": "Limited",
                "limited": {
                    "nominalConcurrencyShares": 0,
                    "borrowingLimitPercent": 0,
                    "limitResponse": {"type": "Reject"},
                },
            },
        },
        "flowschemas": {
            "apiVersion": version,
            "kind": "FlowSchema",
            "metadata": metadata,
            "spec": {
                "priorityLevelConfiguration": {"name": NOBODY_GETS_A_SEAT},
                "matchingPrecedence": 2,
                "rules": [
                    {
                        "subjects": [{"kind": "User", "user": {"name": "operator"}}],
                        "resourceRules": [everything],
                    }
                ],
            },
        },
    }
