"""The layouts that are carried end to end: the one place where a layout is switched on.

The plan maps every layout that arithmetic allows. A layout is carried when registration,
scheduler and worker roles do their part too, shown by a test with real engines or real NIXL
processes; until then the rule named here refuses it, at admission and at the handshake. To
switch a layout on, add it to :data:`CARRIED` and run ``make generate``: the rule leaves RULES,
``docs/rules.md`` and the refused half of ``docs/layouts.md``. Where nobody needs to refuse it any
more, remove the rule and its name here.
"""

from __future__ import annotations

from enum import StrEnum


class Layout(StrEnum):
    """What may be switched on, and the id of the rule that refuses it until then."""

    DATA_NODES = "LayoutUnsupported/data-nodes"


CARRIED: frozenset[Layout] = frozenset()
