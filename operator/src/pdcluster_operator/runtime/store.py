"""What the operator last saw of the cluster, from watch events and from lists.

A watch misses a deletion if its connection was broken for longer than the API server remembers.
So after each LIST of a kind, :meth:`Store.listed` returns what is held and the LIST lacks.

What is read for one cluster comes from indexes, so that an event costs as much as its own cluster
is large.

**Versions.** What the API server says arrives over several connections: events of a watch, lists,
and answers to our own writes. Their order is that of the versions, and not that in which they
arrive.

**Owners.** The UID of its controller says who owns an object. Labels only say which queue key an
event belongs to.
"""

import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Set as AbstractSet
from typing import Any

from pdcluster_operator.api.object_names import CLUSTER_LABEL, SCALER_KIND
from pdcluster_operator.plan.connectors import is_shared_connector, shared_connectors_of
from pdcluster_operator.plan.objects import ownership, shared_parts
from pdcluster_operator.plan.objects.ownership import Reference
from pdcluster_operator.runtime.interfaces import Key

log = logging.getLogger(__name__)

Manifest = dict[str, Any]
Identity = tuple[str, str, str]
"""Kind, namespace, name."""
Place = tuple[str, ...]
"""An index name, and a key in that index."""

CLUSTER_KIND = "PDCluster"
# The indexes. An owner is always in the namespace of what it owns.
CLUSTERS, OWNER, POD_LABEL = "clusters", "owner", "pod-label"
CONNECTOR, MOUNTED = "connector", "mounted"
VERSION = "resourceVersion"
GONE_SECONDS = 60.0
"""How long a deletion is remembered: longer than the answer to a call may take. Without it, such an
answer brings back what is gone (``operator/tests/runtime/test_store_versions.py``)."""


class Store:
    """Objects by (kind, namespace, name). Not thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._reported: dict[Identity, float] = {}  # when the API server had each PDCluster
        self._objects: dict[str, dict[Identity, Manifest]] = {}
        self._index: dict[Place, dict[Identity, Manifest]] = {}
        self._absent: set[str] = set()
        self._gone: dict[str, tuple[str, float]] = {}  # version and moment by UID, oldest first
        self._listed: dict[tuple[str, str | None], str] = {}  # version of the last LIST of a watch
        self._owners: dict[str, Reference | None] = {}  # of pods' workloads, by UID; None: gone

    def put(self, manifest: Manifest) -> Key | None:
        """Remember an object; return the key of the cluster for which it is news.

        A version that is older than the known one is ignored: a watch reports an object later
        than the answer to our own write does. It tells of a change by somebody else, so it counts
        as news. So does the answer to a write that comes later than the deletion of the object.
        The known version itself is no news. Neither is a version in which only fields changed that
        nothing here reads.
        """
        identity = identity_of(manifest)
        held = self._held(identity)
        last, _ = self._gone.get(uid_of(manifest), ("", 0.0))
        if is_older(manifest, held) or is_earlier(version_of(manifest) or "", last):
            return key_of(manifest)
        if identity[0] == CLUSTER_KIND:
            self._reported[identity] = self._clock()
        if held is not None and is_same_version(manifest, held):
            return None
        kept = shared_parts.with_shared_parts(manifest, _to_take_from(held, manifest))
        self._set(identity, kept)
        return None if says_the_same(kept, held) else key_of(manifest)

    def answered(self, manifest: Manifest) -> None:
        """Remember what the API server answers to a write of ours.

        The answer may come so late that a LIST has shown meanwhile that the object is gone.
        """
        kind, namespace, _ = identity = identity_of(manifest)
        lists = (self._listed.get((kind, place), "") for place in (None, namespace))
        held = self._held(identity)
        known = held is not None and uid_of(held) == uid_of(manifest)
        if known or not any(is_from_before(manifest, version) for version in lists):
            self.put(manifest)

    def held(self, manifest: Mapping[str, Any]) -> Manifest | None:
        """Return the object of this kind and name; None if none is known."""
        return self._held(identity_of(manifest))

    def drop(self, manifest: Manifest) -> Key | None:
        """Forget an object; return the key of the cluster that it concerned."""
        identity = identity_of(manifest)
        held = self._held(identity)
        if held is not None and uid_of(held) in (uid_of(manifest), ""):
            self._remove(identity)
        now, uid = self._clock(), uid_of(manifest)
        self._gone.pop(uid, None)
        self._gone[uid] = version_of(manifest) or "", now
        while next(iter(self._gone.values()))[1] < now - GONE_SECONDS:
            del self._gone[next(iter(self._gone))]
        return key_of(manifest)

    def listed(
        self,
        kind: str,
        namespace: str | None,
        names: AbstractSet[tuple[str, str]],
        version: str,
    ) -> list[Manifest]:
        """Note that all objects of a kind were listed; return the held objects that it lacks.

        Args:
            namespace: whose objects were listed; None for all.
            names: namespace and name of each object of the LIST.
            version: of the LIST. What is held in a later version was made after it.
        """
        self._listed[kind, namespace] = version
        return [
            manifest
            for (_, place, name), manifest in self._objects.get(kind, {}).items()
            if namespace in (None, place)
            and (place, name) not in names
            and is_from_before(manifest, version)
        ]

    def set_served(self, kind: str, *, served: bool) -> bool:
        """Remember whether the API server has a kind; return whether that is news."""
        before = self.serves(kind)
        (self._absent.discard if served else self._absent.add)(kind)
        return before != served

    def serves(self, kind: str) -> bool:
        """Whether the API server has a kind, as far as is known."""
        return kind not in self._absent

    def keys(self) -> list[Key]:
        """Every cluster that is known."""
        known = self._objects.get(CLUSTER_KIND, {})
        return [Key(namespace, name) for _, namespace, name in known]

    def clusters_in(self, namespace: str) -> dict[Key, str]:
        """Return every cluster of a namespace, with its UID."""
        found = self._index.get((CLUSTERS, namespace), {}).items()
        return {Key(namespace, name): uid_of(held) for (_, _, name), held in found}

    def cluster(self, key: Key) -> Manifest | None:
        """Return the PDCluster itself."""
        return self._held((CLUSTER_KIND, key.namespace, key.name))

    def reported_seconds(self, key: Key, uid: str) -> float:
        """Return how long ago the API server had this very PDCluster, as far as is known."""
        cluster = self.cluster(key)
        if cluster is None or uid_of(cluster) != uid:
            return math.inf
        return self._clock() - self._reported.get(identity_of(cluster), -math.inf)

    def scaler(self, key: Key) -> Manifest | None:
        """Return the PrefillScaler of the cluster's name."""
        return self._held((SCALER_KIND, key.namespace, key.name))

    def children(self, key: Key) -> tuple[Manifest, ...]:
        """Objects whose controller is this very cluster (by UID), pods aside."""
        cluster = self.cluster(key)
        if cluster is None:
            return ()
        return tuple(self._at(OWNER, key.namespace, uid_of(cluster)))

    def pods(self, key: Key) -> tuple[Mapping[str, Any], ...]:
        """Return the pods that the cluster's workloads made."""
        cluster = self.cluster(key)
        if cluster is None:
            return ()
        chains = self._ends_of_chains(key)
        return tuple(pod for pod, end in chains if ownership.is_pod_of(cluster, pod, end))

    async def learn_owners(
        self, key: Key, read: Callable[[str, str, str], Awaitable[Manifest | None]]
    ) -> None:
        """Read each of the pods' workloads that no watch reports, with ``ApiServer.read``.

        These are ReplicaSets, and what was there before this process or has not our labels. They
        are read once. But a child that has lost the label is read each time, and held meanwhile:
        no watch reports what becomes of it.
        """
        for child in self.children(key):
            if CLUSTER_LABEL not in (child["metadata"].get("labels") or {}):
                self._remove(identity_of(child))
        while unknown := {
            end["uid"]: end
            for _, end in self._ends_of_chains(key)
            if end.get("kind") in ownership.WORKLOADS and end["uid"] not in self._owners
        }:
            for uid, reference in unknown.items():
                live = await read(reference["kind"], key.namespace, reference["name"])
                owner = self._owners[uid] = ownership.owner_in(live, reference)
                if live is not None and owner and owner.get("kind") == CLUSTER_KIND:
                    self.put(live)

    def _ends_of_chains(self, key: Key) -> list[tuple[Manifest, Reference]]:
        """Return the pods with the cluster's label, and where the chain of each one ends."""

        def owner_of(reference: Reference) -> Reference | None:
            held = self._held((reference["kind"], key.namespace, reference["name"]))
            if (owner := ownership.owner_in(held, reference)) is not None:
                self._owners[reference["uid"]] = owner
                return owner
            owner = self._owners.get(reference["uid"])
            return {} if owner is None and held is not None else owner  # another has its name

        at = self._at(POD_LABEL, *key)
        return [(pod, ownership.end_of_chain(pod, owner_of)) for pod in at]

    def connectors(self, namespace: str) -> tuple[Manifest, ...]:
        """Return the ConfigMaps with a connector that the namespace's PDClusters share."""
        return tuple(self._at(CONNECTOR, namespace))

    def all_connectors(self) -> list[Manifest]:
        """Return the ConfigMaps with a connector of all namespaces."""
        held = self._objects.get("ConfigMap", {}).values()
        return [manifest for manifest in held if is_shared_connector(manifest)]

    def is_mounted(self, namespace: str, config_map: str) -> bool:
        """Whether a pod, a workload's template or a stored revision mounts this ConfigMap."""
        return (MOUNTED, namespace, config_map) in self._index

    def _at(self, *place: str) -> Iterable[Manifest]:
        return self._index.get(place, {}).values()

    def _held(self, identity: Identity) -> Manifest | None:
        return self._objects.get(identity[0], {}).get(identity)

    def _set(self, identity: Identity, manifest: Manifest) -> None:
        old = self._held(identity)
        places = places_of(manifest)
        if old is not None and places_of(old) != places:
            self._remove(identity)
        self._objects.setdefault(identity[0], {})[identity] = manifest
        for place in places:
            self._index.setdefault(place, {})[identity] = manifest

    def _remove(self, identity: Identity) -> None:
        self._reported.pop(identity, None)
        manifest = self._objects[identity[0]].pop(identity)
        self._owners.pop(uid_of(manifest), None)  # it may be there still, without the label
        if owner := self._owners.pop(ownership.controller_uid(manifest), None):
            self._owners.pop(str(owner.get("uid")), None)
        for place in places_of(manifest):
            held = self._index.get(place, {})
            held.pop(identity, None)
            if not held:
                self._index.pop(place, None)


def _to_take_from(held: Manifest | None, manifest: Manifest) -> Manifest | None:
    """Return the version before, if it is the same object. Users' free fields have no types."""
    if held is None or held["kind"] == CLUSTER_KIND or uid_of(held) != uid_of(manifest):
        return None
    return held


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
    elif uid := ownership.controller_uid(manifest):
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
    return is_earlier(version_of(manifest) or "", version_of(held) or "")


def is_earlier(version: str, other: str) -> bool:
    """Whether a version is below another one; False if one of them is no number."""
    return version.isdecimal() and other.isdecimal() and int(version) < int(other)


def is_from_before(manifest: Manifest, version: str) -> bool:
    """Whether a LIST of this version shows the object as it is here, or as it became later."""
    held = version_of(manifest) or ""
    return held.isdecimal() and version.isdecimal() and int(held) <= int(version)


def says_the_same(manifest: Manifest, held: Manifest | None) -> bool:
    """Whether nothing changed but the version."""
    if held is None or not (version := version_of(manifest)):
        return False
    return manifest == {**held, "metadata": {**held["metadata"], VERSION: version}}
