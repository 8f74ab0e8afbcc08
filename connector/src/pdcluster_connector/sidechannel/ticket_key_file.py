"""Reads the ticket keys from their file, and again when the file changes.

A Secret that is mounted into a pod changes while the engine runs. When the new content cannot be
used, the keys that were read last stay valid, and the log says what is wrong.

A file holds one or two keys, shared by the prefill and decode engines of a cluster. Both are
accepted, and one of them signs. So a key can be replaced while engines run: every engine accepts
the new key before any engine signs with it.
"""

import hmac
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from pdcluster_connector.certificate_files import Watched
from pdcluster_connector.protocol.ticket import TicketKeys

KEY_BYTES: Final = 32
MOST_KEY_BYTES: Final = 128
MOST_KEYS: Final = 2
MAX_FILE_BYTES: Final = 1024
# The kubelet brings a changed Secret into a pod within about a minute and a half.
ROTATION_SECONDS: Final = 180.0
MAKE_A_KEY_FILE: Final = "(umask 077 && openssl rand -hex 32 > FILE)"

_PURPOSE: Final = b"pdcluster ticket, format 3"  # the keys may serve other purposes, too
_LINE: Final = re.compile(rb"([0-9a-fA-F]{2}){%d,%d}" % (KEY_BYTES, MOST_KEY_BYTES))


class TicketKeyError(ValueError):
    """The key file cannot be used. The message names the file and the remedy, and holds no key."""


class TicketKeyFile:
    """The keys of one file.

    Args:
        path: the file, one or two keys (see :func:`parse_keys`).
        clock: monotonic seconds; says when the file is looked at again.
        wall_clock: Unix seconds; the file's age decides which key signs.

    Raises:
        TicketKeyError: the file cannot be used.
    """

    def __init__(
        self,
        path: str,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._path = Path(path)
        self._wall_clock = wall_clock
        self._content = Watched([self._path], self._read, clock, "ticket keys")

    def __call__(self) -> TicketKeys:
        """Return the keys that are valid now."""
        keys, written = self._content.present()
        return _in_use(keys, self._wall_clock() - written)

    def _read(self) -> tuple[tuple[bytes, ...], float]:
        """Return the file's keys, and when it was written."""
        try:
            # Without waiting: a named pipe would hold up the engine.
            opened = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK)
            with open(opened, "rb") as file:
                raw = file.read(MAX_FILE_BYTES + 1)
                written = os.fstat(file.fileno()).st_mtime
            keys = parse_keys(raw).accepted
        except OSError as error:
            raise self._error(f"cannot be read: {error.strerror}") from None
        except ValueError as error:
            raise self._error(str(error)) from None
        return keys, written

    def _error(self, why: str) -> TicketKeyError:
        return TicketKeyError(
            f"ticket_key_file {self._path} {why}; make one with {MAKE_A_KEY_FILE} and "
            "give the same file to the prefill and the decode engine"
        )


def parse_keys(raw: bytes, age: float = ROTATION_SECONDS) -> TicketKeys:
    """Return the keys of a key file: one or two lines of hexadecimal digits.

    Args:
        raw: the file's content.
        age: seconds since the file was written. In a file younger than ROTATION_SECONDS the second
            key signs, since other engines may not have read the first one yet.

    Raises:
        ValueError: what is wrong, in words that follow the file's name and hold no key.
    """
    if len(raw) > MAX_FILE_BYTES:
        raise ValueError(f"holds more than {MAX_FILE_BYTES} bytes")
    lines = raw.split()
    if not lines:
        raise ValueError("holds no key")
    if len(lines) > MOST_KEYS:
        raise ValueError(f"holds {len(lines)} keys; {MOST_KEYS} can be valid at a time")
    for number, line in enumerate(lines, 1):
        if len(line) < 2 * KEY_BYTES:
            raise ValueError(
                f"holds a key that is too short in line {number}: {len(line)} characters; a key "
                f"has at least {2 * KEY_BYTES} hexadecimal digits ({KEY_BYTES} bytes)"
            )
        if not _LINE.fullmatch(line):
            raise ValueError(
                f"holds a line {number} that is not {2 * KEY_BYTES} to {2 * MOST_KEY_BYTES} "
                "hexadecimal digits, an even number of them"
            )
    keys = tuple(hmac.digest(bytes.fromhex(line.decode()), _PURPOSE, "sha256") for line in lines)
    return _in_use(keys, age)


def _in_use(keys: tuple[bytes, ...], age: float) -> TicketKeys:
    return TicketKeys(keys, keys[-1] if age < ROTATION_SECONDS else keys[0])
