"""What the operator last saw of the cluster, from watch events and from lists.

A watch misses a deletion if its connection was broken for longer than the API server remembers.
So after each LIST of a kind, :meth:`Store.listed` returns what is held and the LIST lacks.

What is read for one cluster comes from indexes, so that an event costs as much as its own cluster
is large. :mod:`.object_metadata` says where an object stands in them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

from pdcluster_operator.api.labels import SCALER_KIND
from pdcluster_operator.plan.connectors import is_shared_connector
from pdcluster_operator.plan.objects.ownership import own_pods
from pdcluster_operator.plan.objects.shared_parts import with_shared_parts
from pdcluster_operator.runtime.interfaces import Key
from pdcluster_operator.runtime.object_metadata import (
    CLUSTER_KIND,
    CLUSTERS,
    CONNECTOR,
    MOUNTED,
    OWNER,
    POD_LABEL,
    Deletions,
    Identity,
    Place,
    identity_of,
    is_from_before,
    is_older,
    is_same_version,
    key_of,
    places_of,
    says_the_same,
    uid_of,
)

Manifest = dict[str, Any]


class Store:
    """Objects by (kind, namespace, name). Not thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._reported: dict[Identity, float] = {}  # when the API server had each PDCluster
        self._objects: dict[str, dict[Identity, Manifest]] = {}
        self._index: dict[Place, dict[Identity, Manifest]] = {}
        self._absent: set[str] = set()
        self._gone = Deletions(clock)
        self._listed: dict[tuple[str, str | None], str] = {}  # version of the last LIST of a watch

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
        if is_older(manifest, held) or self._gone.include(manifest):
            return key_of(manifest)
        self._report(identity)
        if held is not None and is_same_version(manifest, held):
            return None
        kept = with_shared_parts(manifest, _to_take_from(held, manifest))
        self._set(identity, kept)
        return None if says_the_same(kept, held) else key_of(manifest)

    def left_by(self, manifest: Manifest) -> set[Key]:
        """Return the clusters that no longer have an object after this new version of it.

        Somebody may change the labels by which it belongs to a cluster, or by which all clusters
        of its namespace share it.
        """
        held = self._held(identity_of(manifest))
        if held is None or is_same_version(manifest, held):
            return set()
        before, after = key_of(held), key_of(manifest)
        keys = set() if before is None or before == after else {before}
        if is_shared_connector(held) and not is_shared_connector(manifest):
            keys.update(self.clusters_in(held["metadata"]["namespace"]))
        return keys

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

    def has(self, manifest: Mapping[str, Any]) -> bool:
        """Whether this very version of an object is held."""
        held = self.held(manifest)
        return held is not None and is_same_version(manifest, held)

    def drop(self, manifest: Manifest) -> Key | None:
        """Forget an object; return the key of the cluster that it concerned."""
        identity = identity_of(manifest)
        held = self._held(identity)
        if held is not None and uid_of(held) in (uid_of(manifest), ""):
            self._remove(identity)
        self._gone.add(manifest)
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
        moment = self._reported.get(identity_of(cluster), -math.inf)
        return self._clock() - moment

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
        return tuple(own_pods(cluster, self._at(POD_LABEL, *key), self.children(key)))

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

    def _report(self, identity: Identity) -> None:
        if identity[0] == CLUSTER_KIND:
            self._reported[identity] = self._clock()

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
        for place in places_of(self._objects[identity[0]].pop(identity)):
            held = self._index.get(place, {})
            held.pop(identity, None)
            if not held:
                self._index.pop(place, None)


def _to_take_from(held: Manifest | None, manifest: Manifest) -> Manifest | None:
    """Return the version before, if it is the same object. Users' free fields have no types."""
    if held is None or held["kind"] == CLUSTER_KIND or uid_of(held) != uid_of(manifest):
        return None
    return held
