"""All links of a cluster share a number of canaries, and each link is proved again."""

from __future__ import annotations

import pytest
from msgspec import structs
from simulated_cluster import SimulatedCluster, manifest

from pdcluster_operator.api.rules.validate import check_manifest
from pdcluster_operator.plan.peers_and_canaries import CANARIES_PER_SECOND, assign_peers


def interval(replicas: int, ranks: int = 1, role: str = "", **canary: int) -> int:
    """Return the interval if the engines of one role, or all, have so many data-parallel ranks."""
    roles = {one: {"replicas": replicas} for one in ("prefill", "decode")}
    world = SimulatedCluster(manifest(**roles, verification={"canary": canary}))
    world.settle()
    world.run_pods()
    world.speak()
    for name, report in world.engines.items():
        if role in name:
            world.engines[name] = structs.replace(report, data_parallel_size=ranks)
    bodies = list(world.plan().peers.values())
    assert len(bodies) == replicas
    assert len({peer.engine for body in bodies for peer in body.peers}) == replicas
    [seconds] = {body.canary_interval_seconds for body in bodies}
    return int(seconds)


def test_few_links_have_the_interval_of_the_spec() -> None:
    assert interval(2) == 300
    assert interval(2, intervalSeconds=5) == 5


@pytest.mark.parametrize(("replicas", "ranks"), [(8, 1), (8, 4), (7, 1)])
def test_very_many_links_share_their_canaries(replicas: int, ranks: int) -> None:
    seconds = interval(replicas, ranks, intervalSeconds=5)
    canaries = replicas * replicas * ranks
    assert canaries / seconds <= CANARIES_PER_SECOND
    assert canaries / (seconds - 1) > CANARIES_PER_SECOND, "and no less often than that"


def test_each_rank_of_either_role_gets_its_canary() -> None:
    both = interval(8, 4, intervalSeconds=5)
    assert [interval(8, 4, role, intervalSeconds=5) for role in ("prefill", "decode")] == [both] * 2


def test_without_engines_nobody_is_told_anything() -> None:
    cluster, _ = check_manifest(manifest())
    assert assign_peers(cluster, (), (), {}) == {}
