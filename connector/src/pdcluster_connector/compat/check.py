"""Whether two engines can exchange KV, by named rule.

Admission, the command line and the handshake all ask here. Pure: no I/O.
"""

from collections.abc import Iterable

from pdcluster_connector.compat.findings import Finding, Rule, Verdict, show
from pdcluster_connector.compat.pair_rules import BLOCK_RULES, IDENTITY_RULES, PAIR_RULES
from pdcluster_connector.compat.shape import EngineShape
from pdcluster_connector.compat.shape_rules import SHAPE_RULES

# Causes before consequences: another model also has other layers, another dtype other sizes.
RULES: tuple[Rule, ...] = (*IDENTITY_RULES, *SHAPE_RULES, *BLOCK_RULES, *PAIR_RULES)


def check(prefill: EngineShape, decode: EngineShape) -> tuple[Finding, ...]:
    """Return all rules that do not hold between two engines, or cannot be decided yet.

    Args:
        prefill, decode: shapes; None in a field means that it is not known.

    Returns:
        Refusals first, then unknowns, each in the order of :data:`RULES`; for each unknown
        field only the first rule that needs it. Empty: the engines can exchange KV.
    """
    return _findings(RULES, prefill, decode)


def check_engine(shape: EngineShape) -> tuple[Finding, ...]:
    """Return the rules that one engine breaks whoever its peer is; both values are its own."""
    return _findings(SHAPE_RULES, shape, shape)


def refused(findings: Iterable[Finding]) -> Finding | None:
    """Return the first refusal, or None when nothing is refused (unknowns may remain)."""
    return next((finding for finding in findings if finding.verdict is Verdict.REFUSED), None)


def _findings(
    rules: Iterable[Rule], prefill: EngineShape, decode: EngineShape
) -> tuple[Finding, ...]:
    refusals: list[Finding] = []
    unknown: dict[str, Finding] = {}
    for rule in rules:
        clash = rule.test(prefill, decode)
        if clash is None:
            continue
        waits = f"{clash.field} is not known yet, so {rule.id} waits for the handshake"
        finding = Finding(
            reason=rule.reason,
            verdict=clash.verdict,
            field=clash.field,
            prefill_value=show(clash.prefill),
            decode_value=show(clash.decode),
            message=waits if clash.verdict is Verdict.UNKNOWN else clash.message,
            remedy=rule.remedy,
            rule=rule.id,
        )
        if clash.verdict is Verdict.UNKNOWN:
            unknown.setdefault(clash.field, finding)
        else:
            refusals.append(finding)
    return (*refusals, *unknown.values())
