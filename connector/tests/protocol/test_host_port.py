from __future__ import annotations

import pytest

from pdcluster_connector.protocol.host_port import split_address, url


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("127.0.0.1:5600", ("127.0.0.1", 5600)),
        ("[::1]:80", ("::1", 80)),
        ("a.b.svc:1", ("a.b.svc", 1)),
        ("::1:80", None),
        ("[::1:80", None),
        ("::1]:80", None),
        ("[::1]", None),
        ("[]:80", None),
        ("host", None),
        (":80", None),
        ("h:", None),
        ("h:0", None),
        ("h:65535", ("h", 65535)),
        ("h:65536", None),
        ("h:000080", None),
        ("h:٣", None),
        ("h:-1", None),
    ],
)
def test_split(text: str, expected: tuple[str, int] | None) -> None:
    assert split_address(text) == expected


def test_urls() -> None:
    assert url("10.0.0.1", 5600, "/healthz") == "http://10.0.0.1:5600/healthz"
    assert url("fd00::1", 8000, secured=True) == "https://[fd00::1]:8000"
    assert url("a.b.svc", 80) == "http://a.b.svc:80"
