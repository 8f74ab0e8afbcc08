"""The next moves of a rollout, over a simulated cluster that is stopped after any write."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings, strategies as st

from pdcluster_operator.api.object_names import EngineName
from pdcluster_operator.api.spec.types import Role, RolloutType
from pdcluster_operator.plan.observed.pods import gpus
from pdcluster_operator.plan.rollout.fleet import Fleet, RoleFleet, choose_indexes
from pdcluster_operator.plan.rollout.moves import Moves, frozen, next_moves

SURGE, REPLACE, RECREATE = RolloutType.SURGE, RolloutType.REPLACE, RolloutType.RECREATE


def name(role: Role, revision: str, index: int) -> EngineName:
    return EngineName("ns", "c", role, revision, index)


@dataclass(frozen=True)
class Spec:
    """What a user wants: replicas, GPUs of an engine, revisions and the pairing key."""

    replicas: tuple[int, int] = (1, 1)
    cost: tuple[int, int] = (1, 1)
    revisions: tuple[str, str] = ("p1", "d1")
    key: str = "k1"

    def wanted(self, role: Role) -> tuple[EngineName, ...]:
        side = list(Role).index(role)
        count = range(self.replicas[side])
        return tuple(name(role, self.revisions[side], index) for index in count)


@dataclass
class World:
    """Engines that start, link, drain and go, each when the test says so; and one Service."""

    how: RolloutType
    spec: Spec
    surge: int = 1
    live: dict[EngineName, tuple[int, str]] = field(default_factory=dict)
    going: set[EngineName] = field(default_factory=set)
    ready: set[EngineName] = field(default_factory=set)
    linked: set[tuple[EngineName, EngineName]] = field(default_factory=set)
    routed: set[EngineName] = field(default_factory=set)
    served_key: str = ""
    most_used: dict[Role, int] = field(default_factory=dict)
    used: dict[Role, int] = field(default_factory=dict)

    def fleet(self) -> Fleet:
        roles = {}
        for side, role in enumerate(Role):
            live = {n: cost for n, (cost, _) in self.live.items() if n.role is role}
            going = {n for n in self.going if n.role is role}
            roles[role] = RoleFleet(self.wanted(role), self.spec.cost[side], live, going)
        keys = {n: key for n, (_, key) in self.live.items()}
        keys |= {n: self.spec.key for role in Role for n in self.wanted(role)}
        idle = {n for n in self.live if n not in self.ready}
        verified = {pair for pair in self.linked if not self.going & set(pair)}
        return Fleet(
            roles,
            keys,
            verified,
            idle,
            self.routed,
            self.routed,
            set(),
            self.served_key,
            self.surge,
        )

    def wanted(self, role: Role) -> tuple[EngineName, ...]:
        """Return the engines to have. As the planner says it, those that exist stay."""
        side = list(Role).index(role)
        revision = self.spec.revisions[side]
        there = {n for n in self.live if (n.role, n.revision) == (role, revision)} - self.going
        indexes = choose_indexes(self.spec.replicas[side], {n.index for n in there})
        return tuple(name(role, revision, index) for index in indexes)

    def moves(self) -> Moves:
        return next_moves(self.fleet(), self.how)

    def writes(self) -> list[tuple[str, EngineName]]:
        moves = self.moves()
        writes = [("create", n) for n in sorted(moves.made) if n not in self.live]
        assert not moves.removed & self.going, "an engine is removed twice"
        return writes + [("remove", n) for n in sorted(moves.removed)]

    def write(self, verb: str, engine: EngineName) -> None:
        if verb == "create":
            side = list(Role).index(engine.role)
            self.live[engine] = (self.spec.cost[side], self.spec.key)
        else:
            self.going.add(engine)
            self.ready.discard(engine)

    def pairs(self) -> set[tuple[EngineName, EngineName]]:
        """Pairs that clients reach."""
        return {
            pair for pair in self.linked
            if not self.going & set(pair) and self.served_key in ("", self.live[pair[0]][1])
        }  # fmt: skip

    def happen(self) -> list[tuple[str, object]]:
        """Everything that others may do next."""
        events: list[tuple[str, object]] = [("go", n) for n in self.going]
        events += [("ready", n) for n in self.live if n not in self.ready | self.going]
        for p in self.ready:
            for d in self.ready:
                pairing = (p.role, d.role) == tuple(Role) and self.live[p][1] == self.live[d][1]
                if pairing and (p, d) not in self.linked:
                    events.append(("link", (p, d)))
        leaving = self.moves().leaving
        knows = {n for n in self.ready if n not in leaving}
        if self.routed != knows:
            events.append(("route", knows))
        key = self.spec.key
        whole = [pair for pair in self.linked if not self.going & set(pair)]
        if self.served_key != key and any(self.live[p][1] == key for p, _ in whole):
            events.append(("serve", key))
        return sorted(events, key=str)

    def let(self, what: str, thing) -> None:
        if what == "go":
            self.going.discard(thing)
            self.live.pop(thing)
            self.linked = {pair for pair in self.linked if thing not in pair}
            self.routed.discard(thing)
        elif what == "ready":
            self.ready.add(thing)
        elif what == "link":
            self.linked.add(thing)
        elif what == "route":
            self.routed = set(thing)
        else:
            self.served_key = thing

    def settle(self, choose=lambda items: items[0]) -> None:
        """Let everything happen until nothing does; each time in the order that is chosen."""
        for _ in range(400):
            options = [("write", w) for w in self.writes()] + self.happen()
            if not options:
                return
            before = self.pairs()
            what, thing = choose(options)
            if what == "write":
                self.write(*thing)
            else:
                self.let(what, thing)
            self.judge(before)
        raise AssertionError(f"it never settles: {self.writes()}, {self.happen()}")

    def judge(self, before) -> None:
        serves_both = all(self.spec.replicas)
        if before and serves_both and self.how is not RECREATE:
            assert self.pairs(), "no verified pair is left"
        for p, d in self.linked:
            assert self.live[p][1] == self.live[d][1], "a pair across keys"
        for side, role in enumerate(Role):
            used = sum(cost for n, (cost, _) in self.live.items() if n.role is role)
            dearest = max(
                [self.spec.cost[side], *(c for n, (c, _) in self.live.items() if n.role is role)]
            )
            extra = self.surge * self.spec.cost[side] if self.how is SURGE else 0
            limit = self.spec.replicas[side] * dearest + extra
            self.most_used[role] = max(self.most_used.get(role, 0), used)
            # A dear engine that has left makes the budget smaller. Nothing is made then.
            assert used <= max(limit, self.used.get(role, 0)), "more GPUs than the budget has"
            self.used[role] = used

    def change(self, spec: Spec) -> None:
        self.spec = spec
        costs = {role: [c for n, (c, _) in self.live.items() if n.role is role] for role in Role}
        self.used = {role: sum(found) for role, found in costs.items()}

    def names(self) -> set[EngineName]:
        return set(self.live)


def fresh(how: RolloutType, spec: Spec, surge: int = 1) -> World:
    world = World(how, spec, surge)
    world.change(spec)
    world.settle()
    return world


def wanted(spec: Spec) -> set[EngineName]:
    return {n for role in Role for n in spec.wanted(role)}


def sides(names: set[EngineName]) -> Counter[tuple[Role, str]]:
    """How many engines of each role and revision there are."""
    return Counter((n.role, n.revision) for n in names)


ENV = Spec(revisions=("p1", "d2"))
KEY = Spec(revisions=("p2", "d2"), key="k2")


@pytest.mark.parametrize("how", list(RolloutType))
def test_a_new_cluster_is_made_at_once(how: RolloutType) -> None:
    world = World(how, Spec((3, 2)))
    world.change(world.spec)
    assert len(world.moves().made) == 5
    world.settle()
    assert world.names() == wanted(world.spec)
    assert world.writes() == []


@pytest.mark.parametrize("after", [ENV, KEY])
def test_surge_makes_new_engines_first_and_needs_one_more_of_each_role(after: Spec) -> None:
    world = fresh(SURGE, Spec())
    world.change(after)
    assert not world.moves().leaving
    world.settle()
    assert world.names() == wanted(after)
    assert world.most_used[Role.DECODE] == 2


@pytest.mark.parametrize("replicas", [(1, 1), (2, 2), (3, 1)])
@pytest.mark.parametrize("after", [ENV, KEY])
def test_surge_takes_no_place_from_an_old_engine(after: Spec, replicas: tuple[int, int]) -> None:
    """Without a place for a new engine, a Surge waits. Only Replace lets an old one make room."""
    world = fresh(SURGE, Spec(replicas), surge=0)
    world.change(replace(after, replicas=replicas))
    moves = world.moves()
    assert moves.made == wanted(world.spec) & world.names()
    assert not moves.leaving
    assert moves.stuck == ""


def test_old_engines_that_stopped_stay_until_there_are_as_many_as_the_spec_asks_for() -> None:
    """They may be back in a moment, and the new ones may never be."""
    world = fresh(SURGE, Spec((1, 2)))
    world.ready = {n for n in world.ready if n.role is Role.PREFILL}
    for replicas in (2, 3, 4):
        world.change(replace(ENV, replicas=(1, replicas)))
        assert not world.moves().leaving
    world.change(replace(ENV, replicas=(1, 1)))
    assert world.moves().leaving == {name(Role.DECODE, "d1", 1)}


def test_replace_takes_the_place_of_one_old_engine_that_stopped() -> None:
    """It does so even where no engine that serves can make room."""
    world = fresh(REPLACE, Spec((1, 3)))
    [first, second, third] = (name(Role.DECODE, "d1", index) for index in range(3))
    world.ready -= {second, third}
    world.change(replace(KEY, replicas=(1, 3)))
    assert "no prefill engine can make room" in world.moves().stuck
    assert world.moves().leaving == {third}
    assert first in world.ready


def test_old_engines_that_stopped_are_counted_without_those_that_never_ran() -> None:
    world = fresh(SURGE, Spec((1, 3)))
    world.ready = {n for n in world.ready if n.role is Role.PREFILL}
    world.change(replace(ENV, replicas=(1, 2)))
    [first, second, third] = (name(Role.DECODE, "d1", index) for index in range(3))
    assert world.moves().leaving == {third}
    never = replace(world.fleet(), unheard={first})
    assert next_moves(never, SURGE).leaving == {first}, "two are left, as many as are asked for"
    world.change(replace(ENV, replicas=(1, 3)))
    world.live[name(Role.DECODE, "d2", 0)] = (1, "k1")
    assert not world.moves().leaving, "the new one is not verified yet"
    assert second in world.live


def test_a_change_of_decode_leaves_prefill_alone() -> None:
    world = fresh(SURGE, Spec((2, 2)))
    world.change(replace(ENV, replicas=(2, 2)))
    moves = world.moves()
    assert {n.role for n in moves.made if n not in world.live} == {Role.DECODE}


@pytest.mark.parametrize("replicas", [(1, 1), (2, 2)])
def test_old_engines_of_another_key_stay_until_the_service_has_moved(
    replicas: tuple[int, int],
) -> None:
    """Also those that are not the last pair: the new pair serves nobody yet."""
    before = Spec(replicas)
    world = fresh(SURGE, before)
    world.change(replace(KEY, replicas=replicas))
    for write in world.writes():
        world.write(*write)
    pair = name(Role.PREFILL, "p2", 0), name(Role.DECODE, "d2", 0)
    assert world.names() == wanted(before) | set(pair)
    world.ready.update(pair)
    world.linked.add(pair)
    assert not world.moves().leaving
    world.served_key = "k2"
    assert world.moves().leaving == wanted(before)
    # A router that knows them may still send requests.
    assert not world.moves().removed
    world.routed.clear()
    assert world.moves().removed == wanted(before)


def test_replace_needs_no_spare_gpu() -> None:
    world = fresh(REPLACE, Spec((2, 2), (4, 8)))
    after = replace(KEY, replicas=(2, 2), cost=(4, 8))
    world.change(after)
    world.settle()
    assert world.names() == wanted(after)
    assert world.most_used == {Role.PREFILL: 8, Role.DECODE: 16}


@pytest.mark.parametrize(("replicas", "after"), [((1, 1), KEY), ((1, 1), ENV), ((2, 1), KEY)])
def test_replace_holds_where_a_role_has_one_engine(replicas: tuple[int, int], after: Spec) -> None:
    world = fresh(REPLACE, Spec(replicas))
    old = world.names()
    world.change(replace(after, replicas=replicas))
    assert "no verified pair would be left" in world.moves().stuck
    world.settle()
    assert world.names() == old


def test_replace_uses_a_place_that_is_free_before_it_makes_one() -> None:
    world = fresh(REPLACE, Spec((2, 3)))
    del world.live[name(Role.DECODE, "d1", 2)]
    world.linked = {pair for pair in world.linked if pair[1].index != 2}
    world.change(replace(ENV, replicas=(2, 3)))
    moves = world.moves()
    assert [n.index for n in moves.made if n.role is Role.DECODE] == [0]
    assert not moves.leaving


def test_engines_that_are_going_are_no_others_in_place_of_one_that_stopped() -> None:
    world = fresh(SURGE, Spec((1, 3)))
    world.ready = {n for n in world.ready if n.role is Role.PREFILL}
    world.change(replace(ENV, replicas=(1, 2)))
    assert world.moves().leaving == {name(Role.DECODE, "d1", 2)}
    world.write("remove", name(Role.DECODE, "d1", 2))
    assert not world.moves().leaving, "two are left, as many as are asked for"


def test_a_pair_with_an_engine_that_is_going_is_none_that_remains() -> None:
    """It may answer for a moment after its StatefulSet is gone."""
    world = fresh(SURGE, Spec((1, 3)))
    [first, second, third] = (name(Role.DECODE, "d1", index) for index in range(3))
    world.linked = {pair for pair in world.linked if first not in pair}
    world.change(Spec((1, 1)))
    world.going.add(third)
    fleet = replace(world.fleet(), verified=frozenset(world.linked))
    assert {pair[1] for pair in fleet.verified} == {second, third}
    assert not next_moves(fleet, SURGE).leaving


def test_replace_takes_the_engines_of_a_role_away_one_after_another() -> None:
    """The next one leaves when the new one in the place of the last is verified."""
    world = fresh(REPLACE, Spec((1, 3)))
    world.change(replace(ENV, replicas=(1, 3)))
    second, third = (name(Role.DECODE, "d1", index) for index in (1, 2))
    new = name(Role.DECODE, "d2", 0)
    assert world.moves().leaving == {third}
    world.routed.discard(third)
    world.write("remove", third)
    assert not world.moves().leaving, "its pods still hold the place"
    world.let("go", third)
    assert new in world.moves().made
    world.write("create", new)
    assert not world.moves().leaving, "the new one does not serve yet"
    world.let("ready", new)
    world.let("link", (name(Role.PREFILL, "p1", 0), new))
    assert world.moves().leaving == {second}


def test_replace_takes_no_engine_that_serves_while_one_that_stopped_makes_room() -> None:
    world = fresh(REPLACE, Spec((1, 3)))
    third = name(Role.DECODE, "d1", 2)
    world.ready.discard(third)
    world.change(replace(ENV, replicas=(1, 3)))
    assert world.moves().leaving == {third}
    assert world.moves().stuck == ""


def test_replace_takes_an_engine_that_never_moved_kv_before_one_that_serves() -> None:
    """It runs. Only its links to decode do not work."""
    world = fresh(REPLACE, Spec((3, 1)))
    first = name(Role.PREFILL, "p1", 0)
    world.linked = {pair for pair in world.linked if first not in pair}
    world.change(Spec((3, 1), revisions=("p2", "d1")))
    assert world.moves().leaving == {first}
    world.settle()
    assert world.names() == wanted(world.spec)


def test_of_too_many_in_a_rollout_that_is_held_those_leave_first_that_move_no_kv() -> None:
    world = fresh(SURGE, Spec((1, 3)))
    first = name(Role.DECODE, "d1", 0)
    world.linked = {pair for pair in world.linked if first not in pair}
    world.change(ENV)
    assert frozen(world.fleet(), SURGE).leaving == {first}


def test_recreate_makes_new_engines_when_the_old_pods_are_gone() -> None:
    world = fresh(RECREATE, Spec())
    world.change(ENV)
    assert [verb for verb, n in world.writes()] == ["remove"]
    for write in world.writes():
        world.write(*write)
    assert world.writes() == []
    world.settle()
    assert world.names() == wanted(ENV)


def test_recreate_makes_no_new_engine_while_one_old_pod_is_left() -> None:
    """Also where there would be GPUs for it: the two may want the same volume."""
    world = fresh(RECREATE, Spec((2, 1)))
    first, last = (name(Role.PREFILL, "p1", index) for index in range(2))
    world.change(replace(KEY, replicas=(2, 1)))
    for write in world.writes():
        world.write(*write)
    world.let("go", first)
    assert not [engine for engine in world.moves().made if engine.role is Role.PREFILL]
    world.let("go", last)
    assert sum(engine.role is Role.PREFILL for engine in world.moves().made) == 2


def test_recreate_that_goes_back_waits_for_the_pods_of_its_own_revision() -> None:
    """The engines that were told to end still hold their GPUs."""
    world = fresh(RECREATE, Spec((2, 1)))
    first, last = (name(Role.PREFILL, "p1", index) for index in range(2))
    world.change(KEY)
    for engine in sorted(world.moves().removed):
        world.write("remove", engine)
    world.change(Spec())
    world.let("go", first)
    assert first not in world.moves().made
    world.let("go", last)
    assert first in world.moves().made


def test_what_a_superseded_rollout_left_goes_first() -> None:
    world = fresh(SURGE, Spec())
    world.change(ENV)
    for write in world.writes():
        world.write(*write)
    half = name(Role.DECODE, "d2", 0)
    assert half in world.live
    world.change(replace(ENV, revisions=("p1", "d3")))
    assert ("remove", half) in world.writes()
    assert world.moves().removed == {half}
    world.settle()
    assert world.names() == wanted(world.spec)


def test_of_old_engines_those_leave_first_that_were_never_seen_to_move_kv() -> None:
    """Here one of a superseded rollout, which runs. The others serve, whatever their names are."""
    world = fresh(SURGE, Spec((1, 2)))
    world.change(replace(ENV, replicas=(1, 2), revisions=("p1", "a2")))
    for write in world.writes():
        world.write(*write)
    half = name(Role.DECODE, "a2", 0)
    world.ready.add(half)
    world.change(replace(ENV, replicas=(1, 2), revisions=("p1", "d3")))
    assert world.moves().leaving == {half}
    world.settle()
    assert world.names() == wanted(world.spec)


def test_scaling_down_while_rolling_takes_old_engines_first() -> None:
    world = fresh(SURGE, Spec((1, 3)))
    world.change(replace(ENV, replicas=(1, 3)))
    for write in world.writes():
        world.write(*write)
    world.change(replace(ENV, replicas=(1, 2)))
    leaving = world.moves().leaving
    assert leaving == {name(Role.DECODE, "d1", 2)}
    world.settle()
    assert world.names() == wanted(world.spec)


def test_of_too_many_engines_the_last_ones_leave_first() -> None:
    """Here one of them has to stay, because the engine that is wanted is not verified yet."""
    for role, replicas in ((Role.DECODE, (1, 3)), (Role.PREFILL, (3, 1))):
        world = fresh(SURGE, Spec(replicas))
        revision = "p1" if role is Role.PREFILL else "d1"
        first, _, last = (name(role, revision, index) for index in range(3))
        world.linked = {pair for pair in world.linked if first not in pair}
        world.change(Spec((1, 1)))
        assert world.moves().leaving == {last}


def test_zero_replicas_remove_everything() -> None:
    world = fresh(SURGE, Spec((2, 2)))
    world.change(replace(KEY, replicas=(0, 0)))
    world.settle()
    assert world.names() == set()


@pytest.mark.parametrize("how", [SURGE, REPLACE, RECREATE])
@pytest.mark.parametrize("after", [KEY, Spec(revisions=("p2", "d2"))])
def test_a_role_without_a_partner_is_replaced_too(how: RolloutType, after: Spec) -> None:
    """No pair can be verified. Old engines that waited for one would hold GPUs for ever."""
    world = fresh(how, Spec((3, 2)))
    world.change(Spec((3, 0)))
    world.settle()
    world.change(replace(after, replicas=(3, 0)))
    world.settle()
    assert world.names() == wanted(world.spec)
    assert world.most_used[Role.PREFILL] <= 3 + (how is SURGE)


REPLICAS = st.tuples(st.integers(1, 3), st.integers(1, 3))
COSTS = st.tuples(st.sampled_from([1, 2]), st.sampled_from([1, 4]))


@st.composite
def spec_of(draw: st.DrawFn, number: int) -> Spec:
    """A spec that keeps the key and changes decode, or changes key and both roles."""
    rekeyed = draw(st.booleans())
    revisions = (f"p{number}" if rekeyed else "p0", f"d{number}")
    return Spec(draw(REPLICAS), draw(COSTS), revisions, f"k{number}" if rekeyed else "k0")


@pytest.mark.parametrize("how", [SURGE, RECREATE])
@settings(max_examples=settings().max_examples // 2)
@given(data=st.data())
def test_from_any_point_a_rollout_ends_where_a_new_cluster_does(how, data) -> None:
    """Writes are lost, engines start in any order, and the spec changes while it rolls."""
    world = fresh(how, Spec(data.draw(REPLICAS), revisions=("p0", "d0"), key="k0"),
                  data.draw(st.integers(1, 2)))  # fmt: skip
    choose = lambda items: items[data.draw(st.integers(0, len(items) - 1))]  # noqa: E731
    for number in (1, 2):
        world.change(data.draw(spec_of(number)))
        for _ in range(data.draw(st.integers(0, 12))):
            options = [("write", w) for w in world.writes()] + world.happen()
            if not options:
                break
            before = world.pairs()
            what, thing = choose(options)
            if what == "write":
                world.write(*thing)
            else:
                world.let(what, thing)
            world.judge(before)
    world.settle(choose)
    assert sides(world.names()) == sides(wanted(world.spec))
    assert world.pairs()


@settings(max_examples=settings().max_examples // 2)
@given(data=st.data())
def test_replace_ends_or_holds_and_always_serves(data) -> None:
    world = fresh(REPLACE, Spec(data.draw(REPLICAS), revisions=("p0", "d0"), key="k0"))
    choose = lambda items: items[data.draw(st.integers(0, len(items) - 1))]  # noqa: E731
    after = data.draw(spec_of(1))
    world.change(replace(after, cost=(1, 1)))
    world.settle(choose)
    moves = world.moves()
    assert world.pairs()
    assert sides(world.names()) == sides(wanted(world.spec)) or moves.stuck
    if min(world.spec.replicas) > 1 and min(len(world.spec.wanted(r)) for r in Role) > 1:
        assert sides(world.names()) == sides(wanted(world.spec)) or moves.stuck


@pytest.mark.parametrize(
    ("limits", "pieces"),
    [
        ({}, 1),
        ({"memory": "1Gi"}, 1),
        ({"nvidia.com/gpu": 4, "rdma/ib": 4}, 4),
        ({"amd.com/gpu": "2"}, 2),
        ({"nvidia.com/mig-1g.10gb": 3}, 3),
        ({"gpu.intel.com/i915": 2}, 2),
        ({"nvidia.com/gpu": "1k"}, 1000),
        ({"nvidia.com/gpu": "many"}, 1),
    ],
)
def test_what_counts_as_a_gpu_is_what_admission_counts(
    limits: dict[str, object], pieces: int
) -> None:
    assert gpus({"spec": {"containers": [{"resources": {"limits": limits}}]}}) == pieces


def test_the_gpus_of_all_containers_count() -> None:
    def box(**limits: object) -> dict[str, object]:
        return {"resources": {"limits": limits}}

    boxes = [box(**{"nvidia.com/gpu": 2}), box(memory="1Gi"), box(**{"nvidia.com/gpu": "3"}), {}]
    assert gpus({"spec": {"containers": boxes}}) == 5
    assert gpus({"spec": {"containers": boxes[::-1]}}) == 5
