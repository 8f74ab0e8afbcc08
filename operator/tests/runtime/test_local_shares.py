"""The shares that the operator's metric shows: one for each PDCluster that has had prompts."""

from __future__ import annotations

from typing import Any

import pytest

from pdcluster_operator.plan.reports import LinksReport, PromptsReport
from pdcluster_operator.runtime.control_loop import ControlLoop
from pdcluster_operator.runtime.queue import Key


async def test_each_cluster_with_prompts_has_a_share(monkeypatch: pytest.MonkeyPatch) -> None:
    unused: Any = object()
    loop = ControlLoop(api=unused, launchers=unused, events=unused, connector=unused, clock=unused)
    links = {
        Key("ns", "busy"): {
            "d0": LinksReport("d0", "", (), PromptsReport(100, "NoTicket", 30, 30)),
            "d1": LinksReport("d1", "", (), PromptsReport(0, "", 90, 0)),
        },
        Key("ns", "idle"): {"d0": LinksReport("d0", "", (), PromptsReport(0, "", 0, 0))},
        Key("ns", "older"): {"d0": LinksReport("d0", "")},
        Key("ns", "new"): {},
    }
    for key in links:
        metadata = {"namespace": key.namespace, "name": key.name, "uid": key.name}
        loop.store.put({"kind": "PDCluster", "metadata": metadata})
    monkeypatch.setattr(loop.monitor, "links", links.__getitem__)
    assert loop.local_prefill_shares() == {Key("ns", "busy"): 0.25}
