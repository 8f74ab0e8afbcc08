"""Asks for the API key on every path of an engine's server.

vLLM's own ``VLLM_API_KEY`` guards only the paths that begin with /v1, /v2, /inference and /cohere.
Everything else stays open. For example, /invocations computes completions, and /tokenize and the
endpoints for developers answer. This middleware
(``--middleware pdcluster_connector.vllm.api_guard.RequireKey``) guards the other paths too.
"""

import json
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final

from pdcluster_connector.protocol.api_key import VARIABLE, admits

# Probes, the router's health check and Prometheus send no key. These paths show no prompt.
OPEN: Final = frozenset({"/health", "/metrics"})
_BODY: Final = json.dumps({"error": "Unauthorized"}).encode()

Scope = MutableMapping[str, Any]
App = Callable[[Scope, Any, Any], Awaitable[None]]


class RequireKey:
    """ASGI middleware: 401 for a request without the key, except for ``GET`` of an OPEN path.

    Raises:
        RuntimeError: the variable with the key is not set. The server then does not start.
    """

    def __init__(self, app: App) -> None:
        key = os.environ.get(VARIABLE)
        if not key:
            raise RuntimeError(f"{VARIABLE} is not set; it must hold the API key of this server")
        self._app, self._key = app, key

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        """Pass a request on, or answer 401. A websocket without the key is closed with 1008."""
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
        # With two of these headers, a proxy and this server could look at different ones.
        return len(given) == 1 and admits(self._key, given[0].decode("latin-1"))
