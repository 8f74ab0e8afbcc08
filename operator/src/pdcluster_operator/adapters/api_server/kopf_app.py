"""The only module that imports kopf: it watches objects and serves admission reviews.

kopf's persistence is not used. With ``on.event`` alone, kopf writes to an object in one case: it
removes its own finalizer. That finalizer has a name that nobody sets, so it never does. Handlers
return None, because kopf writes any other result into the status.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import ssl
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import kopf

from pdcluster_operator.adapters.api_server.kinds import (
    PDCLUSTER,
    SMALLEST_PAGE,
    WATCHED,
    Kind,
    Same,
    as_kept,
    nothing_is_kept,
)
from pdcluster_operator.adapters.tls.live_certificate import keep_loaded
from pdcluster_operator.api.labels import GROUP
from pdcluster_operator.api.rules.admission import Review

log = logging.getLogger(__name__)

See = Callable[[str, dict[str, Any]], None]
Judge = Callable[[Mapping[str, Any] | None, Mapping[str, Any] | None, str], Review]
"""Judges (new, old, operation) of one admission review."""

IDENTITY: Any = "pdcluster-operator"
REFUSED = 422
CHUNK = SMALLEST_PAGE
"""Objects in a page of the first LIST. kopf has one number for all kinds."""
LEAVE_SECONDS = 0.5
NEVER = 10 * 365 * 86_400.0  # seconds; an event loop sleeps no infinity
WEBHOOK_ID = "validate"
"""The last part of the URL that the API server calls."""


async def watch(
    see: See,
    *,
    namespaces: Collection[str],
    stop: asyncio.Event,
    same: Same = nothing_is_kept,
) -> None:
    """Watch every kind until ``stop`` or a signal, in all namespaces if none is given."""
    registry = kopf.OperatorRegistry()
    _login(registry)
    settings = _settings()
    for kind in WATCHED:
        _watch_kind(registry, kind, see, same)
        if kind.selector:
            settings.watching.label_selectors[kind.group, kind.version, kind.plural] = kind.selector
    await _run(registry, settings, namespaces, stop)


async def serve_webhook(
    judge: Judge,
    *,
    host: str,
    port: int,
    folder: Path,
    stop: asyncio.Event,
    check_seconds: float = 10.0,
) -> None:
    """Answer admission reviews on ``/validate`` until ``stop`` or a signal.

    Args:
        folder: holds ``tls.crt`` and ``tls.key``, read again every ``check_seconds``.
    """
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
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

    following = asyncio.create_task(keep_loaded(context, folder, check_seconds))
    try:
        await _run(registry, settings, (), stop)
    finally:
        following.cancel()


def _watch_kind(registry: kopf.OperatorRegistry, kind: Kind, see: See, same: Same) -> None:
    @kopf.on.event(kind.group, kind.version, kind.plural, id=kind.plural, registry=registry)
    async def event(event: Mapping[str, Any], **_: Any) -> None:
        see(str(event["type"] or "MODIFIED"), as_kept(event["object"], kind, same))


def _login(registry: kopf.OperatorRegistry) -> None:
    @kopf.on.login(registry=registry, retries=3)
    def login(**context: Any) -> Any:
        return kopf.login_with_service_account(**context) or kopf.login_with_kubeconfig(**context)


class _NoDiffs(kopf.DiffBaseStorage):
    """Keeps no diffs: our handlers need none, and the diff of one pod costs a millisecond."""

    def build(self, **_: Any) -> Any:
        return {}

    def fetch(self, **_: Any) -> Any:
        return None

    def store(self, **_: Any) -> None:
        return None


def _settings() -> kopf.OperatorSettings:
    settings = kopf.OperatorSettings()
    settings.persistence.finalizer = f"{GROUP}/never-set"
    settings.persistence.diffbase_storage = _NoDiffs()
    settings.persistence.progress_storage = kopf.AnnotationsProgressStorage(prefix=GROUP, v1=False)
    settings.posting.enabled = False
    settings.peering.standalone = True
    settings.networking.request_timeout = 30.0
    settings.networking.connect_timeout = 5.0
    settings.watching.chunk_size = CHUNK
    settings.watching.server_timeout = 600  # the server reads no fraction
    settings.queueing.idle_timeout = 1.0
    # The kinds and the namespaces are known at the start, so kopf need not look for new ones.
    settings.scanning.disabled = True
    return settings


async def _run(
    registry: kopf.OperatorRegistry,
    settings: kopf.OperatorSettings,
    namespaces: Collection[str],
    stop: asyncio.Event,
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
        clusterwide=not namespaces,
        namespaces=list(namespaces),
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
