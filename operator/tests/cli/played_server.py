"""An HTTP server that answers as an API server on a bad day does, and a kubeconfig for it."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import yaml

Answer = tuple[int, Any]
"""A status and a document."""


def status(code: int, reason: str, message: str) -> Answer:
    """What an API server answers instead of an object."""
    known = {"kind": "Status", "apiVersion": "v1", "status": "Failure"}
    return code, {**known, "code": code, "reason": reason, "message": message}


class Server(ThreadingHTTPServer):
    """Answers each request with what ``answer`` returns for its method and path.

    None: it says nothing until the server is closed.
    """

    daemon_threads = True

    def __init__(self, answer: Callable[[str, str], Answer | None]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answer = answer
        self.asked: list[str] = []
        self.closes = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def _answer(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.asked.append(f"{self.command} {self.path}")
        found = self.server.answer(self.command, self.path)
        if found is None:
            self.server.closes.wait()
            self.close_connection = True
            return
        code, document = found
        body = document.encode() if isinstance(document, str) else json.dumps(document).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _answer  # noqa: N815

    def log_message(self, *_: Any) -> None:
        """Write nothing."""


@contextmanager
def serving(answer: Callable[[str, str], Answer | None]) -> Iterator[Server]:
    """Serve until the end."""
    with Server(answer) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield server
        finally:
            server.closes.set()
            server.shutdown()
            thread.join()


def kubeconfig(folder: Path, url: str, namespace: str = "team") -> Path:
    """Write a kubeconfig for a server without TLS."""
    context = {"cluster": "c", "user": "u", "namespace": namespace}
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "there",
        "contexts": [{"name": "there", "context": context}],
        "clusters": [{"name": "c", "cluster": {"server": url}}],
        "users": [{"name": "u", "user": {}}],
    }
    (file := folder / "kubeconfig").write_text(yaml.safe_dump(document))
    return file
