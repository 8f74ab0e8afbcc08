"""HTTP to the API server. Every failure is an :class:`interfaces.ApiError`.

Of ``kubernetes.aio``, only the configuration, TLS and the authentication are used. Its models drop
fields that they do not know, and write nulls for those that were not set. To turn a document into a
request, the library took as long as we take for everything else of a request.

A document holds what anybody may have written. A pod template of a PDCluster and the data of a
ControllerRevision may have any fields, 10,000 levels deep, and parsers give up at about 1,000. An
error here would end the operator, and would end it again after each start. An object may also be
longer than the lines that aiohttp reads by default: a ConfigMap of one megabyte is six megabytes of
JSON if its text is ``<<<``.
"""

import asyncio
import json
import math
import random
import re
import time
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Iterator, Mapping
from contextlib import suppress
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple, Self
from urllib.parse import urlencode

import aiohttp
import msgspec
from kubernetes.aio import client
from yarl import URL

from pdcluster_operator.adapters.api_server.kinds import namespace_of
from pdcluster_operator.runtime import interfaces

Seen = Callable[[str, str, int, float], None]
"""Called after every call with its method, path, status (0: no answer) and seconds."""

TIMEOUT = 30.0
SILENCE = 180.0
"""Seconds without a byte after which a watch counts as broken. A bookmark comes once a minute."""
HALF_A_LINE = 8 * 1024 * 1024
"""aiohttp reads lines that are twice as long. An object that etcd takes is shorter."""
CALL = aiohttp.ClientTimeout(total=TIMEOUT)
USER_AGENT = "pdcluster-operator"
CLOCK_SECONDS = 2.0
"""By how much an API server's clock may seem to differ: answers take time, seconds are whole."""
TRIES = 5
"""How often a call is sent to an overloaded server, each time after the wait that it asks for. A
webhook that refuses one kind for ten minutes gets 100 requests for one PDCluster, and without this
limit 275 (``operator/tests/adapters/test_overloaded_server.py``)."""
JSON = "application/json"
APPLY = "application/apply-patch+yaml"
MERGE = "application/merge-patch+json"
NO_ANSWER, OK, NOT_FOUND, CONFLICT, INVALID, TOO_MANY = 0, 200, 404, 409, 422, 429
TERMINATING = "NamespaceTerminating"
LEVELS = 200
"""What is deeper is cut off, in a document that cannot be read otherwise. The deepest field that
Kubernetes knows is not half as deep, so it refuses what remains of a field."""
SHORTEST, LONGEST = 0.5, 10.0
"""Bounds of the seconds that a server may ask for."""
MOST_PATIENCE = 30.0
"""How long one call waits in all. Each refusal of another call makes it wait longer.

If a webhook refuses all objects of one kind, the status has to say so within a minute
(``operator/tests/adapters/test_overloaded_server.py``)."""
SPREAD = 0.5
"""Calls that waited together are sent within this share of the time that was asked for."""
_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|[\[{]|[\]}]')


class _Request(NamedTuple):
    """One call, before it has credentials."""

    method: str
    path: str
    query: Mapping[str, str] | None = None
    body: Mapping[str, Any] | None = None
    content: str = JSON


class KubeClient:
    """Connections to one API server. Use as an async context manager.

    Args:
        seen: see :data:`Seen`.
        connections: the most at once; 0 for as many as are needed. The operator reconciles few
            PDClusters at once, and calls that hang for one keep none from the others.
    """

    def __init__(
        self,
        configuration: client.Configuration,
        seen: Seen = lambda *_: None,
        *,
        connections: int = 0,
    ) -> None:
        self._seen, self.configuration = seen, configuration
        self.context: str | None = None  # of the kubeconfig, if a person named one
        self._connections = connections
        self._client = client.ApiClient(configuration)
        self._overload = Overload()
        self._date = time.time(), time.monotonic()  # of the API server, and when it said so

    def now(self) -> float:
        """Return the time by the API server's clock, in seconds since the epoch.

        What is compared with the moments in objects: they are by that clock. Until the first answer
        it is the time of this machine.
        """
        date, moment = self._date
        return date + time.monotonic() - moment

    async def __aenter__(self) -> Self:
        self._http = self._session()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()  # type: ignore[no-untyped-call]
        await self._http.close()

    async def call(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | None = None,
        content: str = JSON,
    ) -> dict[str, Any]:
        """Make one call; return the answer's document.

        Raises:
            NotFound, Conflict, Invalid, ApiError: the server refused or did not answer.
        """
        request, namespace = _Request(method, path, query, body, content), namespace_of(path)
        patience = self._overload.patience()
        for _ in range(TRIES):
            await self._overload.wait(namespace, patience)
            status, text, retry_after = await self._once(request)
            if status != TOO_MANY:
                break
            self._overload.refused(namespace, retry_after)
            if self._overload.is_over(patience):
                break
        if not 200 <= status < 300:
            raise classified(status, _document(status, text))
        if (document := _object_of(text)) is None:  # an HTML page of a proxy, say
            said = f"{method} {path}: the answer is no JSON object: {_beginning(text)}"
            raise interfaces.ApiError("ApiServerUnreachable", said)
        return document

    async def pages(
        self, path: str, selection: Mapping[str, str], most: int
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Yield each page of a LIST, with ``most`` objects; errors are those of :meth:`call`."""
        query = {**selection, "limit": str(most)}
        while True:
            page = await self.call("GET", path, query=query)
            yield page
            if not (more := page["metadata"].get("continue")):
                return
            query["continue"] = more

    async def lines(self, path: str, query: Mapping[str, str]) -> AsyncGenerator[bytes, None]:
        """Yield each line of an answer that goes on for minutes, as a watch does.

        Raises:
            NotFound, ApiError: the server refused, or the connection broke.
        """
        await self._overload.wait(namespace_of(path))
        limits = aiohttp.ClientTimeout(total=None, sock_connect=TIMEOUT, sock_read=SILENCE)
        try:
            async with await self._send(_Request("GET", path, query), limits) as response:
                if response.status == TOO_MANY:
                    asked = response.headers.get("Retry-After", "")
                    self._overload.refused(namespace_of(path), asked)
                if response.status != OK:
                    text = await response.read()
                    raise classified(response.status, _document(response.status, text))
                async for line in response.content:
                    yield line
        except aiohttp.http_exceptions.HttpProcessingError as error:
            said = f"GET {path}: a line is longer than {2 * HALF_A_LINE:,} bytes"
            raise interfaces.ApiError("LineTooLong", said) from error
        except (TimeoutError, ValueError, aiohttp.ClientError, OSError) as error:
            said = str(error) or type(error).__name__
            raise interfaces.ApiError("ApiServerUnreachable", f"GET {path}: {said}") from error

    async def read(self, path: str) -> dict[str, Any] | None:
        """Return an object; None if there is none."""
        with suppress(NotFound):
            return await self.call("GET", path)
        return None

    async def _send(
        self, request: _Request, limits: aiohttp.ClientTimeout
    ) -> aiohttp.ClientResponse:
        """Send a request; return the answer, whose body was not read."""
        configuration = self.configuration
        headers = await self._headers(request.method, request.path, request.content)
        question = f"?{urlencode(request.query)}" if request.query else ""
        return await self._http.request(
            request.method,
            URL(f"{configuration.host}{request.path}{question}", encoded=True),
            data=None if request.body is None else _text(request.body),
            headers=headers,
            timeout=limits,
            proxy=configuration.proxy or None,
            proxy_headers=configuration.proxy_headers or None,
            server_hostname=configuration.tls_server_name or None,
        )

    async def session(self, response: type[aiohttp.ClientResponse]) -> aiohttp.ClientSession:
        """Return a session for somebody else, who closes it. It has the credentials of now."""
        headers = await self._headers("GET", "", JSON)
        return self._session(headers=headers, response_class=response)

    def _session(self, **more: Any) -> aiohttp.ClientSession:
        tls = self._client.rest_client.ssl_context
        options = self.configuration.client_session_kwargs or {}
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=self._connections, ssl=tls),
            read_bufsize=HALF_A_LINE,
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=bool(options.get("trust_env")),
            **more,
        )

    async def _headers(self, method: str, path: str, content: str) -> dict[str, str]:
        headers = {"Accept": JSON, "Content-Type": content, "User-Agent": USER_AGENT}
        await self._client.update_params_for_auth(headers, [], ["BearerToken"], path, method, None)
        return headers

    async def _once(self, request: _Request) -> tuple[int, bytes, str]:
        """Return status, text and Retry-After of one answer."""
        started, status = time.monotonic(), NO_ANSWER
        method, path = request.method, request.path
        try:
            answer = await self._send(request, CALL)
            status = answer.status
            if answer.ok:  # else it may be of a proxy
                self._set_clock(answer.headers.get("Date", ""))
            return status, await answer.read(), answer.headers.get("Retry-After", "")
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            said = str(error) or type(error).__name__
            if isinstance(error, TimeoutError):
                said = f"no answer in {CALL.total:g} s"
            raise interfaces.ApiError("ApiServerUnreachable", f"{method} {path}: {said}") from error
        finally:
            self._seen(method, path, status, time.monotonic() - started)

    def _set_clock(self, date: str) -> None:
        """Set the clock by the ``Date`` header if it differs by more than two seconds."""
        with suppress(ValueError):
            told = parsedate_to_datetime(date).timestamp()
            if abs(told - self.now()) > CLOCK_SECONDS:
                self._date = told, time.monotonic()


class _Asked(NamedTuple):
    until: float = 0.0
    seconds: float = 0.0


class Overload:
    """The pauses that the API server asks of one client, by namespace.

    An overloaded API server asks a client to wait, by ``Retry-After``. What one call is asked holds
    for all calls into its namespace, and for no other namespace: a priority level may be for some
    namespaces only, and an admission webhook can answer 429, too. If an API server refuses all
    calls for 50 PDClusters for a minute, 288 are refused in virtual time. If each call waited for
    itself, it were 3,193, and the benchmark's day with 429 allows 500.

    The empty namespace is for calls without one.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._clock = clock
        self._sleep = sleep
        self._asked: dict[str, _Asked] = {}

    def patience(self) -> float:
        """Return the moment until which a call that begins now may wait."""
        return self._clock() + MOST_PATIENCE

    def is_over(self, patience: float) -> bool:
        """Whether a call has waited long enough, and has to take the answer that it gets."""
        return self._clock() >= patience

    async def wait(self, namespace: str, patience: float = math.inf) -> None:
        """Return when the server may be called again for a namespace, or when patience ends."""
        while True:
            until, asked = self._asked.get(namespace, _Asked())
            if (left := until - self._clock()) <= 0 or self.is_over(patience):
                return
            pause = left + random.uniform(0, SPREAD) * asked  # noqa: S311
            await self._sleep(min(pause, patience - self._clock()))

    def refused(self, namespace: str, retry_after: str) -> None:
        """Take the ``Retry-After`` of an answer: seconds, or anything else."""
        now = self._clock()
        self._asked = {name: one for name, one in self._asked.items() if now < one.until}
        seconds = float(retry_after) if retry_after.isdecimal() else 1.0
        asked = min(max(seconds, SHORTEST), LONGEST)
        until = max(now + asked, self._asked.get(namespace, _Asked()).until)
        self._asked[namespace] = _Asked(until, asked)


class NotFound(interfaces.NamedError):
    """There is no such object."""


def classified(status: int, document: Mapping[str, Any]) -> interfaces.ApiError:
    """Return the error of an answer."""
    message = str(document.get("message") or f"the API server answers {status}")
    if status == NOT_FOUND:
        return NotFound(message)
    if status == CONFLICT:
        return interfaces.Conflict(message)
    if status == INVALID:
        return interfaces.Invalid(message)
    if TERMINATING in _causes(document):
        return interfaces.NamespaceTerminating(message)
    return interfaces.ApiError(str(document.get("reason") or f"Http{status}"), message)


def _causes(document: Mapping[str, Any]) -> list[object]:
    """Return the reasons of an error's causes (`StatusDetails` in the API's `meta/v1`)."""
    details = document.get("details")
    causes = details.get("causes") if isinstance(details, dict) else None
    listed = causes if isinstance(causes, list) else ()
    return [one.get("reason") for one in listed if isinstance(one, dict)]


def _document(status: int, text: bytes) -> dict[str, Any]:
    return _object_of(text) or {"message": f"HTTP {status}: {_beginning(text) or 'no text'}"}


def _beginning(text: bytes) -> str:
    return text[:200].decode(errors="replace").strip().partition("\n")[0].strip()


def _object_of(text: bytes) -> dict[str, Any] | None:
    with suppress(ValueError):
        if isinstance(document := document_of(text), dict):
            return document
    return None


def _text(body: Mapping[str, Any]) -> bytes:
    try:
        return msgspec.json.encode(body)
    except UnicodeEncodeError:  # half a character, which only an escape can write
        return json.dumps(body).encode()


def document_of(text: bytes) -> Any:
    """Return what a JSON document says; null stands for what is too deep.

    Raises:
        ValueError: it is no JSON.
    """
    try:
        return msgspec.json.decode(text)
    except RecursionError:
        return msgspec.json.decode(without_depths(text))


def without_depths(text: bytes) -> bytes:
    """Return a document with null for what is too deep."""
    return b"".join(_shallow_parts(text))


def _shallow_parts(text: bytes) -> Iterator[bytes]:
    level = written = 0
    for token in _TOKEN.finditer(text):
        if token[0] in (b"[", b"{"):
            level += 1
            if level == LEVELS + 1:
                yield text[written : token.start()]
        elif token[0][:1] != b'"':
            if level == LEVELS + 1:
                yield b"null"
                written = token.end()
            level -= 1
    if level <= LEVELS:  # what is cut off has an end
        yield text[written:]


async def shallow(lines: AsyncIterable[bytes]) -> AsyncGenerator[bytes, None]:
    """Yield each line of a stream, as a document that any parser can read."""
    async for line in lines:
        try:
            msgspec.json.decode(line, type=msgspec.Raw)
            yield line
        except RecursionError:
            yield without_depths(line)
