"""A connection that nobody answers is tried again; a request is not."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

import connecting
from loopback import free_port


@pytest.fixture
def silent() -> Iterator[int]:
    """A port whose kernel drops first packets: its queue of connections is full."""
    with socket.socket() as server, socket.socket() as first:
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        first.connect(server.getsockname())
        yield server.getsockname()[1]


def test_a_connection_that_nobody_answers_ends_at_the_deadline(
    silent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connecting, "ATTEMPT_SECONDS", 0.05)
    with pytest.raises(TimeoutError):
        connecting.connected("127.0.0.1", silent, 0.2)


def test_a_new_attempt_reaches_who_listens_now(
    silent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connecting, "ATTEMPT_SECONDS", 0.05)
    create = socket.create_connection
    attempts: list[int] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def led_anew(_: object, timeout: float) -> socket.socket:
            attempts.append(silent)
            if len(attempts) < 4:
                return create(("127.0.0.1", silent), timeout=timeout)
            return create(server.getsockname(), timeout=60)

        monkeypatch.setattr(socket, "create_connection", led_anew)

        def answer() -> None:
            peer, _ = server.accept()
            with peer:
                peer.recv(1000)
                peer.sendall(b"HTTP/1.1 204 No Content\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        connection = connecting.connected("10.96.0.7", 80, 60)
        connection.request("GET", "/")
        assert connection.getresponse().status == 204
        connection.close()
        thread.join()
    assert len(attempts) == 4


def test_a_port_where_nobody_listens_is_said_at_once() -> None:
    with pytest.raises(ConnectionRefusedError):
        connecting.connected("127.0.0.1", free_port(), 600)
