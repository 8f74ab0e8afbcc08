"""What the operator last saw of the cluster, from watch events and from lists.

A watch misses a deletion if its connection was broken for longer than the API server remembers.
So :meth:`Store.replace` swaps all objects of one kind for the result of a LIST; an object that
the list lacks is gone.

Who owns an object is decided by the owner's UID. Labels only say which queue key an event
belongs to.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pdcluster_operator.api.labels import CLUSTER_LABEL
from pdcluster_operator.plan.name_conflicts import owner_uids
from pdcluster_operator.runtime.queue import Key

Manifest = dict[str, Any]
Identity = tuple[str, str, str]
"""Kind, namespace, name."""

CLUSTER_KIND = "PDCluster"


class Store:
    """Objects by (kind, namespace, name). Not thread-safe."""

    def __init__(self) -> None:
        self._objects: dict[Identity, Manifest] = {}
        self._touched: dict[str, set[Identity]] = {}

    def put(self, manifest: Manifest) -> Key | None:
        """Remember an object; return the key of the cluster that it concerns.

        A version that is older than the known one is ignored: a watch reports an object later
        than the answer to our own write does.
        """
        identity = _identity(manifest)
        self._touch(identity)
        if not _older(manifest, self._objects.get(identity)):
            self._objects[identity] = manifest
        return key_of(manifest)

    def drop(self, manifest: Manifest) -> Key | None:
        """Forget an object; return the key of the cluster that it concerned."""
        self._touch(_identity(manifest))
        held = self._objects.get(_identity(manifest))
        if held is not None and _uid(held) in (_uid(manifest), ""):
            del self._objects[_identity(manifest)]
        return key_of(manifest)

    def begin(self, kind: str) -> None:
        """Say that a LIST of ``kind`` begins: what a watch reports from now on is newer."""
        self._touched[kind] = set()

    def replace(self, kind: str, manifests: Iterable[Manifest]) -> set[Key]:
        """Swap all objects of ``kind`` for a LIST's result; return the keys that changed."""
        newer = self._touched.pop(kind, set())
        listed = {_identity(manifest): manifest for manifest in manifests}
        fresh = {identity: listed[identity] for identity in listed.keys() - newer}
        stale = {
            identity: manifest
            for identity, manifest in self._objects.items()
            if identity[0] == kind and identity not in newer
        }
        touched = [stale[identity] for identity in stale.keys() - fresh.keys()]
        touched += [
            manifest
            for identity, manifest in fresh.items()
            if _version(stale.get(identity)) != _version(manifest)
        ]
        for identity in stale:
            del self._objects[identity]
        self._objects.update(fresh)
        return {key for manifest in touched if (key := key_of(manifest)) is not None}

    def _touch(self, identity: Identity) -> None:
        if (touched := self._touched.get(identity[0])) is not None:
            touched.add(identity)

    def keys(self) -> list[Key]:
        """Every cluster that is known."""
        return [
            Key(namespace, name) for kind, namespace, name in self._objects if kind == CLUSTER_KIND
        ]

    def cluster(self, key: Key) -> Manifest | None:
        """Return the PDCluster itself."""
        return self._objects.get((CLUSTER_KIND, key.namespace, key.name))

    def children(self, key: Key) -> tuple[Manifest, ...]:
        """Objects whose controller is this very cluster (by UID), pods aside."""
        cluster = self.cluster(key)
        if cluster is None:
            return ()
        return tuple(
            manifest
            for manifest in self._objects.values()
            if manifest["kind"] != "Pod" and _uid(cluster) in owner_uids(manifest)
        )

    def pods(self, key: Key) -> tuple[Manifest, ...]:
        """Return the pods with the cluster's label. No pod is deleted because of its label."""
        return tuple(
            manifest
            for (kind, namespace, _), manifest in self._objects.items()
            if kind == "Pod"
            and namespace == key.namespace
            and _labels(manifest).get(CLUSTER_LABEL) == key.name
        )


def key_of(manifest: Mapping[str, Any]) -> Key | None:
    """Return the key of the cluster that an object is, belongs to, or names in its label."""
    metadata = manifest["metadata"]
    namespace = metadata.get("namespace", "")
    if manifest["kind"] == CLUSTER_KIND:
        return Key(namespace, metadata["name"])
    for owner in metadata.get("ownerReferences") or ():
        if owner.get("kind") == CLUSTER_KIND:
            return Key(namespace, owner["name"])
    name = _labels(manifest).get(CLUSTER_LABEL)
    return Key(namespace, name) if name else None


def _identity(manifest: Mapping[str, Any]) -> Identity:
    metadata = manifest["metadata"]
    return manifest["kind"], metadata.get("namespace", ""), metadata["name"]


def _uid(manifest: Mapping[str, Any]) -> str:
    return str(manifest["metadata"].get("uid", ""))


def _version(manifest: Mapping[str, Any] | None) -> str | None:
    return None if manifest is None else manifest["metadata"].get("resourceVersion")


def _older(manifest: Manifest, held: Manifest | None) -> bool:
    """Whether a later version of the same object is known. Versions are numbers that grow."""
    if held is None or _uid(held) != _uid(manifest):
        return False
    new, old = _version(manifest) or "", _version(held) or ""
    return new.isdecimal() and old.isdecimal() and int(new) < int(old)


def _labels(manifest: Mapping[str, Any]) -> Mapping[str, str]:
    labels: Mapping[str, str] = manifest["metadata"].get("labels") or {}
    return labels
