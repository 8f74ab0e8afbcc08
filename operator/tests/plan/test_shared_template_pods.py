"""A change of ``spec.podTemplate`` reaches the pods of engines and routers that run."""

from __future__ import annotations

from typing import Any

import pytest
from simulated_cluster import brought_up


@pytest.mark.parametrize("engines", [True, False], ids=["all", "routers alone"])
def test_a_changed_shared_template_replaces_the_pods_that_it_changes(*, engines: bool) -> None:
    world = brought_up()
    sets = {name for kind, name in world.children if kind == "StatefulSet"}
    spec: dict[str, Any] = {"nodeSelector": {"pool": "inference"}}
    if not engines:
        spec = {"containers": [{"name": "router", "imagePullPolicy": "Always"}]}
    world.edit(podTemplate={"spec": spec})
    for _ in range(8):
        world.step()
        world.others_act()
    world.settle()
    assert world.condition("Ready")["status"] == "True"
    left = {name for kind, name in world.children if kind == "StatefulSet"}
    assert sets.isdisjoint(left) if engines else sets == left
    [router] = [one for (kind, _), one in world.children.items() if kind == "Deployment"]
    made = router["spec"]["template"]["spec"]
    if engines:
        assert made["nodeSelector"] == spec["nodeSelector"]
    else:
        assert made["containers"][0]["imagePullPolicy"] == "Always"
    assert not world.plan().steps
