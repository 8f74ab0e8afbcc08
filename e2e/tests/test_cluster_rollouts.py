"""Engines are replaced under load: no request fails, and the Service always has an endpoint."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from client_account import Account
from cluster_access import Proxy
from cluster_install import Installation
from cluster_run import ClusterRun, manifest, running
from local_run import condition
from rollout_changes import (
    CHANGES,
    ROLL_SECONDS,
    change,
    changed,
    no_outage,
    patch,
    served_in_the_end,
    told,
    uids,
    wait_for_answers,
    wait_for_rest,
)
from rollout_record import Record

from cluster.report import ClusterError
from cluster.session import Cluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(2400)]

SOAKED = [pytest.param(what, marks=pytest.mark.soak) for what in CHANGES[1:]]


@pytest.fixture(scope="module")
def rolls(cluster: Cluster, proxy: Proxy, operator: Installation) -> Iterator[ClusterRun]:
    document = manifest(
        "rolls",
        engine={"maxModelLen": 4096},
        transfer={"internalNames": "Shown"},
        rollout={"type": "Surge"},
    )
    with running(cluster, proxy, document, "rolls") as run:
        run.wait_ready(ROLL_SECONDS)
        yield run


@pytest.mark.parametrize("what", ["env", *SOAKED])
def test_surge_replaces_engines_and_no_request_fails(
    rolls: ClusterRun, what: str, tmp_path: Path
) -> None:
    spec = change(what, "Surge", rolls.cluster, tmp_path)
    seed = 100_000 + 10_000 * CHANGES.index(what)
    no_outage(*changed(rolls, f"Surge, {what}", spec, seed, tmp_path))


@pytest.mark.soak
def test_decode_grows_an_engine_is_evicted_and_decode_shrinks_and_no_request_fails(
    rolls: ClusterRun, tmp_path: Path
) -> None:
    two, one = {"decode": {"replicas": 2}}, {"decode": {"replicas": 1}}
    no_outage(*changed(rolls, "replicas 2", two, 30_000, tmp_path))

    pod = max(pod["metadata"]["name"] for pod in rolls.pods("decode"))
    before = uids(rolls)
    with Account(rolls, 35_000) as account, Record(rolls, account) as seen:
        wait_for_answers(rolls, account)
        seen.mark("eviction")
        rolls.wait("eviction", lambda: evicted(rolls, pod), 120)
        rolls.wait("another pod", lambda: uids(rolls).get(pod) != before[pod], ROLL_SECONDS)
        wait_for_rest(rolls)
    told(rolls, "eviction", account, seen, tmp_path)
    no_outage(account, seen)
    assert {name for name, uid in uids(rolls).items() if before.get(name) == uid} >= {
        name for name in before if name != pod and "router" not in name
    }

    no_outage(*changed(rolls, "replicas 1", one, 40_000, tmp_path))


def evicted(run: ClusterRun, pod: str) -> bool:
    """Do to one pod what `kubectl drain` does to each pod of a node. A budget may refuse it yet."""
    eviction = {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": pod, "namespace": run.namespace},
    }
    path = f"/api/v1/namespaces/{run.namespace}/pods/{pod}/eviction"
    try:
        run.kubectl("create", f"--raw={path}", "--filename=-", stdin=json.dumps(eviction))
    except ClusterError as error:
        if "disruption budget" not in str(error):
            raise
        return False
    return True


def says_why(status: Mapping[str, Any]) -> bool:
    why = "No common block size" in condition(status, "Ready")["message"]
    return why and bool(condition(status, "Available")["status"] == "True")


@pytest.mark.soak
def test_engines_that_cannot_start_take_nothing_away(rolls: ClusterRun, tmp_path: Path) -> None:
    """vLLM's CPU attention knows no such blocks. Only an engine that starts finds out."""
    wait_for_rest(rolls)
    good = rolls.get()["spec"]["engine"]["blockSize"]
    before = [rolls.restarts(role) for role in ("prefill", "decode")]
    with Account(rolls, 50_000) as account, Record(rolls, account) as seen:
        patch(rolls, {"engine": {"blockSize": 16}})
        rolls.wait_status("reason while the old engines serve", says_why, ROLL_SECONDS)
        seen.mark("the reason is in the status")
        patch(rolls, {"engine": {"blockSize": good}})
        wait_for_rest(rolls)
    told(rolls, "Surge, engines that cannot start", account, seen, tmp_path)
    no_outage(account, seen)
    assert [rolls.restarts(role) for role in ("prefill", "decode")] == before


def given_up(status: Mapping[str, Any]) -> bool:
    reason = condition(status, "Progressing")["reason"]
    available = condition(status, "Available")["status"] == "True"
    return bool(reason == "ProgressDeadlineExceeded" and available)


@pytest.mark.soak
def test_surge_that_finds_no_room_gives_up_and_takes_nothing_away(
    rolls: ClusterRun, tmp_path: Path
) -> None:
    wait_for_rest(rolls)
    before = [rolls.restarts(role) for role in ("prefill", "decode")]
    asked = rolls.get()["spec"]["decode"]["resources"]["requests"]["memory"]
    with Account(rolls, 60_000) as account, Record(rolls, account) as seen:
        wait_for_answers(rolls, account)
        seen.mark("engines that fit on no node")
        patch(rolls, {"rollout": {"progressDeadlineSeconds": 10}, **memory("900Gi")})
        status = rolls.wait_status("end of its patience", given_up, ROLL_SECONDS)
        message = condition(status, "Progressing")["message"]
        print(message)
        assert "rollout.type" in message
        assert condition(status, "DecodeReady")["reason"] == "Unschedulable"
        seen.mark("it is given up")
        patch(rolls, {"rollout": {"progressDeadlineSeconds": None}, **memory(asked)})
        wait_for_rest(rolls)
        wait_for_answers(rolls, account)
    told(rolls, "Surge, engines that find no room", account, seen, tmp_path)
    no_outage(account, seen)
    assert [rolls.restarts(role) for role in ("prefill", "decode")] == before


def memory(size: str) -> dict[str, Any]:
    return {"decode": {"resources": {"requests": {"memory": size}}}}


@pytest.mark.soak
@pytest.mark.parametrize("what", CHANGES)
def test_recreate_serves_again_in_the_end(rolls: ClusterRun, what: str, tmp_path: Path) -> None:
    """It needs no spare GPU and no second engine, and it is an outage: how long is printed."""
    patch(rolls, {"rollout": {"type": "Recreate"}})
    spec = change(what, "Recreate", rolls.cluster, tmp_path)
    seed = 200_000 + 10_000 * CHANGES.index(what)
    account, seen = changed(rolls, f"Recreate, {what}", spec, seed, tmp_path)
    served_in_the_end(account, seen)
    if what == "router image":
        assert account.failed == []
