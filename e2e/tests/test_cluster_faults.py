"""Pods are deleted under load. The link shows it, other pods keep running, and all recovers."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from pathlib import Path

import pytest
from cluster_run import ClusterRun, broken_under_load, is_false
from kv_load import Knocks, Load, moved, text
from local_run import condition
from status_watch import StatusWatch

from cluster import cgroups

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

RECOVERY_SECONDS = 400.0


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_an_engines_pod_that_is_deleted_comes_back_and_kv_moves_again(
    tiny: ClusterRun, role: str
) -> None:
    """Pods that are killed are in test_cluster_layouts.py and test_cluster_policies.py."""
    tiny.wait_ready()
    other = "decode" if role == "prefill" else "prefill"
    before, survivor, other_pod = tiny.engine_id(role), tiny.engine_id(other), tiny.restarts(other)
    seed = 1000 * (1 + ["prefill", "decode"].index(role))
    # Ready is False for the first reason that is seen; the link may follow.
    broken_under_load(tiny, tiny.pod(role), seed, also="KVLinksEstablished")

    took = tiny.wait_ready(RECOVERY_SECONDS)
    print(f"Ready again after {took:.0f} s")
    assert tiny.engine_id(role).rpartition("/")[0] == before.rpartition("/")[0]
    assert tiny.engine_id(role) != before, "a restart is a new incarnation"
    assert tiny.engine_id(other) == survivor
    assert tiny.restarts(other) == other_pod, "the other engine lived on"
    moved(tiny, text(60, seed + 400))


# Sends a signal to all processes of a pod but its first one, the launcher.
SIGNAL = (
    "import os, sys; [os.kill(int(pid), int(sys.argv[1])) for pid in os.listdir('/proc') "
    "if pid.isdigit() and int(pid) not in (1, os.getpid())]"
)


def launcher_of(pod: str) -> int:
    """The host's number of the process that is 1 in an engine's pod."""
    for pid in cgroups.processes():
        with contextlib.suppress(OSError):
            inside = Path(f"/proc/{pid}/status").read_text().partition("\nNSpid:")[2].split("\n")[0]
            named = f"HOSTNAME={pod}\0".encode() in Path(f"/proc/{pid}/environ").read_bytes()
            if named and inside.split()[-1] == "1":
                return pid
    raise AssertionError(f"{pod} has no process")


# That a launcher is silent shows after its long poll.
@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_an_engine_that_is_stopped_is_named_as_frozen_and_goes_on(
    tiny: ClusterRun, whole: bool
) -> None:
    tiny.wait_ready()
    pod, before = tiny.pod("decode"), tiny.restarts("decode")
    send = ("exec", pod, "--container=engine", "--", "python3", "-c", SIGNAL)

    def says(reason: str, words: str) -> None:
        since = time.monotonic()
        status = tiny.wait_status(
            reason, lambda seen: condition(seen, "DecodeReady")["reason"] == reason, 120
        )
        found = condition(status, "DecodeReady")
        print(f"after {time.monotonic() - since:.1f} s: {found}")
        assert re.search(words, found["message"])
        assert condition(status, "Ready")["reason"] == reason

    launcher = 0
    tiny.kubectl(*send, str(int(signal.SIGSTOP)))
    try:
        says("EngineFrozen", rf"{pod}: a signal \(SIGSTOP\) has stopped \d+ of vLLM's processes")
        if whole and tiny.cluster.ours:
            os.kill(launcher := launcher_of(pod), signal.SIGSTOP)
            says("ContainerFrozen", f"the container of {pod} runs, but fails its readiness probe")
    finally:
        if launcher:
            os.kill(launcher, signal.SIGCONT)
        tiny.kubectl(*send, str(int(signal.SIGCONT)))
    took = tiny.wait_ready(RECOVERY_SECONDS)
    print(f"Ready again after {took:.0f} s")
    assert tiny.restarts("decode") == before
    moved(tiny, text(60, 3400))


def test_a_routers_pod_that_is_deleted_loses_no_request(tiny: ClusterRun) -> None:
    """The only router: it serves while it is being deleted, until another one is ready."""
    tiny.wait_ready()
    engines = [tiny.restarts(role) for role in ("prefill", "decode")]
    knock = tiny.knocker()
    with (
        Knocks(knock) as knocks,
        Load(tiny, lambda number: text(60, 4000 + number)) as load,
        StatusWatch(tiny) as statuses,
    ):
        tiny.wait("request that is answered", lambda: load.answered, 120)
        old = tiny.pod("router")
        tiny.kubectl("delete", "pod", old, "--wait=false")
        status = statuses.wait("Ready=False", is_false("Ready"), 60)
        assert condition(status, "Ready")["reason"] == "RouterUnavailable"
        assert condition(status, "KVPathVerified")["status"] == "True"
        took = tiny.wait_ready(120)
        gone = tiny.wait(
            "end of the old pod",
            lambda: all(pod["metadata"]["name"] != old for pod in tiny.pods("router")),
            120,
        )
    print(
        f"Ready again after {took:.0f} s, the old pod gone {gone:.0f} s later; {knocks.opened} "
        f"connections, the longest answer {knocks.longest:.1f} s; {len(load.replies)} requests"
    )
    assert knocks.failed == []
    assert load.broken == []
    assert [reply.text for reply in load.replies if reply.status != 200] == []
    assert [tiny.restarts(role) for role in ("prefill", "decode")] == engines
    moved(tiny, text(60, 3000))
