"""A launcher that falls silent, and what a kubelet or the node controller writes of its pod."""

from __future__ import annotations

from typing import Any

import pytest
from operator_runs import CHILDREN, Operator, cluster, condition, create, get, until
from played_nodes import PlayedNodes
from real_api import RealApi

pytestmark = pytest.mark.cluster


def test_a_silent_launcher_is_told_by_what_kubernetes_says_of_its_pod(
    real: RealApi, operator: Operator, namespace: str
) -> None:
    operator.start()
    with PlayedNodes(real, namespace) as nodes:
        create(real, namespace, cluster(router={"replicas": 0}))

        def explain() -> object:
            return get(real, namespace), operator.said()

        def says(reason: str, kind: str = "DecodeReady") -> dict[str, Any]:
            def found() -> dict[str, Any] | None:
                one = condition(real, namespace, kind)
                return one if one.get("reason") == reason else None

            return dict(until(found, 60, explain))

        says("EnginesReady")
        [pod] = [
            one
            for one in real.call("GET", CHILDREN["Pod"].format(namespace))[1]["items"]
            if "-decode-" in one["metadata"]["name"]
        ]
        name, [box] = pod["metadata"]["name"], pod["status"]["containerStatuses"]

        def write(container: dict[str, Any], ready: str, reason: str) -> None:
            # A kubelet says why a pod is not ready. The node controller gives no reason.
            told = {"type": "Ready", "status": ready, **({"reason": reason} if reason else {})}
            status = {"containerStatuses": [{**box, **container}], "conditions": [told]}
            path = f"{CHILDREN['Pod'].format(namespace)}/{name}/status"
            code, answer = real.call(
                "PATCH", path, {"status": status}, "application/merge-patch+json"
            )
            assert code == 200, answer

        write({"started": True}, "True", "")
        nodes.silence(pod["metadata"]["uid"])
        assert says("LauncherUnreachable")["status"] == "Unknown"
        write({"started": True, "ready": False}, "False", "ContainersNotReady")
        frozen = says("ContainerFrozen")
        assert f"the container of {name} runs, but fails its readiness probe" in frozen["message"]
        assert condition(real, namespace, "Ready")["reason"] == "ContainerFrozen"
        write({"started": True}, "False", "")
        lost = says("NodeNotReady")
        assert f"of {name} does not report to Kubernetes" in lost["message"]
        write({"started": False, "ready": False}, "False", "ContainersNotReady")
        assert "the launcher does not answer yet" in says("Starting")["message"]
