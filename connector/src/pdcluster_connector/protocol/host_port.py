"""A host and a port as text."""


def reachable(host: str, otherwise: str = "127.0.0.1") -> str:
    """Choose an address to connect to; ``host`` may be the wildcard address."""
    return otherwise if host in {"", "0.0.0.0", "::"} else host  # noqa: S104 - compared alone


def url(host: str, port: int, path: str = "", *, secured: bool = False) -> str:
    """Return ``http://host:port/path``, or ``https://…``; an IPv6 address gets its brackets."""
    scheme = "https" if secured else "http"
    return f"{scheme}://[{host}]:{port}{path}" if ":" in host else f"{scheme}://{host}:{port}{path}"


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
