"""Which certificates each engine has, by what the operator made and stored.

A pod's own labels do not count: whoever may patch pods could change them, and have the operator
speak plain HTTP with an engine that has TLS. The template of the pod's StatefulSet counts. A pod
outlives its StatefulSet for a while; then the stored revision counts. Of a pod with neither of them
nothing is known, and the operator speaks no plain HTTP with it.
"""

from __future__ import annotations

from collections.abc import Iterable

from pdcluster_operator.api.labels import engine_of
from pdcluster_operator.api.object_names import EngineName
from pdcluster_operator.api.spec.enums import Certificates
from pdcluster_operator.plan.builders.certificates import certificates_of_template
from pdcluster_operator.plan.model import Manifest
from pdcluster_operator.plan.rollout.stored import revisions_in


def certificates_by_engine(
    pods: Iterable[Manifest], children: Iterable[Manifest]
) -> dict[EngineName, Certificates]:
    """Return which certificates the engine of each pod has.

    Args:
        pods: the pods that the cluster's own workloads made; see :mod:`..objects.ownership`.
        children: the objects that the cluster controls.
    """
    children = tuple(children)
    sets = {
        str(child["metadata"]["name"]): child["spec"]["template"]
        for child in children
        if child.get("kind") == "StatefulSet"
    }
    engines = {name for name in map(engine_of, pods) if name is not None}
    templates = {name: sets.get(name.stateful_set) for name in engines}
    if None in templates.values():
        stored = {(one.role, one.name): one.template for one in revisions_in(children)}
        for name in engines:
            templates[name] = templates[name] or stored.get((name.role, name.revision))
    return {
        name: Certificates.UNKNOWN
        if template is None
        else certificates_of_template(template, name.cluster)
        for name, template in templates.items()
    }
