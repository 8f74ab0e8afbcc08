"""The operator stopped, and killed: what stands stays, what is deleted goes."""

from __future__ import annotations

import random
import re
import time

import pytest
from cluster_access import Proxy
from cluster_install import Installation
from cluster_run import ClusterRun, manifest, running
from local_run import idle

from cluster.session import Cluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

SECONDS = 180.0  # in which all is there, or gone


def idler() -> dict:
    """A PDCluster that is complete in seconds: its engines and its router do nothing."""
    over = {"podTemplate": idle()}
    return manifest("idler", prefill=over, decode=over, router={"podTemplate": idle("router")})


@pytest.fixture(scope="module")
def idling(cluster: Cluster, proxy: Proxy, operator: Installation) -> ClusterRun:
    with running(cluster, proxy, None, "idler") as run:
        yield run


def standing(run: ClusterRun) -> list[str]:
    """All children by kind and name, without the random suffixes of Kubernetes."""
    drawn = re.compile(r"^(endpointslice\S*|pod/\S+-router-\S+)-[a-z0-9]{5}$")
    return sorted(drawn.sub(r"\1", name) for name in run.children())


def complete(run: ClusterRun) -> bool:
    """Whether all is there, also the slices, which Kubernetes makes in its own time."""
    names = run.children()
    services, slices = (
        sum(name.startswith(kind) for name in names) for kind in ("service/", "endpointslice")
    )
    made = len(run.pods()) == 3 and run.status().get("links") == "0/1"
    return made and 0 < services <= slices


def test_deleting_removes_everything(idling: ClusterRun) -> None:
    idling.apply(idler())
    idling.wait("children", lambda: complete(idling), SECONDS)
    print("\n".join(idling.children()))
    [connector] = idling.connectors()
    idling.kubectl("delete", "pdc", "idler")
    took = idling.wait("end", lambda: idling.children() == [], SECONDS)
    print(f"nothing left after {took:.1f} s")
    assert idling.connectors() == [connector], "it stays for the next PDCluster, and there is one"


def test_deleting_removes_everything_without_an_operator(
    idling: ClusterRun, operator: Installation
) -> None:
    idling.apply(idler())
    idling.wait("children", lambda: complete(idling), SECONDS)
    operator.scale("operator", 0)
    try:
        idling.kubectl("delete", "pdc", "idler", "--timeout=60s")
        took = idling.wait("end", lambda: idling.children() == [], SECONDS)
        print(f"nothing left after {took:.1f} s")
    finally:
        operator.scale("operator", 1)
    time.sleep(3)
    assert idling.children() == [], "an operator that comes back resurrects nothing"


# Half a minute a round: each kill waits for the end of a Lease.
@pytest.mark.parametrize(
    "rounds", [1, pytest.param(30, marks=[pytest.mark.soak, pytest.mark.timeout(2700)])]
)
def test_an_operator_killed_at_any_moment_ends_where_another_would(
    idling: ClusterRun, tiny: ClusterRun, operator: Installation, rounds: int
) -> None:
    tiny.wait_ready()
    served = flips(tiny)
    idling.apply(idler())
    idling.wait("children", lambda: complete(idling), SECONDS)
    wanted = standing(idling)
    idling.kubectl("delete", "pdc", "idler")
    idling.wait("end", lambda: idling.children() == [], SECONDS)
    source = random.Random(9)
    for _ in range(rounds):  # after each kill, the next operator waits for the Lease of this one
        idling.apply(idler())
        time.sleep(source.uniform(0, 1.5))
        operator.kill()
        idling.wait("children", lambda: complete(idling) and standing(idling) == wanted, SECONDS)
        idling.kubectl("delete", "pdc", "idler", "--wait=false")
        time.sleep(source.uniform(0, 0.7))
        operator.kill()
        idling.wait("end", lambda: idling.children() == [], SECONDS)
        operator.wait_ready()
        time.sleep(1)
        assert idling.children() == [], "nothing is resurrected"
    assert flips(tiny) == served, "a new operator asks before it judges"


def flips(run: ClusterRun) -> dict[str, tuple[str, str]]:
    """What Ready consists of, and since when. A message may change while nothing flips."""
    kinds = ("PrefillReady", "DecodeReady", "KVLinksEstablished", "KVPathVerified", "Available")
    found = {kind: run.condition(kind) for kind in (*kinds, "Ready")}
    return {kind: (one["status"], one["lastTransitionTime"]) for kind, one in found.items()}
