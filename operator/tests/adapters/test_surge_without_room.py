"""A quota has no place for another engine: a Surge holds, and the status names a way on."""

from __future__ import annotations

import pytest
from operator_runs import Operator, at_rest, cluster, condition, create, edit, get, until
from played_nodes import PlayedNodes
from real_api import RealApi
from watched_rollout import done, found

pytestmark = pytest.mark.cluster


@pytest.mark.timeout(600)
def test_a_surge_that_a_quota_stops_takes_nothing_away_and_recreate_goes_on(
    real: RealApi, operator: Operator, namespace: str
) -> None:
    def explain() -> object:
        return get(real, namespace), operator.said()

    def engines() -> set[str]:
        return {one["metadata"]["name"] for one in found(real, namespace, "StatefulSet")}

    operator.start()
    with PlayedNodes(real, namespace):
        create(real, namespace, cluster())
        until(lambda: done(real, namespace), 120, explain)
        at_rest(real, operator)
        before = engines()
        used(real, namespace, there=3)
        assert edit(real, namespace, {"engine": {"blockSize": 32}})[0] == 200
        until(
            lambda: condition(real, namespace, "Progressing")["reason"] == "TemplateRefused",
            60,
            explain,
        )
        said = condition(real, namespace, "Progressing")
        assert said["status"] == "False"
        assert "exceeded quota" in said["message"]
        assert "set rollout.type to Replace" in said["message"]
        assert "or to Recreate" in said["message"]
        assert engines() == before
        assert condition(real, namespace, "Available")["status"] == "True"
        # The message names a way on. The old engines and their router go first.
        assert edit(real, namespace, {"rollout": {"type": "Recreate"}})[0] == 200
        until(lambda: not engines() & before, 120, explain)
        used(real, namespace, there=0)
        until(lambda: done(real, namespace), 180, explain)
        assert len(engines()) == 2


def used(real: RealApi, namespace: str, there: int) -> None:
    """Let a quota have room for three pods. No controller counts here, so the test does."""
    quotas = f"/api/v1/namespaces/{namespace}/resourcequotas"
    full = {"metadata": {"name": "full"}, "spec": {"hard": {"pods": "3"}}}
    assert real.call("POST", quotas, full)[0] in (201, 409)
    status = {"status": {**full["spec"], "used": {"pods": str(there)}}}
    merge = "application/merge-patch+json"
    assert real.call("PATCH", f"{quotas}/full/status", status, merge)[0] == 200
