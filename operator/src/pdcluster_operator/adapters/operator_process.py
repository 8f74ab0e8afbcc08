"""The parts of an operator's process, and what each needs. :mod:`..handlers` runs it."""

import asyncio
import gc
import logging
import os
import secrets
import signal
import socket
import time
from collections.abc import Callable, Coroutine, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pdcluster_operator.adapters import connector_bundle, engine_authority, engines_http
from pdcluster_operator.adapters.api_server import events, kube_api, kubeconfig
from pdcluster_operator.adapters.api_server.client import KubeClient
from pdcluster_operator.adapters.api_server.kinds import PDCLUSTER, PREFILL_SCALER
from pdcluster_operator.adapters.api_server.namespace_leases import NamespaceLeases
from pdcluster_operator.adapters.api_server.reflector import Reflectors
from pdcluster_operator.adapters.metrics import Metrics, PageOptions, serve_pages
from pdcluster_operator.adapters.own_secrets import WebhookPlace, find_authority, keep_certificate
from pdcluster_operator.plan import connectors, namespace_lease, types
from pdcluster_operator.runtime import control_loop, interfaces, store

log = logging.getLogger(__name__)

FULL_COLLECTION = 1_000  # after so many of the young objects; Python's own number is 10
RENEWALS_AT_ONCE = 256
"""Connections for Leases. One that hangs keeps one for half a minute."""
SHORTEST_SECONDS, LONGEST_SECONDS = 1.0, 60.0  # between two checks of connectors


@dataclass(frozen=True, slots=True)
class OperatorOptions(PageOptions):
    """The command line of ``pdcluster-operator run``.

    Attributes:
        namespaces: to watch; all if empty.
        authority: namespace and name of the Secret with the CA of all engines; with None, the
            CA lives as long as the process.
        webhook: where the webhook's certificate is stored; None if the operator makes none.
        operator_class: of the PDClusters to work on; empty for those without one.
        keep_connector_seconds: how long a connector's ConfigMap stays that nothing mounts.
    """

    namespaces: tuple[str, ...] = ()
    authority: tuple[str, str] | None = None
    host_path_models: bool = False
    host_path_prefixes: tuple[str, ...] = ()
    webhook: WebhookPlace | None = None
    sweep_seconds: float = 300.0
    launcher_poll_seconds: float = 1.0
    operator_class: str = ""
    engine_certificate: Path | None = None
    keep_connector_seconds: float = connectors.KEEP_SECONDS


class OperatorProcess:
    """All parts of one operator process. PDClusters and PrefillScalers come through :meth:`see`.

    Attributes:
        error: of the first part that failed; None while none has.
    """

    def __init__(self, options: OperatorOptions) -> None:
        self._options = options
        self._stack = AsyncExitStack()
        self._reflectors: Reflectors | None = None
        self.error: BaseException | None = None

    async def start(self) -> None:
        """Serve health and metrics, list everything, and begin to work.

        It waits for the API server, and until all objects of a namespace are known.
        """
        async with self._stack as stack:
            await self._start(stack)
            self._stack = stack.pop_all()

    async def stop(self) -> None:
        """End the work in hand, and give back the Leases."""
        await self._stack.aclose()

    def see(self, event: str | None, manifest: Mapping[str, Any]) -> None:
        """Take in what kopf has watched, or has listed: then the event is None."""
        if self._reflectors is not None:
            self._reflectors.see(event, manifest)

    async def _start(self, stack: AsyncExitStack) -> None:
        engines_http.use_small_buffers()
        # While 1,000 PDClusters started, Python looked through all objects for garbage every 13 s,
        # for up to a second in which nothing else happened, and found 900 of millions at most.
        gc.set_threshold(*gc.get_threshold()[:2], FULL_COLLECTION)
        options, metrics = self._options, Metrics()

        async def readiness() -> str | None:
            known = self._reflectors is not None and self._reflectors.ready.is_set()
            return None if known else "objects are not listed yet"

        await serve_pages(stack, options, readiness, metrics)
        client, watching, renewing = [
            await stack.enter_async_context(
                KubeClient(
                    await kubeconfig.find_configuration(), metrics.called, connections=number
                )
            )
            # A pause after a 429 holds for all calls of a client. A webhook that answers 429 to
            # every write into a namespace must delay no watch there, and no renewal.
            for number in (0, 0, RENEWALS_AT_ONCE)
        ]
        connector = await asyncio.to_thread(connector_bundle.build_connector)
        if options.authority is None:
            log.warning("no --authority-secret: a restart makes all certificates again")
            authority = engine_authority.EngineAuthority.new(time.time())[0]
        else:
            authority = await find_authority(client, options.authority)
        folder = options.engine_certificate
        engines = await stack.enter_async_context(
            engines_http.EnginesHttp(authority, identity=folder)
        )
        if folder is not None:
            try:
                engines.mounted_context()
            except interfaces.LauncherError as error:  # it may be put right later
                log.error("%s", error)
        # The loop needs these two, and they call it back: it is made after them.
        api = kube_api.KubeApi(client, authority, lambda answer: loop.remember(answer))  # noqa: PLW0108
        leases = NamespaceLeases(
            renewing,
            namespace_lease.lease_name(options.operator_class),
            own_identity(),
            needed=lambda namespace: loop.works_in(namespace),  # noqa: PLW0108
            acquired=lambda namespace: loop.wake(namespace),  # noqa: PLW0108
        )
        loop = control_loop.ControlLoop(
            api_server=api,
            launchers=engines,
            events=events.KubeEvents(client),
            connector=connector,
            clock=client.now,
            poll_seconds=options.launcher_poll_seconds,
            place=types.Place(
                kubeconfig.own_namespace(),
                options.host_path_models or options.host_path_prefixes,
                mounted_certificates=folder is not None,
                operator_class=options.operator_class,
                every_address=kubeconfig.every_address(),
            ),
            holds=leases.holds,
            worked=metrics.reconciled,
        )
        metrics.loop = loop
        elsewhere = PDCLUSTER, PREFILL_SCALER
        reflectors = self._reflectors = Reflectors(
            watching, loop, options.namespaces, options.sweep_seconds, elsewhere
        )
        stack.push_async_callback(leases.stop)  # after the loop has stopped
        stack.push_async_callback(loop.stop)
        self._go_on(stack, reflectors.run())
        if options.webhook is not None:
            expires = metrics.certificate_expiry.set
            self._go_on(stack, keep_certificate(client, options.webhook, expires))
        await reflectors.ready.wait()
        loop.start()
        keep = options.keep_connector_seconds
        self._go_on(stack, keep_collecting(loop.store, api, keep, client.now))
        log.info("reconciling %s", ", ".join(options.namespaces) or "every namespace")

    def _go_on(self, stack: AsyncExitStack, part: Coroutine[Any, Any, None]) -> None:
        """Run a part until the process stops. If it fails, so does the process."""
        task = asyncio.create_task(part)

        async def end() -> None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        stack.push_async_callback(end)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() or (error := task.exception()) is None or self.error is not None:
            return
        self.error = error
        log.error("the operator cannot go on: %s", error, exc_info=error)
        signal.raise_signal(signal.SIGTERM)  # kopf ends at it, whoever has started kopf


def own_identity() -> str:
    """Return who this process is: its pod, whose earlier process has ended, or a random name."""
    return os.environ.get("POD_NAME") or f"{socket.gethostname()}-{secrets.token_hex(4)}"


async def keep_collecting(
    objects: store.Store, api: kube_api.KubeApi, keep: float, clock: Callable[[], float]
) -> None:
    """Check again and again the ConfigMaps with a connector, and delete those that nothing mounts.

    ``plan/connectors.py`` decides which. It needs no Lease, because a namespace without PDClusters
    has none. Several operators may do the same at once: each write is only for the version that was
    seen.

    Args:
        clock: the time by the API server's clock.
        keep: how long a connector stays that nothing mounts, in seconds.
    """
    while True:
        await asyncio.sleep(max(SHORTEST_SECONDS, min(LONGEST_SECONDS, keep)))
        await collect(objects, api, clock(), keep)


async def collect(objects: store.Store, api: kube_api.KubeApi, now: float, keep: float) -> None:
    """Check each ConfigMap once. What failed is tried again in the next period."""
    for live in objects.all_connectors():
        try:
            await _one(objects, api, live, now, keep)
        except interfaces.ApiError as error:
            log.info("ConfigMap %s: %s", live["metadata"]["name"], error)
        except Exception:  # of one namespace's objects; the other namespaces go on
            log.exception("ConfigMap %s is left as it is", live["metadata"]["name"])


async def _one(
    objects: store.Store, api: kube_api.KubeApi, live: types.Manifest, now: float, keep: float
) -> None:
    namespace, name = str(live["metadata"]["namespace"]), str(live["metadata"]["name"])
    step_if = partial(connectors.step_for_connector, live, now=now, keep=keep)
    step = step_if(mounted=objects.is_mounted(namespace, name))
    if isinstance(step, types.Delete):  # the store may be stale, and holds only our objects
        there = await api.list_mounting(namespace)
        step = step_if(mounted=any(name in connectors.shared_connectors_of(one) for one in there))
    if step is None:
        return
    await (api.delete(step) if isinstance(step, types.Delete) else api.mark_connector(step))
    verb = "Delete" if isinstance(step, types.Delete) else "MarkConnector"
    log.info("%s/%s: %s: %s", namespace, name, verb, step.why)
