"""Reads the ticket keys from their file, and again when the file changes.

A Secret that is mounted into a pod changes while the engine runs. When the new content cannot be
used, the keys that were read last stay valid, and the log says what is wrong.
``protocol/ticket_keys.py`` says which of the keys signs.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path

from pdcluster_connector.certificate_files import Watched
from pdcluster_connector.protocol import ticket_keys


class TicketKeyError(ValueError):
    """The key file cannot be used. The message names the file and the remedy, and holds no key."""


class TicketKeyFile:
    """The keys of one file.

    Args:
        path: the file, one or two keys (see :func:`ticket_keys.parse_keys`).
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

    def __call__(self) -> ticket_keys.TicketKeys:
        """Return the keys that are valid now."""
        raw, written = self._content.present()
        return ticket_keys.parse_keys(raw, self._wall_clock() - written)

    def _read(self) -> tuple[bytes, float]:
        """Return the file's content, which holds keys, and when it was written."""
        try:
            with open(self._path, "rb", opener=_without_waiting) as file:
                raw = file.read(ticket_keys.MAX_FILE_BYTES + 1)
                written = os.fstat(file.fileno()).st_mtime
            ticket_keys.parse_keys(raw)
        except OSError as error:
            raise self._error(f"cannot be read: {error.strerror}") from None
        except ValueError as error:
            raise self._error(str(error)) from None
        return raw, written

    def _error(self, why: str) -> TicketKeyError:
        return TicketKeyError(
            f"ticket_key_file {self._path} {why}; make one with {ticket_keys.MAKE_A_KEY_FILE} and "
            "give the same file to the prefill and the decode engine"
        )


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # a named pipe would hold up the engine
