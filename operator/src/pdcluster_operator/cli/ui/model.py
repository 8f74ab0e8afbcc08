"""What the page shows of PDClusters, as plain data, and what it is made from."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Facts:
    """What was read of one PDCluster.

    Attributes:
        pods: of its engines and routers.
        events: of ``events.k8s.io/v1``, about it and its pods.
        notes: what could not be read, and why.
    """

    cluster: Mapping[str, Any]
    pods: Sequence[Mapping[str, Any]] = ()
    events: Sequence[Mapping[str, Any]] = ()
    notes: tuple[str, ...] = ()


def entries(value: object) -> list[Mapping[str, Any]]:
    """Return the mappings in a list; nothing for anything else."""
    return [one for one in value if isinstance(one, Mapping)] if isinstance(value, list) else []


@dataclass(frozen=True)
class Mark:
    """A state, as a word with a sign and a tone: colour alone never says it.

    Attributes:
        tone: good, busy, bad or quiet.
    """

    word: str
    tone: str

    @property
    def sign(self) -> str:
        """One character."""
        return {"good": "✓", "busy": "…", "bad": "✗", "quiet": "·"}[self.tone]


@dataclass(frozen=True)
class Engine:
    """One engine.

    Attributes:
        step: so many steps of a start it has reached.
        since: when its oldest pod was made, in seconds since the epoch.
    """

    name: str
    short: str
    role: str
    revision: str
    state: Mark
    step: int
    doing: str
    restarts: int
    gpus: int
    since: float | None
    pods: tuple[str, ...]


@dataclass(frozen=True)
class Link:
    """One link, by the short names of its engines.

    Attributes:
        gigabytes: per second; 0 if this was not measured.
        descriptors: of NIXL, for the KV of 1,000 tokens; 0 if this is not known.
        proven: since when KV is known to move over it, or when it was last seen to if ``late``.
    """

    prefill: str
    decode: str
    state: Mark
    reason: str = ""
    message: str = ""
    gigabytes: float = 0.0
    canary: str = ""
    descriptors: int = 0
    proven: float | None = None
    late: bool = False


@dataclass(frozen=True)
class Matrix:
    """The links, prefill engines in rows and decode engines in columns.

    Attributes:
        rows: a prefill engine, and for each decode engine the link; None where none is kept.
        links: those with a fault first.
        hidden: what is not shown, in words.
        wide: whether a cell has room for a number.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[str, tuple[Link | None, ...]], ...]
    links: tuple[Link, ...]
    total: int
    hidden: str
    wide: bool


@dataclass(frozen=True)
class Condition:
    """One condition, with the next command if it does not hold."""

    type: str
    state: Mark
    reason: str
    message: str
    since: float | None
    next: str


@dataclass(frozen=True)
class Moment:
    """One line of the timeline; ``at`` in seconds since the epoch."""

    at: float
    subject: str
    text: str
    tone: str


@dataclass(frozen=True)
class Page:
    """What the page of one PDCluster shows, without what metrics say.

    Attributes:
        figures: labels and values.
        ready: the condition that summarizes the others; None before the first status.
        notes: what could not be read, and why.
    """

    namespace: str
    name: str
    state: Mark
    headline: str
    figures: tuple[tuple[str, str], ...]
    engines: tuple[Engine, ...]
    matrix: Matrix
    ready: Condition | None
    conditions: tuple[Condition, ...]
    timeline: tuple[Moment, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Row:
    """One PDCluster in the list of all."""

    namespace: str
    name: str
    state: Mark
    headline: str
    prefill: str
    decode: str
    links: str
