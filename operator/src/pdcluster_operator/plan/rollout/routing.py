"""Which engines are listed in the routers, and which routers the Service for clients selects.

There is one set of routers for each pairing key. The Service moves to another key when its routers
run and a verified pair stands behind them.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

from pdcluster_operator.api.object_names import EngineName
from pdcluster_operator.api.spec.enums import Role
from pdcluster_operator.plan.observed.routers import routed_keys, routers_run
from pdcluster_operator.plan.rollout.fleet import Fleet
from pdcluster_operator.plan.rollout.moves import Moves
from pdcluster_operator.plan.types import Observed

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

    def without(self, held: AbstractSet[EngineName]) -> Routing:
        """Return it without engines that are created later, and join when they are verified.

        A router that lists them at once would be replaced, because it forgets them meanwhile.
        """
        members = {
            key: {
                role: tuple(one for one in found if one not in held) for role, found in of.items()
            }
            for key, of in self.members.items()
        }
        return replace(self, members=members)


def route(observed: Observed, fleet: Fleet, moves: Moves, target: str, *, hold: bool) -> Routing:
    """Return the routing while engines are replaced.

    Args:
        target: pairing key of the wanted engines.
        hold: the Service stays where it is.
    """
    served = fleet.served_key or _first_key(observed, fleet, target)
    members = {key: _members(fleet, moves, key) for key in dict.fromkeys((served, target))}
    members = {key: found for key, found in members.items() if all(found.values())}
    verified = {fleet.keys[prefill] for prefill, _ in fleet.verified}
    movable = served not in members or (target in verified and routers_run(observed, target))
    if served != target and movable and not hold:
        served = target if target in members else served
    return Routing(
        served, {key: found for key, found in members.items() if key in (served, target)}
    )


def _first_key(observed: Observed, fleet: Fleet, target: str) -> str:
    """Return the key for a Service that is new, or that somebody deleted: of what serves now."""
    live = {fleet.keys[name] for side in fleet.roles.values() for name in side.live}
    others = (live & routed_keys(observed) or {fleet.keys[one] for one, _ in fleet.verified}) - {
        target
    }
    return target if not others or routers_run(observed, target) else min(others)


def _members(fleet: Fleet, moves: Moves, key: str) -> Members:
    """Return the engines of a key that stay and are verified, or that nothing replaces.

    An engine that restarts stays with the routers that know it: to leave and to join again would
    replace their pods twice. An engine whose pod is being deleted leaves if another one of its role
    serves, because it ends when it gets no more requests. If none of a role is known or verified
    yet, the routers get all that are wanted, and wait for them.
    """
    verified = fleet.proven
    known = verified | fleet.listed
    found = {}
    for role, side in fleet.roles.items():
        staying = {
            name
            for name in (*side.live, *side.wanted)
            if fleet.keys[name] == key and name not in side.going and name not in moves.leaving
        }
        proven = {name for name in staying if name in known or name not in side.wanted}
        if proven & verified:
            proven -= fleet.ending
        found[role] = tuple(sorted(proven if proven or side.old else staying))
    return found
