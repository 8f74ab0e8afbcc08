"""Errors of calls to the API server and to launchers."""

from __future__ import annotations


class ApiError(Exception):
    """A refused or failed API call.

    Attributes:
        reason: CamelCase, as it stands in a condition.
        terminal: trying the same call again cannot help.
        passing: the next try begins from the newer object; users need not know.
    """

    def __init__(
        self, reason: str, message: str, *, terminal: bool = False, passing: bool = False
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.terminal = terminal
        self.passing = passing


class Conflict(ApiError):  # noqa: N818 - the API server's own name for it
    """The object changed since it was read: a UID or resourceVersion precondition failed."""

    def __init__(self, message: str) -> None:
        super().__init__("Conflict", message, passing=True)


class Invalid(ApiError):  # noqa: N818 - the API server's own name for it
    """The object can never be accepted as it is."""

    def __init__(self, message: str) -> None:
        super().__init__("Invalid", message, terminal=True)


class NamespaceTerminating(ApiError):  # noqa: N818 - the API server's own name for it
    """Nothing can be created in the namespace any more, because it is being deleted."""

    def __init__(self, message: str) -> None:
        super().__init__("NamespaceTerminating", message)


class LauncherError(Exception):
    """A launcher did not answer, or not with what was asked for."""
