"""Engines of other shapes: more ranks on one side, and an engine of two pods."""

from __future__ import annotations

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


def test_more_ranks_on_decode(cluster: Cluster, proxy: Proxy, operator: Installation) -> None:
    with running(cluster, proxy, manifest("ranks", decode=tensor(2)), "ranks") as run:
        took = run.wait_ready()
        print(f"Ready after {took:.0f} s")
        for seed in range(8):
            moved(run, text(20 + 10 * seed, 7000 + seed))
        links = run.at_pod(run.pod("decode"), LAUNCHER_PORT, "GET", "/v1/links").document
        [link] = links["links"]
        assert link["shards"] == "2/2", "every decode rank has its link"
        run.kubectl("delete", "pdc", "ranks")
        took = run.wait("end", lambda: run.children() == [], END_SECONDS)
        print(f"nothing left {took:.1f} s after it was deleted")


def test_an_engine_of_two_pods_serves_and_restarts_as_one(
    cluster: Cluster, proxy: Proxy, operator: Installation
) -> None:
    """The same with two ranks on prefill and one on decode."""
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
        restarts = [run.restarts("prefill", pod)[1] for pod in (0, 1)]
        assert restarts == [1, 0], "the follower's next start waited for the leader's"
        moved(run, text(60, 8100))


def _engine_id(run: ClusterRun, pod: str) -> str:
    return str(run.at_pod(pod, LAUNCHER_PORT, "GET", "/readyz").document["engine_id"])
