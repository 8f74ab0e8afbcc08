"""How commands end: exit codes, and the error that is one sentence for a person."""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    """Exit codes of ``pdcluster``."""

    DONE = 0
    MANIFEST = 1
    USAGE = 2
    NOT_READY = 3
    REQUEST_FAILED = 4
    KV_DID_NOT_MOVE = 5
    MACHINE = 6
    INTERRUPTED = 130


class UserError(Exception):
    """Something that the user can put right; its text says what and how."""

    def __init__(self, message: str, exit_code: Exit) -> None:
        super().__init__(message)
        self.exit = exit_code
