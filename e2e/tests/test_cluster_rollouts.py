"""Engines are replaced under load: no request fails, and the Service always has an endpoint."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from client_account import Account
from cluster_access import Proxy
from cluster_install import Installation
from cluster_run import ClusterRun, manifest, running
from rollout_record import Record

from cluster.session import Cluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(2400)]

ROLL_SECONDS = 800.0  # two engines after each other, on busy cores
CHANGES = {
    "env": {"decode": {"engine": {"env": [{"name": "A_VARIABLE", "value": "2"}]}}},
    "blockSize": {"engine": {"blockSize": 64}},
}


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


def patch(run: ClusterRun, spec: dict[str, Any]) -> None:
    run.kubectl("patch", "pdc", run.name, "--type=merge", "--patch", json.dumps({"spec": spec}))


def at_rest(run: ClusterRun) -> bool:
    """Whether what was asked for is done, to the last pod."""
    generation = (run.get() or {})["metadata"]["generation"]
    progress = run.condition("Progressing")
    done = progress["reason"] == "Complete" and run.condition("Ready")["status"] == "True"
    ending = any("deletionTimestamp" in pod["metadata"] for pod in run.pods())
    return done and progress.get("observedGeneration", generation) == generation and not ending


def changed(
    run: ClusterRun, what: str, spec: dict[str, Any], seed: int, folder: Path
) -> tuple[Account, Record]:
    """Change the spec under load. Returns when all is at rest again."""
    run.wait("rest", lambda: at_rest(run), ROLL_SECONDS)
    with Account(run, seed) as account, Record(run, account) as seen:
        run.wait("answers", lambda: len(account.sent) > 10, 180)
        seen.mark(what)
        patch(run, spec)
        run.wait("change", lambda: not at_rest(run), 30)
        took = run.wait("rest", lambda: at_rest(run), ROLL_SECONDS)
        seen.mark("at rest")
    told(run, f"{what}: {took:.0f} s", account, seen, folder)
    return account, seen


def told(run: ClusterRun, what: str, account: Account, seen: Record, folder: Path) -> None:
    """Print what clients got. What they got was right, and no link is between two pairing keys."""
    path = folder / f"{what.partition(':')[0].replace(' ', '-').replace(',', '')}.json"
    seen.write(path)
    print(f"{what}; {account.said()}; {path}", *account.failed[:10], sep="\n")
    assert seen.crossed == []
    good = [one for one in account.sent if not one.wrong]
    for one in (*good[:: max(1, len(good) // 20)], *[one for one in good if one.stream][:1]):
        reply = run.complete(one.prompt, role="prefill", tokens=one.tokens, ignore_eos=one.stream)
        assert reply.completion == one.answer, one.prompt


def no_outage(account: Account, seen: Record) -> None:
    assert account.failed == []
    assert seen.fewest_endpoints >= 1


@pytest.mark.parametrize("what", ["env", pytest.param("blockSize", marks=pytest.mark.soak)])
def test_surge_replaces_engines_and_no_request_fails(
    rolls: ClusterRun, what: str, tmp_path: Path
) -> None:
    seed = 10_000 * (1 + list(CHANGES).index(what))
    no_outage(*changed(rolls, f"Surge, {what}", CHANGES[what], seed, tmp_path))


@pytest.mark.soak
def test_decode_grows_an_engine_is_evicted_and_decode_shrinks_and_no_request_fails(
    rolls: ClusterRun, tmp_path: Path
) -> None:
    two, one = {"decode": {"replicas": 2}}, {"decode": {"replicas": 1}}
    no_outage(*changed(rolls, "replicas 2", two, 30_000, tmp_path))

    pod = max(pod["metadata"]["name"] for pod in rolls.pods("decode"))
    before = uids(rolls)
    with Account(rolls, 35_000) as account, Record(rolls, account) as seen:
        rolls.wait("answers", lambda: len(account.sent) > 10, 60)
        seen.mark("eviction")
        evict(rolls, pod)
        rolls.wait("another pod", lambda: uids(rolls).get(pod) != before[pod], ROLL_SECONDS)
        rolls.wait("rest", lambda: at_rest(rolls), ROLL_SECONDS)
    told(rolls, "eviction", account, seen, tmp_path)
    no_outage(account, seen)
    assert {name for name, uid in uids(rolls).items() if before.get(name) == uid} >= {
        name for name in before if name != pod and "router" not in name
    }

    no_outage(*changed(rolls, "replicas 1", one, 40_000, tmp_path))


def uids(run: ClusterRun) -> dict[str, str]:
    return {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in run.pods()}


def evict(run: ClusterRun, pod: str) -> None:
    """Do to one pod what `kubectl drain` does to each pod of a node."""
    eviction = {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": pod, "namespace": run.namespace},
    }
    path = f"/api/v1/namespaces/{run.namespace}/pods/{pod}/eviction"
    run.kubectl("create", f"--raw={path}", "--filename=-", stdin=json.dumps(eviction))


@pytest.mark.soak
@pytest.mark.timeout(4000)
def test_replace_needs_no_room_and_holds_where_nobody_can_make_it(
    cluster: Cluster, proxy: Proxy, operator: Installation, tmp_path: Path
) -> None:
    """The quota has no place for a fifth engine, as a cluster without another GPU."""
    quota = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "full"},
        "spec": {"hard": {"requests.memory": "13Gi"}},  # four engines of 3 GiB, and routers
    }
    document = manifest(
        "full",
        engine={"maxModelLen": 4096},
        transfer={"internalNames": "Shown"},
        prefill={"replicas": 2},
        decode={"replicas": 2},
        rollout={"type": "Replace"},
    )
    with running(cluster, proxy, None, "full") as run:
        run.apply(quota)
        run.apply(document)
        run.wait_ready(2 * ROLL_SECONDS)
        spec = {"decode": {"engine": {"env": [{"name": "A_VARIABLE", "value": "2"}]}}}
        no_outage(*changed(run, "Replace, env", spec, 80_000, tmp_path))

        alone = {"prefill": {"replicas": 1}, "decode": {"replicas": 1}}
        no_outage(*changed(run, "replicas 1 and 1", alone, 90_000, tmp_path))
        before = uids(run)
        patch(run, {"engine": {"blockSize": 64}})
        run.wait("reason", lambda: "can make room" in run.condition("Progressing")["message"], 60)
        print(run.condition("Progressing"))
        assert run.condition("Progressing")["status"] == "False"
        assert run.condition("Available")["status"] == "True"
        assert uids(run) == before


@pytest.mark.soak
def test_engines_that_cannot_start_take_nothing_away(rolls: ClusterRun, tmp_path: Path) -> None:
    """vLLM's CPU attention knows no such blocks. Only an engine that starts finds out."""
    rolls.wait("rest", lambda: at_rest(rolls), ROLL_SECONDS)
    good = rolls.get()["spec"]["engine"]["blockSize"]
    before = [rolls.restarts(role) for role in ("prefill", "decode")]
    with Account(rolls, 50_000) as account, Record(rolls, account) as seen:
        patch(rolls, {"engine": {"blockSize": 16}})
        said = "No common block size"
        rolls.wait("reason", lambda: said in rolls.condition("Ready")["message"], ROLL_SECONDS)
        assert rolls.condition("Available")["status"] == "True"
        seen.mark("the reason is in the status")
        patch(rolls, {"engine": {"blockSize": good}})
        rolls.wait("rest", lambda: at_rest(rolls), ROLL_SECONDS)
    told(rolls, "Surge, engines that cannot start", account, seen, tmp_path)
    no_outage(account, seen)
    assert [rolls.restarts(role) for role in ("prefill", "decode")] == before


@pytest.mark.soak
@pytest.mark.parametrize("what", CHANGES)
def test_recreate_serves_again_in_the_end(rolls: ClusterRun, what: str, tmp_path: Path) -> None:
    """It needs no spare GPU and no second engine, and it is an outage: how long is printed."""
    specs = {
        "env": {"decode": {"engine": {"env": [{"name": "A_VARIABLE", "value": "3"}]}}},
        "blockSize": {"engine": {"blockSize": 32}},
    }
    patch(rolls, {"rollout": {"type": "Recreate"}})
    seed = 60_000 + 10_000 * list(CHANGES).index(what)
    account, _ = changed(rolls, f"Recreate, {what}", specs[what], seed, tmp_path)
    assert not max(account.sent, key=lambda one: one.began).wrong
