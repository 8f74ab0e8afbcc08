"""Answers, events of watches and lists arrive in random orders: in the end all is as wanted.

For a while, users create, change and delete PDClusters, and delete and change children, mostly
those that the operator has just written. Then nobody does anything any more, and no sweep comes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from late_server import CERTIFICATES, CONNECTOR, KINDS, NAMESPACE, Manifest, Port, Server, Watches

import virtual_time
from pdcluster_operator.adapters.api_server.kinds import BY_NAME, slim
from pdcluster_operator.api.object_names import API_VERSION
from pdcluster_operator.plan.connectors import is_shared_connector
from pdcluster_operator.plan.objects.ownership import controller_uid
from pdcluster_operator.plan.planner import make_plan
from pdcluster_operator.plan.renewals import rotation_of
from pdcluster_operator.plan.types import Observed
from pdcluster_operator.runtime import reconcile
from pdcluster_operator.runtime.control_loop import ControlLoop

BUSY_SECONDS, QUIET_SECONDS = 30.0, 90.0


class Users:
    """Whoever else may write."""

    def __init__(self, server: Server, watches: Watches, random: Random) -> None:
        self.server, self.watches, self.random = server, watches, random

    def act(self) -> None:
        actions = (self.create, self.edit, self.delete, self.make_anew, self.lose_events)
        self.random.choice((*actions, self.edit, self.delete_child, self.bend_child))()

    def create(self) -> None:
        metadata = {"name": self._name(), "namespace": NAMESPACE}
        if self.server.get("PDCluster", NAMESPACE, metadata["name"]) is None:
            spec = {
                "model": {"source": {"huggingFace": {"repo": "org/model"}}},
                "transfer": {"device": "CPU", "tls": "Disabled"},
            }
            self.server.apply(
                {"apiVersion": API_VERSION, "kind": "PDCluster", "metadata": metadata, "spec": spec}
            )

    def edit(self) -> None:
        if (live := self.server.get("PDCluster", NAMESPACE, self._name())) is not None:
            live["spec"]["router"] = {"replicas": self.random.randint(1, 5)}
            live["spec"]["prefill"] = {"replicas": self.random.randint(1, 2)}
            self.server.apply(live)

    def delete(self) -> None:
        self.server.delete("PDCluster", NAMESPACE, self._name())

    def make_anew(self) -> None:
        self.delete()
        self.create()

    def lose_events(self) -> None:
        self.watches.lose(self.random.choice(KINDS).name)

    def delete_child(self) -> None:
        for child in self._some_child(kind.name for kind in KINDS):
            self.server.delete(child["kind"], NAMESPACE, child["metadata"]["name"])

    def bend_child(self) -> None:
        for child in self._some_child(("StatefulSet", "Deployment")):
            child["spec"]["replicas"] = self.random.randint(6, 9)
            self.server.apply(child)

    def _name(self) -> str:
        return f"c{self.random.randrange(6)}"

    def _some_child(self, kinds: Iterable[str]) -> list[Manifest]:
        """Return one that was written a moment ago; none if there is none."""
        found = [one for kind in kinds for one in self.server.list(kind) if kind != "PDCluster"]
        found.sort(key=lambda one: int(one["metadata"]["resourceVersion"]))
        return [self.random.choice(found[-6:])] if found else []


def wrong(server: Server, loop: ControlLoop) -> list[object]:
    """Return what the operator believes wrongly, and what is not as the specs say."""
    there = {_name(one): one["metadata"]["resourceVersion"] for one in server.everything()}
    held = {
        _name(one): one["metadata"]["resourceVersion"]
        for objects in loop.store._objects.values()
        for one in objects.values()
    }
    found: list[object] = sorted(held.items() ^ there.items())
    live = [slim(one, BY_NAME[one["kind"]]) for one in server.everything()]
    for cluster in (one for one in live if one["kind"] == "PDCluster"):
        metadata, status = cluster["metadata"], cluster.get("status") or {}
        if status.get("observedGeneration") != metadata["generation"]:
            found.append((metadata["name"], "its status is old"))
        secret = server.get("Secret", NAMESPACE, f"{metadata['name']}-ticket-key")
        observed = Observed(
            cluster,
            tuple(one for one in live if controller_uid(one) == metadata["uid"]),
            (),
            {},
            {},
            CONNECTOR,
            secret and rotation_of(secret),
            CERTIFICATES,
            connectors=tuple(one for one in live if is_shared_connector(one)),
        )
        found += [(metadata["name"], step) for step in make_plan(observed, 0.0).steps]
    return found


def _name(manifest: Manifest) -> tuple[str, str]:
    return manifest["kind"], manifest["metadata"]["name"]


async def story(seed: int) -> list[object]:
    now = asyncio.get_running_loop().time
    server, random = Server(), Random(seed)
    port = Port(server, random)

    async def publish(*_: object) -> None:
        return

    parts: Any = {
        "launchers": SimpleNamespace(),
        "events": SimpleNamespace(publish=publish),
        "connector": CONNECTOR,
        "clock": now,
    }
    loop = ControlLoop(api_server=port, **parts)  # type: ignore[arg-type]
    port.loop_of = lambda: loop
    loop.store._clock = loop._reconciler._secrets._clock = now
    watches = Watches(server, loop, random)
    users = Users(server, watches, random)
    loop.start()
    while now() < BUSY_SECONDS:
        users.act()
        await asyncio.sleep(random.choice((0.0, 0.01, 0.1, 0.5)))
    await asyncio.sleep(QUIET_SECONDS)
    found = wrong(server, loop)
    await loop.stop()
    for task in watches.tasks:
        task.cancel()
    await asyncio.gather(*watches.tasks, return_exceptions=True)
    return found


@pytest.mark.sampled
@pytest.mark.parametrize("seed", range(4))
def test_in_the_end_all_is_as_the_specs_say(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def now() -> float:
        return asyncio.get_running_loop().time()

    monkeypatch.setattr(reconcile, "time", SimpleNamespace(monotonic=now))
    assert virtual_time.run(story(seed)) == []
