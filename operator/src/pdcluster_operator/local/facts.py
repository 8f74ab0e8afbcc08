"""Gathers what :mod:`.preflight` judges: files, ports, memory, and the engines' Python.

The versions in the engines' Python are read by a process of that Python. It does not import vLLM,
so it takes about a second.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pdcluster_connector
from pdcluster_connector.host_memory import available_bytes
from pdcluster_operator.api.labels import engine_of
from pdcluster_operator.api.spec.enums import Role
from pdcluster_operator.api.spec.types import Cluster
from pdcluster_operator.local.addresses import taken_everywhere
from pdcluster_operator.local.machine import (
    Problem,
    find_problems,
    memory_request,
)
from pdcluster_operator.local.preflight import VISIBLE, Facts, Folder, Gpus
from pdcluster_operator.plan.rollout.desired import desire
from pdcluster_operator.plan.types import ConnectorBundle, Observed

MODULE = "pdcluster_connector.launcher.host"
PATIENCE_SECONDS = 30.0
MOST_NAMES = 10_000

Manifest = Mapping[str, Any]


def gather(
    document: Manifest,
    cluster: Cluster,
    connector: ConnectorBundle,
    environment: Mapping[str, str],
    ports: Iterable[int],
) -> Facts:
    """Look at this machine for one manifest.

    Args:
        document: the PDCluster; ``cluster`` is the same, parsed.
        environment: variables that a container inherits.
        ports: that each pod binds.
    """
    problems: list[tuple[str, Problem]] = []
    models: dict[Role, Folder] = {}
    asked = dict.fromkeys(Role, 0)
    for role, template, copies in _pods(document, cluster, connector):
        found = find_problems(template, environment)
        problems += [(role.value if role else "router", problem) for problem in found]
        if role is not None:
            asked[role] += memory_request(template) * copies
            if path := _model_path(template):
                models[role] = _folder(path)
    python, answer, silence = _ask(environment)
    return Facts(
        python=python,
        silence=silence,
        versions=answer.get("versions", {}),
        supported=answer.get("supported", {}),
        unsupported=tuple(answer.get("unsupported", ())),
        gpus=Gpus(answer.get("gpus"), answer.get("gpu_trouble", ""), VISIBLE in environment),
        models=models,
        problems=tuple(problems),
        asked=asked,
        free=available_bytes(),
        taken=taken_everywhere(ports),
    )


def _pods(
    document: Manifest, cluster: Cluster, connector: ConnectorBundle
) -> Iterator[tuple[Role | None, Manifest, int]]:
    """Yield (role, pod template, number of pods) of each workload of the plan."""
    observed = Observed(
        cluster=document, children=(), pods=(), engines={}, links={}, connector=connector
    )
    for child in desire(observed, cluster).children:
        spec = child.manifest.get("spec") or {}
        if "template" not in spec:
            continue
        engine = engine_of(child.manifest)
        yield engine.role if engine else None, spec["template"], int(spec.get("replicas", 1))


def _model_path(template: Manifest) -> str:
    """Return the folder that a pod mounts as its model; empty for a model by name."""
    volumes = template["spec"].get("volumes") or ()
    model: Manifest = next((volume for volume in volumes if volume.get("name") == "model"), {})
    return str((model.get("hostPath") or {}).get("path") or "")


def _folder(path: str) -> Folder:
    if not Path(path).exists():
        return Folder(path, "does not exist")
    if not Path(path).is_dir():
        return Folder(path, "is not a folder")
    try:
        with os.scandir(path) as entries:
            names = frozenset(entry.name for entry in itertools.islice(entries, MOST_NAMES))
        os.stat(Path(path, "config.json"))
    except FileNotFoundError:
        return Folder(path, "", names)
    except OSError as error:
        return Folder(path, f"can't be read by this user ({error.strerror})")
    return Folder(path, "", names)


def _ask(environment: Mapping[str, str]) -> tuple[str, dict[str, Any], str]:
    """Run the engines' Python; return (its path, its answer, why there is no answer)."""
    python = shutil.which("python3", path=environment["PATH"]) or "python3"
    source = str(Path(pdcluster_connector.__file__).parent.parent)
    try:
        done = subprocess.run(
            [python, "-m", MODULE],
            env={**environment, "PYTHONPATH": source},
            cwd="/",
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
            check=False,
        )
        answer = json.loads(done.stdout) if done.returncode == 0 else None
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        return python, {}, str(error)
    if not isinstance(answer, dict):
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        return python, {}, f"it ends with code {done.returncode}: {last}"
    return python, answer, ""
