"""The only module that imports kopf, which serves admission reviews.

``reflector.py`` watches objects.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import ssl
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import kopf

from pdcluster_operator.adapters.api_server.kinds import PDCLUSTER
from pdcluster_operator.api.labels import GROUP
from pdcluster_operator.api.rules.validate import Review

log = logging.getLogger(__name__)

Judge = Callable[[Mapping[str, Any] | None, Mapping[str, Any] | None, str], Review]
"""Judges (new, old, operation) of one admission review."""

IDENTITY: Any = "pdcluster-operator"
REFUSED = 422
LEAVE_SECONDS = 0.5
NEVER = 10 * 365 * 86_400.0  # seconds; an event loop sleeps no infinity
WEBHOOK_ID = "validate"
"""The last part of the URL that the API server calls."""


async def serve_webhook(
    judge: Judge,
    *,
    host: str,
    port: int,
    context: ssl.SSLContext,
    folder: Path,
    stop: asyncio.Event,
) -> None:
    """Answer admission reviews on ``/validate`` until ``stop`` or a signal.

    Args:
        context: has the certificate; whoever calls loads a renewed one into it.
        folder: holds ``tls.crt`` and ``tls.key``.
    """
    registry = kopf.OperatorRegistry()
    _login(registry)
    settings = _settings()
    settings.admission.server = kopf.WebhookServer(
        addr=host,
        port=port,
        context=context,
        certfile=folder / "tls.crt",
        pkeyfile=folder / "tls.key",
        file_check_interval=NEVER,
    )

    @kopf.on.validate(GROUP, PDCLUSTER.version, PDCLUSTER.plural, id=WEBHOOK_ID, registry=registry)
    async def validate(
        new: Mapping[str, Any] | None,
        old: Mapping[str, Any] | None,
        operation: str,
        warnings: list[str],
        **_: Any,
    ) -> None:
        answer = judge(_plain(new), _plain(old), operation)
        warnings.extend(answer.warnings)
        if answer.errors:
            raise kopf.AdmissionError(answer.message, code=REFUSED)

    await _run(registry, settings, stop)


def _login(registry: kopf.OperatorRegistry) -> None:
    @kopf.on.login(registry=registry, retries=3)
    def login(**context: Any) -> Any:
        return kopf.login_with_service_account(**context) or kopf.login_with_kubeconfig(**context)


def _settings() -> kopf.OperatorSettings:
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.peering.standalone = True
    settings.networking.request_timeout = 30.0
    settings.networking.connect_timeout = 5.0
    settings.scanning.disabled = True  # nothing is watched
    return settings


async def _run(
    registry: kopf.OperatorRegistry, settings: kopf.OperatorSettings, stop: asyncio.Event
) -> None:
    """Run kopf until it fails or ``stop`` is set.

    When kopf ends, it waits 5 s for every task of the event loop, also for ours. So we handle the
    signals ourselves, and wait for kopf only as long as its own tasks need.
    """
    flag = asyncio.Event()
    tasks = await kopf.spawn_tasks(
        registry=registry,
        settings=settings,
        standalone=True,
        clusterwide=True,
        stop_flag=flag,
        # kopf would look up the name of the user, and a container's user has none.
        identity=IDENTITY,
    )
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    running = asyncio.create_task(kopf.run_tasks(tasks, ignored=asyncio.all_tasks()))
    stopped = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((running, stopped), return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            flag.set()
            await asyncio.wait((running,), timeout=LEAVE_SECONDS)
    finally:
        stopped.cancel()
        if not running.done():
            running.cancel()
    if running.done() and not running.cancelled():
        running.result()


def _plain(body: Mapping[str, Any] | None) -> dict[str, Any] | None:
    return None if body is None else dict(body)
