"""Remembers what became of the operator's own applies, for as long as the process runs.

A process that has just started applies each rewritten child once more, which changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pdcluster_operator.plan.model import Event, Rewrite, Rewrites
from pdcluster_operator.plan.objects.rewrites import rewrite_of, rewritten_event
from pdcluster_operator.runtime.queue import Key

Manifest = Mapping[str, Any]


class RewriteNotes:
    """Rewrites by cluster and child."""

    def __init__(self) -> None:
        self._held: dict[Key, dict[tuple[str, str], Rewrite]] = {}

    def of(self, key: Key) -> Rewrites:
        """Return the rewrites of a cluster's children."""
        return dict(self._held.get(key, {}))

    def note(self, key: Key, desired: Manifest, answer: Manifest) -> Event | None:
        """Note what the API server answers to an apply; return an event if that is news."""
        held = self._held.setdefault(key, {})
        child = str(desired["kind"]), str(desired["metadata"]["name"])
        found = rewrite_of(answer, desired)
        before = held.pop(child, None)
        if found is None:
            return None
        held[child] = found
        told = before is not None and [path for path, _ in before.fields] == [
            path for path, _ in found.fields
        ]
        return None if told else rewritten_event(desired, found)

    def forget(self, key: Key) -> None:
        """Drop what is known of a cluster that is gone."""
        self._held.pop(key, None)
