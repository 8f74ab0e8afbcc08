"""NetworkPolicy: the program of `tools/policy`, which this kernel's nftables suffices for."""

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
    """Whether a policy that is applied from now on is obeyed."""
    log = places.logs / f"{NAME}.log"
    return log.exists() and " enforcing\n" in log.read_text()
