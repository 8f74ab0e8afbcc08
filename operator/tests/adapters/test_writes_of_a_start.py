"""How much one PDCluster makes the operator write, from its creation until it is Ready."""

from __future__ import annotations

import itertools
from datetime import datetime

import pytest
from operator_runs import at_rest, cluster, condition, create, edit, events, get, until
from played_nodes import PlayedNodes

from pdcluster_operator.plan.status.pace import QUIET_SECONDS

pytestmark = pytest.mark.cluster

CHILDREN = {
    "configmaps": 1,
    "controllerrevisions": 2,
    "deployments": 1,
    "networkpolicies": 2,
    "poddisruptionbudgets": 2,
    "secrets": 2,
    "serviceaccounts": 1,
    "services": 3,
    "statefulsets": 2,
}
"""Of one prefill engine, one decode engine and a router. One Secret holds certificates."""
TRIED = {"statefulsets": 2, "pods": 2}
"""Dry runs before the first engines, which write nothing."""


def flags(write):
    status = write["requestObject"]["status"]
    found = [(one["type"], one["status"]) for one in status["conditions"]]
    return status["observedGeneration"], found


def moment(write):
    return datetime.fromisoformat(write["requestReceivedTimestamp"]).timestamp()


def few_statuses(writes):
    """Each status says something new. One that flips no condition waits for others like it."""
    assert all(one != other for one, other in itertools.pairwise(map(said, writes)))
    quiet = sum(flags(one) == flags(other) for one, other in itertools.pairwise(writes))
    # The first waits for none, and a stalled machine delays a request on its way.
    assert quiet <= 2 + (moment(writes[-1]) - moment(writes[0])) / QUIET_SECONDS, writes


def said(write):
    return write["requestObject"]["status"]


def is_ready(real, namespace, generation):
    seen = (get(real, namespace).get("status") or {}).get("observedGeneration")
    done = condition(real, namespace, "Progressing").get("reason") == "Complete"
    return seen == generation and done


def written(real, namespace, since):
    """What the operator wrote into the namespace: its children by resource, and the statuses.

    Also what it tried out.
    """
    ours = [
        one
        for one in real.writes(since)
        if one["objectRef"].get("namespace") == namespace
        and one["responseStatus"]["code"] < 300  # a stalled server may answer 409, 429 or 504
    ]
    of_us = [one for one in ours if one["objectRef"]["resource"] not in ("pdclusters", "events")]
    names = [one["objectRef"].get("name") for one in of_us]
    counts, tried = {}, {}
    for one, name in zip(of_us, names, strict=True):
        if name != "authority":  # the CA, which the operator makes at its first start
            resource = one["objectRef"]["resource"]
            found = tried if "dryRun=" in one["requestURI"] else counts
            found[resource] = found.get(resource, 0) + 1
    return counts, [one for one in ours if one["objectRef"]["resource"] == "pdclusters"], tried


def heard_all(operator):
    """The launchers live in this process. If it stalls, what is written is about that."""
    if "does not answer" in operator.log.read_text():
        pytest.skip("this machine stalled: a launcher did not answer the operator in time")


def test_a_cluster_that_no_operator_has_seen_says_so(real, namespace):
    """So does one in a crowd, whose first status waits."""
    create(real, namespace, cluster("unseen"))
    for kind in ("Progressing", "Ready"):
        found = condition(real, namespace, kind, "unseen")
        assert (found["status"], found["reason"]) == ("Unknown", "NotSeenYet")


def test_a_start_and_one_more_engine_write_what_they_need(real, operator, namespace):
    before = real.written
    operator.start()
    with PlayedNodes(real, namespace):
        create(real, namespace, cluster())
        until(lambda: is_ready(real, namespace, 1), 120, operator.said)
        at_rest(real, operator)
        heard_all(operator)
        children, statuses, tried = written(real, namespace, before)
        notes = [one["note"] for one in events(real, namespace)]
        assert [note.partition(":")[0] for note in notes] == ["Ready is True"]
        assert children == CHILDREN
        assert tried == TRIED
        few_statuses(statuses)

        before = real.written
        edit(real, namespace, {"decode": {"replicas": 2}})
        until(lambda: is_ready(real, namespace, 2), 120, operator.said)
        at_rest(real, operator)
        heard_all(operator)
        children, statuses, tried = written(real, namespace, before)
        assert tried == {}
        told = [(one["type"], one["note"].partition(":")[0]) for one in events(real, namespace)]
        assert sorted(told) == [("Normal", "Ready is False"), ("Normal", "Ready is True")]
        changed = ("secrets", "services", "statefulsets", "deployments", "poddisruptionbudgets")
        assert children == dict.fromkeys(changed, 1)
        few_statuses(statuses)
