"""Rules about engine shapes, and their findings."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from pdcluster_connector.compat.reasons import Reason
from pdcluster_connector.compat.shape import EngineShape


class Verdict(StrEnum):
    """How far a rule could decide."""

    REFUSED = "Refused"
    UNKNOWN = "Unknown"


@dataclass(frozen=True, slots=True)
class Finding:
    """One rule that does not hold, or that cannot be decided yet.

    Attributes:
        reason: what users see in errors, conditions, link tables and metric labels.
        rule: id of the rule in :data:`pdcluster_connector.compat.check.RULES`.
        verdict: Refused, or Unknown when a field that the rule needs is not known.
        field: field of :class:`EngineShape` that decides.
        prefill_value, decode_value: both engines' values as text, ``unknown`` for None.
        message: one sentence that says what is wrong, with the values.
        remedy: one sentence that says what to change.
    """

    reason: Reason
    verdict: Verdict
    field: str
    prefill_value: str
    decode_value: str
    message: str
    remedy: str
    rule: str = ""


@dataclass(frozen=True, slots=True)
class Clash:
    """What a rule's test returns when the rule does not hold (or cannot be decided).

    ``message`` may be empty when the verdict is Unknown.
    """

    field: str
    prefill: object
    decode: object
    message: str = ""
    verdict: Verdict = Verdict.REFUSED


PairTest = Callable[[EngineShape, EngineShape], Clash | None]


@dataclass(frozen=True, slots=True)
class Rule:
    """A named rule.

    Attributes:
        id: stable name; the reason alone, or ``Reason/detail`` where a reason has several rules.
        description: what is refused and why, for docs/rules.md.
        remedy: what to change.
        source: where the fact behind the rule comes from.
        test: ``(prefill, decode) -> Clash | None``.
    """

    id: str
    description: str
    remedy: str
    source: str
    test: PairTest

    @property
    def reason(self) -> Reason:
        """The cause that a refusal by this rule is reported under."""
        return Reason(self.id.partition("/")[0])


def show(value: object) -> str:
    """Return the text of a field's value for a message; None is ``unknown``."""
    if value is None:
        return "unknown"
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value)


def counted(number: int, thing: str) -> str:
    """Return ``1 link`` or ``2 links``; ``thing`` is the singular of a regular noun."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"
