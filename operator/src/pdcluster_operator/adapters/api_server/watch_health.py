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
LONGEST_LIST_SECONDS = 3600.0
"""How long a deletion is remembered, if no LIST of its kind ends."""

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
        self._gone: dict[Identity, _Told] = {}  # deleted while a LIST may be under way

    def now(self) -> float:
        """Return the moment, for :meth:`listed`."""
        return self._clock()

    def reported(self, event: str, manifest: Mapping[str, Any]) -> None:
        """One event of a watch: ADDED, MODIFIED or DELETED."""
        identity, told = _identity(manifest), _told(manifest, self._clock())
        if event == "DELETED":
            self._told.pop(identity, None)
            self._owed.pop(identity, None)
            self._gone.pop(identity, None)
            self._gone[identity] = told
            self._forget_deletions(told.moment - LONGEST_LIST_SECONDS)
            return
        self._told[identity] = told
        if not _behind(told, self._owed.get(identity)):
            self._owed.pop(identity, None)

    def listed(
        self,
        kind: str,
        manifests: Iterable[Mapping[str, Any]],
        began: float,
        namespace: str | None = None,
    ) -> None:
        """One LIST of all objects of a kind, which began at that moment.

        Args:
            namespace: whose objects were listed; None for all.
        """
        now = self._clock()
        found = {_identity(manifest): _told(manifest, now) for manifest in manifests}

        def missing(identity: Identity) -> bool:
            return _is_in(identity, kind, namespace) and identity not in found

        for identity in list(filter(missing, self._owed)):
            del self._owed[identity]
        for identity in list(filter(missing, self._told)):
            # A watch that had a gap does not report what was deleted in it. That is no fault.
            if self._told[identity].moment < began:
                del self._told[identity]
        for identity, listed in found.items():
            if _is_over(self._gone.get(identity), listed):
                continue  # the LIST was made before it was deleted, and came later
            if _behind(self._told.get(identity), listed):
                self._owed.setdefault(identity, listed)
        for identity in [one for one in self._gone if _is_in(one, kind, namespace)]:
            if self._gone[identity].moment < began:
                del self._gone[identity]

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

    def _forget_deletions(self, before: float) -> None:
        for identity, told in list(self._gone.items()):  # the oldest first
            if told.moment >= before:
                return
            del self._gone[identity]


def _behind(told: _Told | None, wanted: _Told | None) -> bool:
    """Whether the watch has reported neither the wanted version nor a later one.

    A later one may be of another object of that name: the wanted one is gone then.
    """
    if wanted is None:
        return False
    if told is None or told.version < wanted.version:
        return True
    return told.version == wanted.version and told.uid != wanted.uid


def _is_over(gone: _Told | None, listed: _Told) -> bool:
    """Whether the watch has reported that the listed object was deleted.

    A watch that had a gap reports it in the version that was known before.
    """
    return gone is not None and (gone.uid == listed.uid or gone.version > listed.version)


def _is_in(identity: Identity, kind: str, namespace: str | None) -> bool:
    return identity[0] == kind and namespace in (None, identity[1])


def _identity(manifest: Mapping[str, Any]) -> Identity:
    metadata = manifest["metadata"]
    return str(manifest["kind"]), str(metadata.get("namespace", "")), str(metadata["name"])


def _told(manifest: Mapping[str, Any], moment: float) -> _Told:
    metadata = manifest["metadata"]
    version = str(metadata.get("resourceVersion", ""))
    number = int(version) if version.isdecimal() else 0
    return _Told(str(metadata.get("uid", "")), number, moment)
