"""An ASGI middleware for vLLM's API: request ids without the router's addresses.

vllm-router sends ``X-Request-Id: ___prefill_addr_HOST:PORT___decode_addr_HOST:PORT_UUID``. vLLM
copies it into the ``id`` of its answer. Some connectors read the addresses; ours does not.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final

Scope = MutableMapping[str, Any]
App = Callable[[Scope, Any, Any], Awaitable[None]]

MIDDLEWARE: Final = f"{__name__}.PlainRequestIds"
_HEADER: Final = b"x-request-id"
_MARKS: Final = (b"___prefill_addr_", b"___decode_addr_")
_UNIQUE: Final = re.compile(rb"_([0-9A-Fa-f-]{16,64})\Z")


class PlainRequestIds:
    """Changes one header of a request. Bodies, answers and streams pass unchanged."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        """Handle one connection."""
        if scope["type"] == "http":
            headers = [
                (name, plain(value) if name == _HEADER else value)
                for name, value in scope["headers"]
            ]
            scope = {**scope, "headers": headers}
        await self._app(scope, receive, send)


def plain(request_id: bytes) -> bytes:
    """Return the id; if it holds addresses, only its unique part.

    Every engine makes the same part of the same id.
    """
    if not any(mark in request_id for mark in _MARKS):
        return request_id
    unique = _UNIQUE.search(request_id)
    # The id has an unknown form. Remove the addresses in this case too.
    return unique[1] if unique else hashlib.sha256(request_id).hexdigest()[:32].encode()
