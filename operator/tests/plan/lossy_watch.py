"""What an operator sees of a simulated cluster through watches that lose, delay and repeat events.

The operator's own store takes the events in, and what it holds is what is planned from.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st
from simulated_cluster import SimulatedCluster, copied

from pdcluster_operator.adapters.api_server.kinds import WATCHED, Kind, slim
from pdcluster_operator.api.object_names import engine_of
from pdcluster_operator.plan.types import Observed
from pdcluster_operator.runtime.interfaces import Key
from pdcluster_operator.runtime.store import Store

KEY = Key("default", "llama")
Manifest = dict[str, Any]
FATES = st.sampled_from(["arrives", "arrives", "is lost", "is late", "comes twice"])
BY_NAME = {kind.name: kind for kind in WATCHED}


class LossyWatch:
    """Watches a simulated cluster. ``report`` takes one look, ``sweep`` lists everything."""

    def __init__(self, world: SimulatedCluster) -> None:
        self._world = world
        self._store = Store()
        self._last: dict[tuple[str, str], Manifest] = {}
        self._late: list[tuple[str, Manifest]] = []
        self.sweep()

    def observed(self) -> Observed:
        """Return what the operator believes."""
        cluster = self._store.cluster(KEY)
        assert cluster is not None
        truth = self._world.observed()
        return replace(
            truth,
            cluster=cluster,
            children=self._store.children(KEY),
            pods=self._store.pods(KEY),
            connectors=self._store.connectors(KEY.namespace),
        )

    def report(self, data: st.DataObject) -> None:
        """Let each change since the last look become an event, which may go astray."""
        now = self._now()
        events = [("MODIFIED", one) for name, one in now.items() if one != self._last.get(name)]
        events += [("DELETED", one) for name, one in self._last.items() if name not in now]
        late, self._late = self._late, []
        for event in [*events, *late]:
            fate = data.draw(FATES, label=f"{event[0]} {event[1]['metadata']['name']}")
            if fate == "is late":
                self._late.append(event)
            if fate in ("arrives", "comes twice"):
                self._take(*event)
            if fate == "comes twice":
                self._late.append(event)
        self._last = now

    def sweep(self) -> None:
        """List every kind, as the operator does from time to time."""
        self._last, self._late = self._now(), []
        for kind in WATCHED:
            listed = [one for (name, _), one in self._last.items() if name == kind.name]
            for one in listed:
                self._store.put(copied(one))
            names = {(KEY.namespace, one["metadata"]["name"]) for one in listed}
            for one in self._store.listed(kind.name, None, names, str(2**63)):
                self._store.drop(one)

    def _take(self, event: str, manifest: Manifest) -> None:
        if event == "DELETED":
            self._store.drop(copied(manifest))
        else:
            self._store.put(copied(manifest))

    def _now(self) -> dict[tuple[str, str], Manifest]:
        """Return all objects as an API server has them: each change has another version."""
        world = self._world
        live = [("PDCluster", world.cluster)]
        live += [(kind, child) for (kind, _), child in world.children.items()]
        live += [("ConfigMap", shared) for shared in world.shared.values()]
        live += [("Pod", _owned(world, pod)) for pod in world.pods.values()]
        found = {}
        for name, manifest in live:
            kept = slim(copied(manifest), BY_NAME.get(name, Kind("", "v1", "", name)))
            before = self._last.get((name, kept["metadata"]["name"]))
            if before is not None:
                kept["metadata"]["resourceVersion"] = before["metadata"]["resourceVersion"]
            if kept != before:
                world.counter += 1
                version = str(world.counter)
                kept["metadata"]["resourceVersion"] = version
                manifest["metadata"]["resourceVersion"] = version
                if name == "Pod":
                    world.pods[manifest["metadata"]["name"]]["metadata"]["resourceVersion"] = (
                        version
                    )
            found[name, kept["metadata"]["name"]] = kept
        return found


def _owned(world: SimulatedCluster, pod: Manifest) -> Manifest:
    """Return a pod with the controller that it has on a real API server."""
    engine = engine_of(pod)
    if engine is None or "ownerReferences" in pod["metadata"]:
        return pod
    owner = world.children.get(("StatefulSet", engine.stateful_set))
    uid = owner["metadata"]["uid"] if owner else "gone"
    reference = {
        "kind": "StatefulSet",
        "name": engine.stateful_set,
        "uid": uid,
        "controller": True,
    }
    pod["metadata"]["ownerReferences"] = [reference]
    return pod
