"""Which operator works on a PDCluster: one of its class, which holds the Lease of its namespace.

Operators of two releases may watch the same namespace. Without a Lease, each would undo what the
other does. The rules are those of Kubernetes' own leader election: a Lease whose holder has not
renewed it for its duration may be taken, and the time is measured from when *this* process saw
the last renewal, because clocks of two machines differ.
"""

import math
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from pdcluster_operator.api.object_names import FIELD_MANAGER, OPERATOR_LABELS
from pdcluster_operator.plan.types import Manifest

SHORTEST_SECONDS, LONGEST_SECONDS = 30, 120
RENEWALS_PER_SECOND = 1.0


def belongs_to(cluster: Manifest, operator_class: str | None) -> bool:
    """Whether operators of a class work on a cluster.

    Args:
        operator_class: empty for operators without a class; None for one that works on all.
    """
    asked = (cluster.get("spec") or {}).get("operatorClass") or ""
    return operator_class is None or bool(asked == operator_class)


def act_seconds(term: int) -> float:
    """Return for how long after a renewal a holder acts, which is well before another may begin."""
    return term * 2 / 3


def renew_seconds(term: int) -> float:
    """Return the time between two renewals."""
    return term / 3


def term_of(leases: int) -> int:
    """Return for how many seconds each Lease is held by a process that holds so many.

    A holder that renews no more keeps others away for so long. With the shortest term, a thousand
    namespaces were 100 renewals a second.
    """
    wanted = math.ceil(3 * leases / RENEWALS_PER_SECOND)
    return min(max(wanted, SHORTEST_SECONDS), LONGEST_SECONDS)


@dataclass(frozen=True, slots=True)
class Holding:
    """What the spec of a Lease says; all empty if there is no Lease."""

    holder: str = ""
    seconds: float = 0.0
    transitions: int = 0


def lease_name(operator_class: str) -> str:
    """Return the name of the Lease of the operators of one class."""
    return f"{FIELD_MANAGER}-{operator_class}" if operator_class else FIELD_MANAGER


def holding_of(lease: Manifest | None) -> Holding:
    """Read a Lease."""
    spec = (lease or {}).get("spec") or {}
    return Holding(
        str(spec.get("holderIdentity") or ""),
        float(spec.get("leaseDurationSeconds") or 0),
        min(int(spec.get("leaseTransitions") or 0), 2**31 - 2),  # the field holds one more
    )


def may_hold(held: Holding, me: str, unchanged_seconds: float) -> bool:
    """Whether ``me`` may write itself into a Lease.

    Args:
        unchanged_seconds: how long this process has seen the Lease as it is.
    """
    return held.holder in ("", me) or unchanged_seconds > held.seconds


def lease_manifest(
    live: Manifest | None,
    namespace: str,
    name: str,
    me: str,
    now: float,
    term: int = SHORTEST_SECONDS,
) -> dict[str, Any]:
    """Return the Lease to write, over ``live``, which the API server compares by version.

    Args:
        me: the new holder; empty to give the Lease back.
        now: seconds since the epoch.
    """
    held = holding_of(live)
    metadata: dict[str, Any] = {"name": name, "namespace": namespace, "labels": OPERATOR_LABELS}
    if live is not None:
        metadata["resourceVersion"] = live["metadata"]["resourceVersion"]
    moment = datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    before = ((live or {}).get("spec") or {}).get("acquireTime")
    return {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": metadata,
        "spec": {
            "holderIdentity": me,
            "leaseDurationSeconds": term if me else 1,
            "acquireTime": before if before and held.holder == me else moment,
            "renewTime": moment,
            "leaseTransitions": held.transitions + (me != "" and held.holder not in ("", me)),
        },
    }
