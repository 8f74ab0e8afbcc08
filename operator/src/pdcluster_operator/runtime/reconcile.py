"""One reconcile: observe, plan, perform, and write the status, also when a step failed.

What to do is not decided here: the plan is a pure function of what was observed. The executor
carries it out. The status says that a step failed, unless the failure will pass by itself.
"""

import logging
import math
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from pdcluster_operator.api.conditions import own_status
from pdcluster_operator.api.object_names import KIND, SCALER_KIND
from pdcluster_operator.plan import launchers, lifecycle, planner, types
from pdcluster_operator.plan.builders.engine_objects import POD_GROUP_KIND
from pdcluster_operator.plan.memo import Memo
from pdcluster_operator.plan.moments import Moment
from pdcluster_operator.plan.objects.ownership import is_being_deleted
from pdcluster_operator.plan.status import pace, progress
from pdcluster_operator.plan.status.events import transitions
from pdcluster_operator.plan.types import Manifest, Plan
from pdcluster_operator.runtime import cluster_secrets, executor, interfaces, launcher_monitor
from pdcluster_operator.runtime.interfaces import ApiError, Key, NamespaceTerminating
from pdcluster_operator.runtime.store import Store

log = logging.getLogger(__name__)

STALE_SECONDS = 2.0
"""When to look again if the store is behind the API server."""
AGAIN_SECONDS = 0.5
"""When to look again after something was written. The events of our own writes queue nothing.
A changed spec has engines after 0.6 s, and not 10 (``operator/tests/runtime/test_crowd.py``)."""
MOST_MEMOS = 256
"""How many clusters keep the results of their last plan.

The results of all clusters were a third of the memory that the operator held for them.
"""

BELIEVED_SECONDS = 240.0
"""How long a refusal of a namespace that is being deleted holds. Then one request is made again.

If the answer came late, the namespace may be gone, and the PDClusters may be those of a new one of
its name. It is shorter than the resync period (``operator/tests/runtime/test_reconcile_loop.py``).
"""


@dataclass(eq=False, kw_only=True)
class Reconciler:
    """Each call brings one cluster a step nearer to its spec."""

    store: Store
    api_server: interfaces.ApiServer
    monitor: launcher_monitor.LauncherMonitor
    events: interfaces.EventSink
    connector: types.ConnectorBundle
    clock: Callable[[], float]
    place: types.Place
    may_write: Callable[[Key], bool]
    queued: Callable[[], int]  # how many clusters wait to be reconciled

    def __post_init__(self) -> None:
        self._secrets = cluster_secrets.ClusterSecrets(self.api_server)
        self._executor = executor.Executor(self.api_server, self._secrets, self.may_write)
        self._ending: dict[tuple[Key, str], float] = {}  # see _goes_with_namespace
        self._memos: OrderedDict[Key, Memo] = OrderedDict()
        self._began: dict[Key, str] = {}  # UIDs of the clusters that got first children from us
        self._wrote: dict[Key, float] = {}  # when each status was written, or first was missing
        self._failing: dict[Key, float] = {}  # since when steps fail
        self._waiting: set[Key] = set()  # clusters with a status that waits
        self._moments: dict[Key, tuple[Moment, ...]] = {}  # of clusters with spec.autoscaling
        self._logged: dict[Key, str] = {}  # the fault of the last plan, if it had one

    async def reconcile(self, key: Key) -> float | None:
        """Return seconds until the next call, or None if an event will cause it.

        Raises:
            ApiError: a step failed, or the status could not be written. The queue calls again.
        """
        cluster = self.store.cluster(key)
        if cluster is None or is_being_deleted(cluster) or self._goes_with_namespace(key, cluster):
            self._dismiss(key)
            return None
        try:
            return await self._look(key, cluster)
        except NamespaceTerminating as error:
            log.info("%s: nothing more is done in the namespace: %s", key, error)
            self._note_end_of_namespace(key, cluster)
            self._dismiss(key)
            return None

    def _goes_with_namespace(self, key: Key, cluster: Manifest) -> bool:
        """Whether the namespace is being deleted, as a refusal of the API server said.

        Kubernetes deletes what a namespace holds kind by kind. As long as the PDClusters are there,
        each object that is gone looks like one to create again. No watch reports that a namespace
        ends: the operator may have no right to read namespaces. When a namespace with 500
        PDClusters was deleted, the operator sent four requests into it, and the benchmark's day
        with a deleted namespace allows one for each PDCluster.
        """
        return time.monotonic() < self._ending.get((key, cluster["metadata"]["uid"]), 0.0)

    def _note_end_of_namespace(self, key: Key, cluster: Manifest) -> None:
        """Note that each PDCluster of the namespace goes with it, for ``BELIEVED_SECONDS``.

        If this PDCluster is gone, the refusal may be about an earlier namespace of the same name.
        """
        now = time.monotonic()
        self._ending = {one: until for one, until in self._ending.items() if now < until}
        there = self.store.clusters_in(key.namespace)
        if there.get(key) == cluster["metadata"]["uid"]:
            self._ending |= dict.fromkeys(there.items(), now + BELIEVED_SECONDS)

    def _dismiss(self, key: Key) -> None:
        """Do nothing more for a cluster: Kubernetes deletes the children, which it owns."""
        self.monitor.dismiss(key)
        self.leave(key)

    async def _look(self, key: Key, cluster: Manifest) -> float | None:
        failure = None
        try:
            await self.store.learn_owners(key, self.api_server.read)
        except ApiError as error:
            failure = error
        children, pods = self.store.children(key), self.store.pods(key)
        self.monitor.follow(key, launchers.launchers_to_poll(pods, children))
        wait = lifecycle.wait_before_judging(
            cluster,
            followed_seconds=self.monitor.followed_seconds(key),
            all_heard=self.monitor.all_heard(key),
        )
        if wait > 0:
            return wait
        now = self.clock()
        new = lifecycle.is_new(cluster, has_children=bool(children))
        uid = cluster["metadata"]["uid"]
        ticket_key, certificates = None, types.HeldCertificates()
        try:
            ticket_key = await self._secrets.ticket_key(key, uid, new=new)
            certificates = await self._secrets.certificates(key, uid, new=new)
        except ApiError as error:  # the status is made of everything else
            failure = error
        local = self.place.one_node  # there it is a folder, and was judged before
        model_config = None if local else await self._secrets.model_config(key, cluster)
        try:
            observed = types.Observed(
                cluster=cluster,
                children=children,
                pods=pods,
                engines=self.monitor.engines(key),
                links=self.monitor.links(key),
                connector=self.connector,
                ticket_key=ticket_key,
                certificates=certificates,
                place=self.place,
                pod_groups=self.store.serves(POD_GROUP_KIND),
                rewrites=self._executor.rewrites(key),
                scaler=self.store.scaler(key),
                connectors=self.store.connectors(key.namespace),
                model_config=model_config,
                unread=failure is not None,
                loads=self.monitor.loads(key),
                moments=self._moments.get(key, ()),
            )
            plan = planner.make_plan(observed, now, self._memo(key))
        except Exception as error:
            # A bug of the operator. Users see it in the status, and other clusters go on.
            bug = ApiError("PlanFailed", f"{type(error).__name__}: {error}")
            status = progress.without_plan(cluster, bug.reason, str(bug), now)
            await self._write_status(key, cluster, status)
            raise bug from error
        self._log_once(key, plan.fault)
        return await self._carry_out(key, cluster, plan, now, failure, new)

    def leave(self, key: Key) -> None:
        """Forget a cluster that is gone, or that another operator may change from now on."""
        for held in (
            self._memos, self._began, self._wrote, self._failing, self._moments, self._logged,
        ):  # fmt: skip
            held.pop(key, None)
        self._waiting.discard(key)
        self._secrets.forget(key)
        self._executor.forget(key)
        self.monitor.forget(key)

    def _log_once(self, key: Key, fault: Exception | None) -> None:
        """Log the fault of a plan, unless it is the one of the plan before."""
        if fault is None:
            self._logged.pop(key, None)
        elif self._logged.get(key) != (words := repr(fault)):
            self._logged[key] = words
            log.error("%s: a part of the plan is left out", key, exc_info=fault)

    def _memo(self, key: Key) -> Memo:
        memo = self._memos.setdefault(key, Memo())
        self._memos.move_to_end(key)
        if len(self._memos) > MOST_MEMOS:
            self._memos.popitem(last=False)
        return memo

    async def _carry_out(
        self, key: Key, cluster: Manifest, plan: Plan, now: float, fault: ApiError | None, new: bool
    ) -> float | None:
        events: list[types.Event] = []
        try:
            if not await self._is_still_there(key, cluster, plan, new=new):
                log.info("%s: the cluster is gone, or was created again; nothing was done", key)
                return STALE_SECONDS
            if not await self._executor.perform(key, plan.steps, events):
                return STALE_SECONDS
        except NamespaceTerminating:
            raise
        except ApiError as error:
            fault = fault or error
        status, flips = plan.status, plan.events
        # A Conflict says nothing of a step that was not tried because of it. But Ready does not
        # stay True while an object is known to be missing.
        lacks = fault is not None and fault.lacks and types.creates(plan.steps)
        lacks = lacks and progress.is_ready(status)
        if fault is not None and (not fault.passing or lacks or key in self._failing):
            failing = time.monotonic() - self._failing.setdefault(key, time.monotonic())
            outage = failing if fault.is_outage and not lacks else math.inf
            status = progress.with_failure(status, cluster, fault.reason, str(fault), now, outage)
            refused = not (fault.is_outage or fault.passing)
            found = transitions(cluster.get("status"), status, secured=True, refused=refused)
            flips = (*(one for one in flips if one.type == "Warning" and one not in found), *found)
        self.monitor.assign(key, plan.peers, plan.routed)
        if self.may_write(key):
            events += await self._scale(key, plan)
        wait = await self._write_status(key, cluster, status)
        if not wait:  # else the status of now is still the one before, and the next plan has them
            events = [*flips, *events]
        await self.events.publish(cluster, events)
        if plan.scaler is not None and self.may_write(key):
            uid, status = plan.scaler.uid, plan.scaler.status
            await self.api_server.write_status(key, uid, status, kind=SCALER_KIND)
        if fault is not None:
            raise fault
        self._failing.pop(key, None)
        again = AGAIN_SECONDS if plan.steps else None
        return min((one for one in (wait, plan.requeue_after, again) if one), default=None)

    async def _scale(self, key: Key, plan: Plan) -> list[types.Event]:
        """Set numbers of engines; return warnings about those that the API server refuses.

        The engines that are there serve on, so a refusal is no failure of the PDCluster. A number
        that somebody else has just set is looked at again a minute later.
        """
        self._moments[key] = plan.moments
        if not plan.moments:
            del self._moments[key]
        refused = []
        for step in plan.scales:
            try:
                await self.api_server.scale(key, step)
            except interfaces.Conflict:
                continue
            except ApiError as error:
                text = f"{step.kind} {key.name} could not be scaled to {step.replicas}: {error}"
                refused.append(types.Event("Warning", error.reason, text))
        return refused

    async def _is_still_there(self, key: Key, cluster: Manifest, plan: Plan, *, new: bool) -> bool:
        """Whether the steps of a plan may be performed: the store may hold a deleted cluster.

        If it does, Kubernetes deletes what is created for it, and it looks new once more.
        """
        if not types.creates(plan.steps) or not self.may_write(key):
            return True
        uid = str(cluster["metadata"]["uid"])
        first = new and self._began.get(key) != uid
        self._began[key] = uid
        if not lifecycle.needs_live_check(self.store.reported_seconds(key, uid), first=first):
            return True
        live = await self.api_server.read(KIND, *key)
        return live is not None and not is_being_deleted(live) and live["metadata"]["uid"] == uid

    async def _write_status(self, key: Key, cluster: Manifest, status: Manifest) -> float:
        """Write a status that changed; return how many seconds it has to wait instead."""
        before, moment = own_status(cluster.get("status")), time.monotonic()
        self._waiting.discard(key)
        if status == before or not self.may_write(key):
            return 0.0
        if not before:
            self._wrote.setdefault(key, moment)
        since_last = moment - self._wrote.get(key, -math.inf)
        waiting = len(self._waiting) + self.queued()
        if (wait := pace.wait_before_writing(before, status, since_last, waiting)) > 0:
            self._waiting.add(key)
            return wait
        metadata = cluster["metadata"]
        version = str(metadata.get("resourceVersion") or "")
        await self.api_server.write_status(key, metadata["uid"], status, version)
        self._wrote[key] = moment
        return 0.0
