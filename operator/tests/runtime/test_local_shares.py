"""What the operator's metrics show of each PDCluster: its share of local prompts, and Ready."""

from __future__ import annotations

from typing import Any

import pytest

from pdcluster_connector.protocol.launcher_documents import LinksReport, PromptsReport
from pdcluster_operator.plan.types import Place
from pdcluster_operator.runtime.control_loop import ControlLoop
from pdcluster_operator.runtime.interfaces import Key


async def test_each_cluster_with_prompts_has_a_share(monkeypatch: pytest.MonkeyPatch) -> None:
    unused: Any = object()
    loop = ControlLoop(
        api_server=unused, launchers=unused, events=unused, connector=unused, clock=unused
    )
    links = {
        Key("ns", "busy"): {
            "d0": LinksReport("d0", "", (), PromptsReport(30, 30, "NoTicket")),
            "d1": LinksReport("d1", "", (), PromptsReport(90, 0, "")),
        },
        Key("ns", "idle"): {"d0": LinksReport("d0", "", (), PromptsReport(0, 0, ""))},
        Key("ns", "older"): {"d0": LinksReport("d0", "", ())},
        Key("ns", "new"): {},
    }
    for key in links:
        metadata = {"namespace": key.namespace, "name": key.name, "uid": key.name}
        loop.store.put({"kind": "PDCluster", "metadata": metadata})
    monkeypatch.setattr(loop.monitor, "links", links.__getitem__)
    assert loop.local_prefill_shares() == {Key("ns", "busy"): 0.25}


async def test_who_is_not_ready_has_a_reason() -> None:
    unused: Any = object()
    place = Place(operator_class="")
    parts = dict.fromkeys(("api_server", "launchers", "events", "connector", "clock"), unused)
    loop = ControlLoop(**parts, place=place)

    def told(name: str, status: object, operator_class: str | None = None) -> None:
        metadata = {"namespace": "ns", "name": name, "uid": name}
        spec = {"operatorClass": operator_class} if operator_class else {}
        loop.store.put({"kind": "PDCluster", "metadata": metadata, "spec": spec, "status": status})

    def ready(status: str, reason: str) -> dict[str, Any]:
        return {"conditions": [{"type": "Ready", "status": status, "reason": reason}]}

    told("well", ready("True", "KVMoves"))
    told("failed", ready("False", "LinkFailed"))
    told("unknown", ready("Unknown", "OperatorStarts"))
    told("new", None)
    told("bent", {"conditions": "none"})
    told("of-another", ready("False", "LinkFailed"), "another")
    assert loop.not_ready() == {
        Key("ns", "failed"): "LinkFailed",
        Key("ns", "unknown"): "OperatorStarts",
        Key("ns", "new"): "NotSeenYet",
        Key("ns", "bent"): "NotSeenYet",
    }
    assert {key.name for key in loop.statuses()} == {"well", "failed", "unknown", "new", "bent"}
    assert loop.statuses()[Key("ns", "new")] is None
