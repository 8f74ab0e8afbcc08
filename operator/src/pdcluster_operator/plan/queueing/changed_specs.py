"""Whose spec changed: somebody waits for what comes of it, so it does not wait behind other work.

A PDCluster without a status is new. A thousand that are created at once would keep everybody
waiting.
"""

from __future__ import annotations

from pdcluster_operator.api.labels import KIND
from pdcluster_operator.plan.types import Manifest


def is_changed_spec(manifest: Manifest) -> bool:
    """Whether an object is a PDCluster whose spec is not the one that its status is about."""
    if manifest.get("kind") != KIND:
        return False
    judged = (manifest.get("status") or {}).get("observedGeneration")
    return judged is not None and judged != manifest["metadata"].get("generation")
