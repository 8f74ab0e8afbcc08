"""Whether the API server has a kind may change while the operator runs."""

from __future__ import annotations

from typing import Any

import pytest

from pdcluster_operator.plan.builders.engine_objects import POD_GROUP_KIND
from pdcluster_operator.runtime.control_loop import ControlLoop
from pdcluster_operator.runtime.interfaces import Key


def test_every_cluster_is_looked_at_when_a_kind_comes_or_goes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parts: dict[str, Any] = dict.fromkeys(
        ("api_server", "launchers", "events", "connector", "clock")
    )
    loop = ControlLoop(**parts)
    keys: list[Key] = []
    monkeypatch.setattr(loop.queue, "add", keys.append)
    metadata = {"namespace": "ns", "name": "one", "uid": "uid"}
    loop.store.put({"kind": "PDCluster", "metadata": metadata})
    loop.set_served(POD_GROUP_KIND, served=True)
    assert (keys, loop.store.serves(POD_GROUP_KIND)) == ([], True), "as it is taken to be"
    for served in (False, True):
        loop.set_served(POD_GROUP_KIND, served=served)
        loop.set_served(POD_GROUP_KIND, served=served)
        assert loop.store.serves(POD_GROUP_KIND) is served
    assert keys == [Key("ns", "one"), Key("ns", "one")], "once for each change"
