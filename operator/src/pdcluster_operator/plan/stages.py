"""Which steps of a plan may be carried out concurrently, and which of them create something.

A stage begins when the one before it has ended. Within a stage the steps do not need each other.
"""

from __future__ import annotations

from collections.abc import Iterable

from pdcluster_operator.plan.model import (
    Apply,
    Delete,
    Step,
    TryOut,
    WriteCertificates,
    WriteTicketKey,
)

WORKLOADS = frozenset({"StatefulSet", "Deployment"})
"""The kinds that make pods. Pods mount, or go by, what the other kinds hold."""


def stages(steps: Iterable[Step]) -> list[tuple[Step, ...]]:
    """Return the steps in stages; within a stage they keep their order.

    What pods need comes first, then what makes pods. What is tried out may end all of it before
    something is deleted, and then pods are restarted.
    """
    staged: dict[int, list[Step]] = {}
    for step in steps:
        staged.setdefault(_stage(step), []).append(step)
    return [tuple(staged[number]) for number in sorted(staged)]


def creates(steps: Iterable[Step]) -> bool:
    """Whether any step creates an object."""
    return any(
        not step.uid
        if isinstance(step, Apply)
        else isinstance(step, WriteTicketKey | WriteCertificates | TryOut)
        for step in steps
    )


def _stage(step: Step) -> int:
    if isinstance(step, WriteTicketKey | WriteCertificates):
        return 0
    if isinstance(step, Apply):
        return 1 if step.manifest["kind"] in WORKLOADS else 0
    if isinstance(step, TryOut):
        return 2
    return 3 if isinstance(step, Delete) else 4
