"""What the store reads from an object: its identity, its version, and where its indexes have it.

**Versions.** What the API server says arrives over several connections: events of a watch, lists,
and answers to our own writes. Their order is that of the versions, and not that in which they
arrive.

**Owners.** The UID of its controller says who owns an object. Labels only say which queue key an
event belongs to.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pdcluster_operator.api.labels import CLUSTER_LABEL, SCALER_KIND
from pdcluster_operator.plan.connectors import (
    is_shared_connector,
    shared_connectors_of,
)
from pdcluster_operator.plan.objects.ownership import controller_uid
from pdcluster_operator.runtime.interfaces import Key

log = logging.getLogger(__name__)

Manifest = Mapping[str, Any]
Identity = tuple[str, str, str]
"""Kind, namespace, name."""
Place = tuple[str, ...]
"""An index, and under what an object stands in it."""

CLUSTER_KIND = "PDCluster"
# The indexes. An owner is always in the namespace of what it owns.
CLUSTERS, OWNER, POD_LABEL = "clusters", "owner", "pod-label"
CONNECTOR, MOUNTED = "connector", "mounted"
VERSION = "resourceVersion"
GONE_SECONDS = 60.0
"""How long a deletion is remembered: longer than the answer to a call may take."""


def key_of(manifest: Mapping[str, Any]) -> Key | None:
    """Return the key of the cluster that an object is, belongs to, or names in its label."""
    metadata = manifest["metadata"]
    namespace = metadata.get("namespace", "")
    if manifest["kind"] in (CLUSTER_KIND, SCALER_KIND):
        return Key(namespace, metadata["name"])
    for owner in metadata.get("ownerReferences") or ():
        if owner.get("kind") == CLUSTER_KIND:
            return Key(namespace, owner["name"])
    return _labelled(manifest)


def places_of(manifest: Mapping[str, Any]) -> frozenset[Place]:
    """Return where an object stands in the indexes.

    Anybody may write objects with our labels. One that cannot be read stands in no index, because
    an error here would end the operator, and would end it again after each start.
    """
    try:
        return frozenset(_read_places(manifest))
    except Exception:
        log.exception("%s %s/%s cannot be read", *identity_of(manifest))
        return frozenset()


def _read_places(manifest: Mapping[str, Any]) -> Iterator[Place]:
    namespace = manifest["metadata"].get("namespace", "")
    if manifest["kind"] == CLUSTER_KIND:
        yield CLUSTERS, namespace
        return
    if manifest["kind"] == "Pod":
        if (key := _labelled(manifest)) is not None:
            yield (POD_LABEL, *key)
    elif uid := controller_uid(manifest):
        yield OWNER, namespace, uid
    elif is_shared_connector(manifest):
        yield CONNECTOR, namespace
    for config_map in shared_connectors_of(manifest):
        yield MOUNTED, namespace, config_map


def _labelled(manifest: Mapping[str, Any]) -> Key | None:
    metadata = manifest["metadata"]
    name = (metadata.get("labels") or {}).get(CLUSTER_LABEL)
    return Key(metadata.get("namespace", ""), name) if name else None


def identity_of(manifest: Mapping[str, Any]) -> Identity:
    """Return an object's kind, namespace and name."""
    metadata = manifest["metadata"]
    return manifest["kind"], metadata.get("namespace", ""), metadata["name"]


def uid_of(manifest: Manifest) -> str:
    """Return the UID of an object; empty if it has none."""
    return str(manifest["metadata"].get("uid", ""))


def version_of(manifest: Manifest) -> str | None:
    """Return the resourceVersion of an object."""
    version: str | None = manifest["metadata"].get(VERSION)
    return version


def is_same_version(manifest: Manifest, held: Manifest) -> bool:
    """Whether both are the same object, and the same version of it."""
    version = version_of(manifest)
    return version is not None and (uid_of(manifest), version) == (uid_of(held), version_of(held))


def is_older(manifest: Manifest, held: Manifest | None) -> bool:
    """Whether ``held`` is a later version of the same object. Versions are numbers that grow."""
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
        """Remember a deletion, and forget old ones."""
        now = self._clock()
        while self._held and next(iter(self._held.values()))[1] < now - GONE_SECONDS:
            del self._held[next(iter(self._held))]
        uid = uid_of(manifest)
        self._held.pop(uid, None)
        self._held[uid] = {"metadata": {"uid": uid, VERSION: version_of(manifest)}}, now

    def include(self, manifest: Manifest) -> bool:
        """Whether the object was deleted after this version."""
        last, _ = self._held.get(uid_of(manifest), (None, 0.0))
        return is_older(manifest, last)
