"""Where the operator keeps the CA of its engines: one Secret of its own namespace.

The CA is made at the first start and is never replaced. Its key enters no pod but the operator's.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import time
from collections.abc import Mapping
from typing import Any

from pdcluster_operator.adapters.api_server.client import MERGE, KubeClient, NotFound
from pdcluster_operator.adapters.api_server.kinds import SECRET
from pdcluster_operator.adapters.tls.engine_authority import AuthorityError, EngineAuthority
from pdcluster_operator.api.labels import FIELD_MANAGER
from pdcluster_operator.runtime.errors import ApiError

log = logging.getLogger(__name__)

RETRY_SECONDS = 2.0
CERTIFICATE, KEY = "ca.crt", "ca.key"


async def find_authority(client: KubeClient, place: tuple[str, str]) -> EngineAuthority:
    """Return the CA that the Secret holds. Make it if there is none; wait for the API server.

    Args:
        place: namespace and name of the Secret.
    """
    while True:
        try:
            return await _find(client, place)
        except (ApiError, AuthorityError) as error:
            log.warning("waiting for Secret %s/%s, which holds the engines' CA: %s", *place, error)
        await asyncio.sleep(RETRY_SECONDS)


async def _find(client: KubeClient, place: tuple[str, str]) -> EngineAuthority:
    namespace, name = place
    query = {"fieldManager": FIELD_MANAGER}
    try:
        live = await client.call("GET", SECRET.path(namespace, name))
    except NotFound:
        authority, data = _new()
        metadata = {"name": name, "namespace": namespace}
        body = {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "data": data}
        await client.call("POST", SECRET.path(namespace), query=query, body=body)
        return authority
    if held := live.get("data"):
        return EngineAuthority(_decoded(held, CERTIFICATE), _decoded(held, KEY))
    authority, data = _new()
    # With the version, another operator that was faster makes this a conflict.
    version = {"resourceVersion": live["metadata"]["resourceVersion"]}
    body = {"metadata": version, "data": data}
    path = SECRET.path(namespace, name)
    await client.call("PATCH", path, query=query, body=body, content=MERGE)
    return authority


def _new() -> tuple[EngineAuthority, dict[str, str]]:
    authority, stored = EngineAuthority.new(time.time())
    parts = {CERTIFICATE: stored.certificate, KEY: stored.key}
    return authority, {name: base64.b64encode(part).decode() for name, part in parts.items()}


def _decoded(data: Mapping[str, Any], name: str) -> bytes:
    try:
        return base64.b64decode(str(data.get(name) or ""), validate=True)
    except ValueError:
        return b""
