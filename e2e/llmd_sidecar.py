"""llm-d's P/D contract as its sidecar has it, for tests in front of real engines.

Written from the source of llm-d-router (``pkg/sidecar/proxy``: ``chat_completions.go``,
``connector_nixlv2.go``; ``pkg/common/request``: ``CapSingleToken``), not with its code. The request
comes with the header that llm-d's endpoint picker sets. It goes to prefill for one token, and then
to decode with the ``kv_transfer_params`` of that answer. Without the header it goes to decode as it
is. An error of prefill is the client's answer.
"""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

PREFILL_HEADER = "x-prefiller-host-port"
REQUEST_ID = "x-request-id"
FOR_PREFILL = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
PASSED_ON = ("content-type", "authorization")


def single_token(body: dict[str, Any]) -> dict[str, Any]:
    """The request for prefill: one token, no stream."""
    capped = {**body, "kv_transfer_params": FOR_PREFILL, "stream": False}
    capped |= {"max_tokens": 1, "max_completion_tokens": 1}
    for name in ("min_tokens", "stream_options"):
        capped.pop(name, None)
    return capped


def post(url: str, document: Any, headers: dict[str, str]) -> tuple[int, str, bytes]:
    """(status, type of the content, body)."""
    request = urllib.request.Request(url, json.dumps(document).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=120) as reply:
            return reply.status, reply.headers["content-type"], reply.read()
    except urllib.error.HTTPError as error:
        return error.code, error.headers["content-type"], error.read()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Sidecar

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        headers = {name: self.headers[name] for name in PASSED_ON if self.headers[name]}
        host_port = self.headers[PREFILL_HEADER]
        if host_port:
            headers[REQUEST_ID] = str(uuid.uuid4())
            first = post(f"http://{host_port}{self.path}", single_token(body), headers)
            if first[0] >= 400:
                self._answer(*first)
                return
            body["kv_transfer_params"] = json.loads(first[2]).get("kv_transfer_params")
        self._answer(*post(f"{self.server.decode}{self.path}", body, headers))

    def _answer(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


class Sidecar(ThreadingHTTPServer):
    """Listens on a port of loopback while it is entered.

    ``decode``: the URL of the engine behind it.
    """

    daemon_threads = True

    def __init__(self, decode: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.decode = decode
        self.url = f"http://127.0.0.1:{self.server_port}"

    def __enter__(self) -> Self:
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()
