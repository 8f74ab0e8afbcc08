"""The parts of an engine id: ``logical/incarnation``, and ``_dpN`` for a data-parallel rank.

vLLM appends ``_dpN`` in each engine core of a data-parallel engine. For peers, such a rank is an
engine of its own, with its own side channel, leases and memory.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

# No leading zeros: one rank has one name.
_DATA_RANK: Final = re.compile(r"(?P<rest>.*)_dp(?P<rank>0|[1-9][0-9]{0,3})", re.DOTALL)


@dataclass(frozen=True, slots=True)
class EngineId:
    """An engine id's parts.

    Attributes:
        logical: which engine, also after a restart.
        incarnation: which start of it; empty where the id has no slash.
        data_rank: which data-parallel rank; None in an engine without data parallelism.
    """

    logical: str
    incarnation: str
    data_rank: int | None = None

    @property
    def engine(self) -> str:
        """The id that all data-parallel ranks of this incarnation share."""
        return f"{self.logical}/{self.incarnation}" if self.incarnation else self.logical

    def succeeds(self, other: EngineId) -> bool:
        """Whether this is another incarnation of the same engine, whichever rank of it."""
        return (
            bool(self.incarnation and other.incarnation)
            and self.logical == other.logical
            and self.incarnation != other.incarnation
        )


def parse_engine_id(text: str) -> EngineId:
    """Return the parts of any text. Without ``_dpN`` there is no data-parallel rank."""
    logical, slash, incarnation = text.rpartition("/")
    match = _DATA_RANK.fullmatch(incarnation)
    if match is None:
        return EngineId(logical, incarnation) if slash else EngineId(text, "")
    rest, rank = match["rest"], int(match["rank"])
    return EngineId(logical, rest, rank) if slash else EngineId(rest, "", rank)


def id_of_rank(engine_id: str, data_rank: int, size: int) -> str:
    """Return what vLLM calls one data-parallel rank of an engine of ``size`` such ranks."""
    return engine_id if size == 1 else f"{engine_id}_dp{data_rank}"
