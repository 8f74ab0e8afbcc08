"""What the operator last saw of the cluster, from watch events and from lists.

A watch misses a deletion if its connection was broken for longer than the API server remembers.
So :meth:`Store.replace` swaps all objects of one kind for the result of a LIST; an object that
the list lacks is gone.

Who owns an object is decided by the UID of its controller. Labels only say which queue key an
event belongs to. What is read for one cluster comes from indexes, so that an event costs as much
as its own cluster is large.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from pdcluster_operator.api.labels import CLUSTER_LABEL, SCALER_KIND
from pdcluster_operator.plan.ownership import controller_uid, own_pods
from pdcluster_operator.runtime.queue import Key

Manifest = dict[str, Any]
Identity = tuple[str, str, str]
"""Kind, namespace, name."""
Owner = tuple[str, str]
"""Namespace and UID of a controller. An owner is always in the namespace of what it owns."""

CLUSTER_KIND = "PDCluster"
Place = TypeVar("Place")


class Store:
    """Objects by (kind, namespace, name). Not thread-safe."""

    def __init__(self) -> None:
        self._objects: dict[str, dict[Identity, Manifest]] = {}
        self._children: dict[Owner, dict[Identity, Manifest]] = {}
        self._pods: dict[Key, dict[Identity, Manifest]] = {}  # by label
        self._touched: dict[str, set[Identity]] = {}

    def put(self, manifest: Manifest) -> Key | None:
        """Remember an object; return the key of the cluster that it concerns.

        A version that is older than the known one is ignored: a watch reports an object later
        than the answer to our own write does.
        """
        identity = _identity(manifest)
        self._touch(identity)
        if not _older(manifest, self._held(identity)):
            self._set(identity, manifest)
        return key_of(manifest)

    def drop(self, manifest: Manifest) -> Key | None:
        """Forget an object; return the key of the cluster that it concerned."""
        identity = _identity(manifest)
        self._touch(identity)
        held = self._held(identity)
        if held is not None and _uid(held) in (_uid(manifest), ""):
            self._remove(identity)
        return key_of(manifest)

    def begin(self, kind: str) -> None:
        """Say that a LIST of ``kind`` begins: what a watch reports from now on is newer."""
        self._touched[kind] = set()

    def replace(self, kind: str, manifests: Iterable[Manifest]) -> set[Key]:
        """Swap all objects of ``kind`` for a LIST's result; return the keys that changed."""
        newer = self._touched.pop(kind, set())
        listed = {_identity(manifest): manifest for manifest in manifests}
        held = self._objects.get(kind, {})
        gone = [identity for identity in held.keys() - listed.keys() if identity not in newer]
        changed = [
            identity
            for identity in listed.keys() - newer
            if identity not in held or _version(held[identity]) != _version(listed[identity])
        ]
        touched = [held[identity] for identity in gone]
        touched += [listed[identity] for identity in changed]
        for identity in gone:
            self._remove(identity)
        for identity in changed:
            self._set(identity, listed[identity])
        return {key for manifest in touched if (key := key_of(manifest)) is not None}

    def keys(self) -> list[Key]:
        """Every cluster that is known."""
        known = self._objects.get(CLUSTER_KIND, {})
        return [Key(namespace, name) for _, namespace, name in known]

    def cluster(self, key: Key) -> Manifest | None:
        """Return the PDCluster itself."""
        return self._held((CLUSTER_KIND, key.namespace, key.name))

    def scaler(self, key: Key) -> Manifest | None:
        """Return the PrefillScaler of the cluster's name."""
        return self._held((SCALER_KIND, key.namespace, key.name))

    def children(self, key: Key) -> tuple[Manifest, ...]:
        """Objects whose controller is this very cluster (by UID), pods aside."""
        cluster = self.cluster(key)
        if cluster is None:
            return ()
        return tuple(self._children.get((key.namespace, _uid(cluster)), {}).values())

    def pods(self, key: Key) -> tuple[Manifest, ...]:
        """Return the pods that the cluster's workloads made."""
        return tuple(own_pods(self._pods.get(key, {}).values(), self.children(key)))

    def _touch(self, identity: Identity) -> None:
        if (touched := self._touched.get(identity[0])) is not None:
            touched.add(identity)

    def _held(self, identity: Identity) -> Manifest | None:
        return self._objects.get(identity[0], {}).get(identity)

    def _set(self, identity: Identity, manifest: Manifest) -> None:
        old = self._held(identity)
        if old is not None and _places(old) != _places(manifest):
            self._remove(identity)
        self._objects.setdefault(identity[0], {})[identity] = manifest
        owner, cluster = _places(manifest)
        if owner is not None:
            self._children.setdefault(owner, {})[identity] = manifest
        if cluster is not None:
            self._pods.setdefault(cluster, {})[identity] = manifest

    def _remove(self, identity: Identity) -> None:
        owner, cluster = _places(self._objects[identity[0]].pop(identity))
        if owner is not None:
            _take(self._children, owner, identity)
        if cluster is not None:
            _take(self._pods, cluster, identity)


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


def _places(manifest: Mapping[str, Any]) -> tuple[Owner | None, Key | None]:
    """Return under what an object stands in the indexes: its owner, or a pod's cluster."""
    if manifest["kind"] == "Pod":
        return None, _labelled(manifest)
    uid = controller_uid(manifest)
    return ((manifest["metadata"].get("namespace", ""), uid) if uid else None), None


def _take(index: dict[Place, dict[Identity, Manifest]], place: Place, identity: Identity) -> None:
    if (held := index.get(place)) is not None:
        held.pop(identity, None)
        if not held:
            del index[place]


def _labelled(manifest: Mapping[str, Any]) -> Key | None:
    metadata = manifest["metadata"]
    name = (metadata.get("labels") or {}).get(CLUSTER_LABEL)
    return Key(metadata.get("namespace", ""), name) if name else None


def _identity(manifest: Mapping[str, Any]) -> Identity:
    metadata = manifest["metadata"]
    return manifest["kind"], metadata.get("namespace", ""), metadata["name"]


def _uid(manifest: Mapping[str, Any]) -> str:
    return str(manifest["metadata"].get("uid", ""))


def _version(manifest: Mapping[str, Any]) -> str | None:
    version: str | None = manifest["metadata"].get("resourceVersion")
    return version


def _older(manifest: Manifest, held: Manifest | None) -> bool:
    """Whether a later version of the same object is known. Versions are numbers that grow."""
    if held is None or _uid(held) != _uid(manifest):
        return False
    new, old = _version(manifest) or "", _version(held) or ""
    return new.isdecimal() and old.isdecimal() and int(new) < int(old)
