"""The layouts that are carried end to end: the one place where a layout is switched on.

The plan maps every layout that arithmetic allows. A layout is carried when registration,
scheduler and worker roles do their part too, shown by a test with real engines or real NIXL
processes; until then the rule named here refuses it, at admission and at the handshake. To
switch a layout on, add it to :data:`CARRIED` and run ``make generate``: the rule leaves RULES,
``docs/rules.md`` and the refused half of ``docs/layouts.md``.
"""

from __future__ import annotations

from enum import StrEnum


class Layout(StrEnum):
    """What may be switched on, and the id of the rule that refuses it until then."""

    PIPELINE = "LayoutUnsupported/pipeline"
    DATA_NODES = "LayoutUnsupported/data-nodes"
    QUANTIZED = "LayoutUnsupported/quantized"
    SLIDING_WINDOW = "LayoutUnsupported/sliding-window"
    MLA = "LayoutUnsupported/mla"
    MAMBA = "LayoutUnsupported/mamba"
    MAMBA_TENSOR = "LayoutUnsupported/mamba-tensor"
    GROUPS = "LayoutUnsupported/groups"
    BLOCK_SIZES = "BlockSizeMismatch"


CARRIED: frozenset[Layout] = frozenset(
    {
        Layout.PIPELINE,
        Layout.SLIDING_WINDOW,
        Layout.GROUPS,
        Layout.MLA,
        Layout.MAMBA,
        Layout.MAMBA_TENSOR,
    }
)
