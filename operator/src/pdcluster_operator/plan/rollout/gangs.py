"""PodGroups, with ``spec.scheduling.gang``: pods that get their nodes together or not at all.

Three rules:

* The first prefill engine and the first decode engine of a pairing key start together, in one
  group. A group of a start never waits for an engine that is not created in the same plan.
* While that group has no nodes yet, no other engine of its pairing key is created. Several engines
  of one role could otherwise take the room of the pair, and serve nothing.
* Any other engine of several pods has a group of its own. One of a single pod needs none.

A pod never leaves its group, and no change of a template reaches pods that exist. So an engine
that exists keeps the group that its StatefulSet names, or none. Only the count of a group changes.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Set as AbstractSet
from dataclasses import dataclass, field

from pdcluster_operator.api.object_names import EngineName, engine_of, is_group_of, start_group_name
from pdcluster_operator.api.spec.types import Role
from pdcluster_operator.plan.observed.engines import Live
from pdcluster_operator.plan.rollout.revisions import Revision, short_hash
from pdcluster_operator.plan.types import Manifest


@dataclass(frozen=True, slots=True)
class Gang:
    """One PodGroup.

    Attributes:
        pods: how many pods have to fit at once.
        priority: ``priorityClassName`` of its pods; empty if they have none.
    """

    name: str
    pods: int
    priority: str


@dataclass(frozen=True, slots=True)
class Gangs:
    """The PodGroups of a cluster.

    Attributes:
        of: the group of each engine whose pods are in one.
        held: engines that are not created before the first pair of their key has its nodes.
    """

    groups: tuple[Gang, ...] = ()
    of: Mapping[EngineName, str] = field(default_factory=dict)
    held: frozenset[EngineName] = frozenset()


@dataclass(frozen=True, slots=True)
class GangEngines:
    """The engines that groups are made of, and what is known of them.

    Attributes:
        cluster: its name.
        names: engines that exist or are created now, by role, the first ones first.
        live: the StatefulSets of engines, by role.
        keys: pairing key of each engine.
        revisions: what new engines are made from.
        pods: live pods.
    """

    cluster: str
    names: Mapping[Role, tuple[EngineName, ...]]
    live: Live
    keys: Mapping[EngineName, str]
    revisions: Mapping[Role, Revision]
    pods: tuple[Manifest, ...]

    def size(self, name: EngineName) -> int:
        """Return how many pods an engine has. One that was released gets them back later."""
        revision = self.revisions[name.role]
        if revision.name == name.revision:
            return revision.nodes
        engine = self.live[name.role][name]
        return int(engine["spec"].get("replicas") or 1)

    def priority(self, name: EngineName) -> str:
        """Return the ``priorityClassName`` of an engine's pods."""
        engine = self.live[name.role].get(name)
        template = engine["spec"]["template"] if engine else self.revisions[name.role].template
        return str((template.get("spec") or {}).get("priorityClassName") or "")


def find_gangs(known: GangEngines, *, enabled: bool) -> Gangs:
    """Return the groups.

    Args:
        enabled: whether new engines get groups. Those that exist keep theirs in any case.
    """
    of = {name: group_of(name, known) for role in Role for name in known.names[role]}
    held: set[EngineName] = set()
    if enabled:
        for key in sorted({known.keys[name] for name in of}):
            of |= _start(known, key, of)
        held = _held(known, of)
        of |= {
            name: name.stateful_set
            for name, group in of.items()
            if not group and name not in known.live[name.role] and known.size(name) > 1
        }
    of = {name: group for name, group in of.items() if group and name not in held}
    members: dict[str, list[EngineName]] = {}
    for name, group in of.items():
        members.setdefault(group, []).append(name)
    groups = tuple(
        Gang(group, _count(known, found), known.priority(found[0]))
        for group, found in sorted(members.items())
    )
    return Gangs(groups, of, frozenset(held))


def group_of(name: EngineName, known: GangEngines) -> str:
    """Return the group of ours that an existing engine names. A user may name another one."""
    engine = known.live[name.role].get(name)
    if engine is None:
        return ""
    given = (engine["spec"]["template"].get("spec") or {}).get("schedulingGroup") or {}
    group = str(given.get("podGroupName") or "")
    return group if is_group_of(name, group) else ""


def _start(known: GangEngines, key: str, of: Mapping[EngineName, str]) -> dict[EngineName, str]:
    """Return the engines that join the group of a start: the first of a role, and its partner."""
    joining: list[EngineName] = []
    waiting: set[Role] = set()
    for role in Role:
        mine = [name for name in known.names[role] if known.keys[name] == key]
        if any(known.keys.get(name) == key for name in known.live[role]):
            # An engine of this role exists. It is a partner if it is in the group itself.
            if any(of[name] == _start_of(known, name) for name in mine):
                waiting.add(role)
        elif mine:
            joining.append(mine[0])
            waiting.add(role)
    if len(waiting) < len(Role):
        return {}
    return {name: _start_of(known, name) for name in joining}


def _start_of(known: GangEngines, name: EngineName) -> str:
    """Return the group of a start: one for each pairing key and priority, which never change."""
    key, priority = known.keys[name], known.priority(name)
    return start_group_name(known.cluster, short_hash([key, priority]) if priority else key)


def _held(known: GangEngines, of: Mapping[EngineName, str]) -> set[EngineName]:
    """Return the new engines that wait for the first pair of their key to get its nodes."""
    found: set[EngineName] = set()
    placed = _placed(known.pods)
    for key in {known.keys[name] for name in of}:
        first = [
            name
            for name, group in of.items()
            if known.keys[name] == key and group == _start_of(known, name)
        ]
        rest = {name for name in of if known.keys[name] == key} - set(first)
        others = {name for side in known.live.values() for name in side} - set(first)
        if not first or any(known.keys.get(name) == key for name in others):
            continue
        if any(placed[name] < known.size(name) for name in first):
            found |= rest
    return found


def _count(known: GangEngines, members: list[EngineName]) -> int:
    """Return how many pods of a group have to fit at once: all of them.

    Later, none of the first pair may have a node while other engines of their key serve. Then each
    of the two is of use alone, and they do not wait for each other.
    """
    sizes = [known.size(name) for name in members]
    placed = _placed(known.pods)
    keys = {known.keys[name] for name in members}
    others = any(known.keys.get(name) in keys for name in placed if name not in members)
    if others and not any(placed[name] >= known.size(name) for name in members):
        return min(sizes)
    return sum(sizes)


def _placed(pods: Iterable[Manifest]) -> Counter[EngineName]:
    """Return how many pods of each engine have a node."""
    placed = (pod for pod in pods if (pod.get("spec") or {}).get("nodeName"))
    return Counter(name for name in map(engine_of, placed) if name is not None)


def without(
    names: Mapping[Role, tuple[EngineName, ...]], blocked: AbstractSet[EngineName]
) -> dict[Role, tuple[EngineName, ...]]:
    """Return the engines that are not blocked."""
    return {role: tuple(one for one in names[role] if one not in blocked) for role in Role}
