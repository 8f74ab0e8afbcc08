"""Notices a watch that is dead although its connection looks well.

The sweeps list all objects over connections of their own. What a sweep has seen, the watch of that
kind must report too, in this version or a newer one. A watch that does not do so in time is dead:
changes are then noticed only by sweeps, so the process should be started again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

LATE_SECONDS = 60.0
"""How much later than a sweep a watch may report an object. A healthy one needs milliseconds."""

Identity = tuple[str, str, str]


@dataclass(frozen=True, slots=True)
class _Told:
    uid: str
    version: int
    moment: float


class WatchHealth:
    """What the watches have reported, and what they owe. Used from one event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._told: dict[Identity, _Told] = {}
        self._owed: dict[Identity, _Told] = {}

    def now(self) -> float:
        """Return the moment, for :meth:`listed`."""
        return self._clock()

    def reported(self, event: str, manifest: Mapping[str, Any]) -> None:
        """One event of a watch: ADDED, MODIFIED or DELETED."""
        identity, told = _identity(manifest), _told(manifest, self._clock())
        if event == "DELETED":
            self._told.pop(identity, None)
            self._owed.pop(identity, None)
            return
        self._told[identity] = told
        if not _behind(told, self._owed.get(identity)):
            self._owed.pop(identity, None)

    def listed(self, kind: str, manifests: Iterable[Mapping[str, Any]], began: float) -> None:
        """One LIST of all objects of a kind, which began at that moment."""
        now = self._clock()
        found = {_identity(manifest): _told(manifest, now) for manifest in manifests}
        for identity in [one for one in self._owed if one[0] == kind and one not in found]:
            del self._owed[identity]
        for identity, told in list(self._told.items()):
            # A watch that had a gap does not report what was deleted in it. That is no fault.
            if identity[0] == kind and identity not in found and told.moment < began:
                del self._told[identity]
        for identity, listed in found.items():
            if _behind(self._told.get(identity), listed):
                self._owed.setdefault(identity, listed)

    def trouble(self) -> str | None:
        """Return which watch is dead; None while all report in time."""
        limit = self._clock() - LATE_SECONDS
        for (kind, namespace, name), owed in self._owed.items():
            if owed.moment < limit:
                return (
                    f"the watch of {kind} is dead: {namespace}/{name} was listed more than "
                    f"{LATE_SECONDS:.0f} s ago, and the watch has not reported it"
                )
        return None


def _behind(told: _Told | None, wanted: _Told | None) -> bool:
    """Whether the watch has reported neither the wanted version nor a later one."""
    if wanted is None:
        return False
    return told is None or told.uid != wanted.uid or told.version < wanted.version


def _identity(manifest: Mapping[str, Any]) -> Identity:
    metadata = manifest["metadata"]
    return str(manifest["kind"]), str(metadata.get("namespace", "")), str(metadata["name"])


def _told(manifest: Mapping[str, Any], moment: float) -> _Told:
    metadata = manifest["metadata"]
    version = str(metadata.get("resourceVersion", ""))
    number = int(version) if version.isdecimal() else 0
    return _Told(str(metadata.get("uid", "")), number, moment)
