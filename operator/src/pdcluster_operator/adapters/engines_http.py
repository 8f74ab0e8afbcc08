"""HTTP to launchers, on aiohttp. Every failure is a :class:`LauncherError`.

A redirect is a failure. A pod that carries an engine's labels could otherwise have the operator,
which reaches every namespace, send its requests somewhere else.

Engines whose certificates a user mounts do not know the operator's own CA. So somebody else has to
give the operator a certificate that they trust, and the CA of theirs, in a folder.
"""

import asyncio
import socket
import ssl
import threading
import time
from asyncio import sslproto
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote

import aiohttp

from pdcluster_connector.certificate_files import TlsError, TlsFiles, Watched, client_context
from pdcluster_connector.protocol import launcher_documents, messages
from pdcluster_connector.protocol.engine_id import OPERATOR_NAME, engine_name, role_name
from pdcluster_operator.adapters.engine_authority import EngineAuthority
from pdcluster_operator.api.spec.types import Certificates
from pdcluster_operator.plan.launchers import Target
from pdcluster_operator.runtime.interfaces import LauncherError

TIMEOUT = aiohttp.ClientTimeout(total=2.0, connect=1.0)
WAIT_SECONDS = 30
"""How long a launcher may hold a request for changes. One that has died is noticed earlier: the
kernel probes a silent connection after ``KEEPALIVE``."""
WAIT_TIMEOUT = aiohttp.ClientTimeout(total=WAIT_SECONDS + 5.0, connect=1.0)
KEEPALIVE = (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3))
JSON = {"Content-Type": "application/json"}
OWN_SECONDS = 86_400.0
"""How long the operator uses a certificate of its own before it makes another one."""
CLOCKS_DIFFER = 86_400.0
FILES = ("ca.crt", "tls.crt", "tls.key")
BUFFER_BYTES = 16 * 1024
_held = threading.local()


@dataclass(eq=False)
class EnginesHttp:
    """Talks to launchers. Use as an async context manager.

    Args:
        authority: signs the operator's own certificate, and those of the engines.
        clock: seconds since the epoch.
        identity: folder of the operator's certificate for engines whose certificates are mounted:
            ``ca.crt``, ``tls.crt`` and ``tls.key``; None if it has none. When the files change, new
            connections use the new ones.
    """

    authority: EngineAuthority
    clock: Callable[[], float] = time.time
    identity: Path | None = None
    _mounted: Watched[ssl.SSLContext] | None = field(default=None, init=False)
    _context: tuple[float, ssl.SSLContext] | None = field(default=None, init=False)

    async def __aenter__(self) -> Self:
        # Each launcher holds one connection until something changes, so there may be many.
        connector = aiohttp.TCPConnector(limit=0, socket_factory=_socket)
        jar = aiohttp.DummyCookieJar()
        self._http = aiohttp.ClientSession(connector=connector, timeout=TIMEOUT, cookie_jar=jar)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.close()

    async def changes(
        self, target: Target, seen: str, *, wait: bool
    ) -> launcher_documents.ChangesReport:
        """See :class:`..runtime.interfaces.Launchers`."""
        path = f"/v1/changes?seen={quote(seen)}&wait={WAIT_SECONDS if wait else 0}"
        timeout = WAIT_TIMEOUT if wait else TIMEOUT
        report = launcher_documents.decode_changes(
            await self._call("GET", target, path, timeout=timeout)
        )
        if isinstance(report, messages.Malformed):
            raise LauncherError(
                f"{target.url}{path} did not answer with the state of an engine: {report.message}"
            )
        return report

    async def put_peers(self, target: Target, document: launcher_documents.PeersDocument) -> None:
        """See :class:`..runtime.interfaces.Launchers`."""
        body = launcher_documents.encode_json(document)
        await self._call("PUT", target, "/v1/peers", body)

    async def tell_routed(self, target: Target, *, routed: bool) -> None:
        """See :class:`..runtime.interfaces.Launchers`."""
        await self._call("PUT" if routed else "DELETE", target, "/v1/routed")

    async def _call(
        self,
        method: str,
        target: Target,
        path: str,
        body: bytes | None = None,
        timeout: aiohttp.ClientTimeout | None = None,  # noqa: ASYNC109 - the session's own kind
    ) -> bytes:
        url = f"{target.url}{path}"
        try:
            async with self._http.request(
                method,
                url,
                data=body,
                headers=None if body is None else JSON,
                allow_redirects=False,
                timeout=timeout or TIMEOUT,
                **self._tls(target),
            ) as answer:
                text = await _read(answer.content)
                if answer.status not in (200, 204):
                    said = text[:200].decode(errors="replace").strip()
                    raise LauncherError(f"{method} {url} answers {answer.status}: {said}")
                return text
        except TimeoutError as error:
            raise LauncherError(f"{method} {url} did not answer in time") from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise LauncherError(f"{method} {url}: {error}") from error

    def _tls(self, target: Target) -> dict[str, Any]:
        """Return aiohttp's arguments that accept the target's engine and nobody else."""
        if not target.url.startswith("https:"):
            return {}
        if target.certificates is Certificates.MOUNTED:
            return {"ssl": self.mounted_context(), "server_hostname": role_name(target.engine)}
        now = self.clock()
        if self._context is None or now > self._context[0]:
            start, end = now - CLOCKS_DIFFER, now + OWN_SECONDS + CLOCKS_DIFFER
            own = self.authority.sign(OPERATOR_NAME, start, end)
            self._context = (now + OWN_SECONDS, self.authority.client_context(own))
        return {"ssl": self._context[1], "server_hostname": engine_name(target.engine)}

    def mounted_context(self) -> ssl.SSLContext:
        """Return the context for engines whose certificates are mounted.

        Raises:
            LauncherError: there are no files that can be used, and there were none before.
        """
        if self.identity is None:
            raise LauncherError("the operator has no certificate for mounted ones of engines")
        try:
            if self._mounted is None:
                ca, certificate, key = (self.identity / name for name in FILES)
                files = TlsFiles(ca, certificate, key)
                self._mounted = Watched(files.paths, lambda: client_context(files), self.clock)
        except TlsError as error:
            raise LauncherError(
                f"{self.identity} holds no usable {', '.join(FILES)}: {error}. Put the operator's "
                f"certificate there, with the DNS name {OPERATOR_NAME}"
            ) from error
        return self._mounted.present()


def _socket(info: aiohttp.AddrInfoType) -> socket.socket:
    family, kind, number, _, _ = info
    made = socket.socket(family, kind, number)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE:
        if (option := getattr(socket, name, None)) is not None:  # not every system has them
            made.setsockopt(socket.IPPROTO_TCP, option, value)
    return made


async def _read(stream: aiohttp.StreamReader) -> bytes:
    most = launcher_documents.MAX_ANSWER_BYTES
    try:
        await stream.readexactly(most + 1)
    except asyncio.IncompleteReadError as whole:
        return whole.partial
    raise LauncherError(f"the answer is longer than {most} bytes")


class SharedBuffer(sslproto.SSLProtocol):
    """asyncio's TLS, with one receive buffer of one TLS record for all connections of a thread.

    asyncio gives each TLS connection a buffer of 256 KiB, and the operator holds a connection to
    each launcher. 1,000 connections take 44 KiB of memory each so, and 303 KiB each without
    (``operator/tests/adapters/test_memory_of_connections.py``). Sharing is safe where an event loop
    reads into the buffer and hands it to OpenSSL in one step, as it does everywhere but on Windows.
    """

    max_size = BUFFER_BYTES

    def __init__(self, loop: asyncio.AbstractEventLoop, *rest: Any, **more: Any) -> None:
        super().__init__(loop, *rest, **more)
        if isinstance(loop, asyncio.SelectorEventLoop):
            if not hasattr(_held, "buffer"):
                _held.buffer = bytearray(BUFFER_BYTES)
            self._ssl_buffer = _held.buffer
            self._ssl_buffer_view = memoryview(_held.buffer)


def use_small_buffers() -> None:
    """Let all TLS connections that this process makes from now on have small buffers."""
    sslproto.SSLProtocol = SharedBuffer  # type: ignore[misc]
