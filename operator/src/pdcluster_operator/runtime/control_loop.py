"""The operator's control loop: store, queue, reconciler and launcher monitor.

It is the same in a cluster and in local mode. Both feed :meth:`ControlLoop.see` with what is listed
and watched, and give it the interfaces through which it reads and writes.
"""

import random
import time
from collections.abc import Callable, Collection

from pdcluster_operator.api import conditions, object_names
from pdcluster_operator.plan import connectors, lifecycle, namespace_lease, types
from pdcluster_operator.plan.status.conditions import local_share
from pdcluster_operator.runtime import interfaces, launcher_monitor, queue, reconcile
from pdcluster_operator.runtime.store import CLUSTER_KIND, Manifest, Store, key_of

RESYNC_SECONDS = 300.0
"""When each PDCluster is reconciled once more, up to a tenth later, if nothing happens before. Only
this finds that a Secret is gone: none is watched (``operator/tests/runtime/test_crowd.py``)."""


class ControlLoop:
    """The parts of one operator process, connected to each other.

    Args:
        connector: what is mounted into engine pods.
        clock: seconds since the epoch, for conditions.
        worked: called after every reconcile with its seconds, and with whether it failed.
        holds: whether this process may work in a namespace now.
    """

    def __init__(
        self,
        *,
        api_server: interfaces.ApiServer,
        launchers: interfaces.Launchers,
        events: interfaces.EventSink,
        connector: types.ConnectorBundle,
        clock: Callable[[], float] = time.time,
        poll_seconds: float = 1.0,
        backoff: queue.Backoff = queue.BACKOFF,
        place: types.Place | None = None,
        worked: Callable[[float, bool], None] = lambda *_: None,
        holds: Callable[[str], bool] = lambda _: True,
    ) -> None:
        self._place = place = place or types.Place()
        self._worked = worked
        self._holds = holds
        self.store = Store()
        self.queue = queue.KeyedQueue(
            self._work, is_urgent=self._is_urgent, is_new=self._is_new, backoff=backoff
        )
        self.monitor = launcher_monitor.LauncherMonitor(
            launchers, self.queue.add, period=poll_seconds
        )
        self._reconciler = reconcile.Reconciler(
            store=self.store,
            api_server=api_server,
            monitor=self.monitor,
            events=events,
            connector=connector,
            clock=clock,
            place=place,
            may_write=lambda key: holds(key.namespace),
            queued=self.queue.slots.waiting,
        )
        self.unlisted: frozenset[str] = frozenset()

    def see(self, event: str, manifest: Manifest) -> None:
        """Take in a watch event: ADDED, MODIFIED or DELETED. It queues a cluster if it is news.

        Somebody may change the label by which a pod belongs to a cluster. The cluster that it
        leaves is queued, too: the pod's StatefulSet cannot make another pod of this name.
        """
        before = self.store.held(manifest)
        key = self.store.drop(manifest) if event == "DELETED" else self.store.put(manifest)
        if key is not None:
            self._queue(key, manifest)
            if before is not None and (left := key_of(before)) not in (None, key):
                self._queue(left, manifest)
        elif event == "DELETED" and connectors.is_shared_connector(manifest):
            self.wake(str(manifest["metadata"]["namespace"]))

    def remember(self, manifest: Manifest) -> None:
        """Take in what the API server answered to a write of ours.

        It queues the cluster only if somebody has changed the spec since it was read. A watch that
        has to list again would not report such a change, because the store has this version then.
        """
        before = self.store.held(manifest)
        self.store.answered(manifest)
        if manifest["kind"] in (CLUSTER_KIND, object_names.SCALER_KIND) and before is not None:
            metadata = manifest["metadata"]
            if metadata.get("generation") != before["metadata"].get("generation"):
                self._queue(interfaces.Key(metadata["namespace"], metadata["name"]), manifest)

    def _queue(self, key: interfaces.Key, manifest: Manifest) -> None:
        urgent = manifest["kind"] == CLUSTER_KIND and self._is_urgent(key)
        self.queue.add(key, urgent=urgent)

    def _is_urgent(self, key: interfaces.Key) -> bool:
        cluster = self.store.cluster(key)
        return cluster is not None and lifecycle.is_changed(cluster)

    def _is_new(self, key: interfaces.Key) -> bool:
        cluster = self.store.cluster(key)
        return cluster is not None and lifecycle.is_new(
            cluster, has_children=bool(self.store.children(key))
        )

    def set_unlisted(self, namespaces: Collection[str]) -> None:
        """Say in which namespaces nothing can be done: not all of their objects are known."""
        known = self.unlisted.difference(namespaces)
        self.unlisted = frozenset(namespaces)
        for namespace in known:
            self.wake(namespace)

    def set_served(self, kind: str, *, served: bool) -> None:
        """Say whether the API server has a kind. If that is news, every cluster is looked at."""
        if self.store.set_served(kind, served=served):
            keys = self.store.keys()
            for key in keys:
                self.queue.add(key)

    def local_prefill_shares(self) -> dict[tuple[str, str], float]:
        """Return which share of its latest prompts each cluster's decode engines computed.

        A cluster without prompts has no entry.
        """
        keys = self.store.keys()
        shares = {key: local_share(self.monitor.links(key).values()) for key in keys}
        return {key: share for key, share in shares.items() if share is not None}

    def statuses(self) -> dict[tuple[str, str], object]:
        """Return the status of each cluster of ours; None of a cluster that has none yet."""
        ours = filter(self._is_ours, self.store.keys())
        return {key: (self.store.cluster(key) or {}).get("status") for key in ours}

    def not_ready(self) -> dict[tuple[str, str], str]:
        """Return the reason of the condition Ready for each cluster of ours that is not Ready."""
        found: dict[tuple[str, str], str] = {}
        for key, status in self.statuses().items():
            ready = conditions.find_condition(status, conditions.ConditionType.READY)
            if ready.get("status") != "True":
                found[key] = str(ready.get("reason") or conditions.StatusReason.NOT_SEEN_YET)
        return found

    def start(self) -> None:
        """Start working on the running loop."""
        self.queue.start()

    async def stop(self) -> None:
        """End the work in hand and all polling."""
        await self.queue.stop()
        await self.monitor.stop()

    def works_in(self, namespace: str) -> bool:
        """Whether a namespace has PDClusters of this operator's class."""
        return any(map(self._is_ours, self.store.clusters_in(namespace)))

    def wake(self, namespace: str) -> None:
        """Queue every cluster of a namespace."""
        for key in self.store.clusters_in(namespace):
            self.queue.add(key)

    def _is_ours(self, key: interfaces.Key) -> bool:
        cluster = self.store.cluster(key)
        if cluster is None or key.namespace in self.unlisted:
            return False
        return namespace_lease.belongs_to(cluster, self._place.operator_class)

    async def _work(self, key: interfaces.Key) -> float | None:
        ours = self._is_ours(key) and self._holds(key.namespace)
        if self.store.cluster(key) is not None and not ours:
            self._reconciler.leave(key)  # another operator's, or nobody's yet
            return None
        started, failed = time.monotonic(), True
        try:
            again_after = await self._reconciler.reconcile(key)
            failed = False
        finally:
            self._worked(time.monotonic() - started, failed)
        if self.store.cluster(key) is None:
            return None
        resync = RESYNC_SECONDS * random.uniform(1.0, 1.1)  # noqa: S311
        return min(again_after or resync, resync)
