"""A LIST of all objects of a kind, taken in as a reflector does."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pdcluster_operator.runtime.control_loop import ControlLoop
from pdcluster_operator.runtime.interfaces import Key
from pdcluster_operator.runtime.store import Store

LATER = "1000000"
"""A version that is later than each object's in these tests."""


def names_of(manifests: Iterable[dict[str, Any]]) -> set[tuple[str, str]]:
    found = (one["metadata"] for one in manifests)
    return {(one.get("namespace", ""), one["name"]) for one in found}


def list_into(
    store: Store, kind: str, manifests: list[dict[str, Any]], version: str = LATER
) -> set[Key]:
    """Return the keys of the clusters that changed."""
    keys = {store.put(one) for one in manifests}
    gone = store.listed(kind, None, names_of(manifests), version)
    return {key for key in (*keys, *map(store.drop, gone)) if key is not None}


def loop_lists(loop: ControlLoop, kind: str, manifests: list[dict[str, Any]]) -> None:
    for one in manifests:
        loop.see("MODIFIED", one)
    for one in loop.store.listed(kind, None, names_of(manifests), LATER):
        loop.see("DELETED", one)
