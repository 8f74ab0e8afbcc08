"""Reads the ticket keys from their file, and again when the file changes.

A Secret that is mounted into a pod changes while the engine runs. When the new content cannot be
used, the keys that were read last stay valid, and the log says what is wrong.
``protocol/ticket_keys.py`` says which of the keys signs.
"""

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from pdcluster_connector.protocol.ticket_keys import (
    MAKE_A_KEY_FILE,
    MAX_FILE_BYTES,
    TicketKeys,
    parse_keys,
)

logger = logging.getLogger(__name__)

LOOK_AGAIN_SECONDS: Final = 1.0


class TicketKeyError(ValueError):
    """The key file cannot be used. The message names the file and the remedy, and holds no key."""


class TicketKeyFile:
    """The keys of one file. Not thread-safe.

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
        self._clock = clock
        self._wall_clock = wall_clock
        self._problem = ""
        self._keys = self._read()
        self._look_at = clock() + LOOK_AGAIN_SECONDS

    def __call__(self) -> TicketKeys:
        """Return the keys that are valid now. Looks at the file at most once a second."""
        now = self._clock()
        if now >= self._look_at:
            self._look_at = now + LOOK_AGAIN_SECONDS
            self._look()
        return self._keys

    def _look(self) -> None:
        before = self._keys
        try:
            self._keys, self._problem = self._read(), ""
        except TicketKeyError as error:
            if self._problem != str(error):
                self._problem = str(error)
                logger.error("%s; the keys that were read before stay valid", error)
        if self._keys.accepted != before.accepted:
            count = len(self._keys.accepted)
            logger.info("ticket_key_file %s was read again; valid keys: %d", self._path, count)

    def _read(self) -> TicketKeys:
        try:
            with open(self._path, "rb", opener=_without_waiting) as file:
                raw = file.read(MAX_FILE_BYTES + 1)
                written = os.fstat(file.fileno()).st_mtime
            return parse_keys(raw, self._wall_clock() - written)
        except OSError as error:
            raise self._error(f"cannot be read: {error.strerror}") from None
        except ValueError as error:
            raise self._error(str(error)) from None

    def _error(self, why: str) -> TicketKeyError:
        return TicketKeyError(
            f"ticket_key_file {self._path} {why}; make one with {MAKE_A_KEY_FILE} and give the "
            "same file to the prefill and the decode engine"
        )


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # a named pipe would hold up the engine
