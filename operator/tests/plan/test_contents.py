"""A ConfigMap of which only hashes are kept is compared as if its content were there."""

from __future__ import annotations

from simulated_cluster import SimulatedCluster, manifest

from pdcluster_operator.plan.objects.drift import is_settled, rewrite_of
from pdcluster_operator.plan.objects.kept_fields import MARK, without_contents
from pdcluster_operator.plan.types import ConnectorBundle

CONFIG_MAP = {
    "kind": "ConfigMap",
    "metadata": {"name": "pdcluster-connector-0123456789abcdef", "annotations": {}},
    "immutable": True,
    "binaryData": {"connector.pyz": "QUJD" * 1000},
}


def test_hashes_stand_for_contents_and_for_themselves() -> None:
    kept = without_contents(CONFIG_MAP)
    assert kept["binaryData"]["connector.pyz"].startswith(MARK)
    assert without_contents(kept) == kept
    assert CONFIG_MAP["binaryData"] == {"connector.pyz": "QUJD" * 1000}
    assert is_settled(kept, CONFIG_MAP, None)
    assert is_settled(CONFIG_MAP, kept, None)
    other = {**CONFIG_MAP, "binaryData": {"connector.pyz": "QUJE" * 1000}}
    assert not is_settled(kept, other, None)
    assert rewrite_of(kept, CONFIG_MAP) is None
    changed = rewrite_of(without_contents(other), CONFIG_MAP)
    assert changed is not None
    assert [path for path, _ in changed.fields] == ["binaryData.connector.pyz"]


def test_a_rewrite_is_the_same_in_whatever_order_the_server_sends_it() -> None:
    wanted = {"kind": "Pod", "metadata": {"name": "a"}, "spec": {"limits": [{"a": "1"}]}}
    found = [{"b": "2", "a": "1"}, {"a": "1", "b": "2"}]
    first, second = (rewrite_of({**wanted, "spec": {"limits": [one] * 2}}, wanted) for one in found)
    assert first is not None
    assert first == second, "or the operator would apply it again and again"


def test_what_is_no_connector_is_kept() -> None:
    other = {**CONFIG_MAP, "metadata": {"name": "settings"}}
    assert without_contents(other) is other
    secret = {**CONFIG_MAP, "kind": "Secret"}
    assert without_contents(secret) is secret


def test_an_operator_that_keeps_hashes_finds_nothing_to_do() -> None:
    world = SimulatedCluster(manifest())
    world.connector = ConnectorBundle("c0ffee" + "0" * 58, b"x" * 10_000)
    world.settle()
    for name, child in world.children.items():
        world.children[name] = dict(without_contents(child))
    [(shared, configmap)] = world.shared.items()
    configmap = world.shared[shared] = dict(without_contents(configmap))
    assert world.plan().steps == ()
    configmap["binaryData"] = {"connector.pyz": MARK + "0" * 64}
    assert [step.why for step in world.plan().steps] == ["the connector that engines mount"]
