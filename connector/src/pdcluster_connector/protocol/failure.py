"""One named cause of one failed request, probe or handshake."""

from __future__ import annotations

from dataclasses import dataclass

from pdcluster_connector.compat.reasons import Reason


@dataclass(frozen=True, slots=True)
class Failure:
    """Why something did not happen.

    Attributes:
        reason: the name that users, metrics and conditions see.
        message: one sentence with the values at hand and, where there is one, the remedy.
    """

    reason: Reason
    message: str

    def __str__(self) -> str:
        return f"{self.reason}: {self.message}"
