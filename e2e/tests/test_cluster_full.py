"""Two engines of each role, and no room for another one: `Replace`, and a node that is drained."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from client_account import EVERY, Account
from cluster_access import Proxy
from cluster_install import Installation
from cluster_run import ClusterRun, manifest, running
from local_run import condition
from rollout_changes import (
    CHANGES,
    ROLL_SECONDS,
    at_rest,
    change,
    changed,
    no_outage,
    patch,
    told,
    uids,
    wait_for_answers,
    wait_for_rest,
)
from rollout_record import Record

from cluster.session import Cluster

pytestmark = [pytest.mark.cluster, pytest.mark.soak, pytest.mark.timeout(6000)]

# The quota has no place for a fifth engine, as a cluster without another GPU.
QUOTA = {
    "apiVersion": "v1",
    "kind": "ResourceQuota",
    "metadata": {"name": "full"},
    "spec": {"hard": {"requests.memory": "14Gi"}},  # four engines of 3 GiB, and routers
}
TWO = {"prefill": {"replicas": 2}, "decode": {"replicas": 2}}
ONE = {"prefill": {"replicas": 1}, "decode": {"replicas": 1}}


@pytest.fixture(scope="module")
def full(cluster: Cluster, proxy: Proxy, operator: Installation) -> Iterator[ClusterRun]:
    document = manifest(
        "full",
        engine={"maxModelLen": 4096},
        transfer={"internalNames": "Shown"},
        router={"replicas": 2},  # with one router, a drain of its node is an outage
        rollout={"type": "Replace"},
        **TWO,
    )
    with running(cluster, proxy, None, "full") as run:
        run.apply(QUOTA)
        run.apply(document)
        run.wait_ready(2 * ROLL_SECONDS)
        yield run


@pytest.mark.parametrize("what", CHANGES)
def test_replace_needs_no_room(full: ClusterRun, what: str, tmp_path: Path) -> None:
    spec = change(what, "Replace", full.cluster, tmp_path)
    seed = 400_000 + 10_000 * CHANGES.index(what)
    no_outage(*changed(full, f"Replace, {what}", spec, seed, tmp_path))


@pytest.mark.parametrize(("every", "seed"), [(EVERY, 90_000), (10 * EVERY, 120_000)])
def test_a_drain_of_a_node_loses_no_request(
    full: ClusterRun, every: float, seed: int, tmp_path: Path
) -> None:
    """`kubectl drain` evicts all pods of the node, as fast as the disruption budgets allow.

    There is only one node. It takes pods again at once, in the place of other nodes. With few
    requests, an engine that is evicted is quiet long before the routers have forgotten it.
    """
    wait_for_rest(full)
    before = uids(full)
    [node] = {pod["spec"]["nodeName"] for pod in full.pods()}
    drain = (
        *("drain", node, f"--pod-selector=pdcluster.dev/cluster={full.name}"),
        *("--ignore-daemonsets", "--delete-emptydir-data", f"--timeout={2 * ROLL_SECONDS:.0f}s"),
    )
    many = every == EVERY
    with Account(full, seed, every, streams=many) as account, Record(full, account) as seen:
        wait_for_answers(full, account)
        seen.mark("drain")
        with ThreadPoolExecutor(1) as pool:
            drained = pool.submit(full.cluster.kubectl, *drain)
            try:
                full.wait("cordon", lambda: drained.done() or cordoned(full, node), 60)
            finally:
                full.cluster.kubectl("uncordon", node)
            print(drained.result())
        took = wait_for_rest(full)
        seen.mark("at rest")
        wait_for_answers(full, account)
    what = f"drain, a request every {every:.1f} s: at rest {took:.0f} s later"
    told(full, what, account, seen, tmp_path)
    no_outage(account, seen)
    assert not set(before.values()) & set(uids(full).values()), "a pod was left out"


def holds(status: Mapping[str, Any]) -> bool:
    progressing, available = condition(status, "Progressing"), condition(status, "Available")
    why = "can make room" in progressing["message"]
    return bool(why and progressing["status"] == "False" and available["status"] == "True")


def cordoned(run: ClusterRun, node: str) -> bool:
    found = run.proxy.get(f"/api/v1/nodes/{node}")
    return bool(found and found["spec"].get("unschedulable"))


def test_replace_holds_where_no_engine_can_make_room(full: ClusterRun, tmp_path: Path) -> None:
    no_outage(*changed(full, "replicas 1 and 1", ONE, 100_000, tmp_path))
    before = uids(full)
    good = full.get()["spec"]["engine"]["blockSize"]
    patch(full, {"engine": {"blockSize": 128}})
    print(full.wait_status("reason while the old engines serve", holds, 120)["conditions"])
    assert uids(full) == before
    patch(full, {"engine": {"blockSize": good}})
    full.wait("rest", lambda: at_rest(full), ROLL_SECONDS)
