"""What Argo CD and Flux would say of a PDCluster, by the texts of docs/gitops.md."""

from __future__ import annotations

import copy
import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from simulated_cluster import SimulatedCluster, manifest

from cluster import binaries
from cluster.places import Places

pytestmark = pytest.mark.helm

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "gitops.md").read_text()
BLOCKS = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
ARGO, _, FLUX = map(yaml.safe_load, BLOCKS)
[LUA] = ARGO["data"].values()
[CHECK] = FLUX["spec"]["healthCheckExprs"]
ORDER = ("inProgress", "failed", "current")  # in which Flux evaluates them; the first one counts
DEADLINE = 700


@pytest.fixture(scope="module")
def program() -> Path:
    return binaries.provide([binaries.GITOPS], Places.of_user())["gitops"]


def nothing_yet(world: SimulatedCluster) -> None:
    """Nobody has seen the object."""


def starting(world: SimulatedCluster) -> None:
    world.step()


def serving(world: SimulatedCluster) -> None:
    world.bring_up()


def refused(world: SimulatedCluster) -> None:
    world.bring_up()
    world.edit(transfer={"device": "CPU", "backends": ["none"]})
    world.step()


def changed(world: SimulatedCluster) -> None:
    world.bring_up()
    world.edit(engine={"extraArgs": ["--max-num-seqs", "7"]})


def replacing(world: SimulatedCluster) -> None:
    changed(world)
    world.step()


def paused(world: SimulatedCluster) -> None:
    world.bring_up()
    world.edit(rollout={"paused": True}, engine={"extraArgs": ["--max-num-seqs", "7"]})
    world.step()


def stuck(world: SimulatedCluster) -> None:
    replacing(world)
    world.now += DEADLINE
    world.step()


def a_canary_fails(world: SimulatedCluster) -> None:
    world.bring_up()
    world.link(state="Failed")
    world.step()


@pytest.mark.parametrize(
    ("happens", "argo", "flux"),
    [
        (nothing_yet, "Progressing", "inProgress"),
        (starting, "Progressing", None),
        (serving, "Healthy", "current"),
        (refused, "Degraded", "failed"),
        (changed, "Progressing", "inProgress"),
        (replacing, "Progressing", None),
        (paused, "Suspended", None),
        (stuck, "Degraded", "failed"),
        (a_canary_fails, "Progressing", None),
    ],
)
def test_the_tools_see_what_the_status_says(
    program: Path, happens: Callable[[SimulatedCluster], None], argo: str, flux: str | None
) -> None:
    world = SimulatedCluster(manifest(rollout={"progressDeadlineSeconds": DEADLINE - 100}))
    happens(world)
    seen = copy.deepcopy(world.cluster)
    seen.setdefault("status", {})
    expressions = {name: CHECK[name] for name in ORDER if name == "inProgress" or seen["status"]}
    asked = {"lua": LUA, "cel": expressions, "object": seen}
    done = subprocess.run(
        [program], input=json.dumps(asked), capture_output=True, text=True, check=False
    )
    assert not done.stderr
    said = json.loads(done.stdout)
    assert said["lua"]["status"] == argo, said
    assert next((name for name in ORDER if said["cel"].get(name)), None) == flux, said
    assert said["lua"]["message"].strip(": ")
