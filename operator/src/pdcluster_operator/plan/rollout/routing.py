"""Which engines are listed in the routers, and which routers the Service for clients selects.

There is one set of routers for each pairing key. The Service moves to another key when its routers
run and a verified pair stands behind them.

Routers are rendered anew when the user changes what they are made from, or when their engines mount
another connector. Another builder or another default alone replaces no router. So each Deployment
carries, in an annotation, its template and the part of the spec that it was rendered from.
"""

import json
from collections.abc import Mapping, Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Any

from pdcluster_operator.api.object_names import API_VERSION, KIND, RENDERED_ANNOTATION, EngineName
from pdcluster_operator.api.spec import parse, types
from pdcluster_operator.api.spec.pod_templates import as_mapping
from pdcluster_operator.api.spec.types import Role
from pdcluster_operator.plan.builders import router
from pdcluster_operator.plan.connectors import mounted_connector
from pdcluster_operator.plan.observed.routers import routed_keys, routers_run
from pdcluster_operator.plan.rollout.fleet import Fleet
from pdcluster_operator.plan.rollout.gangs import without
from pdcluster_operator.plan.rollout.moves import Moves
from pdcluster_operator.plan.rollout.revisions import is_pod_template
from pdcluster_operator.plan.types import Manifest, Observed

Members = Mapping[Role, tuple[EngineName, ...]]


@dataclass(frozen=True, slots=True)
class Routing:
    """The routers of a cluster.

    Attributes:
        served_key: pairing key of the routers that the Service selects.
        members: the engines that routers know, by pairing key and role.
        stop: the engines that routers knew before are being ended, and none serves in their place.
    """

    served_key: str
    members: Mapping[str, Members]
    stop: bool = False

    def without(self, held: AbstractSet[EngineName]) -> "Routing":
        """Return it without engines that are created later, and join when they are verified.

        A router that lists them at once would be replaced, because it forgets them meanwhile.
        """
        members = {key: without(found, held) for key, found in self.members.items()}
        return replace(self, members=members)


def route(observed: Observed, fleet: Fleet, moves: Moves, target: str, *, hold: bool) -> Routing:
    """Return the routing while engines are replaced.

    Args:
        target: pairing key of the wanted engines.
        hold: the Service stays where it is.
    """
    served = fleet.served_key or _first_key(observed, fleet, target)
    keys = dict.fromkeys((served, target))
    members = {key: _members(fleet, moves, key, hold=hold) for key in keys}
    members = {key: found for key, found in members.items() if all(found.values())}
    verified = {fleet.keys[prefill] for prefill, _ in fleet.verified}
    movable = served not in members or (target in verified and routers_run(observed, target))
    if movable and not hold and target in members:
        served = target
    return Routing(
        served, {key: found for key, found in members.items() if key in (served, target)}
    )


def _first_key(observed: Observed, fleet: Fleet, target: str) -> str:
    """Return the key for a Service that does not exist: that of the engines that serve now."""
    live = {fleet.keys[name] for side in fleet.roles.values() for name in side.live}
    others = (live & routed_keys(observed) or {fleet.keys[one] for one, _ in fleet.verified}) - {
        target
    }
    return target if not others or routers_run(observed, target) else min(others)


def _members(fleet: Fleet, moves: Moves, key: str, *, hold: bool) -> Members:
    """Return the engines of a key that stay and are verified, or that nothing replaces.

    An engine that restarts stays with the routers that know it: to leave and to join again would
    replace their pods twice. An engine whose pod is being deleted leaves if another one of its role
    serves, because it ends when it gets no more requests. If none of a role is known or verified
    yet, the routers get all that are wanted, and wait for them. While a change is held, those that
    are not wanted may be the new ones, so they have to be verified, too.
    """
    verified = fleet.proven
    known = verified | fleet.listed
    found = {}
    for role, side in fleet.roles.items():
        # One that is wanted serves until its pods end, whatever became of its StatefulSet.
        gone = moves.leaving | (side.going - (set(side.wanted) - fleet.ending))
        staying = {
            name
            for name in (*side.live, *side.wanted)
            if fleet.keys[name] == key and name not in gone
        }
        proven = {name for name in staying if name in known or not (hold or name in side.wanted)}
        if proven & verified:
            proven -= fleet.ending
        found[role] = tuple(sorted(proven if proven or (side.old and not hold) else staying))
    return found


PARTS = ("router", "requestTimeoutSeconds", "commonMetadata", "podTemplate")
"""What routers are made from in the spec."""


def stored_templates(observed: Observed) -> dict[str, str]:
    """Return the annotation of each router's Deployment, by the Deployment's name."""
    return {
        child["metadata"]["name"]: text
        for child in observed.children
        if child.get("kind") == "Deployment"
        and (text := (child["metadata"].get("annotations") or {}).get(RENDERED_ANNOTATION))
    }


def with_stored_router(observed: Observed, given: Manifest) -> dict[str, Any]:
    """Return a spec with the ``PARTS`` that the present routers have, or without routers."""
    for text in stored_templates(observed).values():
        if then := _read(text, {}):
            return {**{n: given[n] for n in given if n not in PARTS}, **then["spec"]}
    return {**given, "router": {**as_mapping(given.get("router")), "replicas": 0}}


def router_template(
    cluster: types.Cluster, given: Manifest, key: str, connector: str, stored: str, host: str
) -> dict[str, Any]:
    """Return the stored template if it renders to the same pods as the spec, else a new one.

    The pod template stands under ``template``, before it is bound to engines. Under ``spec`` are
    the fields of ``PARTS`` as the user wrote them. Both specs are rendered by the builder of today
    to find out.

    Args:
        given: the spec as the user wrote it.
        key: the pairing key.
        connector: name of the ConfigMap that the engines mount.
        stored: the annotation; empty if there is none.
        host: the address that the router binds to.
    """
    spec = {part: given[part] for part in PARTS if part in given}
    template = router.build_router_template(cluster, key, connector, host)
    today = {"spec": spec, "template": template}
    then = _read(stored, router.router_selector(cluster, key))
    if then is None or then["template"] == template:
        return today
    if mounted_connector(then["template"]) != mounted_connector(template):
        return today
    if then["spec"] == spec:
        return then
    others = {name: value for name, value in given.items() if name not in PARTS}
    named = {"name": cluster.name, "namespace": cluster.namespace, "uid": cluster.uid}
    document = {"apiVersion": API_VERSION, "kind": KIND, "metadata": named}
    parsed = parse.parse_cluster({**document, "spec": {**others, **then["spec"]}})
    if parsed.errors:
        return today
    meant = router.build_router_template(parsed.cluster, key, connector, host)
    return {**then, "spec": spec} if meant == template else today


def _read(text: str, selector: Mapping[str, str]) -> dict[str, Any] | None:
    """Return what an annotation says; None if it is not one that this operator would write.

    Args:
        selector: labels by which the Deployment finds its pods.
    """
    try:
        document = json.loads(text) if text else None
    except (ValueError, RecursionError):
        return None
    if not isinstance(document, dict):
        return None
    spec, template = document.get("spec"), document.get("template")
    if not isinstance(spec, dict) or not is_pod_template(template):
        return None
    fits = selector.items() <= template["metadata"]["labels"].items()
    return {"spec": spec, "template": template} if fits else None
