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
        fill(real, namespace)
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
        # The message names a way on. The old engines go first, and their places are free then.
        assert edit(real, namespace, {"rollout": {"type": "Recreate"}})[0] == 200
        until(lambda: not engines() & before, 120, explain)
        assert real.call("DELETE", quota(namespace))[0] == 200
        until(lambda: done(real, namespace), 180, explain)
        assert len(engines()) == 2


def quota(namespace: str) -> str:
    return f"/api/v1/namespaces/{namespace}/resourcequotas/full"


def fill(real: RealApi, namespace: str) -> None:
    """Make a quota that is used up. No controller counts here, so the test says what is used."""
    hard = {"pods": "3"}
    body = {"metadata": {"name": "full"}, "spec": {"hard": hard}}
    assert real.call("POST", quota(namespace).rpartition("/")[0], body)[0] == 201
    status = {"status": {"hard": hard, "used": hard}}
    merge = "application/merge-patch+json"
    assert real.call("PATCH", f"{quota(namespace)}/status", status, merge)[0] == 200
