"""HTTP to launchers, on aiohttp. Every failure is a :class:`LauncherError`.

A redirect is a failure. A pod that carries an engine's labels could otherwise have the operator,
which reaches every namespace, send its requests somewhere else.
"""

from __future__ import annotations

import json
import socket
import ssl
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote

import aiohttp

from pdcluster_connector.protocol.peer_name import OPERATOR_NAME, engine_name, role_name
from pdcluster_operator.adapters.tls.engine_authority import EngineAuthority
from pdcluster_operator.adapters.tls.mounted_identity import IdentityError, MountedIdentity
from pdcluster_operator.api.spec.enums import Certificates
from pdcluster_operator.plan.launchers import Target
from pdcluster_operator.plan.reports import (
    EngineReport,
    LauncherNews,
    LinksReport,
    parse_engine_report,
    parse_links_report,
    parse_news,
)
from pdcluster_operator.runtime.errors import LauncherError

TIMEOUT = aiohttp.ClientTimeout(total=2.0, connect=1.0)
WAIT_SECONDS = 30
"""How long a launcher may keep a question for news. One that has died is noticed earlier: the
kernel asks a silent connection's other end after ``KEEPALIVE``."""
WAIT_TIMEOUT = aiohttp.ClientTimeout(total=WAIT_SECONDS + 5.0, connect=1.0)
KEEPALIVE = (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3))
MAX_ANSWER = 4 << 20
OWN_SECONDS = 86_400.0
"""How long the operator uses a certificate of its own before it makes another one."""
CLOCKS_DIFFER = 86_400.0


class EnginesHttp:
    """Talks to launchers. Use as an async context manager.

    Args:
        authority: signs the operator's own certificate, and those of the engines.
        clock: seconds since the epoch.
        identity: the operator's certificate for engines whose certificates are mounted; None if it
            has none.
    """

    def __init__(
        self,
        authority: EngineAuthority,
        clock: Callable[[], float] = time.time,
        identity: MountedIdentity | None = None,
    ) -> None:
        self._authority = authority
        self._identity = identity
        self._clock = clock
        self._context: tuple[float, ssl.SSLContext] | None = None
        self._http: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        # Each launcher holds one connection while it has no news, so their number has no limit.
        connector = aiohttp.TCPConnector(limit=0, socket_factory=_socket)
        jar = aiohttp.DummyCookieJar()
        self._http = aiohttp.ClientSession(connector=connector, timeout=TIMEOUT, cookie_jar=jar)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._http is not None:
            await self._http.close()

    async def ready(self, target: Target) -> EngineReport:
        """See :class:`..runtime.interfaces.Launchers`."""
        document = await self._call("GET", target, "/readyz", (200, 503))
        if (report := parse_engine_report(document)) is None:
            raise LauncherError(f"{target.url}/readyz did not answer with the state of an engine")
        return report

    async def links(self, target: Target) -> LinksReport:
        """See :class:`..runtime.interfaces.Launchers`."""
        document = await self._call("GET", target, "/v1/links", (200,))
        if (report := parse_links_report(document)) is None:
            raise LauncherError(f"{target.url}/v1/links did not answer with a list of links")
        return report

    async def news(self, target: Target, seen: str, *, wait: bool) -> LauncherNews | None:
        """See :class:`..runtime.interfaces.Launchers`."""
        path = f"/v1/changes?seen={quote(seen)}&wait={WAIT_SECONDS if wait else 0}"
        timeout = WAIT_TIMEOUT if wait else TIMEOUT
        return parse_news(await self._call("GET", target, path, (200, 403, 404), timeout=timeout))

    async def put_peers(self, target: Target, body: Mapping[str, Any]) -> None:
        """See :class:`..runtime.interfaces.Launchers`."""
        await self._call("PUT", target, "/v1/peers", (200, 204), body)

    async def tell_routed(self, target: Target, *, routed: bool) -> None:
        """See :class:`..runtime.interfaces.Launchers`."""
        await self._call("PUT" if routed else "DELETE", target, "/v1/routed", (200, 204))

    async def _call(
        self,
        method: str,
        target: Target,
        path: str,
        expected: tuple[int, ...],
        body: Mapping[str, Any] | None = None,
        timeout: aiohttp.ClientTimeout | None = None,  # noqa: ASYNC109 - the session's own kind
    ) -> Any:
        if self._http is None:
            raise LauncherError("the client is not open")
        url = f"{target.url}{path}"
        try:
            async with self._http.request(
                method,
                url,
                json=body,
                allow_redirects=False,
                timeout=timeout or TIMEOUT,
                **self._tls(target),
            ) as answer:
                text = await _read(answer.content)
                if answer.status not in expected:
                    said = text[:200].decode(errors="replace").strip()
                    raise LauncherError(f"{method} {url} answers {answer.status}: {said}")
                return json.loads(text) if text else None
        except TimeoutError as error:
            raise LauncherError(f"{method} {url} did not answer in time") from error
        except RecursionError:
            raise LauncherError(
                f"{method} {url} answers with JSON that is nested too deep"
            ) from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise LauncherError(f"{method} {url}: {error}") from error

    def _tls(self, target: Target) -> dict[str, Any]:
        """Return what aiohttp has to be told so that only the target's engine is spoken to."""
        if not target.url.startswith("https:"):
            return {}
        if target.certificates is Certificates.MOUNTED:
            return {"ssl": self._mounted(), "server_hostname": role_name(target.engine)}
        now = self._clock()
        if self._context is None or now > self._context[0]:
            start, end = now - CLOCKS_DIFFER, now + OWN_SECONDS + CLOCKS_DIFFER
            own = self._authority.sign(OPERATOR_NAME, start, end)
            self._context = (now + OWN_SECONDS, self._authority.client_context(own))
        return {"ssl": self._context[1], "server_hostname": engine_name(target.engine)}

    def _mounted(self) -> ssl.SSLContext:
        if self._identity is None:
            raise LauncherError("the operator has no certificate for mounted ones of engines")
        try:
            return self._identity.context()
        except IdentityError as error:
            raise LauncherError(str(error)) from error


def _socket(info: aiohttp.AddrInfoType) -> socket.socket:
    family, kind, number, _, _ = info
    made = socket.socket(family, kind, number)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE:
        if (option := getattr(socket, name, None)) is not None:  # not every system has them
            made.setsockopt(socket.IPPROTO_TCP, option, value)
    return made


async def _read(stream: aiohttp.StreamReader) -> bytes:
    parts: list[bytes] = []
    size = 0
    async for part in stream.iter_chunked(1 << 16):
        size += len(part)
        if size > MAX_ANSWER:
            raise LauncherError(f"the answer is longer than {MAX_ANSWER} bytes")
        parts.append(part)
    return b"".join(parts)
