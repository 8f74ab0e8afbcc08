"""What `pdcluster plan --against` prints is what the operator then writes: the audit log says so.

The operator is a process of its own, on a real API server. Only the nodes are played.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from operator_runs import (
    CHILDREN,
    REFUSED_BY_SERVER,
    Operator,
    at_rest,
    cluster,
    condition,
    create,
    edit,
    get,
    until,
)
from played_nodes import PlayedNodes
from real_api import TOKEN, RealApi

pytestmark = pytest.mark.cluster

Write = tuple[str, str, str]
"""Verb, kind and name."""
KINDS = {path.rpartition("/")[2]: kind for kind, path in CHILDREN.items()}
VERBS = {"patch": "apply", "delete": "delete"}
LINE = re.compile(r" *\d+\. (try, then apply|apply|delete) (\w+) (\S+)")


def variable(value: str) -> dict[str, Any]:
    return {"env": [{"name": "A", "value": value}]}


def pdcluster(real: RealApi, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the command as an administrator would."""
    kubeconfig = real.kubeconfig("admin", TOKEN)
    path = os.pathsep.join(one for one in sys.path if one.endswith("/src"))
    return subprocess.run(
        [sys.executable, "-m", "pdcluster_operator", *words],
        env={**os.environ, "KUBECONFIG": str(kubeconfig), "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )


def printed(said: str) -> list[list[Write]]:
    """Return the steps of each round."""
    rounds: list[list[Write]] = [[]]
    for line in said.splitlines():
        if line.startswith("when "):
            rounds.append([])
        elif found := LINE.match(line):
            verb, kind, name = found.groups()
            rounds[-1].append((verb.rpartition(" ")[2], kind, name))
    return [one for one in rounds if one]


def written(real: RealApi, namespace: str, since: int) -> list[Write]:
    """Return the operator's writes, without dry runs, statuses, events and Leases."""
    found = []
    for entry in real.writes(since):
        about = entry["objectRef"]
        kind = KINDS.get(about["resource"])
        mine = about.get("namespace") == namespace and "subresource" not in about
        if kind is None or not mine or "dryRun=All" in entry["requestURI"]:
            continue
        if entry["responseStatus"]["code"] >= 300:
            continue  # the object had changed, or was gone already: nothing was written
        found.append((VERBS[entry["verb"]], kind, about["name"]))
    return found


def is_ready(real: RealApi, namespace: str) -> bool:
    live = get(real, namespace)
    ready = condition(real, namespace, "Ready")
    return (
        ready.get("status") == "True"
        and ready["observedGeneration"] == live["metadata"]["generation"]
    )


CHANGES = {
    "recreate": (
        {"rollout": {"type": "Recreate"}},
        {"decode": {"engine": variable("1")}},
    ),
    "surge, other pairing key": (
        {"rollout": {"type": "Surge"}},
        {"engine": {"blockSize": 32}},
    ),
    "replace": (
        {"rollout": {"type": "Replace"}, "decode": {"replicas": 2}},
        {"decode": {"replicas": 2, "engine": variable("1")}},
    ),
    "scale up": ({}, {"decode": {"replicas": 2}}),
    "from our router to llm-d's": ({}, {"router": {"type": "LLMD"}}),
    "scale down": ({"decode": {"replicas": 2}}, {"decode": {"replicas": 1}}),
}


def together(rounds: list[list[Write]]) -> list[list[Write]]:
    """Join a round that only deletes to one before it that deletes, too.

    Nodes decide which engine has drained first, and so which Service goes first.
    """
    joined: list[list[Write]] = []
    for one in rounds:
        only = all(verb == "delete" for verb, *_ in one)
        if only and joined and any(verb == "delete" for verb, *_ in joined[-1]):
            joined[-1] += one
        else:
            joined.append(list(one))
    return joined


@pytest.mark.timeout(600)
@pytest.mark.parametrize("change", CHANGES)
def test_the_operator_writes_what_was_printed(
    real: RealApi, operator: Operator, namespace: str, tmp_path: Path, change: str
) -> None:
    first, then = CHANGES[change]
    operator.start()
    with PlayedNodes(real, namespace):
        create(real, namespace, cluster(**first))
        until(
            lambda: is_ready(real, namespace), 90, lambda: (get(real, namespace), operator.said())
        )
        at_rest(real, operator)  # what is written late would be taken for a step of the plan
        manifest = tmp_path / "changed.yaml"
        manifest.write_text(json.dumps(cluster(**{**first, **then})))
        planned = pdcluster(real, "plan", str(manifest), "--against", "-n", namespace)
        assert planned.returncode == 0, planned.stdout + planned.stderr
        rounds = printed(planned.stdout)
        expected = [step for one in rounds for step in one]
        assert expected, planned.stdout
        since = real.written
        assert edit(real, namespace, then)[0] == 200
        until(
            lambda: len(written(real, namespace, since)) >= len(expected),
            90,
            lambda: (planned.stdout, written(real, namespace, since), operator.said()),
        )
        until(lambda: is_ready(real, namespace), 60, operator.said)
        at_rest(real, operator)  # nothing more comes
        done = written(real, namespace, since)
    assert sorted(done) == sorted(expected), planned.stdout
    gone = [(kind, name) for verb, kind, name in done if verb == "delete"]
    for name in (name for kind, name in gone if kind == "StatefulSet"):
        assert gone.index(("StatefulSet", name)) < gone.index(("Service", name)), done
    place = 0
    # In a round, what does not need each other is written side by side.
    for one in together(rounds):
        assert sorted(done[place : place + len(one)]) == sorted(one), (planned.stdout, done)
        place += len(one)


def test_a_plan_writes_nothing_and_says_what_the_server_refuses(
    real: RealApi, operator: Operator, namespace: str, tmp_path: Path
) -> None:
    operator.start()
    with PlayedNodes(real, namespace):
        create(real, namespace, cluster())
        until(lambda: is_ready(real, namespace), 90, operator.said)
        before = get(real, namespace)
        manifest = tmp_path / "refused.yaml"
        manifest.write_text(json.dumps(cluster(decode={"podTemplate": REFUSED_BY_SERVER})))
        planned = pdcluster(real, "plan", str(manifest), "--against", "-n", namespace)
        assert planned.returncode == 1, planned.stdout + planned.stderr
        assert "decode.podTemplate.spec.securityContext.sysctls changed" in planned.stdout
        assert "Bogus" in planned.stdout
        # One engine of a role cannot make room for its successor.
        changed = cluster(rollout={"type": "Replace"}, decode={"engine": variable("1")})
        manifest.write_text(json.dumps(changed))
        planned = pdcluster(real, "plan", str(manifest), "--against", "-n", namespace)
        assert planned.returncode == 3, planned.stdout + planned.stderr
        assert "InsufficientCapacity" in planned.stdout
        manifest.write_text(json.dumps(cluster()))
        planned = pdcluster(real, "plan", str(manifest), "--against", "-n", namespace)
        assert planned.returncode == 0, planned.stdout + planned.stderr
        assert "nothing is left to do" in planned.stdout
    after = get(real, namespace)
    assert after["metadata"]["generation"] == before["metadata"]["generation"]
