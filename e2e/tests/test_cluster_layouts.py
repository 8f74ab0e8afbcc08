"""Engines of several ranks: in one pod, and in two.

With different numbers of ranks they are in test_local_layouts.py and test_engine_layouts.py.
"""

from __future__ import annotations

import pytest
from cluster_access import Proxy
from cluster_install import Installation
from cluster_run import KILLED, ClusterRun, broken_under_load, manifest, running
from kv_load import moved, text
from local_run import END_AT_ONCE, START_SECONDS, tensor

from cluster.session import Cluster
from pdcluster_operator.api.object_names import LAUNCHER_PORT

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200)]

END_SECONDS = 240.0  # the pods' grace period is 90


def test_engines_of_two_ranks_in_one_pod_and_in_two(
    cluster: Cluster, proxy: Proxy, operator: Installation
) -> None:
    """Decode's ranks share a pod, and prefill's have one each, which live and die as one."""
    router = {"podTemplate": {"spec": {"containers": [{"name": "router", **END_AT_ONCE}]}}}
    document = manifest("two-pods", prefill=tensor(2, nodes=2), decode=tensor(2), router=router)
    with running(cluster, proxy, document, "two-pods") as run:
        took = run.wait_ready(2 * START_SECONDS)
        print(f"Ready after {took:.0f} s")
        leader, follower = sorted(pod["metadata"]["name"] for pod in run.pods("prefill"))
        assert (leader[-2:], follower[-2:]) == ("-0", "-1")
        before = _engine_id(run, leader)
        assert _engine_id(run, follower) == before, "one engine id in all ranks"
        links = run.at_own_launcher(run.pod("decode"), "/v1/links")
        [link] = links["links"]
        assert link["shards"] == "2/2", "every decode rank has its link"
        for seed in range(8):
            moved(run, text(20 + 10 * seed, 8000 + seed))

        decode = run.restarts("decode")
        broken_under_load(run, follower, 8200, *KILLED)
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

        run.kubectl("delete", "pdc", "two-pods", "--wait=false")
        took = run.wait("end", lambda: run.children() == [], END_SECONDS)
        print(f"nothing left {took:.1f} s after it was deleted")


def _engine_id(run: ClusterRun, pod: str) -> str:
    return str(run.at_pod(pod, LAUNCHER_PORT, "GET", "/readyz").document["engine_id"])
