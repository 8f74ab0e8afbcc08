"""Pods are deleted under load. The link shows it, other pods keep running, and all recovers."""

from __future__ import annotations

import pytest
from cluster_run import ClusterRun
from kv_load import Load, moved, text

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

RECOVERY_SECONDS = 400.0


def breaks(run: ClusterRun, role: str, seed: int, *words: str) -> None:
    """Delete a role's pod under load. Ready is False within 5 s, and no wrong token is served."""
    with Load(run, lambda number: text(100, seed + number)) as load:
        run.wait("request that is answered", lambda: load.answered, 30)
        run.kubectl("delete", "pod", run.pod(role), "--wait=false", *words)
        seen = run.wait_not_ready(10)
        ready = run.condition("Ready")
        print(
            f"{role} deleted: Ready=False {ready['reason']} after {seen:.1f} s: {ready['message']}"
        )
        assert seen < 5, f"it showed only after {seen:.1f} s"
    for reply in load.replies:
        # With the policy Fail, a request succeeds or gets an error, but never wrong tokens.
        if reply.status == 200:
            assert reply.kv_path["outcome"] == "transferred", reply.text
        else:
            assert 500 <= reply.status < 600, reply.text


@pytest.mark.parametrize("how", ["deleted", "killed"])
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_an_engines_pod_comes_back_and_kv_moves_again(
    tiny: ClusterRun, role: str, how: str
) -> None:
    tiny.wait_ready()
    other = "decode" if role == "prefill" else "prefill"
    before, survivor, other_pod = tiny.engine_id(role), tiny.engine_id(other), tiny.restarts(other)
    seed = 1000 * (1 + ["prefill", "decode"].index(role)) + (500 if how == "killed" else 0)
    breaks(tiny, role, seed, *(["--force", "--grace-period=0"] if how == "killed" else []))
    assert tiny.condition("KVLinksEstablished")["status"] == "False"

    took = tiny.wait_ready(RECOVERY_SECONDS)
    print(f"Ready again after {took:.0f} s")
    assert tiny.engine_id(role).rpartition("/")[0] == before.rpartition("/")[0]
    assert tiny.engine_id(role) != before, "a restart is a new incarnation"
    assert tiny.engine_id(other) == survivor
    assert tiny.restarts(other) == other_pod, "the other engine lived on"
    moved(tiny, text(60, seed + 400))


def test_the_routers_pod_comes_back(tiny: ClusterRun) -> None:
    tiny.wait_ready()
    engines = [tiny.restarts(role) for role in ("prefill", "decode")]
    tiny.kubectl("delete", "pod", tiny.pod("router"), "--wait=false")
    tiny.wait_not_ready(10)
    assert tiny.condition("Ready")["reason"] == "RouterUnavailable"
    assert tiny.condition("KVPathVerified")["status"] == "True"
    took = tiny.wait_ready(120)
    print(f"Ready again after {took:.0f} s")
    assert [tiny.restarts(role) for role in ("prefill", "decode")] == engines
    moved(tiny, text(60, 3000))
