"""Kubernetes' probes over HTTP and TCP, against a container's address."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import aiohttp


async def passes(probe: Mapping[str, Any], container: Mapping[str, Any], address: str) -> bool:
    """One attempt, within the probe's ``timeoutSeconds``."""
    timeout = float(probe.get("timeoutSeconds", 1))
    target = probe.get("httpGet") or probe.get("tcpSocket") or {}
    port = _port(target.get("port"), container)
    with suppress(aiohttp.ClientError, OSError, asyncio.TimeoutError):
        if "httpGet" in probe:
            url = f"{target.get('scheme', 'HTTP')}://{address}:{port}{target.get('path', '/')}"
            http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=timeout))
            async with http, http.get(url, ssl=False) as answer:  # like Kubernetes', it trusts all
                return 200 <= answer.status < 400
        _, writer = await asyncio.wait_for(asyncio.open_connection(address, port), timeout)
        writer.close()
        return True
    return False


def _port(port: Any, container: Mapping[str, Any]) -> int:
    for entry in container.get("ports") or ():
        if entry.get("name") == port:
            return int(entry["containerPort"])
    return int(port)
