"""The option `tls`: which files it names, and what is said of one that is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdcluster_connector.certificate_files import TlsFiles, tls_files

GOOD = {"ca": "/tls/ca.crt", "certificate": "/tls/tls.crt", "key": "/tls/tls.key"}


@pytest.mark.parametrize(
    ("names", "named", "by_role"),
    [("engines", True, False), ("roles", True, True), ("hosts", False, False)],
)
def test_what_certificates_name(names: str, named: bool, by_role: bool) -> None:
    paths = (Path(path) for path in GOOD.values())
    assert tls_files({**GOOD, "names": names}) == TlsFiles(*paths, named=named, by_role=by_role)


@pytest.mark.parametrize("name", GOOD)
@pytest.mark.parametrize("wrong", ["", 1, None, ["/tls"]])
def test_the_file_that_is_no_path_is_named(name: str, wrong: object) -> None:
    with pytest.raises(ValueError, match=f"holds a {name} that is not a path"):
        tls_files({**GOOD, name: wrong})


@pytest.mark.parametrize("wrong", ["/tls", {}, {**GOOD, "more": "/x"}, {"ca": "/x"}, None])
def test_all_three_files_are_needed_and_nothing_else(wrong: object) -> None:
    with pytest.raises(ValueError, match=r'is not \{"ca": PATH'):
        tls_files(wrong)


@pytest.mark.parametrize("wrong", ["pods", 1, None])
def test_what_certificates_cannot_name(wrong: object) -> None:
    with pytest.raises(ValueError, match="allowed are engines, roles or hosts"):
        tls_files({**GOOD, "names": wrong})
