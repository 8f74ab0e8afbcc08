"""The launcher's HTTP interface: for the operator, the kubelet and this engine's own workers.

A request gets one answer, whatever it contains. Bodies are bounded, parsers accept any bytes, and
an error is a status code with one sentence in JSON. What it serves is decided in
``launcher/engine/readiness.py`` and ``launcher/links/link_table.py``.

The engine's metrics have a port of their own. vLLM shows them on the port of its API, and a scraper
that reaches that port could also send requests. A NetworkPolicy can open this port to scrapers and
the API's port to the router only.
"""

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final, TypeVar

import msgspec
from aiohttp import web
from msgspec import UNSET
from msgspec.structs import replace

from pdcluster_connector import listening
from pdcluster_connector.certificate_files import Tls
from pdcluster_connector.launcher.engine import engine_api, load_window, prompt_window
from pdcluster_connector.launcher.engine.readiness import Readiness
from pdcluster_connector.launcher.links.link_table import LinkTable
from pdcluster_connector.launcher.multi_node import Followers, Rendezvous
from pdcluster_connector.protocol import api_key, launcher_documents as documents
from pdcluster_connector.protocol.engine_id import OPERATOR_NAME, names_in
from pdcluster_connector.protocol.messages import Malformed

MAX_WAIT_SECONDS: Final = 30.0
LOOK_SECONDS: Final = 0.25  # between two looks for a change that a client waits for

_Document = TypeVar("_Document")
_Decode = Callable[[bytes], _Document | Malformed]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(eq=False, repr=False)  # of no log: it holds a token
class LauncherServer:
    """Serves one engine's readiness, peers, links and drain.

    Args:
        readiness: what ``/readyz`` reports.
        links: what ``/v1/links`` reports; peers and reports go into it.
        token: this engine's workers send it with their reports.
        drain: called once for every ``POST /v1/drain``; must not block.
        followers: the followers of a multi-node engine's leader. Without them, the server has no
            rendezvous.
        tls: serve HTTPS. Everything but ``/readyz``, which the kubelet asks without a certificate,
            is then for the operator and for this engine alone.
        prompts: the latest prompts of a decode engine, for ``/v1/links``.
        load: what the engine did in the last minute, for ``/v1/changes``.
    """

    readiness: Readiness
    links: LinkTable
    token: str
    drain: Callable[[], None]
    followers: Followers | None = None
    tls: Tls | None = None
    prompts: prompt_window.PromptWindow | None = None
    load: load_window.LoadWindow | None = None

    def __post_init__(self) -> None:
        self._stopping = False
        self._guard: listening.ConnectionGuard | None = None

    def application(self) -> web.Application:
        """Build the aiohttp application."""
        checks = [_errors_as_json, self._known_clients]
        app = web.Application(client_max_size=documents.MAX_DOCUMENT_BYTES, middlewares=checks)
        app.router.add_get("/readyz", self._get_readyz)
        app.router.add_put("/v1/peers", self._put_peers)
        app.router.add_get("/v1/peers", self._get_peers)
        app.router.add_post("/v1/reports", self._post_reports)
        app.router.add_get("/v1/links", self._get_links)
        app.router.add_get("/v1/changes", self._get_changes)
        app.router.add_post("/v1/drain", self._post_drain)
        app.router.add_put("/v1/routed", self._set_routed)
        app.router.add_delete("/v1/routed", self._set_routed)
        if self.followers is not None:
            app.router.add_get("/v1/rendezvous", self._get_rendezvous)
        return app

    async def start(self, host: str, port: int) -> None:
        """Listen; raises OSError where the address cannot be bound."""
        context = None if self.tls is None else self.tls.open_server
        listener = listening.open_port(host, port)
        self._guard = await listening.serve(
            self.application(), listener, context, shutdown_timeout=0.2
        )

    async def stop(self) -> None:
        """Stop listening; requests that wait are answered or dropped within 0.2 s."""
        self._stopping = True
        if self._guard is not None:
            await self._guard.close()

    @web.middleware
    async def _known_clients(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Let strangers ask for ``/readyz`` and nothing else."""
        if self.tls is not None and request.path != "/readyz":
            certificate = request.get_extra_info("peercert")
            names = names_in(certificate)
            known = {OPERATOR_NAME, self.tls.server_name(self.tls.engine_id)}
            if not (known.intersection(names) if self.tls.named else certificate):
                shown = ", ".join(names)[:300] or "without a name"
                return _error(
                    403,
                    f"{request.path} is for the operator and for this engine; the certificate of "
                    f"this client is {shown}",
                )
        return await handler(request)

    async def _get_readyz(self, _: web.Request) -> web.Response:
        report = self._engine()
        return _json(report, status=200 if report.ready else 503)

    def _engine(self) -> documents.EngineReport:
        return self.readiness.report(None if self.tls is None else self.tls.expires)

    async def _put_peers(self, request: web.Request) -> web.Response:
        self.links.set_peers(await _body(request, documents.decode_peers))
        return web.Response(status=204)

    async def _get_peers(self, request: web.Request) -> web.Response:
        after = _number(request, "after", -1)
        await self._wait(request, lambda: self._peers().generation == after)
        return _json(self._peers())

    def _peers(self) -> documents.PeersDocument:
        """Return the peers that the workers link to: none until the engine was ready once.

        While vLLM captures CUDA graphs, calls to CUDA on other threads fail the capture, and with
        it the engine's start. A probe makes such calls: it reads into GPU memory.
        """
        return documents.PeersDocument(0, ()) if self.readiness.loading else self.links.peers

    async def _wait(self, request: web.Request, unchanged: Callable[[], bool]) -> None:
        """Wait for a change, as long as the client does and for at most its ``wait`` seconds."""
        deadline = time.monotonic() + min(_number(request, "wait", 0), MAX_WAIT_SECONDS)
        while unchanged() and not self._stopping and request.transport is not None:
            left = deadline - time.monotonic()
            if left <= 0:
                break
            await asyncio.sleep(min(left, LOOK_SECONDS))

    async def _post_reports(self, request: web.Request) -> web.Response:
        given = request.headers.get("Authorization", "")
        if not api_key.admits(self.token, given):
            return _error(401, "reports need this engine's token (PDCLUSTER_CONTROL_TOKEN)")
        wrong = self.links.add(await _body(request, documents.decode_report), time.monotonic())
        return _error(400, wrong) if wrong else web.Response(status=204)

    async def _get_links(self, _: web.Request) -> web.Response:
        return _json(self._link_reports())

    def _link_reports(self) -> documents.LinksReport:
        engine, now = self.readiness.engine, time.monotonic()
        links = tuple(row.report for row in self.links.rows(now))
        prompts = UNSET if self.prompts is None else self.prompts.report(now)
        return documents.LinksReport(engine.logical, engine.engine, links, prompts)

    async def _get_changes(self, request: web.Request) -> web.Response:
        """Answer as soon as the revision is another than ``seen``, or after ``wait`` seconds.

        A new revision comes with the answers of ``/readyz`` and ``/v1/links``.
        """
        seen = request.query.get("seen", "")
        await self._wait(request, lambda: self._changes().revision == seen)
        report = self._changes()
        return _json(documents.ChangesReport(seen) if report.revision == seen else report)

    def _changes(self) -> documents.ChangesReport:
        engine, links = self._engine(), self._link_reports()
        load = None if self.load is None else self.load.report(time.monotonic())
        return documents.ChangesReport(revision_of(engine, links), engine, links, load)

    async def _get_rendezvous(self, request: web.Request) -> web.Response:
        if self.followers is None:
            raise web.HTTPNotFound
        rank, start = _number(request, "rank", 0), request.query.get("start", "")
        leaving = request.query.get("leaving") == "1"
        engine_id, now = self.readiness.engine.engine, time.monotonic()
        if request.query.get("of", engine_id) == engine_id:
            if wrong := self.followers.heard(rank, start, now, leaving=leaving):
                return _error(400, wrong)
            if loss := self.followers.loss(now):
                return _error(409, f"{loss}: the engine ends and starts again")
        return _json(Rendezvous(engine_id, self.token, self.readiness.ready))

    async def _set_routed(self, request: web.Request) -> web.Response:
        """Note that routers may send requests (PUT), or that none does any more (DELETE)."""
        self.readiness.routed = request.method == "PUT"
        return web.Response(status=204)

    async def _post_drain(self, _: web.Request) -> web.Response:
        self.drain()
        return web.Response(status=202)


class _BadRequestError(Exception):
    """A request whose content is wrong. The message says where."""


async def _body(request: web.Request, decode: _Decode[_Document]) -> _Document:
    document = decode(await request.read())
    if isinstance(document, Malformed):
        raise _BadRequestError(f"{request.method} {request.path}: {document.message}")
    return document


def _number(request: web.Request, name: str, default: int) -> int:
    text = request.query.get(name)
    if text is None:
        return default
    if not text.isascii() or not text.isdecimal() or len(text) > 18:
        raise _BadRequestError(f"{name} must be a whole number of at most 18 digits")
    return int(text)


def revision_of(engine: documents.EngineReport, links: documents.LinksReport) -> str:
    """Return a name for the documents that changes when the operator would judge them otherwise.

    Numbers that change all the time, such as a bandwidth or an age, do not count. The operator
    reads those when it asks without a revision.
    """
    rows = [
        replace(
            link,
            bytes_per_second=0.0,
            canary=replace(link.canary, bytes=0, age_seconds=UNSET),
            receives=UNSET,
        )
        for link in links.links
    ]
    prompts = (links.prompts.percent, links.prompts.cause) if links.prompts else ()
    text = msgspec.json.encode([engine, rows, prompts], order="deterministic")
    return hashlib.blake2b(text, digest_size=8).hexdigest()


def _json(document: object, status: int = 200) -> web.Response:
    body = msgspec.json.encode(document)
    return web.Response(body=body, status=status, content_type="application/json")


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": message}, status=status)


@web.middleware
async def _errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except _BadRequestError as error:
        return _error(400, str(error))
    except web.HTTPRequestEntityTooLarge:
        return _error(413, f"the body is larger than {documents.MAX_DOCUMENT_BYTES} bytes")
    except web.HTTPException as error:
        return _error(error.status, error.reason)


CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"  # Prometheus' text format


def metrics_page(fetch: Callable[[], Awaitable[bytes]]) -> web.Application:
    """Build the application that serves ``GET /metrics`` and nothing else.

    ``fetch`` reads the engine's metrics, in Prometheus' text format.
    """
    asking: asyncio.Future[bytes] | None = None

    async def get_metrics(_: web.Request) -> web.Response:
        nonlocal asking
        # All who ask meanwhile get the same answer: a crowd takes one connection to the engine.
        if asking is None or asking.done():
            asking = asyncio.ensure_future(fetch())
        try:
            body = await asyncio.shield(asking)
            return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE})
        except TimeoutError:
            return web.Response(status=503, text="the engine's /metrics did not answer in time\n")
        except (engine_api.ApiError, engine_api.ApiUnreachableError) as error:
            return web.Response(status=503, text=f"{error}\n")

    app = web.Application(client_max_size=1)
    app.router.add_get("/metrics", get_metrics)
    return app
