"""When the Secret with the ticket keys is written: once, and again for each rotation.

``runtime/cluster_secrets.py`` makes the keys and keeps an old one. The connector's
``protocol/ticket_keys.py`` says when a new key begins to sign.
"""

from __future__ import annotations

from pdcluster_operator.api.labels import ROTATE_TICKET_KEY_ANNOTATION
from pdcluster_operator.api.spec.types import Cluster
from pdcluster_operator.plan.builders.ticket_key import build_ticket_key_secret
from pdcluster_operator.plan.model import Observed, WriteTicketKey


def ticket_key_step(observed: Observed, cluster: Cluster) -> WriteTicketKey | None:
    """Return the step that the Secret needs; None if it is as it should be.

    A Secret that exists keeps its keys. Only a new value of the annotation replaces one; taking the
    annotation away replaces none.
    """
    annotations = observed.cluster["metadata"].get("annotations") or {}
    wanted = str(annotations.get(ROTATE_TICKET_KEY_ANNOTATION, ""))
    held = observed.ticket_key
    if held is not None and wanted in ("", held.rotation):
        return None
    return WriteTicketKey(
        build_ticket_key_secret(cluster, wanted),
        rotate=held is not None,
        why="a new key that signs tickets; the old one stays valid"
        if held is not None
        else "the key that signs tickets",
    )
