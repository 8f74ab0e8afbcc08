"""The door of an engine that is told to end: later requests get a 503, those under way finish.

Routers of the operator's forget an engine before it ends. A router of the user's may send requests
for as long as it likes, and the engine would wait for all of them. So the launcher closes the door,
and an ASGI middleware in vLLM's API server turns new requests away. vLLM may run several API
servers, so a file says that the door is closed.
"""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any, Final

from pdcluster_connector.launcher.terminal import say

Scope = MutableMapping[str, Any]
App = Callable[[Scope, Any, Any], Awaitable[None]]

MIDDLEWARE: Final = f"{__name__}.Door"
VARIABLE: Final = "PDCLUSTER_DOOR"
"""Environment variable of an engine: path of the file that exists when the door is closed."""
_BODY: Final = (
    b'{"error":{"message":"this engine is told to end and takes no new requests; send the request '
    b'to another engine","type":"ServiceUnavailable","param":null,"code":503}}'
)


class DoorFile:
    """What the launcher has of the door.

    Attributes:
        path: where the file will be. It does not exist before the door is closed.
    """

    def __init__(self) -> None:
        self.path = Path(tempfile.gettempdir(), f"pdcluster-door-{secrets.token_hex(8)}")

    def close(self) -> None:
        """Close the door for good. Without a place to write to, the engine goes on as before."""
        if self.path.exists():
            return
        try:
            self.path.touch()
        except OSError as error:
            say(f"new requests cannot be turned away: {self.path}: {error.strerror}")

    def clean_up(self) -> None:
        """Leave no file behind."""
        self.path.unlink(missing_ok=True)


class Door:
    """ASGI middleware: 503 for each new ``POST`` once the door is closed. All else passes."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._file = os.environ.get(VARIABLE, "")

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        """Handle one connection."""
        if scope["type"] == "http" and scope["method"] == "POST" and self._closed():
            headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
            await send({"type": "http.response.start", "status": 503, "headers": headers})
            await send({"type": "http.response.body", "body": _BODY})
        else:
            await self._app(scope, receive, send)

    def _closed(self) -> bool:
        return bool(self._file) and Path(self._file).exists()
