"""Where a side channel may listen, what is said where it cannot, and how many it takes in."""

from __future__ import annotations

import errno
import http.client
import os
import resource
import socket
from collections.abc import Callable
from contextlib import closing

import pytest

from pdcluster_connector import listening
from pdcluster_connector.listening import connection_limit
from pdcluster_connector.sidechannel.server import (
    SideChannelError,
    SideChannelServer,
    open_port,
    require_loopback,
)


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (errno.EADDRINUSE, "is in use; set side_channel_port to a free port or stop the process "),
        (errno.EADDRNOTAVAIL, "is not an address of this machine; set side_channel_host to one "),
        (socket.EAI_NONAME, "is not an address of this machine; set side_channel_host to one "),
        (errno.EACCES, "needs privileges; set side_channel_port to a port above 1023"),
        (errno.EMFILE, f"cannot be opened: {os.strerror(errno.EMFILE)}"),
    ],
)
def test_a_port_that_cannot_be_opened_is_named_with_the_cause_and_what_to_set(
    monkeypatch: pytest.MonkeyPatch, number: int, said: str
) -> None:
    def refused(*_: object, **__: object) -> socket.socket:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(socket, "create_server", refused)
    with pytest.raises(SideChannelError) as caught:
        open_port("10.0.0.7", 443)
    assert str(caught.value).startswith(f"side channel port 443 on 10.0.0.7 {said}")


def test_a_side_channel_listens_on_the_family_of_its_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with closing(open_port("127.0.0.1", 0)) as listener:
        assert listener.family is socket.AF_INET
        assert not listener.getblocking(), "one client would otherwise hold up all others"
    families: list[socket.AddressFamily] = []
    create = socket.create_server

    def note(
        _: object, *, family: socket.AddressFamily, backlog: int, **_more: object
    ) -> socket.socket:
        families.append(family)
        assert backlog > 1100, "the client of a SYN that is dropped comes again after a second"
        return create(("127.0.0.1", 0))

    monkeypatch.setattr(socket, "create_server", note)
    for host in ("10.0.0.7", "engine.example", "fd00::1"):
        open_port(host, 5600).close()
    assert families == [socket.AF_INET, socket.AF_INET, socket.AF_INET6]


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::"])
def test_every_address_is_one_of_both_families(host: str) -> None:
    if not socket.has_dualstack_ipv6():
        pytest.skip("this kernel has no IPv6")
    with closing(listening.open_port(host, 0)) as listener:
        for client in ("127.0.0.1", "::1"):
            socket.create_connection((client, listener.getsockname()[1])).close()


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::"])
def test_a_kernel_without_ipv6_has_those_of_ipv4(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)
    with closing(listening.open_port(host, 0)) as listener:
        assert listener.getsockname()[0] == listening.every_address() == "0.0.0.0"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.255.255.254", "::1", "localhost"])
def test_a_loopback_address_needs_no_tls(host: str) -> None:
    require_loopback(host, 5600)


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.1", "::", "fd00::1", "localhost.example", ""])
def test_any_other_address_needs_tls(host: str) -> None:
    with pytest.raises(SideChannelError) as caught:
        require_loopback(host, 5600)
    assert str(caught.value).startswith(f"side channel on {host}:5600 refused: without TLS it ")


@pytest.mark.parametrize(
    ("files", "most"),
    [(1024, 256), (1027, 256), (1028, 257), (2**20, 8192), (resource.RLIM_INFINITY, 8192)],
)
def test_a_kind_of_clients_takes_a_quarter_of_the_files_at_most(
    monkeypatch: pytest.MonkeyPatch, files: int, most: int
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (files, files))
    assert connection_limit() == most


@pytest.mark.parametrize(("size", "status"), [(256 * 1024, 400), (256 * 1024 + 1, 413)])
@pytest.mark.parametrize("chunked", [False, True])
def test_a_question_has_256_kib_at_most(
    serve: Callable[..., SideChannelServer], size: int, status: int, chunked: bool
) -> None:
    """Whether or not it says its length before. Up to there it is read, and is no handshake."""
    body = bytes(size)
    connection = http.client.HTTPConnection("127.0.0.1", serve().port, timeout=60)
    with closing(connection):
        connection.request(
            "POST", "/v1/handshake", iter([body]) if chunked else body, encode_chunked=chunked
        )
        assert connection.getresponse().status == status
