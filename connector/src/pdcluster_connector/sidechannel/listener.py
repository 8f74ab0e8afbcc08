"""Where the side channel listens: on a port that is free, and only where nobody else reaches it."""

from __future__ import annotations

import errno
import ipaddress
import socket


class SideChannelError(Exception):
    """The side channel cannot be opened; the message names the port and the remedy."""


class SideChannelRefusedError(SideChannelError):
    """The address is not loopback, and nothing protects the side channel."""


def require_loopback(host: str, port: int) -> None:
    """Raise SideChannelRefusedError if other machines can reach this address."""
    if not _is_loopback(host):
        raise SideChannelRefusedError(
            f"side channel on {host}:{port} refused: without TLS it listens on"
            " loopback only, since whoever reaches it can read KV memory; set"
            " tls, or side_channel_host to 127.0.0.1, or allow_insecure: true in a network"
            " that you trust"
        )


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens; raises SideChannelError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=256)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            why = "is in use; set side_channel_port to a free port or stop the process that has it"
        elif error.errno in {errno.EADDRNOTAVAIL, socket.EAI_NONAME}:
            why = "is not an address of this machine; set side_channel_host to one that is"
        elif error.errno == errno.EACCES:
            why = "needs privileges; set side_channel_port to a port above 1023"
        else:
            why = f"cannot be opened: {error.strerror}"
        raise SideChannelError(f"side channel port {port} on {host} {why}") from error
    listener.setblocking(False)
    return listener


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name: only one is loopback everywhere
        return host == "localhost"
