"""A ConfigMap of which only hashes are kept is compared as if its content were there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from simulated_cluster import SimulatedCluster, manifest

from pdcluster_operator.plan.contents import MARK, SHORT, with_shared_text, without_contents
from pdcluster_operator.plan.drift import is_applied
from pdcluster_operator.plan.model import ConnectorBundle
from pdcluster_operator.plan.rewrites import rewrite_of

CONFIG_MAP = {
    "kind": "ConfigMap",
    "metadata": {"name": "a", "annotations": {}},
    "immutable": True,
    "binaryData": {"connector.pyz": "QUJD" * 1000},
}


def test_hashes_stand_for_contents_and_for_themselves() -> None:
    kept = without_contents(CONFIG_MAP)
    assert kept["binaryData"]["connector.pyz"].startswith(MARK)
    assert without_contents(kept) == kept
    assert CONFIG_MAP["binaryData"] == {"connector.pyz": "QUJD" * 1000}
    assert is_applied(kept, CONFIG_MAP)
    assert is_applied(CONFIG_MAP, kept)
    other = {**CONFIG_MAP, "binaryData": {"connector.pyz": "QUJE" * 1000}}
    assert not is_applied(kept, other)
    assert rewrite_of(kept, CONFIG_MAP) is None
    changed = rewrite_of(without_contents(other), CONFIG_MAP)
    assert changed is not None
    assert [path for path, _ in changed.fields] == ["binaryData.connector.pyz"]


def test_what_is_short_or_can_change_is_kept() -> None:
    short = {**CONFIG_MAP, "binaryData": {"a": "x" * SHORT}}
    assert without_contents(short) == short
    changeable = {**CONFIG_MAP, "immutable": False}
    assert without_contents(changeable) is changeable
    secret = {**CONFIG_MAP, "kind": "Secret"}
    assert without_contents(secret) is secret


def test_an_operator_that_keeps_hashes_finds_nothing_to_do() -> None:
    world = SimulatedCluster(manifest())
    world.connector = ConnectorBundle("c0ffee" + "0" * 58, b"x" * 10_000)
    world.settle()
    for name, child in world.children.items():
        world.children[name] = dict(without_contents(child))
    assert world.plan().steps == ()
    [configmap] = [child for (kind, _), child in world.children.items() if kind == "ConfigMap"]
    configmap["binaryData"] = {"connector.pyz": MARK + "0" * 64}
    assert [step.why for step in world.plan().steps] == ["the connector that engines mount"]


def strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    for item in value.values() if isinstance(value, dict) else value if type(value) is list else ():
        yield from strings(item)
    yield from value if isinstance(value, dict) else ()


def test_a_string_that_two_documents_have_is_held_once() -> None:
    world = SimulatedCluster(manifest())
    world.settle()
    texts = [json.dumps(child) for child in world.children.values()]
    ones, others = ([with_shared_text(json.loads(text)) for text in texts] for _ in range(2))
    assert ones == others == list(world.children.values())
    short = [text for text in strings(ones) if len(text) <= SHORT]
    assert len(short) > 500
    held = {text: id(text) for text in short}
    assert [id(text) for text in strings(others) if len(text) <= SHORT] == [
        held[text] for text in short
    ]


def test_a_document_may_be_deep() -> None:
    deep: Any = "x" * 2
    for _ in range(300):
        deep = {"a": [deep]}
    assert json.dumps(with_shared_text(deep)) == json.dumps(deep)
