"""One reconcile: observe, plan, perform, and write the status, also when a step failed.

Nothing is decided here. The plan is a pure function of what was observed; this module
carries it out, stops at the first step that fails, and says so in the status.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pdcluster_operator.api.conditions import ConditionType, no, set_conditions
from pdcluster_operator.api.labels import LAUNCHER_PORT, POD_INDEX_LABEL, engine_of
from pdcluster_operator.plan.engines import known_ids
from pdcluster_operator.plan.model import Apply, Observed, Plan, Step, WriteTicketKey
from pdcluster_operator.plan.planner import make_plan
from pdcluster_operator.runtime.errors import ApiError
from pdcluster_operator.runtime.launcher_monitor import LauncherMonitor, Target
from pdcluster_operator.runtime.ports import Api, Clock, ConnectorSource, EventSink
from pdcluster_operator.runtime.queue import Key
from pdcluster_operator.runtime.store import Store

log = logging.getLogger(__name__)

Manifest = Mapping[str, Any]
STALE_SECONDS = 2.0
"""After which a cluster is looked at again whose store entry is behind the server."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where the operator runs, and what it was allowed there.

    Attributes:
        namespace: of the operator's pod; None where that is not known.
        host_path_models: whether a PDCluster may mount folders of the nodes.
        one_node: whether all pods run on one machine, as in local mode.
    """

    namespace: str | None = None
    host_path_models: bool = True
    one_node: bool = False


class Reconciler:
    """Brings one cluster a step nearer to its spec, each time that it is called."""

    def __init__(
        self,
        *,
        store: Store,
        api: Api,
        monitor: LauncherMonitor,
        events: EventSink,
        connector: ConnectorSource,
        clock: Clock,
        place: Place | None = None,
    ) -> None:
        self._store = store
        self._api = api
        self._monitor = monitor
        self._events = events
        self._connector = connector
        self._clock = clock
        self._place = place or Place()

    async def reconcile(self, key: Key) -> float | None:
        """Return seconds until the next look, or None where an event will tell.

        Raises :class:`ApiError` when a step or the status could not be written; the queue
        calls again.
        """
        cluster = self._store.cluster(key)
        if cluster is None or "deletionTimestamp" in cluster["metadata"]:
            self._monitor.forget(key)  # owner references remove the rest
            return None
        self._monitor.follow(key, leaders(self._store.pods(key)))
        if (wait := self._monitor.first_look(key)) > 0 and any(known_ids(cluster).values()):
            # This process has just started: that it has not heard an engine yet, which another
            # process has, is no news.
            return wait
        now = self._clock.now()
        try:
            plan = make_plan(await self._observe(key, cluster), now)
        except ApiError as error:
            before = cluster.get("status") or {}
            await self._write_status(key, cluster, _with_failure(before, cluster, error, now))
            raise
        except Exception as error:
            # A bug of ours must stand where users look, and must not stop other clusters.
            failure = ApiError("PlanFailed", f"{type(error).__name__}: {error}")
            before = cluster.get("status") or {}
            await self._write_status(key, cluster, _with_failure(before, cluster, failure, now))
            raise failure from error
        return await self._carry_out(key, cluster, plan, now)

    async def _carry_out(self, key: Key, cluster: Manifest, plan: Plan, now: float) -> float | None:
        failure: ApiError | None = None
        try:
            if not await self._perform(key, cluster, plan.steps):
                return STALE_SECONDS
        except ApiError as error:
            failure = error
        status = plan.status
        if failure is not None:
            status = _with_failure(status, cluster, failure, now)
        await self._write_status(key, cluster, status)
        self._monitor.assign(key, plan.peers)
        await self._events.publish(cluster, plan.events)
        if failure is not None:
            raise failure
        return plan.requeue_after

    async def _write_status(self, key: Key, cluster: Manifest, status: Manifest) -> None:
        if status != cluster.get("status"):
            await self._api.write_status(key, cluster["metadata"]["uid"], status)

    async def _observe(self, key: Key, cluster: Manifest) -> Observed:
        return Observed(
            cluster=cluster,
            children=self._store.children(key),
            pods=self._store.pods(key),
            engines=self._monitor.engines(key),
            links=self._monitor.links(key),
            connector=self._connector.bundle(),
            # Secrets are neither listed nor watched: nobody is given that right.
            ticket_key=await self._api.read_ticket_key(key, cluster["metadata"]["uid"]),
            operator_namespace=self._place.namespace,
            host_path_models=self._place.host_path_models,
            one_node=self._place.one_node,
        )

    async def _perform(self, key: Key, cluster: Manifest, steps: Iterable[Step]) -> bool:
        """Carries steps out in order; False when the cluster is no longer the one observed."""
        checked = False
        for step in steps:
            if isinstance(step, Apply | WriteTicketKey):
                # A ghost in the store must not bring children to life that nobody deletes.
                if not checked and await self._api.read_uid(key) != cluster["metadata"]["uid"]:
                    log.info("%s: is gone or made anew; nothing done", key)
                    return False
                checked = True
            if isinstance(step, WriteTicketKey):
                await self._api.write_ticket_key(step)
            elif isinstance(step, Apply):
                await self._api.apply(step.manifest)
            else:
                await self._api.delete(step)
            log.info("%s: %s: %s", key, type(step).__name__, step.why)
        return True


def leaders(pods: Iterable[Manifest]) -> Iterator[Target]:
    """Yield the launchers to ask: node 0 of every engine that has an address."""
    for pod in pods:
        metadata, status = pod["metadata"], pod.get("status") or {}
        engine, address = engine_of(pod), status.get("podIP")
        if engine and address and metadata["labels"].get(POD_INDEX_LABEL, "0") == "0":
            host = f"[{address}]" if ":" in address else address
            restarts = sum(c.get("restartCount", 0) for c in status.get("containerStatuses") or ())
            process = f"{metadata['uid']}/{restarts}"
            yield Target(engine.logical, engine.role, f"http://{host}:{LAUNCHER_PORT}", process)


def _with_failure(
    status: Manifest, cluster: Manifest, failure: ApiError, now: float
) -> dict[str, Any]:
    """Return the planned status, with the failure in its Progressing condition."""
    verdict = (ConditionType.PROGRESSING, no(failure.reason, str(failure)))
    generation = cluster["metadata"].get("generation", 0)
    [failed] = set_conditions(cluster.get("status"), [verdict], generation, now)
    others = [c for c in status.get("conditions") or () if c["type"] != failed["type"]]
    return {**status, "conditions": sorted([*others, failed], key=_place)}


def _place(condition: Manifest) -> int:
    return [kind.value for kind in ConditionType].index(condition["type"])
