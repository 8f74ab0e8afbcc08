"""Engines are replaced under load: no request fails, and the Service always has an endpoint."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from client_account import Account
from cluster_access import Proxy
from cluster_install import Installation
from cluster_run import ClusterRun, manifest, running
from rollout_changes import (
    ROLL_SECONDS,
    changed,
    no_outage,
    patch,
    told,
    uids,
    wait_for_answers,
    wait_for_rest,
)
from rollout_record import Record

from cluster.report import ClusterError
from cluster.session import Cluster
from images.for_cluster import load_engine_image
from models.tiny import model_path

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(2400)]

CHANGES = ("env", "blockSize", "leaseSeconds", "image", "model", "router image")
SOAKED = [pytest.param(what, marks=pytest.mark.soak) for what in CHANGES[1:]]


def change(what: str, how: str, cluster: Cluster, folder: Path) -> dict[str, Any]:
    """The change to a spec. ``how`` the engines are replaced chooses among two values."""
    number = ("Surge", "Recreate").index(how)
    if what in ("image", "router image"):
        image = load_engine_image(cluster, what.replace(" ", "-") + str(number))
        return {"engine" if what == "image" else "router": {"image": image}}
    if what == "model":  # the same weights, so that the answers can be compared
        path = shutil.copytree(model_path("llama"), folder / "model")
        return {"model": {"source": {"hostPath": {"path": str(path)}}}}
    env = [{"name": "A_VARIABLE", "value": how}]
    changes = {
        "env": {"decode": {"engine": {"env": env}}},
        "blockSize": {"engine": {"blockSize": (64, 128)[number]}},
        "leaseSeconds": {"transfer": {"leaseSeconds": (40, 50)[number]}},
    }
    return changes[what]


@pytest.fixture(scope="module")
def rolls(cluster: Cluster, proxy: Proxy, operator: Installation) -> Iterator[ClusterRun]:
    document = manifest(
        "rolls",
        engine={"maxModelLen": 4096},
        transfer={"internalNames": "Shown"},
        rollout={"type": "Surge"},
    )
    with running(cluster, proxy, document, "rolls") as run:
        run.wait_ready()
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


@pytest.mark.soak
def test_engines_that_cannot_start_take_nothing_away(rolls: ClusterRun, tmp_path: Path) -> None:
    """vLLM's CPU attention knows no such blocks. Only an engine that starts finds out."""
    wait_for_rest(rolls)
    good = rolls.get()["spec"]["engine"]["blockSize"]
    before = [rolls.restarts(role) for role in ("prefill", "decode")]
    with Account(rolls, 50_000) as account, Record(rolls, account) as seen:
        patch(rolls, {"engine": {"blockSize": 16}})
        said = "No common block size"
        rolls.wait("reason", lambda: said in rolls.condition("Ready")["message"], ROLL_SECONDS)
        assert rolls.condition("Available")["status"] == "True"
        seen.mark("the reason is in the status")
        patch(rolls, {"engine": {"blockSize": good}})
        wait_for_rest(rolls)
    told(rolls, "Surge, engines that cannot start", account, seen, tmp_path)
    no_outage(account, seen)
    assert [rolls.restarts(role) for role in ("prefill", "decode")] == before


@pytest.mark.soak
@pytest.mark.parametrize("what", CHANGES)
def test_recreate_serves_again_in_the_end(rolls: ClusterRun, what: str, tmp_path: Path) -> None:
    """It needs no spare GPU and no second engine, and it is an outage: how long is printed."""
    patch(rolls, {"rollout": {"type": "Recreate"}})
    spec = change(what, "Recreate", rolls.cluster, tmp_path)
    seed = 200_000 + 10_000 * CHANGES.index(what)
    account, _ = changed(rolls, f"Recreate, {what}", spec, seed, tmp_path)
    if what == "router image":
        assert account.failed == []
    assert not max(account.sent, key=lambda one: one.began).wrong
