"""The rough hands of ``operator/tests/plan`` on a real API server: the same acts, the same model.

What the simulated cluster leaves out takes part here: admission, defaults, owner
references and their garbage collector, and the controllers that make pods.

``PDCLUSTER_HANDS_SEED=N`` plays the course of one seed again. In `make soak`,
``PDCLUSTER_HANDS_SECONDS`` says for how long courses are played.
"""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from collections.abc import AsyncIterator

import pytest
from real_api import RealApi
from real_world import RealWorld
from rough_course import Course, Length, until_at_rest
from rough_world import Manifest

from conftest import new_namespace
from pdcluster_operator.adapters.api_server.client import KubeClient
from pdcluster_operator.adapters.api_server.kube_api import KubeApi
from pdcluster_operator.adapters.api_server.kubeconfig import find_configuration
from pdcluster_operator.adapters.engine_authority import EngineAuthority

pytestmark = pytest.mark.cluster

SHORT = Length(engines=2, acts=(3, 5), looks=2)
SOAK_SECONDS = 1200.0
SEEDS = [int(seed) for seed in os.environ.get("PDCLUSTER_HANDS_SEED", "").split()] or range(4)


class Server:
    """A real API server, and both of who work on it: the operator's adapter, and the others."""

    def __init__(self, real: RealApi, admin: KubeClient, api: KubeApi) -> None:
        self._real, self._admin, self._api = real, admin, api

    async def brought_up(self, spec: Manifest) -> RealWorld:
        """Return a world in a new namespace in which a cluster of this spec runs."""
        world = RealWorld(self._admin, self._api, new_namespace(self._real), spec)
        await world.begin()
        await until_at_rest(world)
        return world


@pytest.fixture
async def server(real: RealApi) -> AsyncIterator[Server]:
    users = [
        KubeClient(await find_configuration(str(real.folder / f"{user}.kubeconfig")))
        for user in ("admin", "operator")
    ]
    async with users[0] as admin, users[1] as operator:
        yield Server(real, admin, KubeApi(operator, EngineAuthority.new(time.time())[0]))


@pytest.mark.parametrize("seed", SEEDS)
async def test_rough_hands_on_a_real_api_server_make_the_operator_do_no_harm(
    server: Server, seed: int
) -> None:
    counts = await Course(seed, server.brought_up, SHORT).play()
    assert counts["statuses"] > 0


@pytest.mark.soak
@pytest.mark.timeout(3 * SOAK_SECONDS)
async def test_twenty_minutes_of_rough_hands_on_a_real_api_server(server: Server) -> None:
    seconds = float(os.environ.get("PDCLUSTER_HANDS_SECONDS", SOAK_SECONDS))
    until, seed = time.monotonic() + seconds, random.SystemRandom().randrange(10**9)
    counts = Counter[str]()
    while time.monotonic() < until:
        counts += await Course(seed, server.brought_up, Length(engines=2, looks=4)).play()
        counts["courses"] += 1
        seed += 1
    print(f"from {seed - counts['courses']}: {dict(counts)}")
    assert counts["as fresh"] > counts["courses"] / 4
