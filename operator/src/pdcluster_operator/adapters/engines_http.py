"""HTTP to launchers, on aiohttp. Every failure is a :class:`LauncherError`.

A redirect is a failure. A pod that carries an engine's labels could otherwise have the operator,
which reaches every namespace, send its requests somewhere else.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

import aiohttp

from pdcluster_operator.plan.reports import (
    EngineReport,
    LinksReport,
    parse_engine_report,
    parse_links_report,
)
from pdcluster_operator.runtime.errors import LauncherError

TIMEOUT = aiohttp.ClientTimeout(total=2.0, connect=1.0)
MAX_ANSWER = 4 << 20


class EnginesHttp:
    """Talks to launchers. Use as an async context manager."""

    def __init__(self) -> None:
        self._http: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._http = aiohttp.ClientSession(timeout=TIMEOUT, cookie_jar=aiohttp.DummyCookieJar())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._http is not None:
            await self._http.close()

    async def ready(self, url: str) -> EngineReport:
        """See :class:`..runtime.ports.Launchers`."""
        document = await self._call("GET", f"{url}/readyz", (200, 503))
        if (report := parse_engine_report(document)) is None:
            raise LauncherError(f"{url}/readyz answers with something else than a report")
        return report

    async def links(self, url: str) -> LinksReport:
        """See :class:`..runtime.ports.Launchers`."""
        document = await self._call("GET", f"{url}/v1/links", (200,))
        if (report := parse_links_report(document)) is None:
            raise LauncherError(f"{url}/v1/links answers with something else than links")
        return report

    async def put_peers(self, url: str, body: Mapping[str, Any]) -> None:
        """See :class:`..runtime.ports.Launchers`."""
        await self._call("PUT", f"{url}/v1/peers", (200, 204), body)

    async def _call(
        self,
        method: str,
        url: str,
        expected: tuple[int, ...],
        body: Mapping[str, Any] | None = None,
    ) -> Any:
        if self._http is None:
            raise LauncherError("the client is not open")
        try:
            async with self._http.request(method, url, json=body, allow_redirects=False) as answer:
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


async def _read(stream: aiohttp.StreamReader) -> bytes:
    parts: list[bytes] = []
    size = 0
    async for part in stream.iter_chunked(1 << 16):
        size += len(part)
        if size > MAX_ANSWER:
            raise LauncherError(f"the answer is longer than {MAX_ANSWER} bytes")
        parts.append(part)
    return b"".join(parts)
