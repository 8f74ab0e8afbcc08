"""The operator as a process. It starts every part, and ends when one of them ends."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import secrets
import socket
import time
from collections.abc import Coroutine, Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdcluster_operator.adapters.api_server.children import KubeApi, KubeConnectors
from pdcluster_operator.adapters.api_server.client import KubeClient, NotFound
from pdcluster_operator.adapters.api_server.events import KubeEvents
from pdcluster_operator.adapters.api_server.kinds import LEASE
from pdcluster_operator.adapters.api_server.kubeconfig import find_configuration, own_namespace
from pdcluster_operator.adapters.api_server.reflector import Reflectors
from pdcluster_operator.adapters.connector_bundle import BuiltConnector
from pdcluster_operator.adapters.engine_authority import EngineAuthority
from pdcluster_operator.adapters.engines_http import (
    EnginesHttp,
    IdentityError,
    MountedIdentity,
    use_small_buffers,
)
from pdcluster_operator.adapters.metrics import Metrics
from pdcluster_operator.adapters.own_secrets import CertificateKeeper, WebhookPlace, find_authority
from pdcluster_operator.adapters.status_pages import serve_pages
from pdcluster_operator.plan.connectors import KEEP_SECONDS
from pdcluster_operator.plan.operators.namespace_lease import lease_name
from pdcluster_operator.runtime.connector_collector import PERIOD_SECONDS, ConnectorCollector
from pdcluster_operator.runtime.control_loop import ControlLoop
from pdcluster_operator.runtime.namespace_leases import NamespaceLeases
from pdcluster_operator.runtime.reconcile import Place
from pdcluster_operator.runtime.store import Store

log = logging.getLogger(__name__)

RENEWALS_AT_ONCE = 256
"""Connections for Leases. One that hangs keeps one for half a minute."""


@dataclass(frozen=True, slots=True)
class OperatorOptions:
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
    webhook: WebhookPlace | None = None
    host: str = "0.0.0.0"  # noqa: S104 - a pod's own network
    health_port: int = 8081
    metrics_port: int = 8080
    sweep_seconds: float = 300.0
    launcher_poll_seconds: float = 1.0
    operator_class: str = ""
    engine_certificate: Path | None = None
    keep_connector_seconds: float = KEEP_SECONDS


class _WallClock:
    def now(self) -> float:
        return time.time()


async def run_operator(options: OperatorOptions, stop: asyncio.Event) -> None:
    """Run until ``stop``, a signal, or the first part that fails, whose error is raised."""
    _allow_many_connections()
    use_small_buffers()
    metrics = Metrics()
    watched: list[Reflectors] = []

    async def alive() -> str | None:
        return next(filter(None, (one.trouble() for one in watched)), None)

    async def readiness() -> str | None:
        known = any(one.is_ready for one in watched)
        return None if known else "objects are not listed yet"

    async with AsyncExitStack() as stack:
        await serve_pages(
            stack,
            host=options.host,
            health_port=options.health_port,
            metrics_port=options.metrics_port,
            checks={"/healthz": alive, "/readyz": readiness},
            metrics=metrics,
        )
        client = KubeClient(await find_configuration(), metrics.called)
        await stack.enter_async_context(client)
        # Behind a burst on a slow API server, or behind calls that hang, a renewal would come too
        # late.
        renewing = KubeClient(
            await find_configuration(), metrics.called, connections=RENEWALS_AT_ONCE
        )
        await stack.enter_async_context(renewing)
        watching = KubeClient(await find_configuration(), metrics.called, connections=0)
        await stack.enter_async_context(watching)
        connector = await asyncio.to_thread(BuiltConnector)
        authority: list[EngineAuthority] = []

        async def find() -> None:
            if options.authority is None:
                log.warning("no --authority-secret: a restart makes all certificates again")
                authority.append(EngineAuthority.new(time.time())[0])
            else:
                authority.append(await find_authority(client, options.authority))

        if not await _unless_stopped(find(), stop):
            return
        store = Store()
        folder = options.engine_certificate
        identity = None if folder is None else _identity(folder)
        # The loop needs these two, and they call it back: it is made after them.
        api = KubeApi(
            client,
            authority[0],
            lambda answer: loop.remember(answer),  # noqa: PLW0108
            store.same,
        )
        leases = NamespaceLeases(
            KubeLeases(renewing),
            lease_name(options.operator_class),
            own_identity(),
            needed=lambda namespace: loop.works_in(namespace),  # noqa: PLW0108
            acquired=lambda namespace: loop.wake(namespace),  # noqa: PLW0108
        )
        loop = ControlLoop(
            store=store,
            api=api,
            launchers=await stack.enter_async_context(EnginesHttp(authority[0], identity=identity)),
            events=KubeEvents(client),
            connector=connector,
            clock=_WallClock(),
            poll_seconds=options.launcher_poll_seconds,
            place=Place(
                own_namespace(),
                options.host_path_models,
                mounted_certificates=identity is not None,
                operator_class=options.operator_class,
            ),
            leases=leases,
            worked=lambda seconds, failed: metrics.reconciled(seconds, failed=failed),
        )
        metrics.measure(
            lambda: loop.queue.depth,
            lambda: len(store.keys()),
            loop.local_prefill_shares,
            loop.not_ready,
            lambda: loop.unlisted,
        )
        reflectors = Reflectors(watching, loop, options.namespaces, options.sweep_seconds)
        watched.append(reflectors)
        stack.push_async_callback(leases.stop)  # after the loop has stopped
        stack.push_async_callback(loop.stop)

        async def work() -> None:
            await reflectors.ready()
            loop.start()
            await collector.run()

        keep = options.keep_connector_seconds
        collector = ConnectorCollector(
            store,
            KubeConnectors(client, api),
            _WallClock(),
            period=max(1.0, min(PERIOD_SECONDS, keep)),
            keep=keep,
        )
        parts: list[Coroutine[Any, Any, object]] = [stop.wait(), reflectors.run(), work()]
        if options.webhook is not None:
            keeper = CertificateKeeper(
                client, options.webhook, expires=metrics.certificate_expiry.set
            )
            parts.append(keeper.run())
        log.info("reconciling %s", ", ".join(options.namespaces) or "every namespace")
        await until_one_ends(parts)


def _identity(folder: Path) -> MountedIdentity:
    """Return the operator's certificate, or say why not. It may be put right later."""
    identity = MountedIdentity(folder)
    try:
        identity.context()
    except IdentityError as error:
        log.error("%s", error)
    return identity


def _allow_many_connections() -> None:
    """Raise the limit of open files: each launcher holds a connection while it has no news."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


async def until_one_ends(parts: list[Coroutine[Any, Any, object]]) -> None:
    """Run all parts until the first ends; its error is raised."""
    tasks = [asyncio.create_task(part) for part in parts]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()


async def _unless_stopped(work: Coroutine[Any, Any, None], stop: asyncio.Event) -> bool:
    """Run ``work``; return whether it ended before ``stop``."""
    task, stopped = asyncio.create_task(work), asyncio.create_task(stop.wait())
    await asyncio.wait((task, stopped), return_when=asyncio.FIRST_COMPLETED)
    finished = task.done()
    for one in (task, stopped):
        one.cancel()
    await asyncio.gather(task, stopped, return_exceptions=True)
    return finished


Manifest = Mapping[str, Any]


class KubeLeases:
    """The Lease objects of an API server; see ``runtime/namespace_leases.py``."""

    def __init__(self, client: KubeClient) -> None:
        self._client = client

    async def read_lease(self, namespace: str, name: str) -> Manifest | None:
        """Return the Lease; None if there is none."""
        try:
            return await self._client.call("GET", LEASE.path(namespace, name))
        except NotFound:
            return None

    async def write_lease(self, manifest: Manifest) -> None:
        """Create the Lease, or replace the version that was read."""
        metadata = manifest["metadata"]
        if "resourceVersion" not in metadata:
            await self._client.call("POST", LEASE.path(metadata["namespace"]), body=manifest)
            return
        path = LEASE.path(metadata["namespace"], metadata["name"])
        await self._client.call("PUT", path, body=manifest)


def own_identity() -> str:
    """Return who this process is: its pod, whose earlier process has ended, or a random name."""
    return os.environ.get("POD_NAME") or f"{socket.gethostname()}-{secrets.token_hex(4)}"
