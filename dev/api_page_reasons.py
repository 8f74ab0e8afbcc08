"""The part of docs/api.md about the reasons of conditions: what each means, and what to do."""

from __future__ import annotations

from collections.abc import Iterable

from pdcluster_connector.compat.check import RULES
from pdcluster_connector.compat.reasons import Reason
from pdcluster_operator.api.conditions import StatusReason
from pdcluster_operator.api.remedies import PAGE, table

HEAD = "| reason | what holds | what to do |\n|---|---|---|"


def reasons_part() -> str:
    """Return the section of reasons as Markdown. rules.md has the reasons that are rules."""
    rules = {rule.reason for rule in RULES}
    parts = [
        "### Reasons\n",
        f"[{PAGE}]({PAGE}) also says what you see, and the next command.\n",
        HEAD,
        *_rows(StatusReason),
        "\nWhat happens on the KV path has these reasons, or a rule of [rules.md](rules.md):\n",
        HEAD,
        *_rows(reason for reason in Reason if reason not in rules),
        "",
    ]
    return "\n".join(parts)


def _rows(reasons: Iterable[str]) -> Iterable[str]:
    entries = (table()[str(reason)] for reason in reasons)
    return (f"| [`{one.name}`]({one.link}) | {one.cause} | {one.remedy} |" for one in entries)
