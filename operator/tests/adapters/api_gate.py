"""A gate between an operator and its API server: it forwards bytes, until it is shut."""

from __future__ import annotations

import contextlib
import socket
import threading
from pathlib import Path

from real_api import RealApi


class Gate:
    """Listens on a port of its own. While it is shut, connections are cut and refused."""

    def __init__(self, real: RealApi) -> None:
        host, _, port = real.url.removeprefix("https://").partition(":")
        self._target = host, int(port)
        self._open = True
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

    def open(self) -> None:
        with self._lock:
            self._open = True

    def close(self) -> None:
        self.shut()
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
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


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            sink.sendall(data)
    for one in (source, sink):
        with contextlib.suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)
