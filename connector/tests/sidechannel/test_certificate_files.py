"""Certificate files that change: what is used, and what the log says of it."""

from __future__ import annotations

import os
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest

from authority import Authority
from pdcluster_connector.certificate_files import (
    LOOK_SECONDS,
    TlsError,
    TlsFiles,
    Watched,
    client_context,
)

WHO = "ns.c.prefill.r.0/00"


class Files:
    """The files of an engine, and what is made from them when they are looked at."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.authority = Authority()
        self.now = 0.0
        self.fault = ""
        self.made = 0
        self.watched = Watched(self.write().paths, self.make, lambda: self.now)

    def write(self) -> TlsFiles:
        return self.authority.files(self.folder, WHO)

    def make(self) -> ssl.SSLContext:
        files = TlsFiles(*(self.folder / name for name in ("ca.crt", "tls.crt", "tls.key")))
        self.made += 1
        if self.fault:
            raise TlsError(self.fault)
        return client_context(files)

    def look(self) -> ssl.SSLContext:
        self.now += LOOK_SECONDS
        return self.watched.present()


@pytest.fixture
def files(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Iterator[Files]:
    with caplog.at_level("INFO"):
        yield Files(tmp_path)


def test_files_that_stay_broken_are_warned_of_once(
    files: Files, caplog: pytest.LogCaptureFixture
) -> None:
    first = files.watched.present()
    (files.folder / "tls.crt").write_text("spoiled")
    for _ in range(5):
        assert files.look() is first
    assert caplog.text.count("The old ones stay in use") == 1
    (files.folder / "tls.crt").write_text("spoiled in another way")
    for _ in range(5):
        assert files.look() is first
    assert caplog.text.count("The old ones stay in use") == 2, "they changed once more"
    files.write()
    second = files.look()
    assert second is not first
    assert files.look() is second
    assert caplog.text.count("read again") == 1


def test_files_that_become_usable_without_a_change_are_taken_up(
    files: Files, caplog: pytest.LogCaptureFixture
) -> None:
    """A certificate may be valid from tomorrow on."""
    first = files.watched.present()
    files.write()
    files.fault = "it is not valid yet"
    for _ in range(3):
        assert files.look() is first
    files.fault = ""
    assert files.look() is not first
    assert caplog.text.count("it is not valid yet") == 1


def test_files_are_not_read_again_while_they_stay_the_same(files: Files) -> None:
    files.write()
    assert files.watched.present() is files.watched.present(), "they are looked at once in a while"
    assert files.made == 1
    for _ in range(3):
        files.look()
    assert files.made == 2


def test_files_that_vanish_leave_what_was_made(files: Files) -> None:
    first = files.watched.present()
    for name in ("ca.crt", "tls.crt", "tls.key"):
        (files.folder / name).unlink()
    assert files.look() is first
    files.write()
    assert files.look() is not first


def test_files_that_have_changed_are_used_within_five_seconds(files: Files) -> None:
    first = files.watched.present()
    files.write()
    files.now += 4.75
    assert files.watched.present() is first
    files.now += 0.25
    second = files.watched.present()
    assert second is not first
    files.write()
    files.now += 4.75
    assert files.watched.present() is second, "the time begins anew with each look"
    files.now += 0.25
    assert files.watched.present() is not second


@pytest.mark.parametrize("name", ["ca.crt", "tls.crt", "tls.key"])
def test_a_change_of_any_of_the_files_is_seen(files: Files, name: str) -> None:
    path = files.folder / name
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content)
    os.utime(path, (1.0, 1.0))
    files.look()
    assert files.made == 2
