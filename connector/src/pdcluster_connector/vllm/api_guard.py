"""Ask for the API key on every path of an engine's server.

vLLM's own ``VLLM_API_KEY`` guards what begins with /v1, /v2, /inference and /cohere. Everything
else stays open: /invocations computes completions, /tokenize and the developer's endpoints answer.
This middleware (``--middleware pdcluster_connector.vllm.api_guard.RequireKey``) closes the rest.
"""

from __future__ import annotations

import json
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final

from pdcluster_connector.protocol.api_key import VARIABLE, admits

# Probes, the router's health check and Prometheus send no key, and learn no prompt there.
OPEN: Final = frozenset({"/health", "/metrics"})
_BODY: Final = json.dumps({"error": "Unauthorized"}).encode()

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class RequireKey:
    """ASGI middleware: 401 for a request without the key, except for ``GET`` of an OPEN path.

    Raises:
        RuntimeError: the variable of the key is not set; the server then does not start.
    """

    def __init__(self, app: App) -> None:
        key = os.environ.get(VARIABLE)
        if not key:
            raise RuntimeError(f"{VARIABLE} is not set: nothing could be asked for")
        self._app, self._key = app, key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer 401; a websocket is closed with 1008."""
        if scope["type"] not in ("http", "websocket") or self._may(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1008, "reason": "Unauthorized"})
        else:
            headers = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": _BODY})

    def _may(self, scope: Scope) -> bool:
        path = scope["path"].removeprefix(scope.get("root_path", "")).rstrip("/")
        if scope.get("method") == "GET" and path in OPEN:
            return True
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        # Two of them would let a proxy and this server look at different ones.
        return len(given) == 1 and admits(self._key, given[0].decode("latin-1"))
