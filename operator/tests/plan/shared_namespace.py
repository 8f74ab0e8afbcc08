"""Several simulated PDClusters of one namespace, and the ConfigMaps that they share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from simulated_cluster import SimulatedCluster, manifest

from pdcluster_operator.adapters.api_server.kinds import POD, slim
from pdcluster_operator.plan.connectors import shared_connectors_of, step_for_connector
from pdcluster_operator.plan.types import Apply, Delete

Step = Apply | Delete


class SharedNamespace:
    def __init__(self, *names: str, **spec: Any) -> None:
        self.clusters = {name: SimulatedCluster(manifest(name, **spec)) for name in names}
        self.shared: dict[str, dict[str, Any]] = {}
        for number, world in enumerate(self.clusters.values()):
            world.shared = self.shared
            world.counter = number * 1_000_000  # no two objects have one UID or version

    def __getitem__(self, name: str) -> SimulatedCluster:
        return self.clusters[name]

    @property
    def now(self) -> float:
        return max(world.now for world in self.clusters.values())

    def wait(self, seconds: float) -> None:
        for world in self.clusters.values():
            world.now = max(world.now, self.now) + seconds

    def mounted(self) -> set[str]:
        """What is mounted, of workloads, stored revisions and pods as the store keeps them."""
        return {name for one in self._holders() for name in shared_connectors_of(one)}

    def missing(self) -> set[str]:
        """What a pod that starts now would lack, of pods and of what makes pods."""
        kinds = ("Pod", "StatefulSet", "Deployment")
        holders = [one for one in self._holders() if one["kind"] in kinds]
        needed = {name for one in holders for name in shared_connectors_of(one)}
        return needed - self.shared.keys()

    def collector_steps(self) -> list[Step]:
        """What a collector plans from what it sees now."""
        mounted = self.mounted()
        steps = (
            step_for_connector(live, mounted=name in mounted, now=self.now)
            for name, live in sorted(self.shared.items())
        )
        return [step for step in steps if step is not None]

    def collect(self, steps: list[Step] | None = None) -> None:
        """Carry the collector's steps out, each only on the very version that was seen.

        Args:
            steps: planned before. The look before a deletion was then made before, too.
        """
        for step in self.collector_steps() if steps is None else steps:
            if isinstance(step, Delete):
                name, version = step.name, step.resource_version
            else:
                marked = step.manifest["metadata"]
                name, version = marked["name"], marked["resourceVersion"]
            live = self.shared.get(name)
            if live is None or live["metadata"]["resourceVersion"] != version:
                continue
            if isinstance(step, Delete):
                del self.shared[name]
            else:
                live["metadata"]["annotations"] = dict(marked["annotations"])
                live["metadata"]["resourceVersion"] += "1"

    def delete(self, name: str) -> None:
        """Delete a PDCluster with all that it owns; its pods are gone when they have ended."""
        world = self.clusters[name]
        world.children.clear()
        world.cluster.pop("status", None)
        for pod in world.pods.values():
            pod["metadata"]["deletionTimestamp"] = "2027-01-01T00:00:00Z"

    def _holders(self) -> Iterator[dict[str, Any]]:
        for world in self.clusters.values():
            yield from world.children.values()
            yield from (slim(pod, POD) for pod in world.pods.values())
