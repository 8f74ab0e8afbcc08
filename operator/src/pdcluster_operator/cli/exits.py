"""How commands end: exit codes, and the error that a user can correct."""

from enum import IntEnum


class Exit(IntEnum):
    """Exit codes of ``pdcluster``. Each command decides by itself with which one it ends.

    NOT_READY also means that a change waits for a person. MACHINE means that this machine lacks
    something.
    """

    DONE = 0
    MANIFEST = 1
    USAGE = 2
    NOT_READY = 3
    REQUEST_FAILED = 4
    KV_DID_NOT_MOVE = 5
    MACHINE = 6
    INTERRUPTED = 130


class UserError(Exception):
    """An error that the user can correct. Its text names the fault and the remedy."""

    def __init__(self, message: str, exit_code: Exit) -> None:
        super().__init__(message)
        self.exit = exit_code
