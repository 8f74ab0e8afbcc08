"""A new revision is tried out on the API server before it replaces anything.

The revision is stored once the server would take its objects. So a stored revision has passed,
and one that was refused leaves the engines as they are.
"""

from __future__ import annotations

from typing import Any

from pdcluster_operator.api.labels import POD_INDEX_LABEL
from pdcluster_operator.api.object_names import EngineName
from pdcluster_operator.api.spec.types import Cluster
from pdcluster_operator.plan.builders.engine_statefulset import build_engine_statefulset
from pdcluster_operator.plan.model import TryOut
from pdcluster_operator.plan.objects.drift import stamped
from pdcluster_operator.plan.rollout.moves import MAKE_ROOM
from pdcluster_operator.plan.rollout.stored import Revision, build_revision, engine_template

REFUSALS = frozenset({"Invalid", "Forbidden", "BadRequest"})
"""What an API server answers to an object that it does not take. Anything else is its trouble."""
USED_UP = "exceeded quota"


def try_out(cluster: Cluster, revision: Revision, *, beside: bool) -> TryOut:
    """Return the step that tries a revision out.

    Args:
        beside: the new engines are to run while the old ones do.
    """
    name = EngineName(cluster.namespace, cluster.name, revision.role, revision.name, 0)
    engine = build_engine_statefulset(
        cluster,
        name,
        engine_template(revision, name),
        pairing_key=revision.pairing_key,
        nodes=revision.nodes,
    )
    why = f"would the API server take {revision.role} engines of revision {revision.name}?"
    return TryOut(
        (engine, _pod_of(engine)), stamped(build_revision(cluster, revision)), beside, why
    )


def refusal(step: TryOut, kind: str, reason: str, message: str) -> str | None:
    """Return why a revision is refused, in words; None if this answer does not refuse it.

    Args:
        reason, message: what the API server answered to the dry run of a ``kind``.
    """
    if reason not in REFUSALS:
        return None
    if USED_UP in message and not step.beside:
        return None
    remedy = f"; {MAKE_ROOM}" if USED_UP in message else ""
    return f"the API server refuses the new {kind}, so the old engines serve on: {message}{remedy}"


def _pod_of(engine: dict[str, Any]) -> dict[str, Any]:
    """Return a pod as the StatefulSet would make it, with a name that the server makes up."""
    template, metadata = engine["spec"]["template"], engine["metadata"]
    labels = {**template["metadata"]["labels"], POD_INDEX_LABEL: "0"}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            **template["metadata"],
            "generateName": f"{metadata['name']}-",
            "namespace": metadata["namespace"],
            "labels": labels,
        },
        "spec": template["spec"],
    }
