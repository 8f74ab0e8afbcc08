"""The identity of an engine: a stable logical id, and a new incarnation for each start."""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass, field
from typing import Final

MAX_LOGICAL_ID: Final = 200
_LOGICAL_ID = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?")
_INCARNATION = re.compile(r"[0-9a-f]{16}")


def mint_incarnation() -> str:
    """64 random bits as 16 hexadecimal characters."""
    return secrets.token_hex(8)


@dataclass(frozen=True, slots=True)
class Identity:
    """An engine's identity. Every rank on every node has the same ``engine_id``.

    Attributes:
        logical: ``namespace.cluster.role.revision.index``; the same after a restart.
        incarnation: 16 hexadecimal characters. The leader's launcher makes them at each start, so
            peers see every restart.
    """

    logical: str
    incarnation: str = field(default_factory=mint_incarnation)

    def __post_init__(self) -> None:
        """Raise ValueError for an id that could not stand in an address, a label or a log."""
        if len(self.logical) > MAX_LOGICAL_ID or not _LOGICAL_ID.fullmatch(self.logical):
            raise ValueError(
                f"{self.logical[:MAX_LOGICAL_ID]!r} is not a valid engine id: use letters, "
                f"digits, '.', '-' and '_' ({MAX_LOGICAL_ID} at most), such as "
                "default.llama.prefill.7f9c4.0"
            )
        if not _INCARNATION.fullmatch(self.incarnation):
            raise ValueError(
                f"{self.incarnation!r} is not an incarnation: use 16 hexadecimal characters"
            )

    @property
    def engine_id(self) -> str:
        """``logical/incarnation``."""
        return f"{self.logical}/{self.incarnation}"
