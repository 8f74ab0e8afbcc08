"""The operator as kopf sees it: all handlers, and how kopf is run. Only this module imports kopf.

``kopf run -m pdcluster_operator.handlers`` starts an operator, and so does ``pdcluster-operator
run``. PDClusters and PrefillScalers come from kopf's watches. Their handlers only hand an object to
the store, so kopf writes nothing: no finalizer, no annotation, no event. A reflector of ours
watches what the operator creates, which is more, and reports more often (docs/adr/0013).

``pdcluster-operator webhook`` runs another registry, with the admission handler alone.
"""

import asyncio
import itertools
import logging
import os
import signal
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import fields
from functools import partial
from typing import Any, NoReturn

import aiohttp
import click
import kopf
import msgspec
from aiohttp import web

from pdcluster_connector import listening
from pdcluster_operator.adapters import webhook_process
from pdcluster_operator.adapters.api_server import kubeconfig
from pdcluster_operator.adapters.api_server.client import KubeClient, document_of, shallow
from pdcluster_operator.adapters.api_server.kinds import PDCLUSTER, PREFILL_SCALER
from pdcluster_operator.adapters.api_server.reflector import WATCHED_LINE
from pdcluster_operator.adapters.operator_process import OperatorOptions, OperatorProcess
from pdcluster_operator.adapters.webhook_process import WEBHOOK_ID, WebhookOptions, WebhookProcess
from pdcluster_operator.api.object_names import GROUP

log = logging.getLogger(__name__)

WEBHOOK = kopf.OperatorRegistry()
"""The handlers of the webhook's process. All others are in kopf's default registry."""

ENVIRONMENT = "PDCLUSTER_"
"""``kopf run`` has no options of ours. Each field of OperatorOptions is a variable, so prefixed."""
IDENTITY: Any = "pdcluster-operator"
REFUSED = 422
LEAVE_SECONDS = 0.5
OK, TOO_MANY, SERVER_ERROR = 200, 429, 500
AGAIN = frozenset({401, 403})
"""What kopf does not give up at; so it is with ``SERVER_ERROR`` and more."""
PAUSE_SECONDS = 5.0
"""How long kopf waits after an answer that would end it, before it asks again."""
FORGOTTEN = b'{"type":"ERROR","object":{"kind":"Status","code":410,"reason":"Expired"}}\n'
"""The line of a watch after which kopf lists again."""


@kopf.on.startup(errors=kopf.ErrorsMode.PERMANENT)
async def start(settings: kopf.OperatorSettings, memo: Any, **_: Any) -> None:
    """List everything, and begin to work. Wait for the API server and for the CRDs meanwhile."""
    _configure(settings)
    by_kopf = "options" not in memo
    try:
        options = options_of_kopf_run(os.environ) if by_kopf else memo.options
        process = memo.process = OperatorProcess(options)
        await process.start()
    except (kubeconfig.NotConnected, ValueError, OSError) as error:
        if by_kopf:  # which would print the stack of any other error
            raise SystemExit(f"stopped: {error}") from error
        raise


@kopf.on.startup(errors=kopf.ErrorsMode.PERMANENT, registry=WEBHOOK)
async def start_webhook(settings: kopf.OperatorSettings, memo: Any, **_: Any) -> None:
    """Wait for the certificate, and have kopf serve reviews with it."""
    _configure(settings)
    # kopf logs every manifest that is refused.
    logging.getLogger("kopf.objects").setLevel(logging.CRITICAL)
    process = memo.process = WebhookProcess(memo.options)
    await process.start()
    settings.admission.server = _ReviewServer(
        addr=process.options.host, port=process.options.port, context=process.context
    )


class _ReviewServer(kopf.WebhookServer):
    """kopf's, with the limits of every other port."""

    async def __call__(self, fn: Any) -> AsyncIterator[Any]:
        app = web.Application()
        app.router.add_post("/{id}", partial(self._serve, fn))
        listener = listening.open_port(self.addr or "", self.port or 0)
        # The API server keeps a connection for 90 s, and does not repeat a review that got lost.
        guard = await listening.serve(app, listener, self.context, idle_seconds=100.0)
        try:
            yield {}  # kopf manages no configuration of webhooks
            await asyncio.Event().wait()
        finally:
            await guard.close()


@kopf.on.cleanup()
@kopf.on.cleanup(registry=WEBHOOK)
async def stop(memo: Any, **_: Any) -> None:
    """End what was started. An operator ends the work in hand, and gives back its Leases."""
    await memo.process.stop()


@kopf.on.login(retries=3)
@kopf.on.login(retries=3, registry=WEBHOOK)
async def login(**_: Any) -> kopf.AiohttpSession:
    """Return a session with the same rights as the operator's own. kopf asks again after a 401."""
    configuration = await kubeconfig.find_configuration()
    async with KubeClient(configuration) as client:
        session = await client.session(_Response)
    return kopf.AiohttpSession(server=configuration.host, aiohttp_session=session)


@kopf.on.event(GROUP, PDCLUSTER.version, PDCLUSTER.plural, id="pdcluster")
@kopf.on.event(GROUP, PREFILL_SCALER.version, PREFILL_SCALER.plural, id="prefill-scaler")
async def see(event: Mapping[str, Any], memo: Any, **_: Any) -> None:
    """Hand on what kopf has listed (the type is None) or watched: ADDED, MODIFIED or DELETED."""
    memo.process.see(event["type"], dict(event["object"]))


@kopf.on.validate(GROUP, PDCLUSTER.version, PDCLUSTER.plural, id=WEBHOOK_ID, registry=WEBHOOK)
async def validate(*, warnings: list[str], memo: Any, **review: Any) -> None:
    """Judge one admission review by the rules of ``pdcluster lint``."""
    new, old = (one if one is None else dict(one) for one in (review["new"], review["old"]))
    found = await webhook_process.find_config(new)
    answer = memo.process.judge(new, old, review["operation"], found)
    warnings.extend(answer.warnings)
    if answer.errors:
        raise kopf.AdmissionError(answer.message, code=REFUSED)


async def run_operator(options: OperatorOptions, stop: asyncio.Event) -> None:
    """Run the operator until ``stop``, a signal, or the first part that fails.

    Raises:
        Exception: the error of that part; or kopf's, if it cannot go on with its watches.
    """
    memo = kopf.Memo(options=options)
    await _run(kopf.get_default_registry(), stop, memo, options.namespaces)
    if (process := memo.get("process")) is not None and process.error is not None:
        raise process.error


async def run_webhook(options: WebhookOptions, stop: asyncio.Event) -> None:
    """Answer admission reviews until ``stop``, a signal or a failure."""
    await _run(WEBHOOK, stop, kopf.Memo(options=options), leave=LEAVE_SECONDS)


def options_of_kopf_run(environment: Mapping[str, str]) -> OperatorOptions:
    """Return the options of an operator that ``kopf run`` has started.

    Namespaces are those of ``kopf run -n``; the rest are variables such as
    ``PDCLUSTER_AUTHORITY=NAMESPACE/NAME`` and ``PDCLUSTER_HOST_PATH_MODELS=true``, and defaults.

    Raises:
        ValueError: a variable has a value of another type, or a namespace is a pattern.
    """
    context = click.get_current_context(silent=True)
    named = [*(context.params.get("namespaces", ()) if context else ())]
    named += filter(None, [environment.get("KOPF_RUN_NAMESPACE")])  # kopf adds it by itself
    if patterns := [one for one in named if not one.replace("-", "").isalnum()]:
        raise ValueError(
            f"--namespace {patterns[0]}: name each namespace; patterns are not watched"
        )
    chosen: dict[str, Any] = {"namespaces": tuple(named)}
    read = partial(msgspec.convert, strict=False, dec_hook=lambda kind, value: kind(value))
    for field in fields(OperatorOptions):
        text = environment.get(variable := ENVIRONMENT + field.name.upper())
        # For a Service pdcluster-metrics, Kubernetes sets PDCLUSTER_METRICS_PORT=tcp://10.0.0.1:80.
        if text is None or text.startswith(("tcp://", "udp://", "sctp://")):
            continue
        separator = {"authority": "/", "host_path_prefixes": ":"}.get(field.name)
        given = text.split(separator) if separator else text
        try:
            chosen[field.name] = read(given, field.type)
        except msgspec.ValidationError as error:
            raise ValueError(f"{variable}={text}: {error}") from error
    return OperatorOptions(**chosen)


class _Endless:
    """Seconds between the attempts of one request of kopf, which never gives up.

    A list with an end would end the process after a minute without an API server, or because of
    one namespace in which the operator has lost its rights.
    """

    def __iter__(self) -> Iterator[float]:
        return itertools.chain((1.0, 3.0), itertools.repeat(10.0))


class _NothingKept(kopf.StatusDiffBaseStorage):
    """kopf's record of what its handlers have seen of an object. It would be a copy of each object,
    and no handler of ours needs it. kopf stores it only for handlers of other kinds.
    """

    def build(self, **_: Any) -> Any:
        return {}


class _Response(aiohttp.ClientResponse):
    """An answer to kopf, which gives up at many that a server, a proxy or a user can cause.

    Documents may be too deep for its parser; see ``document_of``. It repeats a request after a
    403, a 5xx and a broken connection, and logs in again after a 401. Any other refusal, an error
    within a watch, and an answer that is no JSON would end its process. So it is told that a watch
    is forgotten, or that a list was broken off: then it lists again.
    """

    async def start(self, connection: Any) -> aiohttp.ClientResponse:
        await super().start(connection)
        if self.status in AGAIN or self.status >= SERVER_ERROR:  # kopf repeats it
            return self
        if self.status == TOO_MANY:  # kopf would wait for as long as anybody asks
            raise aiohttp.ClientConnectionError(f"{self.url}: {self.status} {self.reason}")
        if self.url.query.get("watch") == "true":
            self.content = _ShallowLines(self.content, refused=not self.ok)  # type: ignore[assignment]
            self.status = min(self.status, OK)
        elif not self.ok and self._is_list():
            await _broken_off(f"{self.url}: {self.status} {self.reason}")
        return self

    async def text(self, encoding: str | None = None, errors: str = "replace") -> str:
        return await super().text(encoding, errors)

    async def json(self, **more: Any) -> Any:
        try:
            document = document_of(await self.read())
        except ValueError:
            document = None
        if isinstance(document, dict):
            return document
        if self.ok and self._is_list():
            await _broken_off(f"{self.url}: the answer is no JSON object")
        return await super().json(**more)  # raises what kopf expects

    def _is_list(self) -> bool:
        return self.url.name in (PDCLUSTER.plural, PREFILL_SCALER.plural)


async def _broken_off(why: str) -> NoReturn:
    """Raise what kopf takes for an answer that broke off. It makes no pause of its own then."""
    await asyncio.sleep(PAUSE_SECONDS)
    raise aiohttp.ClientPayloadError(why)


class _ShallowLines:
    """The lines of a watch.

    Args:
        refused: whether there are none, because the watch was refused.
    """

    def __init__(self, content: aiohttp.StreamReader, *, refused: bool) -> None:
        self._content = content
        self._refused = refused

    def __getattr__(self, name: str) -> Any:
        return getattr(self._content, name)

    async def iter_chunked(self, _: int) -> Any:
        heard = False
        if self._refused:
            await asyncio.sleep(PAUSE_SECONDS)
            yield FORGOTTEN
            return
        try:
            async for line in shallow(self._content):
                if WATCHED_LINE.decode(line).type == "ERROR":
                    await asyncio.sleep(PAUSE_SECONDS)
                    yield FORGOTTEN
                    return
                yield line
                heard = True
        except ValueError as error:
            await _broken_off(str(error))
        if not heard:  # the server ends what has just begun, and kopf would ask again at once
            await asyncio.sleep(PAUSE_SECONDS)


def _configure(settings: kopf.OperatorSettings) -> None:
    settings.posting.enabled = False
    settings.peering.standalone = True
    # Neither CRDs nor namespaces are watched: the operator needs no right for it.
    settings.scanning.disabled = True
    settings.networking.request_timeout = 30.0
    settings.networking.connect_timeout = 5.0
    settings.networking.error_backoffs = _Endless()
    settings.watching.chunk_size = PDCLUSTER.page
    settings.persistence.finalizer = f"{GROUP}/none"
    settings.persistence.diffbase_storage = _NothingKept()
    settings.persistence.progress_storage = kopf.StatusProgressStorage()
    # Whoever runs kopf reports why it did not start; kopf would print the stack as well.
    logging.getLogger("kopf.activities.startup").setLevel(logging.CRITICAL)
    # One line for each event is too much. A handler that raises is logged.
    logging.getLogger("kopf.objects").setLevel(logging.ERROR)


async def _run(
    registry: kopf.OperatorRegistry,
    stop: asyncio.Event,
    memo: Any,
    namespaces: tuple[str, ...] = (),
    leave: float | None = None,
) -> None:
    """Run kopf until it fails or ``stop`` is set, and then its cleanup.

    ``kopf.run_tasks`` would then wait for every other task of the event loop, too: five seconds for
    reviews that are being answered, and for ever for a watch that wants to log in again.

    Args:
        leave: how long to wait for the cleanup, in seconds; None for as long as it takes.
    """
    tasks = await kopf.spawn_tasks(
        registry=registry,
        memo=memo,
        standalone=True,
        clusterwide=not namespaces,
        namespaces=namespaces,
        # kopf would look up the name of the user, and a container's user has none.
        identity=IDENTITY,
    )
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    stopped = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((*tasks, stopped), return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopped.cancel()
        for task in tasks:
            task.cancel()
    done, _ = await asyncio.wait(tasks, timeout=leave)
    for error in (task.exception() for task in done if not task.cancelled()):
        if error is not None:
            raise error.__cause__ or error  # kopf wraps the error of a handler of startup
