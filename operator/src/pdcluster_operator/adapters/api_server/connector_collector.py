"""Deletes the ConfigMaps with a connector that nothing mounts any more.

``plan/connectors.py`` decides which. It needs no Lease, because a
namespace without PDClusters has none. Several operators may do the same at once: each write is only
for the version that was seen.
"""

import asyncio
import logging
from collections.abc import Callable
from functools import partial

from pdcluster_operator.adapters.api_server.kube_api import KubeApi
from pdcluster_operator.plan import connectors, types
from pdcluster_operator.runtime.interfaces import ApiError
from pdcluster_operator.runtime.store import Store

log = logging.getLogger(__name__)

SHORTEST_SECONDS, LONGEST_SECONDS = 1.0, 60.0


async def keep_collecting(
    store: Store, api: KubeApi, keep: float, clock: Callable[[], float]
) -> None:
    """Check all such ConfigMaps again and again, until the task is cancelled.

    Args:
        clock: the time by the API server's clock.
        keep: how long a connector stays that nothing mounts, in seconds.
    """
    while True:
        await asyncio.sleep(max(SHORTEST_SECONDS, min(LONGEST_SECONDS, keep)))
        await collect(store, api, clock(), keep)


async def collect(store: Store, api: KubeApi, now: float, keep: float) -> None:
    """Check each ConfigMap once. What failed is tried again in the next period."""
    for live in store.all_connectors():
        try:
            await _one(store, api, live, now, keep)
        except ApiError as error:
            log.info("ConfigMap %s: %s", live["metadata"]["name"], error)
        except Exception:  # of one namespace's objects; the other namespaces go on
            log.exception("ConfigMap %s is left as it is", live["metadata"]["name"])


async def _one(store: Store, api: KubeApi, live: types.Manifest, now: float, keep: float) -> None:
    namespace, name = str(live["metadata"]["namespace"]), str(live["metadata"]["name"])
    step_if = partial(connectors.step_for_connector, live, now=now, keep=keep)
    step = step_if(mounted=store.is_mounted(namespace, name))
    if isinstance(step, types.Delete):  # the store may be stale, and holds only our objects
        there = await api.list_mounting(namespace)
        step = step_if(mounted=any(name in connectors.shared_connectors_of(one) for one in there))
    if step is None:
        return
    await (api.delete(step) if isinstance(step, types.Delete) else api.mark_connector(step))
    verb = "Delete" if isinstance(step, types.Delete) else "MarkConnector"
    log.info("%s/%s: %s: %s", namespace, name, verb, step.why)
