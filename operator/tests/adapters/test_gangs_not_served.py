"""An API server without PodGroups, as most are: the status says so and what to do."""

from __future__ import annotations

import pytest
from operator_runs import Operator, cluster, condition, create, edit, owned, until
from real_api import RealApi

pytestmark = pytest.mark.cluster


def test_without_pod_groups_the_reason_is_named_and_nothing_hangs(
    real: RealApi, operator: Operator, namespace: str
) -> None:
    operator.start()
    create(real, namespace, cluster(scheduling={"gang": "Enabled"}))
    until(
        lambda: condition(real, namespace, "Accepted").get("status") == "False",
        60,
        operator.said,
    )
    message = condition(real, namespace, "Accepted")["message"]
    assert "spec.scheduling.gang = Enabled" in message
    assert "PodGroupsNotServed" in message
    assert "GenericWorkload" in message
    assert owned(real, namespace) == []
    edit(real, namespace, {"scheduling": {"gang": "Disabled"}})
    until(lambda: len(owned(real, namespace, "Pod")) == 3, 60, operator.said)
    assert condition(real, namespace, "Accepted")["status"] == "True"
