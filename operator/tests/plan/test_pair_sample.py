"""Which links are kept: all of a few, and of very many a sample that reaches each engine."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st
from simulated_cluster import SimulatedCluster, manifest

from pdcluster_connector.protocol.launcher_documents import LinksReport
from pdcluster_operator.api.conditions import StatusReason
from pdcluster_operator.api.object_names import EngineName
from pdcluster_operator.api.spec.types import Role
from pdcluster_operator.plan.observed.engines import EngineView
from pdcluster_operator.plan.observed.links import ALL_LINKS, linkable, sample_pairs

numbers = st.integers(1, 80)


def names(role: str, count: int) -> tuple[str, ...]:
    return tuple(f"ns.c.{role}.r.{number}" for number in range(count))


@given(numbers, numbers)
def test_each_engine_has_a_link_and_the_number_is_bounded(prefill: int, decode: int) -> None:
    wanted, readers = names("prefill", prefill), names("decode", decode)
    sample = sample_pairs(wanted, readers)
    links = sum(map(len, sample.values()))
    assert set(sample) == set(readers)
    assert all(sample.values()), "each decode engine has a link"
    assert set().union(*sample.values()) == set(wanted), "each prefill engine has a link"
    assert links >= min(prefill * decode, ALL_LINKS)
    assert links <= ALL_LINKS + prefill + decode
    if prefill * decode <= ALL_LINKS:
        assert links == prefill * decode


@given(numbers, numbers, st.randoms(use_true_random=False))
def test_the_order_of_the_engines_does_not_matter(prefill: int, decode: int, random) -> None:
    wanted, readers = names("prefill", prefill), names("decode", decode)
    shuffled = random.sample(wanted, prefill), random.sample(readers, decode)
    assert sample_pairs(*map(tuple, shuffled)) == sample_pairs(wanted, readers)


@pytest.mark.parametrize(("prefill", "decode"), [(12, 12), (40, 40), (64, 64), (10, 70)])
def test_an_engine_more_changes_few_links_of_the_others(prefill: int, decode: int) -> None:
    wanted, readers = names("prefill", prefill + 1), names("decode", decode)
    few, many = sample_pairs(wanted[:-1], readers), sample_pairs(wanted, readers)
    gained = {(reader, name) for reader in readers for name in many[reader] - few[reader]}
    assert {name for _, name in gained} == {wanted[-1]}, "no other engine gets a new link"
    lost = sum(len(few[reader] - many[reader]) for reader in readers)
    assert lost <= len(gained)


@pytest.mark.parametrize(("prefill", "decode"), [(0, 3), (3, 0), (0, 0)])
def test_without_a_role_there_are_no_links(prefill: int, decode: int) -> None:
    sample = sample_pairs(names("prefill", prefill), names("decode", decode))
    assert not any(sample.values())


def test_a_cluster_with_very_many_links_is_ready_by_its_sample() -> None:
    roles = {role: {"replicas": 9} for role in ("prefill", "decode")}
    world = SimulatedCluster(manifest(**roles))
    world.settle()
    world.run_pods()
    world.speak()
    found = world.plan().peers.items()
    peers = {decode: {peer.engine for peer in document.peers} for decode, document in found}
    assert len(peers) == 9
    assert len(set().union(*peers.values())) == 9, "each prefill engine is covered"
    links = sum(map(len, peers.values()))
    assert ALL_LINKS <= links < 81
    assert world.plan().status["links"].endswith(f"/{links}"), "the status counts the same links"


class Told(SimulatedCluster):
    """Decode engines have links to the prefill engines that they were told of, and no others."""

    def link(self, **changes: object) -> None:
        super().link(**changes)
        for decode, document in self.plan().peers.items():
            told = {peer.engine for peer in document.peers}
            rows = (row for row in self.links[decode].links if row.prefill in told)
            self.links[decode] = LinksReport(decode, "any", tuple(rows))


@pytest.mark.parametrize("how", ["Surge", "Replace"])
@pytest.mark.parametrize("name", ["b", "c"])
def test_the_first_new_engines_are_linked_though_the_others_have_to_wait(
    how: str, name: str
) -> None:
    roles = {role: {"replicas": 12} for role in ("prefill", "decode")}
    world = Told(manifest(name, rollout={"type": how}, **roles))
    for _ in range(4):
        world.step()
        world.others_act()
    assert world.step().status["conditions"][-1]["status"] == "True"
    old = {engine.revision for engine in world.leaders("decode")}
    world.edit(engine={"blockSize": 32})
    for _ in range(40):
        world.step()
        world.others_act()
        left = old & {engine.revision for engine in world.leaders("decode")}
        if not left and world.condition("Ready")["status"] == "True":
            return
    raise AssertionError(f"engines of {left} are still there, or {world.condition('Ready')}")


def views(role: Role, count: int) -> tuple[EngineView, ...]:
    named = (EngineName("ns", "c", role, "r", number) for number in range(count))
    return tuple(
        EngineView(name, True, StatusReason.ENGINES_READY, "", "x/1", "10.0.0.1", 1)
        for name in named
    )


def test_engines_that_have_to_wait_are_in_no_sample() -> None:
    prefill, decode = views(Role.PREFILL, 9), views(Role.DECODE, 9)
    waiting = frozenset(one.name for one in (*prefill[1:], *decode[2:]))
    assert linkable((prefill, decode), waiting) == (prefill[:1], decode[:2])
    few = (prefill[:8], decode[:8])
    assert linkable(few, waiting) == few, "all links of a few engines are kept"
    prefill, decode = views(Role.PREFILL, 13), views(Role.DECODE, 5)
    assert linkable((prefill, decode), waiting) == (
        (prefill[0], *prefill[9:]),
        decode[:2],
    ), "docs/design.md says 64"
    nobody = frozenset(one.name for one in prefill)
    assert linkable((prefill, decode), nobody) == (prefill, decode)


def test_the_status_counts_no_links_of_engines_that_still_have_to_wait() -> None:
    """Of twelve new engines of each role, one is made at first. Its link is the only new one."""
    roles = {role: {"replicas": 12} for role in ("prefill", "decode")}
    # With this name, a sample of all engines would leave the first new pair out.
    world = Told(manifest("f", rollout={"type": "Surge"}, **roles))
    for _ in range(4):
        world.step()
        world.others_act()
    old = set(world.leaders("decode"))
    before = int(world.step().status["links"].partition("/")[2])
    world.edit(engine={"blockSize": 32})
    world.step()  # the new revisions are tried out
    plan = world.step()
    assert len(world.leaders("decode")) == 13
    assert plan.status["links"] == f"{before}/{before + 1}"
    world.run_pods()
    world.speak()
    [new] = set(world.leaders("decode")) - old
    told = world.plan().peers[new.logical].peers
    assert len(told) == 1, "its one partner"
