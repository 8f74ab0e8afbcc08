"""When a namespace loses its connector, all its PDClusters are looked at again, and no others."""

from __future__ import annotations

from typing import Any

import pytest
from listing import loop_lists

from pdcluster_operator.runtime.control_loop import ControlLoop
from pdcluster_operator.runtime.interfaces import Key

DIGEST = "a" * 16
CONNECTOR = {
    "kind": "ConfigMap",
    "metadata": {
        "name": f"pdcluster-connector-{DIGEST}",
        "namespace": "ns",
        "uid": "u",
        "resourceVersion": "7",
        "labels": {"pdcluster.dev/connector": DIGEST},
    },
}


@pytest.fixture
def woken(monkeypatch: pytest.MonkeyPatch) -> tuple[ControlLoop, list[Key]]:
    unused: Any = object()
    loop = ControlLoop(
        api_server=unused, launchers=unused, events=unused, connector=unused, clock=unused
    )
    keys: list[Key] = []
    monkeypatch.setattr(loop.queue, "add", keys.append)
    for key in (Key("ns", "one"), Key("ns", "two"), Key("other", "three")):
        metadata = {"namespace": key.namespace, "name": key.name, "uid": key.name}
        loop.store.put({"kind": "PDCluster", "metadata": metadata})
    return loop, keys


async def test_a_watch_and_a_list_report_it(woken: tuple[ControlLoop, list[Key]]) -> None:
    loop, keys = woken
    loop.see("ADDED", CONNECTOR)
    loop_lists(loop, "ConfigMap", [CONNECTOR])
    assert keys == [], "nobody waits for one that comes: who needs it applies it"
    loop.see("DELETED", CONNECTOR)
    assert sorted(keys) == [Key("ns", "one"), Key("ns", "two")]
    keys.clear()
    later = {**CONNECTOR["metadata"], "resourceVersion": "8"}
    loop.see("ADDED", {**CONNECTOR, "metadata": later})
    loop_lists(loop, "ConfigMap", [])
    assert sorted(keys) == [Key("ns", "one"), Key("ns", "two")]
