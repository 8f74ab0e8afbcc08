"""Which version of an object is the later one, and which objects were deleted a moment ago.

What the API server says arrives over several connections: events of a watch, lists, and answers to
our own writes. Their order is that of the versions, and not that in which they arrive.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

Manifest = Mapping[str, Any]

VERSION = "resourceVersion"
GONE_SECONDS = 60.0
"""How long a deletion is remembered: longer than the answer to a call may take."""


def uid_of(manifest: Manifest) -> str:
    """Return the UID of an object; empty if it has none."""
    return str(manifest["metadata"].get("uid", ""))


def version_of(manifest: Manifest) -> str | None:
    """Return the resourceVersion of an object."""
    version: str | None = manifest["metadata"].get(VERSION)
    return version


def is_older(manifest: Manifest, held: Manifest | None) -> bool:
    """Whether a later version of the same object is known. Versions are numbers that grow."""
    if held is None or uid_of(held) != uid_of(manifest):
        return False
    new, old = version_of(manifest) or "", version_of(held) or ""
    return new.isdecimal() and old.isdecimal() and int(new) < int(old)


def is_from_before(manifest: Manifest, version: str) -> bool:
    """Whether a LIST of this version shows the object as it is here, or as it became later."""
    held = version_of(manifest) or ""
    return held.isdecimal() and version.isdecimal() and int(held) <= int(version)


def says_the_same(manifest: Manifest, held: Manifest | None) -> bool:
    """Whether nothing changed but the version."""
    if held is None or not version_of(manifest):
        return False
    return _without_version(manifest) == _without_version(held)


def _without_version(manifest: Manifest) -> dict[str, Any]:
    metadata = {key: value for key, value in manifest["metadata"].items() if key != VERSION}
    return {**manifest, "metadata": metadata}


class Deletions:
    """The objects that were deleted a moment ago, each with its last version."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._held: dict[str, tuple[Manifest, float]] = {}  # by UID, the oldest first

    def __len__(self) -> int:
        return len(self._held)

    def add(self, manifest: Manifest) -> None:
        """Remember a deletion, and forget those of long ago."""
        now = self._clock()
        while self._held and next(iter(self._held.values()))[1] < now - GONE_SECONDS:
            del self._held[next(iter(self._held))]
        uid = uid_of(manifest)
        self._held.pop(uid, None)
        self._held[uid] = {"metadata": {"uid": uid, VERSION: version_of(manifest)}}, now

    def tell_of(self, manifest: Manifest) -> bool:
        """Whether the object was deleted after this version."""
        last, _ = self._held.get(uid_of(manifest), (None, 0.0))
        return is_older(manifest, last)
