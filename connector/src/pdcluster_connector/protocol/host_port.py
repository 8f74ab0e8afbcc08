"""A host and a port as text."""

EVERY_ADDRESS = frozenset({"", "0.0.0.0", "::"})  # noqa: S104 - compared, not bound to


def reachable(host: str, otherwise: str = "127.0.0.1") -> str:
    """Choose an address to connect to; ``host`` may be the wildcard address."""
    return otherwise if host in EVERY_ADDRESS else host


def join_address(host: str, port: int) -> str:
    """Return ``host:port``; an IPv6 address gets its brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def url(host: str, port: int, path: str = "", *, secured: bool = False) -> str:
    """Return ``http://host:port/path``, or ``https://…``; an IPv6 address gets its brackets."""
    scheme = "https" if secured else "http"
    return f"{scheme}://{join_address(host, port)}{path}"


def split_address(text: str) -> tuple[str, int] | None:
    """Return (host, port) of ``host:port`` or ``[v6]:port``; None when it is neither."""
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        return None
    if not colon or not host or not (port.isascii() and port.isdigit()) or len(port) > 5:
        return None
    return (host, int(port)) if 1 <= int(port) <= 65535 else None
