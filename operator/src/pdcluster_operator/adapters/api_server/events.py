"""Kubernetes events of ``events.k8s.io/v1``: one for each transition. Repeats are counted."""

import logging
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, NamedTuple

from pdcluster_operator.adapters.api_server.client import MERGE, KubeClient, NotFound
from pdcluster_operator.adapters.api_server.kinds import EVENT
from pdcluster_operator.api.object_names import API_VERSION, GROUP, KIND
from pdcluster_operator.plan.rollout.revisions import short_hash
from pdcluster_operator.plan.types import Event
from pdcluster_operator.runtime.interfaces import ApiError, NamespaceTerminating

log = logging.getLogger(__name__)

SERIES_SECONDS = 1800.0
"""How long a repeat is counted in the first event. API servers keep an event for an hour."""
REMEMBERED = 4096
LONGEST_NOTE, LONGEST_REASON = 1024, 128  # bytes that API servers take
CONTROLLER = f"{GROUP}/operator"


class _Posted(NamedTuple):
    name: str
    times: int
    last: float


class KubeEvents:
    """See :class:`pdcluster_operator.runtime.interfaces.EventSink`."""

    def __init__(self, client: KubeClient, clock: Callable[[], float] = time.time) -> None:
        self._client = client
        self._clock = clock
        self._instance = os.environ.get("HOSTNAME") or "pdcluster-operator"
        self._posted: OrderedDict[tuple[str, ...], _Posted] = OrderedDict()

    async def publish(self, cluster: Mapping[str, Any], events: Iterable[Event]) -> None:
        """Publish; an event that cannot be posted is logged and lost.

        Raises:
            NamespaceTerminating: no event can be posted there any more.
        """
        for event in events:
            try:
                await self._post(cluster["metadata"], event)
            except NamespaceTerminating:
                raise
            except ApiError as error:
                log.warning("event %s was not posted: %s", event.reason, error)

    async def _post(self, metadata: Mapping[str, Any], event: Event) -> None:
        now = self._clock()
        key = (str(metadata["uid"]), event.type, event.reason, event.message)
        known = self._posted.get(key)
        if known is not None and now - known.last < SERIES_SECONDS:
            series = known._replace(times=known.times + 1, last=now)
            if await self._count(metadata["namespace"], series):
                self._remember(key, series)
                return
        name = f"{metadata['name']}.{short_hash([*key, now], 12)}"
        await self._client.call(
            "POST",
            EVENT.path(metadata["namespace"]),
            body=event_object(metadata, event, name, now, self._instance),
        )
        self._remember(key, _Posted(name, 1, now))

    async def _count(self, namespace: str, series: _Posted) -> bool:
        body = {"series": {"count": series.times, "lastObservedTime": _micro(series.last)}}
        path = EVENT.path(namespace, series.name)
        try:
            await self._client.call("PATCH", path, body=body, content=MERGE)
        except NotFound:  # the server forgets events after an hour
            return False
        return True

    def _remember(self, key: tuple[str, ...], posted: _Posted) -> None:
        self._posted[key] = posted
        self._posted.move_to_end(key)
        while len(self._posted) > REMEMBERED:
            self._posted.popitem(last=False)


def event_object(
    metadata: Mapping[str, Any], event: Event, name: str, now: float, instance: str
) -> dict[str, Any]:
    """Return an event about the PDCluster with this metadata.

    Args:
        instance: which process reports it.
    """
    return {
        "apiVersion": EVENT.api_version,
        "kind": EVENT.name,
        "metadata": {"name": name, "namespace": metadata["namespace"]},
        "eventTime": _micro(now),
        "type": event.type,
        "reason": event.reason[:LONGEST_REASON],
        "action": "Reconcile",
        "note": event.message.encode()[:LONGEST_NOTE].decode(errors="ignore"),
        "reportingController": CONTROLLER,
        "reportingInstance": instance,
        "regarding": {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "namespace": metadata["namespace"],
            "name": metadata["name"],
            "uid": metadata["uid"],
        },
    }


def _micro(moment: float) -> str:
    return datetime.fromtimestamp(moment, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
