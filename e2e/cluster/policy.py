"""NetworkPolicy, enforced by the program of `tools/policy`. It needs only the kernel's nftables."""

from __future__ import annotations

from cluster import network
from cluster.daemons import Daemon, Programs
from cluster.places import Places

NAME = "policy"


def enforcer(places: Places, programs: Programs) -> Daemon:
    return Daemon(
        NAME,
        (
            programs["policy"],
            f"--kubeconfig={places.settings / 'policy.kubeconfig'}",
            f"--node={network.NODE_NAME}",
        ),
    )


def enforcing(places: Places) -> bool:
    """Whether a policy that is applied from now on is enforced."""
    log = places.logs / f"{NAME}.log"
    return log.exists() and " enforcing\n" in log.read_text()
