"""What an engine or the router answers over HTTP."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any


class Reply:
    """An HTTP answer: its status, and its JSON body where it has one."""

    def __init__(self, status: int, body: bytes) -> None:
        self.status, self.text = status, body.decode(errors="replace")

    @property
    def document(self) -> Any:
        return json.loads(self.text)

    @property
    def completion(self) -> str:
        return str(self.document["choices"][0]["text"])

    @property
    def kv_path(self) -> Mapping[str, Any]:
        return (self.document.get("kv_transfer_params") or {}).get("kv_path") or {}


def answer(request: urllib.request.Request) -> Reply:
    """The answer, whatever its status."""
    try:
        with urllib.request.urlopen(request, timeout=120) as reply:
            return Reply(reply.status, reply.read())
    except urllib.error.HTTPError as error:
        return Reply(error.code, error.read())
