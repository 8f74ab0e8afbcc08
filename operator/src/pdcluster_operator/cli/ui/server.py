"""Serves the page on this machine, to whoever has its token.

Other users of the machine, and pages of other sites in the same browser, can reach a port of
localhost. So each path begins with a token, which the printed URL has. There is no cookie: browsers
send one to every port of a machine, and the servers of other users listen there, too. A request
under another name than localhost is refused: another site's name may point to this machine (DNS
rebinding). The page loads nothing from elsewhere, tells no other page its address, and runs no
inline script.
"""

import hmac
import logging
import os
import re
import secrets
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from functools import partial
from importlib import resources
from typing import Any, Self

import jinja2
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from pdcluster_operator.cli.exits import Exit, UserError
from pdcluster_operator.cli.ui import page, series
from pdcluster_operator.cli.ui.board import Board
from pdcluster_operator.cli.ui.readers import Reader
from pdcluster_operator.runtime.interfaces import Key

ADDRESS = "127.0.0.1"
NAMES = re.compile(r"(localhost|127\.0\.0\.1|\[::1\])(:[0-9]{1,5})?")
"""In `Host`. A forwarded port may have another number."""
NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
MOST_VIEWERS = 64
"""Browsers that are kept up to date at once."""
MOST_BOARDS = 64
HEARTBEAT_SECONDS = 15.0
"""A connection that the other side left is noticed then."""
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
STATIC = {"ui.css": "text/css", "ui.js": "text/javascript", "htmx.min.js": "text/javascript",
          "htmx-ext-sse.js": "text/javascript", "icon.svg": "image/svg+xml"}  # fmt: skip
SECTIONS = {
    "cluster": (
        "banner", "head", "engines", "links", "linklist", "conditions", "timeline", "traffic",
    ),
    "list": ("banner", "clusters"),
}  # fmt: skip
LOGGER = logging.getLogger(__name__)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Pages:
    """The templates. Every value is escaped.

    Args:
        root: with which the path of each link begins.
    """

    def __init__(self, root: str = "") -> None:
        self._environment = jinja2.Environment(
            loader=jinja2.PackageLoader("pdcluster_operator.cli.ui"),
            autoescape=True,
            undefined=jinja2.ChainableUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._environment.filters.update(stamp=stamp, clock=clock, ago=ago)
        box = {"width": series.WIDTH, "height": series.HEIGHT}
        self._environment.globals.update(steps=len(page.STEPS), box=box, root=root)

    def sections(self, kind: str, context: Mapping[str, Any]) -> dict[str, str]:
        """Return the HTML of each section of a page."""
        module = self._environment.get_template(f"{kind}.html").make_module(dict(context))
        return {name: str(getattr(module, name)()) for name in SECTIONS[kind]}

    def whole(self, kind: str, **context: Any) -> str:
        """Return a whole page."""
        return self._environment.get_template("page.html").render(kind=kind, **context)


class UiServer:
    """The server. Use as an async context manager; :attr:`url` is then what to open.

    Args:
        first: the PDCluster that is shown first; None for the list.
        port: 0 for any that is free.
    """

    def __init__(self, reader: Reader, first: Key | None, port: int = 0) -> None:
        self._reader, self._first, self._port = reader, first, port
        self._token = secrets.token_urlsafe(32)
        self._root = f"/{self._token}"
        self._pages = Pages(self._root)
        self._boards: dict[Key | None, Board] = {}
        self._viewers = 0
        application = web.Application(middlewares=[self._guard])
        application.add_routes(
            [
                web.get(self._root, self._index),
                web.get(f"{self._root}/", self._index),
                web.get(f"{self._root}/clusters", self._clusters),
                web.get(f"{self._root}/clusters/events", self._events),
                web.get(f"{self._root}/c/{{namespace}}/{{name}}", self._cluster),
                web.get(f"{self._root}/c/{{namespace}}/{{name}}/events", self._events),
                web.get(f"{self._root}/static/{{file}}", _static),
            ]
        )
        self._runner = web.AppRunner(
            application, access_log=None, logger=LOGGER, shutdown_timeout=1.0
        )

    @property
    def url(self) -> str:
        """The address with the token."""
        return f"http://{ADDRESS}:{self._port}{self._root}/"

    async def __aenter__(self) -> Self:
        """Listen.

        Raises:
            UserError: the port is taken, or this user may not have it.
        """
        await self._runner.setup()
        site = web.TCPSite(self._runner, ADDRESS, self._port)
        try:
            await site.start()
        except OSError as error:
            await self._runner.cleanup()
            raise UserError(
                f"--port {self._port}: {os.strerror(error.errno or 0)}; choose "
                "another one, or leave out --port to have a free one chosen",
                Exit.MACHINE,
            ) from error
        self._port = self._runner.addresses[0][1]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Refuse what comes under another name, or without the token; add the headers."""
        try:
            answer = self._refusal(request) or await handler(request)
        except web.HTTPException as error:
            answer = web.Response(status=error.status, text=f"{error.status}: {error.reason}\n")
        if not answer.prepared:
            answer.headers.update(HEADERS)
        return answer

    def _refusal(self, request: web.Request) -> web.Response | None:
        if not NAMES.fullmatch(request.headers.get("Host", "")):
            return web.Response(status=403, text="403: open this page as localhost or 127.0.0.1\n")
        given = request.path[1:].partition("/")[0].encode(errors="replace")
        if not hmac.compare_digest(given, self._token.encode()):
            words = "403: open the URL that `pdcluster ui` printed; it has a token\n"
            return web.Response(status=403, text=words)
        return None

    async def _index(self, _: web.Request) -> web.Response:
        first = self._first
        where = f"/c/{first.namespace}/{first.name}" if first else "/clusters"
        return web.Response(status=303, headers={"Location": f"{self._root}{where}"})

    async def _clusters(self, _: web.Request) -> web.Response:
        board = self._board(None)
        await board.fresh()
        return self._html("list", "PDClusters", f"{self._root}/clusters/events", board)

    async def _cluster(self, request: web.Request) -> web.Response:
        key = _key(request)
        board = self._board(key)
        if key is None or not await board.fresh():
            raise web.HTTPNotFound(reason="there is no PDCluster of this name in this namespace")
        return self._html("cluster", key.name, f"{request.path}/events", board)

    def _html(self, kind: str, title: str, events: str, board: Board) -> web.Response:
        text = self._pages.whole(kind, title=title, events=events, sections=board.sections)
        return web.Response(text=text, content_type="text/html")

    async def _events(self, request: web.Request) -> web.StreamResponse:
        """Send each section that changes, until the browser leaves."""
        board = self._board(_key(request))
        if self._viewers >= MOST_VIEWERS:
            words = f"{MOST_VIEWERS} browsers watch already: close one"
            raise web.HTTPServiceUnavailable(reason=words)
        answer = web.StreamResponse(headers={**HEADERS, "Content-Type": "text/event-stream"})
        await answer.prepare(request)
        self._viewers += 1
        try:
            async with board:
                shown: dict[str, str] = {}
                while True:
                    news = await board.news(shown, HEARTBEAT_SECONDS)
                    shown.update(news)
                    sent = "".join(event(name, html) for name, html in news.items())
                    await answer.write((sent or ": nothing new\n\n").encode())
        except ConnectionError:
            return answer
        finally:
            self._viewers -= 1

    def _board(self, key: Key | None) -> Board:
        """Return the board of a page; forget the oldest ones that nobody watches."""
        if key not in self._boards:
            idle = sorted(
                (one for one, board in self._boards.items() if not board.viewers),
                key=lambda one: self._boards[one].last_used,
            )
            for one in idle[: max(0, len(self._boards) - MOST_BOARDS + 1)]:
                del self._boards[one]
            kind = "list" if key is None else "cluster"
            self._boards[key] = Board(self._reader, key, partial(self._pages.sections, kind))
        return self._boards[key]


def _without_path(record: logging.LogRecord) -> bool:
    """Leave out the traceback: of a request that is none, it has the path with the token."""
    error, record.exc_info = record.exc_info and record.exc_info[1], None
    record.msg = f"{record.msg} ({type(error).__name__})"
    return not isinstance(error, HttpProcessingError)


LOGGER.addFilter(_without_path)


def stamp(at: float) -> str:
    """Return a moment as ``datetime`` of HTML has it."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def clock(at: float, now: float) -> str:
    """Return the time of a moment in UTC, with its day if it is not the day of now."""
    moment, today = (datetime.fromtimestamp(one, UTC) for one in (at, now))
    return moment.strftime("%H:%M:%S" if moment.date() == today.date() else "%m-%d %H:%M")


def ago(at: float, now: float) -> str:
    """Return how long a moment is ago, in whole minutes, hours or days."""
    minutes = max(0, int(now - at)) // 60
    if minutes < 60:
        return f"{minutes} min" if minutes else "< 1 min"
    return f"{minutes // 60} h" if minutes < 48 * 60 else f"{minutes // 1440} d"


def event(name: str, html: str) -> str:
    """Return one server-sent event. The protocol takes three kinds of line ends."""
    lines = re.split(r"\r\n|\r|\n", html)
    return f"event: {name}\n" + "".join(f"data: {line}\n" for line in lines) + "\n"


def _key(request: web.Request) -> Key | None:
    """Return the PDCluster that a path names; None if it names none."""
    if "name" not in request.match_info:
        return None
    namespace, name = (request.match_info[part] for part in ("namespace", "name"))
    if not (NAME.fullmatch(namespace) and NAME.fullmatch(name)):
        raise web.HTTPNotFound(reason="a name has only lower-case letters, digits and hyphens")
    return Key(namespace, name)


async def _static(request: web.Request) -> web.Response:
    file = request.match_info["file"]
    if file not in STATIC:
        raise web.HTTPNotFound(reason="there is no such file")
    body = resources.files(__package__).joinpath("static", file).read_bytes()
    return web.Response(body=body, content_type=STATIC[file], charset="utf-8")
