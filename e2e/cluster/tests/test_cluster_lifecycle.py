"""Up and down, also repeated and interrupted, leave nothing on the machine."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import pytest

from cluster import cgroups, lifecycle, machine, network
from cluster.commands import run
from cluster.places import PACKAGE, Places
from cluster.report import ClusterError

pytestmark = pytest.mark.cluster

# Counters and clocks, which change by themselves.
RESTLESS = re.compile(
    r"^(fs\.(dentry-state|inode-(nr|state)|file-nr|aio-nr|quota)|kernel\.(random|ns_last_pid|pty\.nr|"
    r"perf_event_max_sample_rate)|net\.netfilter\.nf_conntrack_count|vm\.stat_refresh)"
)


def fingerprint() -> dict[str, object]:
    """What a cluster could leave behind on the host."""
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    sysctls = run("sysctl", "-a").splitlines()
    return {
        "mounts": sorted(line.split()[4] for line in mounts),
        "links": sorted(link["ifname"] for link in json.loads(run("ip", "-j", "link"))),
        "routes": sorted(run("ip", "-4", "route", "show", "table", "all").splitlines()),
        "rules": run("nft", "list", "ruleset"),
        "cgroups": sorted(
            str(path)
            for hierarchy in cgroups.hierarchies()
            for path in hierarchy.path.iterdir()
            if path.is_dir()
        ),
        "sysctls": [line for line in sysctls if not RESTLESS.match(line)],
        "folders": sorted(
            str(path)
            for folder in ("/run", "/var/lib", "/var/log", "/etc", "/opt")
            for path in Path(folder).iterdir()
        ),
        "node": Places.of_user().node.exists(),
    }


def networks(processes: Iterable[int]) -> set[str]:
    """The network namespaces that these processes are in."""
    found = set()
    for pid in processes:
        with contextlib.suppress(OSError):
            found.add(os.readlink(f"/proc/{pid}/ns/net"))
    return found


def program(pid: int) -> str | None:
    """The name of a process; None once it has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return None


@pytest.fixture
def places() -> Places:
    """No cluster before and after the test."""
    if lifecycle.users_own():
        pytest.skip("KUBECONFIG names another cluster; these are tests of our own")
    places = Places.of_user()
    if machine.running():
        pytest.skip("a cluster is up, and these tests would take it down: make cluster-down")
    machine.stop(places)
    yield places
    machine.stop(places)


def command(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "cluster", *arguments],
        env={**os.environ, "PYTHONPATH": str(PACKAGE.parent)},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def outcome(*arguments: str) -> tuple[int, str]:
    process = command(*arguments)
    text, _ = process.communicate(timeout=280)
    return process.returncode, text


def test_down_leaves_nothing(places):
    lifecycle.ensure_packages()
    before = fingerprint()
    lifecycle.up(places)
    kubectl = ["--kubeconfig", str(places.kubeconfig)]
    program = places.links / "kubectl"
    # A pod that is running, with a network of its own, when the end comes.
    run(program, *kubectl, "run", "idle", "--image=local/pod:1", "--image-pull-policy=Never")
    run(program, *kubectl, "wait", "--for=condition=Ready", "pod/idle", "--timeout=120s")
    during = fingerprint()
    assert network.HOST_LINK in during["links"]
    assert during["node"]
    inside = networks(cgroups.processes())
    assert len(inside) >= 3, "the node's own, CoreDNS's and the idle pod's"
    lifecycle.down(places)
    everything = (int(folder.name) for folder in Path("/proc").glob("[0-9]*"))
    assert not inside & networks(everything)
    assert fingerprint() == before
    assert not places.kubeconfig.exists()


def daemons() -> set[int]:
    """The node's lasting processes. Others start and end with every probe and every rule."""
    names = {"etcd", "kube-apiserver", "kube-scheduler", "kubelet", "kube-proxy", "containerd"}
    return {pid for pid in cgroups.processes() if program(pid) in names}


def test_two_ups_at_once_and_a_later_one_are_one_cluster(places):
    both = [command("up"), command("up")]
    texts = [process.communicate(timeout=280)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], texts
    assert sum("is up after" in text for text in texts) == 1
    first = daemons()
    assert len(first) >= 6
    code, text = outcome("up")
    assert code == 0
    assert f"export KUBECONFIG={places.kubeconfig}" in text
    assert "is up after" not in text, "there was nothing to start"
    assert first <= daemons()
    assert outcome("status")[0] == 0


def test_down_twice_is_no_error(places):
    assert outcome("down")[0] == 0
    assert outcome("down")[0] == 0
    assert outcome("status") == (3, "no cluster\n")


def test_up_that_is_killed_half_way_can_be_repeated(places):
    process = command("up")
    while not machine.running():
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert outcome("status")[0] == 1
    lifecycle.up(places)
    assert lifecycle.healthy(places)


def test_program_that_ends_is_named(places):
    lifecycle.up(places)
    scheduler = [pid for pid in cgroups.processes() if program(pid) == "kube-scheduler"]
    os.kill(scheduler[0], signal.SIGKILL)
    while not lifecycle.ended(places):
        time.sleep(0.05)
    code, text = outcome("status")
    assert code == 1
    assert "kube-scheduler was killed by signal 9" in text
    lifecycle.up(places)
    assert outcome("status")[0] == 0


def test_network_that_is_taken_is_said(places):
    run("ip", "link", "add", "taken0", "type", "veth", "peer", "name", "taken1")
    try:
        run("ip", "link", "set", "taken0", "up")
        run("ip", "route", "add", "10.244.0.0/16", "dev", "taken0")
        with pytest.raises(ClusterError, match=r"routes 10\.244\.0\.0/16 to taken0.*KUBECONFIG"):
            lifecycle.up(places)
        assert not machine.running()
    finally:
        run("ip", "link", "delete", "taken0")


def test_users_cluster_is_left_alone(places, monkeypatch):
    monkeypatch.setenv("KUBECONFIG", "/some/where/else")
    code, text = outcome("up")
    assert (code, machine.running()) == (0, False)
    assert "KUBECONFIG is set to /some/where/else" in text
