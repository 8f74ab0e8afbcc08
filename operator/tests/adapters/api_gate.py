"""A gate between an operator and its API server: it forwards bytes, until it is shut or refuses."""

from __future__ import annotations

import contextlib
import http.server
import json
import socket
import ssl
import threading
from pathlib import Path

from real_api import RealApi

REFUSAL = {
    "kind": "Status",
    "apiVersion": "v1",
    "status": "Failure",
    "message": "the server is currently unable to handle the request",
    "reason": "ServiceUnavailable",
    "code": 503,
}


class Gate:
    """Listens on a port of its own. While it is shut, connections are cut and refused.

    Attributes:
        refused: method and path of each request that was answered 503.
    """

    def __init__(self, real: RealApi) -> None:
        host, _, port = real.url.removeprefix("https://").partition(":")
        self._target = host, int(port)
        self._open = True
        self._refuses = False
        self.refused: list[tuple[str, str]] = []
        self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        keys = real.folder / "keys"
        self._tls.load_cert_chain(keys / "apiserver.crt", keys / "apiserver.key")
        self._lock = threading.Lock()
        self._held: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"https://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def kubeconfig(self, real: RealApi) -> Path:
        """Return the operator's kubeconfig with the gate as its server."""
        text = (real.folder / "operator.kubeconfig").read_text()
        path = real.folder / "gate.kubeconfig"
        path.write_text(text.replace(real.url, self.url))
        return path

    def shut(self) -> None:
        with self._lock:
            self._open = False
            held, self._held = self._held, set()
        for one in held:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def refuse(self) -> None:
        """Answer 503 to everything, as a load balancer does that has no API server behind it."""
        self.shut()
        with self._lock:
            self._open = self._refuses = True

    def open(self) -> None:
        if self._refuses:
            self.shut()
        with self._lock:
            self._open, self._refuses = True, False

    def close(self) -> None:
        self.shut()
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        if self._refuses:
            self._answer_503(client)
            return
        with contextlib.suppress(OSError), client, socket.create_connection(self._target) as server:
            with self._lock:
                if not self._open:
                    return
                self._held |= {client, server}
            back = threading.Thread(target=_pump, args=(server, client), daemon=True)
            back.start()
            _pump(client, server)
            back.join()
            with self._lock:
                self._held -= {client, server}

    def _answer_503(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError), self._tls.wrap_socket(client, server_side=True) as held:
            with self._lock:
                if not self._refuses:
                    return
                self._held.add(held)
            _refusals(self.refused)(held, ("", 0), None)  # type: ignore[arg-type]
            with self._lock:
                self._held.discard(held)


def _refusals(seen: list[tuple[str, str]]) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            return

        def _refuse(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            seen.append((self.command, self.path))
            text = json.dumps(REFUSAL).encode()
            self.send_response(503)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        do_GET = do_POST = do_PATCH = do_PUT = do_DELETE = _refuse  # noqa: N815

    return Handler


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            sink.sendall(data)
    for one in (source, sink):
        with contextlib.suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)
