"""A host and a port as text."""


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
