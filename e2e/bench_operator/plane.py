"""A control plane whose nodes and pods kwok simulates, and the launchers in these pods.

kwok gives each pod an address of 127/8, where one process answers for all launchers.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from operator_runs import until
from real_api import PROGRAMS, RealApi, die_with_us, running_api

from cluster import binaries
from cluster.places import Places

ROOT = Path(__file__).resolve().parents[2]
CRDS = ROOT / "crds"
SAMPLE, RAW, BENCH, DOOMED = NAMESPACES = ("sample", "raw", "bench", "doomed")
NODES = 10
PODS = "127.64.0.1/10"
"""4 million addresses. Linux delivers all of them to the loopback interface."""
MERGE = "application/merge-patch+json"
ROOM = {"cpu": "1000000", "memory": "1000Ti", "pods": "100000", "ephemeral-storage": "1000Ti"}
AUDIT = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [
        {"level": "None", "verbs": ["get", "list", "watch"]},
        {"level": "Request", "users": ["operator"], "namespaces": [SAMPLE]},
        {"level": "Metadata", "users": ["operator"]},
        {"level": "Metadata", "users": ["admin"], "namespaces": [RAW]},
        {"level": "None"},
    ],
}
"""Bodies are kept of one cluster only: those of a thousand would be 400 MB."""
ENVIRONMENT = {"GOGC": "400", "GOMEMLIMIT": "6GiB"}
"""Two cores run all of it. Go collects garbage a quarter as often, which takes memory instead.

With 5,000 PDClusters, kube-apiserver would take more than the 24 GB of the machine. With the limit,
Go collects more often before a process takes more.
"""
NODE_IS_READY = """conditions:
- {type: Ready, status: "True", lastTransitionTime: {{ Now | Quote }}}
"""
POD_RUNS = """phase: Running
startTime: {{ $now | Quote }}
{{ $addresses := PodIPsWith .spec.nodeName false .metadata.uid .metadata.name .metadata.namespace }}
podIP: {{ index $addresses 0 | Quote }}
podIPs:
{{ range $addresses }}
- ip: {{ . | Quote }}
{{ end }}
conditions:
- {type: Initialized, status: "True", lastTransitionTime: {{ $now | Quote }}}
"""
POD_IS_READY = """conditions:
{{ range $type := (list "ContainersReady" "Ready") }}
- {type: {{ $type | Quote }}, status: "True", lastTransitionTime: {{ $now | Quote }}}
{{ end }}
"""
CONTAINERS = """containerStatuses:
{{ range .spec.containers }}
- image: {{ .image | Quote }}
  imageID: {{ .image | Quote }}
  name: {{ .name | Quote }}
  ready: READY
  started: READY
  restartCount: 0
  state: {running: {startedAt: {{ $now | Quote }}}}
{{ end }}
"""
IS_READY = '.status.conditions.[] | select( .type == "Ready" ) | .status'
LIVES = {"key": ".metadata.deletionTimestamp", "operator": "DoesNotExist"}


def _stage(
    name: str, kind: str, selector: list[dict[str, Any]], then: dict[str, Any], **more: Any
) -> dict[str, Any]:
    """Return what kwok does with objects of a kind that the selector matches."""
    return {
        "apiVersion": "kwok.x-k8s.io/v1alpha1",
        "kind": "Stage",
        "metadata": {"name": name},
        "spec": {
            "resourceRef": {"apiGroup": "v1", "kind": kind},
            "selector": {"matchExpressions": selector},
            **more,
            "next": then,
        },
    }


def _pod_status(status: str, *, ready: bool) -> dict[str, str]:
    containers = CONTAINERS.replace("READY", str(ready).lower())
    return {"statusTemplate": f"{{{{ $now := Now }}}}\n{status}{containers}"}


def _stages() -> list[dict[str, Any]]:
    has_address = {"key": ".status.podIP", "operator": "Exists"}
    return [
        _stage(
            "node-ready",
            "Node",
            [{"key": ".status.conditions", "operator": "DoesNotExist"}],
            {"statusTemplate": NODE_IS_READY},
        ),
        _stage(
            "pod-runs",
            "Pod",
            [LIVES, {**has_address, "operator": "DoesNotExist"}],
            _pod_status(POD_RUNS, ready=False),
        ),
        _stage(
            "pod-is-ready",
            "Pod",
            [LIVES, has_address, {"key": IS_READY, "operator": "NotIn", "values": ["True"]}],
            _pod_status(POD_IS_READY, ready=True),
            delay={"durationMilliseconds": 4000},
        ),
        _stage("pod-delete", "Pod", [{**LIVES, "operator": "Exists"}], {"delete": True}),
    ]


def provided(*more: binaries.Program) -> dict[str, Path]:
    """Return the path of each program by its name. Builds programs that are missing."""
    wanted = [one for one in binaries.PROGRAMS if one.name in PROGRAMS]
    return binaries.provide([*wanted, binaries.KWOK, *more], Places.of_user())


@contextlib.contextmanager
def running_plane(crds: Path = CRDS, *, tls: bool = False) -> Iterator[RealApi]:
    """Start everything but the operator, and end it.

    Args:
        crds: folder with the CRDs. An older operator needs its own.
        tls: whether launchers speak TLS.
    """
    programs = provided()
    with running_api(AUDIT, environment=ENVIRONMENT) as real, contextlib.ExitStack() as stack:
        _install(real, crds)
        admin = str(real.folder / "admin.kubeconfig")
        stages = real.folder / "stages.yaml"
        stages.write_text(yaml.safe_dump_all(_stages()))
        commands = {
            "kube-scheduler": (
                str(programs["kube-scheduler"]),
                f"--kubeconfig={admin}",
                "--leader-elect=false",
                "--secure-port=0",
                "--kube-api-qps=500",
                "--kube-api-burst=1000",
            ),
            "kwok": (
                str(programs["kwok"]),
                f"--kubeconfig={admin}",
                f"--config={stages}",
                f"--cidr={PODS}",
                "--manage-all-nodes=true",
                "--node-lease-duration-seconds=0",
            ),
            "launchers": (
                sys.executable,
                "-m",
                "bench_operator.launchers",
                str(real.folder),
                *(["--tls"] if tls else ()),
            ),
        }
        for name, command in commands.items():
            stack.enter_context(_started(real.folder / f"{name}.log", command))
        yield real


def _install(real: RealApi, folder: Path) -> None:
    """Install the CRDs, and give the user `operator` all rights: rights are not measured here."""
    crds = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
    kinds = [yaml.safe_load(file.read_text()) for file in folder.glob("*.yaml")]
    for kind in kinds:
        _create(real, crds, kind)
    rbac = "rbac.authorization.k8s.io"
    binding = {
        "apiVersion": f"{rbac}/v1",
        "kind": "ClusterRoleBinding",
        "metadata": {"name": "operator"},
        "roleRef": {"apiGroup": rbac, "kind": "ClusterRole", "name": "cluster-admin"},
        "subjects": [{"kind": "User", "name": "operator", "apiGroup": rbac}],
    }
    _create(real, f"/apis/{rbac}/v1/clusterrolebindings", binding)
    for name in NAMESPACES:
        body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
        _create(real, "/api/v1/namespaces", body)
    for number in range(NODES):
        _node(real, f"node-{number}")
    for kind in kinds:
        ours = f"/apis/pdcluster.dev/v1alpha1/{kind['spec']['names']['plural']}"
        until(lambda path=ours: real.call("GET", path)[0] == 200, 30, lambda: "a CRD is not served")


def _node(real: RealApi, name: str) -> None:
    status = {"allocatable": ROOM, "capacity": ROOM}
    body = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}, "status": status}
    _create(real, "/api/v1/nodes", body)
    # Admission taints a new node. The controller that would take this back does not run here.
    patched = real.call("PATCH", f"/api/v1/nodes/{name}", {"spec": {"taints": None}}, MERGE)
    assert patched[0] == 200, patched


def _create(real: RealApi, path: str, body: dict[str, Any]) -> None:
    status, answer = real.call("POST", path, body)
    assert status == 201, json.dumps(answer)


@contextlib.contextmanager
def _started(log: Path, command: tuple[str, ...]) -> Iterator[None]:
    with (
        log.open("wb") as output,
        subprocess.Popen(
            command,
            env={**os.environ, **ENVIRONMENT},
            stdout=output,
            stderr=output,
            preexec_fn=die_with_us,  # noqa: PLW1509
        ) as process,
    ):
        try:
            yield
        finally:
            process.kill()


if __name__ == "__main__":  # before the benchmark, whose network reaches nothing
    provided(*([binaries.LWS] if "--peer" in sys.argv else []))
