"""Two engines of each role, and no room for another one: `Replace`, and a node that is drained."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from client_account import Account
from cluster_access import Proxy
from cluster_install import Installation
from cluster_run import ClusterRun, manifest, running
from rollout_changes import (
    ROLL_SECONDS,
    at_rest,
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


def test_replace_needs_no_room(full: ClusterRun, tmp_path: Path) -> None:
    spec = {"decode": {"engine": {"env": [{"name": "A_VARIABLE", "value": "2"}]}}}
    no_outage(*changed(full, "Replace, env", spec, 80_000, tmp_path))


def test_a_drain_of_a_node_loses_no_request(full: ClusterRun, tmp_path: Path) -> None:
    """`kubectl drain` evicts all pods of the node, as fast as the disruption budgets allow.

    There is only one node. It takes pods again at once, in the place of other nodes.
    """
    wait_for_rest(full)
    before = uids(full)
    [node] = {pod["spec"]["nodeName"] for pod in full.pods()}
    drain = (
        *("drain", node, f"--pod-selector=pdcluster.dev/cluster={full.name}"),
        *("--ignore-daemonsets", "--delete-emptydir-data", f"--timeout={2 * ROLL_SECONDS:.0f}s"),
    )
    with Account(full, 90_000) as account, Record(full, account) as seen:
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
    told(full, f"drain: at rest {took:.0f} s later", account, seen, tmp_path)
    no_outage(account, seen)
    assert not set(before.values()) & set(uids(full).values()), "a pod was left out"


def cordoned(run: ClusterRun, node: str) -> bool:
    found = run.proxy.get(f"/api/v1/nodes/{node}")
    return bool(found and found["spec"].get("unschedulable"))


def test_replace_holds_where_no_engine_can_make_room(full: ClusterRun, tmp_path: Path) -> None:
    no_outage(*changed(full, "replicas 1 and 1", ONE, 100_000, tmp_path))
    before = uids(full)
    patch(full, {"engine": {"blockSize": 64}})
    full.wait("reason", lambda: "can make room" in full.condition("Progressing")["message"], 120)
    print(full.condition("Progressing"))
    assert full.condition("Progressing")["status"] == "False"
    assert full.condition("Available")["status"] == "True"
    assert uids(full) == before
    patch(full, {"engine": {"blockSize": 32}})
    full.wait("rest", lambda: at_rest(full), ROLL_SECONDS)
