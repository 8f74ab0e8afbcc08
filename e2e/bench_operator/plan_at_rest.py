"""What a plan costs when nothing has changed: milliseconds of CPU time, in a process of its own.

The PDCluster comes to rest in the forecast's world, which `pdcluster plan` uses, too. Each plan
gets the same objects in new collections, as the store and the launcher monitor return them.
`operator/tests/plan/test_plan_at_rest.py` counts what such a plan calls.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from pdcluster_operator.plan.forecast.world import World
from pdcluster_operator.plan.memo import Memo
from pdcluster_operator.plan.planner import make_plan
from pdcluster_operator.plan.types import ConnectorBundle, Observed, stages

PLANS = {1: 200, 64: 20}
"""How many plans are measured, by engines of each role."""
MOST_ROUNDS = 50
START = 1_800_000_000.0


def measured(checkout: Path | None = None) -> dict[str, Any]:
    """Return what :func:`main` prints in a new process.

    Args:
        checkout: folder with another version of this repository to measure.
    """
    folders = [checkout / part / "src" for part in ("operator", "connector")] if checkout else []
    path = os.pathsep.join((*map(str, folders), os.environ.get("PYTHONPATH", "")))
    found = subprocess.run(
        (sys.executable, "-m", "bench_operator.plan_at_rest"),
        env={**os.environ, "PYTHONPATH": path.strip(os.pathsep)},
        stdout=subprocess.PIPE,
        check=True,
    )
    result: dict[str, Any] = json.loads(found.stdout)
    return result


def at_rest(engines: int) -> tuple[Observed, float]:
    """Return a PDCluster that is Ready, with so many engines of each role, and the time."""
    cluster = {
        "apiVersion": "pdcluster.dev/v1alpha1",
        "kind": "PDCluster",
        "metadata": {"name": "one", "namespace": "default", "uid": "one", "generation": 1},
        "spec": {
            "model": {"source": {"hostPath": {"path": "/models/tiny"}}},
            "prefill": {"replicas": engines},
            "decode": {"replicas": engines},
            "transfer": {"device": "CPU"},
        },
    }
    connector = ConnectorBundle("c0ffee" + "0" * 58, b"a connector")
    world, memo, now = World(Observed(cluster, (), (), {}, {}, connector)), Memo(), START
    for _ in range(MOST_ROUNDS):
        plan = make_plan(world.observed(), now, memo)
        world.write_status(plan.status)
        now += 1
        for step in (step for stage in stages(plan.steps) for step in stage):
            world.perform(step, now)
        if not plan.steps and not world.others_act():
            return world.observed(), now
    raise AssertionError("the PDCluster does not come to rest")


def milliseconds(engines: int, plans: int) -> dict[str, float]:
    """Return the least and the median of some plans at rest, with so many engines of each role."""
    observed, now = at_rest(engines)
    memo = Memo()
    first = make_plan(observed, now, memo)
    taken = []
    for _ in range(plans):
        again = replace(
            observed,
            children=(*observed.children,),
            pods=(*observed.pods,),
            engines=dict(observed.engines),
            links=dict(observed.links),
        )
        began = time.process_time()
        plan = make_plan(again, now, memo)
        taken.append(1000 * (time.process_time() - began))
        assert plan == first
    return {"min": round(min(taken), 3), "p50": round(median(taken), 3)}


def main() -> None:
    """Print the numbers as JSON."""
    found = {
        f"milliseconds_{engines}p{engines}d": milliseconds(engines, plans)
        for engines, plans in PLANS.items()
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
