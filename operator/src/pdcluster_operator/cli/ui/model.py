"""What the page shows of PDClusters, as plain data."""

from dataclasses import dataclass

from pdcluster_operator.cli.status_document import Step


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
    revision: str
    state: Mark
    step: int
    doing: str
    restarts: int
    gpus: int
    since: float | None


@dataclass(frozen=True)
class Link:
    """One link, by the short names of its engines.

    Attributes:
        gigabytes: per second; 0 if this was not measured.
        descriptors: of NIXL, for the KV of 1,000 tokens; 0 if this is not known.
        proof: how many seconds ago KV was last seen to move, at most; None if it was not.
    """

    prefill: str
    decode: str
    state: Mark
    reason: str = ""
    message: str = ""
    gigabytes: float = 0.0
    descriptors: int = 0
    proof: int | None = None


@dataclass(frozen=True)
class Matrix:
    """The links, prefill engines in rows and decode engines in columns.

    Attributes:
        summary: one sentence.
        rows: a prefill engine, and for each decode engine the link; None where none is kept.
        links: those with a fault first.
        hidden: what is not shown, in words.
        wide: whether a cell has room for a number.
    """

    summary: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, tuple[Link | None, ...]], ...]
    links: tuple[Link, ...]
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
        since: when Ready last changed, in seconds since the epoch.
        diagnosis: what the links together show that no single one does.
        steps: what to do, the worst first.
        figures: labels and values.
        notes: what could not be read, and why.
    """

    namespace: str
    name: str
    state: Mark
    headline: str
    since: float | None
    diagnosis: tuple[str, ...]
    steps: tuple[Step, ...]
    figures: tuple[tuple[str, str], ...]
    engines: tuple[Engine, ...]
    matrix: Matrix
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
