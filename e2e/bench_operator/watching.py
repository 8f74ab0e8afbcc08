"""The objects of one kind as the API server reports them, for the benchmark's own eyes."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import aiohttp
import yaml

LONGEST_LINE = 16 << 20
Event = dict[str, Any]


async def events(folder: Path, path: str, selector: str = "") -> AsyncGenerator[Event, None]:
    """Yield every watch event of a path, beginning with what is there; a lost watch starts anew.

    Args:
        folder: of the control plane; holds ``admin.kubeconfig``.
    """
    document = yaml.safe_load((folder / "admin.kubeconfig").read_text())
    cluster, user = document["clusters"][0]["cluster"], document["users"][0]["user"]
    context = ssl.create_default_context(cafile=cluster["certificate-authority"])
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    async with aiohttp.ClientSession(
        headers={"Authorization": f"Bearer {user['token']}"},
        connector=aiohttp.TCPConnector(ssl=context),
        timeout=aiohttp.ClientTimeout(total=None),
        read_bufsize=LONGEST_LINE,
    ) as http:
        while True:
            try:
                query = {"watch": "1", "labelSelector": selector}
                async with http.get(cluster["server"] + path, params=query) as answer:
                    async for line in answer.content:
                        event = json.loads(line)
                        if event["type"] in ("ADDED", "MODIFIED", "DELETED"):
                            yield event
            except (aiohttp.ClientError, ValueError, OSError):
                await asyncio.sleep(0.5)
