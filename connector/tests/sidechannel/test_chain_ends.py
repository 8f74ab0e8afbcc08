"""When peers no longer accept an engine's certificate: the first of its chain decides."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

from authority import Authority
from pdcluster_connector.certificate_files import Tls, TlsFiles
from pdcluster_connector.protocol.engine_id import engine_name

WHO = "ns.c.prefill.r.0/00"
DAY = 86_400.0


@pytest.mark.parametrize(
    ("root", "between", "leaf", "first"),
    [
        (300, None, 100, 100),
        (50, None, 100, 50),
        (300, 200, 100, 100),
        (300, 50, 100, 50),
        (50, 200, 100, 50),
    ],
)
def test_the_first_certificate_of_the_chain_that_ends_decides(
    tmp_path: Path, root: int, between: int | None, leaf: int, first: int
) -> None:
    signer = Authority("root", days=root)
    if between is not None:
        signer = Authority("between", above=signer, days=between)
    before = time.time()
    expires = Tls(signer.files(tmp_path, WHO, days=leaf), WHO).expires
    assert expires is not None
    assert before - 3600 < expires - (first - 2) * DAY < time.time() + 1


def test_an_authority_that_signed_nothing_of_the_chain_does_not_count(tmp_path: Path) -> None:
    """During a rotation, engines trust the former authority until it is taken out."""
    former = Authority("former", days=3)
    expires = Tls(Authority(days=300).files(tmp_path, WHO, trusting=(former,)), WHO).expires
    assert expires is not None
    assert expires > time.time() + 5 * DAY


def test_a_certificate_that_signed_itself_is_its_own_authority(tmp_path: Path) -> None:
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256",
         "-nodes", "-days", "100", "-subj", "/CN=engine", "-keyout", "tls.key", "-out", "tls.crt",
         "-addext", f"subjectAltName=DNS:{engine_name(WHO)}"],
        cwd=tmp_path, check=True, capture_output=True,
    )  # fmt: skip
    certificate = tmp_path / "tls.crt"
    expires = Tls(TlsFiles(certificate, certificate, tmp_path / "tls.key"), WHO).expires
    assert expires is not None
    assert expires > time.time() + 90 * DAY
