"""The next moves of a rollout or of a resize: which engines are created, and which leave.

It is computed from the observed objects alone, so an operator that was restarted goes on at the
same place. Three rules hold in ``Surge`` and in ``Replace``, and whenever replicas
change:

* engines leave only while a verified pair remains that clients reach, if there was one;
* the engines of a role never use more GPUs than its budget;
* an engine is taken out of the routers first, and is deleted when no router lists it any more.

:mod:`.fleet` sorts the engines of a side. The last one leaves first.
"""

from collections.abc import Iterable, Set as AbstractSet
from dataclasses import dataclass

from pdcluster_operator.api.object_names import EngineName
from pdcluster_operator.api.spec.types import RolloutType
from pdcluster_operator.plan.rollout.fleet import Fleet, RoleFleet

MAKE_ROOM = (
    "Surge starts new engines beside the old ones. Make room for them, or set rollout.type to "
    "Replace, which needs two verified engines of each role that changes, or to Recreate, which "
    "serves nothing for a while"
)


@dataclass(frozen=True, slots=True)
class Moves:
    """What to do now.

    Attributes:
        made: wanted engines that exist or are created now.
        leaving: engines that routers must forget.
        removed: engines of them to delete now.
        stuck: why the rollout cannot go on; empty if it can.
    """

    made: frozenset[EngineName]
    leaving: frozenset[EngineName]
    removed: frozenset[EngineName]
    stuck: str = ""


def next_moves(fleet: Fleet, how: RolloutType) -> Moves:
    """Return the next moves. Nothing is left to do when all wanted engines are made."""
    leaving = _surplus(fleet)
    if how is RolloutType.RECREATE:
        return _recreate(fleet, leaving)
    spare = 1 if how is RolloutType.REPLACE else 0
    for side in fleet.roles.values():
        leaving |= _useless(side, fleet, spare)
    for side in fleet.roles.values():
        leaving |= _replaced(side, fleet, leaving)
    stuck = _make_room(fleet, leaving) if how is RolloutType.REPLACE else ""
    made: set[EngineName] = set()
    for side in fleet.roles.values():
        made |= _affordable(side, fleet.surge if how is RolloutType.SURGE else 0)
    return Moves(frozenset(made), frozenset(leaving), _forgotten(fleet, leaving), stuck)


def frozen(fleet: Fleet, how: RolloutType) -> Moves:
    """Return the moves of a rollout that is held: as many engines serve as are asked for.

    Engines of both revisions count as far as clients reach them. Those of a surge that began stay.
    """
    made, leaving = set[EngineName](), _surplus(fleet)
    for side in fleet.roles.values():
        old = [name for name in side.old if fleet.reached(name)]
        serving = [name for name in old if not fleet.served_key or name in fleet.listed]
        missing = max(0, len(side.wanted) - len(side.made) - len(serving))
        new = _affordable(side, fleet.surge if how is RolloutType.SURGE else 0) - set(side.made)
        made.update(side.made, sorted(new)[:missing])
        most = len(side.wanted) + fleet.surge if side.wanted else 0
        for name in _in_order(side.old, fleet):
            there = side.live.keys() - side.going - leaving
            if len(there) > most and _may_leave(name, fleet, leaving):
                leaving.add(name)
    return Moves(frozenset(made), frozenset(leaving), _forgotten(fleet, leaving))


def _forgotten(fleet: Fleet, leaving: AbstractSet[EngineName]) -> frozenset[EngineName]:
    """Return the engines that leave and get no requests any more."""
    deaf = fleet.idle - fleet.ending
    return frozenset(name for name in leaving if name in deaf or name not in fleet.routed)


def _surplus(fleet: Fleet) -> set[EngineName]:
    """Return the engines that are too many, as far as a verified pair remains without them."""
    found: set[EngineName] = set()
    for side in fleet.roles.values():
        for name in reversed(side.surplus):
            if name in fleet.idle or _may_leave(name, fleet, found):
                found.add(name)
    return found


def _useless(side: RoleFleet, fleet: Fleet, spare: int) -> set[EngineName]:
    """Return the old engines that serve nobody: the Service has another key, or they do not run.

    One that does not run may be back in a moment, and new engines may never be. So, as with a
    Deployment, such engines leave only as far as others are there in their place.

    Args:
        spare: how many engines of a role may be missing.
    """
    found = {name for name in side.old if name in fleet.unheard or not fleet.reached(name)}
    waiting = len(set(side.made) - fleet.proven)
    there = len(side.live) - len(side.going) - len(found)
    stopped = [name for name in reversed(side.old) if name in fleet.idle and name not in found]
    return found | set(stopped[: max(0, there - len(side.wanted) - waiting + spare)])


def _recreate(fleet: Fleet, surplus: AbstractSet[EngineName]) -> Moves:
    old = {name for side in fleet.roles.values() for name in side.old}
    made: set[EngineName] = set()
    for side in fleet.roles.values():
        revisions = {name.revision for name in side.wanted}
        clear = all(name.revision in revisions for name in side.live)
        made |= _affordable(side, 0) if clear else set(side.made)
    return Moves(frozenset(made), frozenset(old | surplus), _forgotten(fleet, surplus) | old)


def _affordable(side: RoleFleet, surge: int) -> set[EngineName]:
    """Return the wanted engines that exist, and those that the budget has GPUs for."""
    dearest = max([side.cost, *side.live.values()])
    used, limit = sum(side.live.values()), len(side.wanted) * dearest + surge * side.cost
    made = set(side.made)
    for name in side.wanted:
        if name in side.live:  # it exists, or its pods are still going
            continue
        if used + side.cost > limit:
            break
        used += side.cost
        made.add(name)
    return made


def _replaced(side: RoleFleet, fleet: Fleet, leaving: set[EngineName]) -> set[EngineName]:
    """Return the old engines that new engines have replaced."""
    fresh = fleet.fresh(side)
    old = _in_order(set(side.old) - leaving, fleet)
    found: set[EngineName] = set()
    for name in old[: max(0, len(old) + len(fresh) - len(side.wanted))]:
        served = fleet.scaled_to_zero or all(fleet.reached(other) for other in fresh)
        if served and _may_leave(name, fleet, leaving | found):
            found.add(name)
    return found


def _in_order(old: Iterable[EngineName], fleet: Fleet) -> list[EngineName]:
    """Return old engines in the order in which they leave: first those of no verified pair."""
    proven = fleet.proven
    return sorted(old, key=lambda name: (name not in proven, name), reverse=True)


def _may_leave(name: EngineName, fleet: Fleet, leaving: AbstractSet[EngineName]) -> bool:
    """Whether clients still reach a verified pair when this engine leaves, too.

    While launchers do not answer, their engines serve on. If no pair is known to be verified, one
    that may be must remain.
    """
    if fleet.scaled_to_zero or not fleet.reached(name):
        return True
    verified = [(one, other) for one, other in fleet.verified if fleet.reached(one)]
    reached = verified or [(one, other) for one, other in fleet.unclear if fleet.reached(one)]
    gone = leaving | {name} | {n for side in fleet.roles.values() for n in side.going}
    return not reached or any(not gone & set(pair) for pair in reached)


def _make_room(fleet: Fleet, leaving: set[EngineName]) -> str:
    """Let one old engine leave for each role whose new engines have no place.

    Engines of both roles leave together or not at all: new ones of one role alone may not pair.
    Returns why no old engine can leave; empty if one leaves or none has to.
    """
    found: set[EngineName] = set()
    for role, side in fleet.roles.items():
        old = [name for name in side.old if name not in leaving]
        if not _needs_room(side, fleet) or side.going or len(old) < len(side.old):
            continue
        first = (name for name in _in_order(old, fleet) if _may_leave(name, fleet, leaving | found))
        if (name := next(first, None)) is None:
            return (
                f"no {role} engine can make room, because no verified pair would be left. Replace "
                "needs two verified engines of each role that changes. Use Surge if there are "
                "spare GPUs, or Recreate, which serves nothing for a while"
            )
        found.add(name)
    leaving |= found
    return ""


def _needs_room(side: RoleFleet, fleet: Fleet) -> bool:
    """Whether an old engine must leave for a new one. False while a new engine is unverified."""
    made = side.made
    if len(made) == len(side.wanted) or len(_affordable(side, 0)) > len(made):
        return False
    return fleet.fresh(side) >= set(made)
