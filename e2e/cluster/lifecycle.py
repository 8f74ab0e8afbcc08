"""Up, down, status. Each may be repeated, and gives the same result from any state."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from cluster import access, binaries, certificates, dns, images, machine, network, policy
from cluster.api import Api
from cluster.daemons import Programs
from cluster.locks import alone
from cluster.packages import ensure_packages
from cluster.places import Places
from cluster.report import ClusterError, say

PATIENCE = 120.0
LAST_LINES = 15


def users_own() -> str:
    """The value of KUBECONFIG, if it names a cluster that is not ours; else empty."""
    named = os.environ.get("KUBECONFIG", "")
    return "" if named == str(Places.of_user().kubeconfig) else named


def up(places: Places) -> Programs:
    """Start the cluster unless it is up. Returns the paths of the programs by name.

    Raises:
        ClusterError: why there is no cluster, and what to do.
    """
    if os.geteuid():
        raise ClusterError(
            "a node's namespaces need root: repeat this as root, or set KUBECONFIG "
            "to a cluster that you have"
        )
    ensure_packages()
    programs = binaries.provide(binaries.NODE_PROGRAMS, places)
    with _alone(places):
        _up(places, programs)
    return programs


def _up(places: Places, programs: Programs) -> None:
    paths = json.dumps({name: str(path) for name, path in programs.items()})
    if healthy(places) and _programs_file(places).read_text() == paths:
        return
    if machine.running() or places.node.exists():
        say("  removing what an earlier cluster left")
        machine.stop(places)
    started = time.monotonic()
    network.check_free()
    for folder in (places.node, places.settings, places.logs, places.ended):
        folder.mkdir()
    certificates.make_certificates(places.keys)
    access.write_access(places.keys, places.settings)
    _programs_file(places).write_text(paths)
    machine.start(places)
    images.load_own(places, programs)
    _until_ready(places, programs)
    kubeconfig = (places.settings / f"{access.ADMIN}.kubeconfig").read_text()
    access.write_secret(places.kubeconfig, kubeconfig)
    version = binaries.pinned_version(binaries.NODE_PROGRAMS[0])
    say(f"  Kubernetes {version} is up after {time.monotonic() - started:.1f} s")


def down(places: Places) -> None:
    """Remove the cluster and everything it left on this machine, except the built programs."""
    started = time.monotonic()
    with _alone(places):
        machine.stop(places)
    say(f"  the cluster is down after {time.monotonic() - started:.1f} s")


def healthy(places: Places) -> bool:
    """Whether a cluster is up with all of its programs."""
    return (
        places.kubeconfig.exists()
        and machine.running()
        and not ended(places)
        and Api(places.kubeconfig).ready()
    )


def ended(places: Places) -> dict[str, str]:
    """The node's programs that should run but do not: the name, and how each ended."""
    if not places.ended.exists():
        return {}
    return {path.name: path.read_text() for path in sorted(places.ended.iterdir())}


def _alone(places: Places) -> AbstractContextManager[None]:
    return alone(places.home / "cluster.lock", "starts or ends the cluster")


def _programs_file(places: Places) -> Path:
    return places.settings / "programs.json"


def _until_ready(places: Places, programs: Programs) -> None:
    api = Api(places.settings / f"{access.ADMIN}.kubeconfig")
    _wait(places, "the API server", api.ready)
    dns.apply(places, programs)
    _wait(places, "the node", api.node_ready)
    _wait(places, "NetworkPolicies", lambda: policy.enforcing(places))
    # Without this account, the API server would refuse the first pod of a test.
    account = "/api/v1/namespaces/default/serviceaccounts/default"
    _wait(places, "the default ServiceAccount", lambda: api.exists(account))
    _wait(places, "DNS", lambda: dns.ready(api))


def _wait(places: Places, what: str, condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        for name, how in ended(places).items():
            log = places.logs / f"{name}.log"
            lines = "\n".join(log.read_text().splitlines()[-LAST_LINES:])
            raise ClusterError(f"{name} {how}; the last lines of {log}:\n{lines}")
        if not machine.running():
            raise ClusterError(f"the node ended:\n{(places.logs / 'node.log').read_text()}")
        if time.monotonic() > end:
            raise ClusterError(f"{what}: not ready after {PATIENCE:.0f} s; logs: {places.logs}")
        time.sleep(0.05)
