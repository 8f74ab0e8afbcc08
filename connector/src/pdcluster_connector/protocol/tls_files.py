"""Which files hold an engine's certificate: the option ``tls`` of the connector.

::

    {"ca": "/tls/ca.crt", "certificate": "/tls/tls.crt", "key": "/tls/tls.key", "names": "engines"}

``names`` says what a certificate names: ``engines``, ``roles`` or ``hosts``.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_PATHS = ("ca", "certificate", "key")


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Where the PEM files lie.

    Attributes:
        ca: certificates of the authorities whose engines are peers.
        certificate: this engine's certificate, for servers and clients, with its chain.
        key: its private key, without a password.
        named: whether certificates name engines. If not, everybody with a certificate of the
            authority is a peer, and a server's certificate names its host.
        by_role: whether the certificates that name engines name the role instead. All engines of
            one role of a PDCluster then share a certificate.
    """

    ca: Path
    certificate: Path
    key: Path
    named: bool = True
    by_role: bool = False


def tls_files(value: object) -> TlsFiles:
    """Return the files that the option ``tls`` names; raises ValueError with what is wrong."""
    if not isinstance(value, dict) or set(value) - {"names"} != set(_PATHS):
        raise ValueError('is not {"ca": PATH, "certificate": PATH, "key": PATH}')
    for name in _PATHS:
        if not isinstance(value[name], str) or not value[name]:
            raise ValueError(f"holds a {name} that is not a path")
    names = value.get("names", "engines")
    if not isinstance(names, str) or names not in {"engines", "roles", "hosts"}:
        raise ValueError(f"holds names {names!r}; allowed are engines, roles or hosts")
    ca, certificate, key = (Path(value[name]) for name in _PATHS)
    return TlsFiles(ca, certificate, key, named=names != "hosts", by_role=names == "roles")
