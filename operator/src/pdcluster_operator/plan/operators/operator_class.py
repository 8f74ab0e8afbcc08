"""Which operators work on a PDCluster: those of its class.

Of these, the one that holds the Lease of the namespace works (``namespace_lease.py``).
``runtime/control_loop.py`` asks both.
"""

from __future__ import annotations

from pdcluster_operator.plan.types import Manifest


def belongs_to(cluster: Manifest, operator_class: str | None) -> bool:
    """Whether operators of a class work on a cluster.

    Args:
        operator_class: empty for operators without a class; None for one that works on all.
    """
    asked = (cluster.get("spec") or {}).get("operatorClass") or ""
    return operator_class is None or bool(asked == operator_class)
