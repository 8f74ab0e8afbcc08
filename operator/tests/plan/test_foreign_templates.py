"""What others write into pod templates ends no engine; a restart on purpose is a rollout."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from simulated_cluster import SimulatedCluster, manifest

from pdcluster_operator.api.object_names import PAIRING_LABEL, engine_of
from pdcluster_operator.plan.objects.drift import rewrite_of
from pdcluster_operator.plan.objects.ownership import identity
from pdcluster_operator.plan.rollout.revisions import short_hash
from pdcluster_operator.plan.types import Apply, Observed, Rewrite, Step

TWO = {"replicas": 2}
HASH_LABEL = "controller-revision-hash"


class Governed(SimulatedCluster):
    """A policy writes into StatefulSets, and their controller says which template is the newest.

    Attributes:
        mirror: the registry that the policy writes into the image of each container.
        notes: what this process of the operator remembers of its applies.
    """

    def __init__(self, **spec: Any) -> None:
        super().__init__(manifest(prefill=TWO, decode=TWO, **spec))
        self.mirror = ""
        self.notes: dict[tuple[str, str], Rewrite] = {}

    def observed(self) -> Observed:
        return replace(super().observed(), rewrites=dict(self.notes))

    def perform(self, step: Step) -> None:
        super().perform(step)
        if isinstance(step, Apply) and step.manifest["kind"] == "StatefulSet":
            name = identity(step.manifest)
            for container in self.template(name)["spec"]["containers"] if self.mirror else ():
                container["image"] = f"{self.mirror}/engine"
            self.notes.pop(name, None)
            if found := rewrite_of(self.children[name], step.manifest):
                self.notes[name] = found

    def template(self, name: tuple[str, str]) -> dict[str, Any]:
        template: dict[str, Any] = self.children[name]["spec"]["template"]
        return template

    def make_pods(self) -> None:
        super().make_pods()
        for name in self.engines_there():
            newest = short_hash(json.dumps(self.template(name), sort_keys=True))
            self.children[name]["status"] = {"updateRevision": newest}
            for pod in self.pods.values():
                if (engine := engine_of(pod)) is not None and engine.stateful_set == name[1]:
                    pod["metadata"]["labels"].setdefault(HASH_LABEL, newest)

    def engines_there(self) -> list[tuple[str, str]]:
        return [name for name in self.children if name[0] == "StatefulSet"]

    def outdated(self) -> int:
        """Count the pods that Kubernetes calls pods of an older template."""
        newest = {name[1]: self.children[name]["status"]["updateRevision"]
                  for name in self.engines_there()}  # fmt: skip
        labels = [pod["metadata"]["labels"] for pod in self.pods.values()]
        return sum(one[HASH_LABEL] != newest[one["pdcluster.dev/engine"]] for one in labels)

    def keys(self) -> set[str]:
        labels = [self.children[name]["metadata"]["labels"] for name in self.engines_there()]
        return {one[PAIRING_LABEL] for one in labels}

    def uids(self) -> set[str]:
        return {pod["metadata"]["uid"] for pod in self.pods.values()}

    def served(self) -> None:
        assert self.condition("Available")["status"] == "True", self.condition("Available")


def up(mirror: str = "", **spec: Any) -> Governed:
    world = Governed(**spec)
    world.mirror = mirror
    world.bring_up()
    assert world.condition("Ready")["status"] == "True"
    assert len(world.uids()) == 4
    return world


@pytest.mark.parametrize("paused", [False, True])
@pytest.mark.parametrize("later", ["there", ""])
def test_a_policy_that_changes_ends_no_engine_when_the_operator_starts_again(
    later: str, *, paused: bool
) -> None:
    """The new process knows of no rewrite, so it applies each StatefulSet once more."""
    world = up("here", rollout={"paused": paused})
    pods = world.uids()
    assert len(world.notes) == 4
    world.mirror = later
    world.settle()
    assert world.outdated() == 0, "no patch before the operator starts again"
    world.notes.clear()
    assert len(world.step().steps) == 4
    world.others_act()
    assert world.outdated() == 4
    for _ in range(3):
        plan = world.step()
        assert plan.steps == ()
        assert plan.events == ()
        world.others_act()
        world.served()
        assert world.uids() == pods
    assert world.condition("Ready")["status"] == "True"
    assert world.condition("Progressing")["reason"] == "Complete"


@pytest.mark.parametrize("paused", [False, True])
def test_kubectl_rollout_restart_of_the_statefulsets_ends_no_engine(*, paused: bool) -> None:
    world = up(rollout={"paused": paused})
    pods = world.uids()
    for name in world.engines_there():
        metadata = world.template(name)["metadata"]
        metadata["annotations"] = {"kubectl.kubernetes.io/restartedAt": "2026-11-26T10:00:00Z"}
    world.others_act()
    assert world.outdated() == 4
    for _ in range(3):
        assert world.step().steps == ()
        world.others_act()
    assert world.uids() == pods
    assert world.condition("Ready")["status"] == "True"


def test_a_field_of_ours_that_somebody_changed_is_put_right_and_ends_no_engine() -> None:
    world = up()
    pods = world.uids()
    for name in world.engines_there():
        world.template(name)["spec"]["containers"][0]["image"] = "somebody/elses"
    world.others_act()
    assert len(world.step().steps) == 4
    for name in world.engines_there():
        assert world.template(name)["spec"]["containers"][0]["image"] != "somebody/elses"
    world.others_act()
    assert world.settle().steps == ()
    assert world.uids() == pods


@pytest.mark.parametrize("how", ["Surge", "Replace"])
def test_a_restart_on_purpose_goes_one_engine_of_a_role_at_a_time(how: str) -> None:
    world = up("here", rollout={"type": how})
    pods = world.uids()
    keys = world.keys()
    world.mirror = "there"
    world.edit(rollout={"type": how, "paused": True, "renew": "2026-11-26T10:00:00Z"})
    world.settle()
    assert world.uids() == pods, "paused holds it back"
    world.edit(rollout={"type": how, "renew": "2026-11-26T10:00:00Z"})
    for _ in range(40):
        before = set(world.engines_there())
        plan = world.step()
        world.served()
        gone = [name for name in before if name not in world.children]
        assert len([name for name in gone if "-prefill-" in name[1]]) <= 1
        assert len([name for name in gone if "-decode-" in name[1]]) <= 1
        world.others_act()
        if not plan.steps and world.condition("Progressing")["reason"] == "Complete":
            break
    assert world.condition("Ready")["status"] == "True"
    assert len(world.uids()) == 4
    assert not world.uids() & pods
    assert world.keys() == keys, "old and new engines exchange KV"
    images = {world.template(name)["spec"]["containers"][0]["image"]
              for name in world.engines_there()}  # fmt: skip
    assert images == {"there/engine"}
