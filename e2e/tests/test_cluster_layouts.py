"""Engines of other shapes: more ranks on one side, and engines of two pods."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
from cluster_access import Proxy
from cluster_install import Installation
from cluster_run import ClusterRun, manifest, running
from kv_load import moved, text
from local_run import START_SECONDS

from cluster.session import Cluster
from pdcluster_operator.api.labels import LAUNCHER_PORT

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200)]

END_SECONDS = 120.0  # the pods' grace period is 90


def tensor(ranks: int, nodes: int = 1) -> dict[str, Any]:
    return {"parallelism": {"tensor": ranks, "nodes": nodes}}


@pytest.mark.parametrize(("prefill", "decode"), [(2, 1), (1, 2)])
def test_ranks_differ(
    cluster: Cluster, proxy: Proxy, operator: Installation, prefill: int, decode: int
) -> None:
    name = f"tp-{prefill}-{decode}"
    document = manifest(name, prefill=tensor(prefill), decode=tensor(decode))
    with running(cluster, proxy, document, name) as run:
        took = run.wait_ready()
        print(f"Ready after {took:.0f} s")
        for seed in range(8):
            moved(run, text(20 + 10 * seed, 7000 + seed))
        links = run.at_pod(run.pod("decode"), LAUNCHER_PORT, "GET", "/v1/links").document
        [link] = links["links"]
        assert link["shards"] == f"{decode}/{decode}", "every decode rank has its link"
        run.kubectl("delete", "pdc", name)
        took = run.wait("end", lambda: run.children() == [], END_SECONDS)
        print(f"nothing left {took:.1f} s after it was deleted")


def test_an_engine_of_two_pods_serves_and_restarts_as_one(
    cluster: Cluster, proxy: Proxy, operator: Installation
) -> None:
    document = manifest("two-pods", prefill=tensor(2, nodes=2))
    with running(cluster, proxy, document, "two-pods") as run:
        took = run.wait_ready(2 * START_SECONDS)
        print(f"Ready after {took:.0f} s")
        leader, follower = sorted(pod["metadata"]["name"] for pod in run.pods("prefill"))
        assert (leader[-2:], follower[-2:]) == ("-0", "-1")
        before = _engine_id(run, leader)
        assert _engine_id(run, follower) == before, "one engine id in all ranks"
        for seed in range(8):
            moved(run, text(20 + 10 * seed, 8000 + seed))

        decode = run.restarts("decode")
        run.kubectl("delete", "pod", follower, "--wait=false", "--force", "--grace-period=0")
        took = run.wait_not_ready(10)
        print(f"follower deleted: {run.condition('Ready')} after {took:.1f} s")
        took = run.wait_ready(2 * START_SECONDS)
        print(f"Ready again after {took:.0f} s")
        after = _engine_id(run, leader)
        assert after != before, "the leader restarted with its follower"
        assert after.rpartition("/")[0] == before.rpartition("/")[0]
        assert _engine_id(run, follower) == after
        assert run.restarts("decode") == decode, "the other engine lived on"
        moved(run, text(60, 8100))


def test_data_parallel_ranks_in_two_pods(
    cluster: Cluster, proxy: Proxy, operator: Installation
) -> None:
    document = manifest("data", prefill={"parallelism": {"data": 2, "nodes": 2}})
    with running(cluster, proxy, document, "data") as run:
        took = run.wait_ready(2 * START_SECONDS)
        print(f"Ready after {took:.0f} s")
        leader, follower = sorted(pod["metadata"]["name"] for pod in run.pods("prefill"))
        engine_id = _engine_id(run, leader)
        assert _engine_id(run, follower) == engine_id
        links = run.at_pod(run.pod("decode"), LAUNCHER_PORT, "GET", "/v1/links").document
        [link] = links["links"]
        assert link["shards"] == "2/2", "one pair for each data-parallel rank"
        prompts = [text(40 + 10 * seed, 9000 + seed) for seed in range(8)]
        with ThreadPoolExecutor(len(prompts)) as threads:
            replies = list(threads.map(partial(moved, run), prompts))
        ranks = {reply.kv_path["prefill"] for reply in replies}
        assert ranks == {f"{engine_id}_dp0", f"{engine_id}_dp1"}, "both pods computed prompts"


def _engine_id(run: ClusterRun, pod: str) -> str:
    return str(run.at_pod(pod, LAUNCHER_PORT, "GET", "/readyz").document["engine_id"])
