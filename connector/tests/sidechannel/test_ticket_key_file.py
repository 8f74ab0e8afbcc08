"""The file with the ticket keys: what is refused, and what happens when it changes."""

from __future__ import annotations

import itertools
import logging
import os
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from pdcluster_connector.certificate_files import LOOK_SECONDS
from pdcluster_connector.sidechannel.ticket_key_file import (
    ROTATION_SECONDS,
    TicketKeyError,
    TicketKeyFile,
    parse_keys,
)

OLD, NEW = b"0a" * 32, b"0b" * 32


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


TIMES = itertools.count()


def write(path: Path, raw: bytes, written: float | None = None) -> None:
    """As the kubelet does it: the new file takes the old one's place at once."""
    new = path.with_suffix(".new")
    written = next(TIMES) if written is None else written  # long ago
    new.write_bytes(raw)
    os.utime(new, (written, written))
    new.rename(path)


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (b"", "holds no key"),
        (b"\n \n", "holds no key"),
        (b"0a" * 31, r"holds a key that is too short in line 1: 62 .*at least 64 hexadecimal"),
        (OLD + b"\n" + b"0b" * 16, "holds a key that is too short in line 2"),
        (b"0g" * 32, "holds a line 1 that is not 64 to 256 hexadecimal digits"),
        (OLD + b"0", "holds a line 1 that is not 64 to 256"),
        (b"0a" * 129, "holds a line 1 that is not 64 to 256"),
        (b"\n".join([OLD, NEW, b"0c" * 32]), "holds 3 keys; 2 can be valid"),
        (b"0a" * 600, "holds more than 1024 bytes"),
        (bytes(range(128, 256)), "holds a line 1 that is not"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_a_file_that_holds_no_keys_is_refused(tmp_path: Path, raw: bytes, why: str) -> None:
    path = tmp_path / "key"
    path.write_bytes(raw)
    said = rf"ticket_key_file {path} {why}.*openssl rand -hex 32"
    with pytest.raises(TicketKeyError, match=said) as caught:
        TicketKeyFile(str(path))
    shown = raw.strip()[:16].decode("latin-1")
    assert not shown or shown not in str(caught.value), "keys stay unsaid"


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TicketKeyError, match=r"none cannot be read: No such file.*the same file"):
        TicketKeyFile(str(tmp_path / "none"))
    with pytest.raises(TicketKeyError, match=r"cannot be read: Is a directory"):
        TicketKeyFile(str(tmp_path))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(TicketKeyError, match=r"pipe holds no key"):
        TicketKeyFile(str(tmp_path / "pipe"))


@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n", b"\n\n"])
def test_one_key_or_two_are_read(tmp_path: Path, end: bytes) -> None:
    path = tmp_path / "key"
    write(path, NEW + end)
    assert TicketKeyFile(str(path))() == parse_keys(NEW)
    write(path, NEW + b"\n" + OLD + end)
    both = TicketKeyFile(str(path))()
    assert both.accepted == (parse_keys(NEW).signing, parse_keys(OLD).signing)
    assert both.signing == parse_keys(NEW).signing


def test_keys_are_made_when_the_file_changes_and_not_for_each_ticket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "keys", OLD)
    keys = TicketKeyFile(str(tmp_path / "keys"))
    monkeypatch.delattr("pdcluster_connector.sidechannel.ticket_key_file.parse_keys")
    assert keys() == keys() == parse_keys(OLD)


def test_keys_are_replaced_while_the_engine_runs(tmp_path: Path) -> None:
    path, clock, wall = tmp_path / "key", Clock(), Clock()
    old, new = parse_keys(OLD), parse_keys(NEW)
    write(path, OLD)
    keys = TicketKeyFile(str(path), clock, wall)
    write(path, NEW + b"\n" + OLD, written=wall.now)
    assert keys() == old, "looked at every few seconds only"
    clock.now += LOOK_SECONDS
    assert keys().accepted == (new.signing, old.signing)
    assert keys().signing == old.signing, "other engines may not have the new key yet"
    wall.now += ROTATION_SECONDS - 1
    clock.now += LOOK_SECONDS
    assert keys().signing == old.signing
    wall.now += 2
    clock.now += LOOK_SECONDS
    assert keys().signing == new.signing
    write(path, NEW, written=wall.now)
    clock.now += LOOK_SECONDS
    assert keys() == new


@pytest.mark.parametrize("ahead", [1, ROTATION_SECONDS, 1e6])
def test_a_file_from_the_future_is_young(tmp_path: Path, ahead: float) -> None:
    """Another machine's clock wrote its time, so how long it has been there is not known."""
    path, wall = tmp_path / "key", Clock()
    write(path, NEW + b"\n" + OLD, written=wall.now + ahead)
    keys = TicketKeyFile(str(path), Clock(), wall)
    assert keys().signing == parse_keys(OLD).signing, "every engine has the old key"
    wall.now += ahead + ROTATION_SECONDS
    assert keys().signing == parse_keys(NEW).signing


def test_what_cannot_be_used_leaves_the_keys_as_they_were(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, clock = tmp_path / "key", Clock()
    write(path, OLD)
    keys = TicketKeyFile(str(path), clock)
    for spoil in (lambda: write(path, b"short"), path.unlink, lambda: write(path, b"")):
        spoil()
        with caplog.at_level(logging.WARNING):
            for _ in range(3):
                clock.now += LOOK_SECONDS
                assert keys() == parse_keys(OLD)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 3, "once each"
    assert all(f"ticket_key_file {path} " in line for line in said)
    assert all("stay in use" in line for line in said)
    write(path, NEW)
    clock.now += LOOK_SECONDS
    assert keys() == parse_keys(NEW)


LINES = st.lists(
    st.binary(max_size=140) | st.integers(30, 130).map(lambda n: b"5a" * n), max_size=4
).map(b"\n".join)


@given(LINES | st.binary(max_size=1100), st.floats(-1e9, 1e9))
def test_any_content_is_keys_or_refused_in_words_without_it(raw: bytes, age: float) -> None:
    keys, refusal = None, ""
    try:
        keys = parse_keys(raw, age)
    except ValueError as error:
        refusal = str(error)
    if keys is None:
        assert refusal.startswith("holds ")
        assert len(refusal) < 200
        for line in raw.split():
            assert len(line) < 16 or line.decode("latin-1") not in refusal
    else:
        assert 1 <= len(keys.accepted) <= 2
        assert keys.signing in keys.accepted
        assert all(len(line) >= 64 for line in raw.split())


def test_keys_are_never_printed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, clock = tmp_path / "key", Clock()
    write(path, OLD)
    keys = TicketKeyFile(str(path), clock)
    with caplog.at_level(logging.DEBUG):
        write(path, NEW + b"\n" + OLD)
        clock.now += LOOK_SECONDS
        shown = repr(keys()) + str(keys()) + caplog.text
    assert f"ticket keys read again: {path}" in shown
    for key in (*keys().accepted, bytes.fromhex(OLD.decode()), bytes.fromhex(NEW.decode())):
        assert key.hex() not in shown
        assert repr(key)[2:-1] not in shown


def test_the_file_is_looked_at_every_five_seconds(tmp_path: Path) -> None:
    path, clock = tmp_path / "key", Clock()
    write(path, OLD)
    keys = TicketKeyFile(str(path), clock)
    for raw, former in ((NEW, OLD), (OLD, NEW)):
        write(path, raw)
        clock.now += 4.75
        assert keys() == parse_keys(former)
        clock.now += 0.25
        assert keys() == parse_keys(raw)
