"""The programs of the cluster: found on PATH at the pinned version, else built once with Go.

Each folder `tools/NAME` is a Go module of its own that pins one project and its dependencies. In
one common module, Go would choose other versions of Kubernetes' dependencies than Kubernetes was
tested with. The built programs are kept under a digest of the module's files.
"""

from __future__ import annotations

import collections
import hashlib
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from cluster.locks import alone
from cluster.places import PACKAGE, Places
from cluster.report import ClusterError, Progress

TOOLS = PACKAGE / "tools"
# Build only what go.sum pins, without a C compiler, and without this machine's paths in the files.
BUILD = {
    "GOTOOLCHAIN": "local",
    "GOWORK": "off",
    "CGO_ENABLED": "0",
    "GOFLAGS": "-mod=readonly -buildvcs=false -trimpath",
    # The compiler collects its garbage less often: a seventh less of the processors' time.
    "GOGC": "400",
}
# A build uses all processors for minutes. Other programs on this machine go first.
POLITELY = ("nice", "-n", "19")


@dataclass(frozen=True)
class Program:
    """One executable: the module of `tools` with its package, and how to ask for its version."""

    name: str
    tool: str
    package: str = "."  # import path; "." for a main of our own
    asks_version: tuple[str, ...] = ()  # arguments; without any, PATH is not looked at
    version_variable: str = ""  # Go variable that the linker sets to the pinned version
    elsewhere: str = ""  # what it is called where a person installed it, if not by its name


def _kubernetes(name: str, *asks_version: str) -> Program:
    return Program(
        name,
        "kubernetes",
        f"k8s.io/kubernetes/cmd/{name}",
        asks_version or ("--version",),
        "k8s.io/component-base/version.gitVersion",
    )


def _cni(name: str, kind: str) -> Program:
    return Program(name, "cni", f"github.com/containernetworking/plugins/plugins/{kind}/{name}")


def _containerd(name: str, *asks_version: str) -> Program:
    return Program(
        name, "containerd", f"github.com/containerd/containerd/v2/cmd/{name}", asks_version
    )


def _helm(major: int) -> Program:
    module = f"helm.sh/helm/v{major}"
    return Program(
        f"helm{major}",
        f"helm{major}",
        f"{module}/cmd/helm",
        ("version", "--short"),
        f"{module}/internal/version.version",
        elsewhere="helm",
    )


NODE_PROGRAMS = (
    _kubernetes("kube-apiserver"),
    _kubernetes("kube-controller-manager"),
    _kubernetes("kube-scheduler"),
    _kubernetes("kubelet"),
    _kubernetes("kube-proxy"),
    _kubernetes("kubectl", "version", "--client"),
    Program("etcd", "etcd", "go.etcd.io/etcd/server/v3", ("--version",)),
    _containerd("containerd", "--version"),
    _containerd("containerd-shim-runc-v2"),
    _containerd("ctr", "--version"),
    _cni("ptp", "main"),
    _cni("host-local", "ipam"),
    _cni("loopback", "main"),
    Program("coredns", "dns"),
    Program("policy", "policy"),
    Program("pod", "pod"),
)
HELM_PROGRAMS = (_helm(3), _helm(4))
PROGRAMS = (*NODE_PROGRAMS, *HELM_PROGRAMS)
# Simulates nodes and pods. Only `make bench-operator` needs it.
KWOK = Program(
    "kwok",
    "kwok",
    "sigs.k8s.io/kwok/cmd/kwok",
    ("--version",),
    "sigs.k8s.io/kwok/pkg/consts.Version",
)
# A peer of this product. Only `make bench-operator PEER=1` needs it.
LWS = Program("lws", "lws", "sigs.k8s.io/lws/cmd")
# A queue for engines. Only a test of `make soak` needs it.
KUEUE = Program("kueue", "kueue", "sigs.k8s.io/kueue/cmd/kueue")
# Sets replicas by what Prometheus answers. Only a test of `make soak` needs it.
_KEDA = "github.com/kedacore/keda/v2"
KEDA = (
    Program("keda", "keda", f"{_KEDA}/cmd/operator"),
    Program("keda-adapter", "keda", f"{_KEDA}/cmd/adapter"),
)
# The kinds of gateways, of which only the CRDs are read. Only a test of `make soak` needs them.
GATEWAY = Program("gateway", "gateway", "sigs.k8s.io/gateway-api")
INFERENCE = Program("inference", "gateway", "sigs.k8s.io/gateway-api-inference-extension")
# Judges a PDCluster's health as Argo CD and Flux do. Only a test of the page about them needs it.
GITOPS = Program("gitops", "gitops")
# More names for a person's shell, so that the commands of the chart's notes work.
CALLED = {"helm": "helm4"}


def provide(programs: Iterable[Program], places: Places) -> dict[str, Path]:
    """Return the path of each program by its name. Builds programs that are missing.

    Raises:
        ClusterError: Go is missing or a build failed.
    """
    with alone(places.home / "programs.lock", "builds the cluster's programs"):
        paths = {program.name: _provide(program, places) for program in programs}
        places.links.mkdir(exist_ok=True)
        called = {name: paths[program] for name, program in CALLED.items() if program in paths}
        for name, path in {**paths, **called}.items():
            link = places.links / name
            if not link.is_symlink() or link.readlink() != path:
                link.unlink(missing_ok=True)
                link.symlink_to(path)
    return paths


def pinned_version(program: Program) -> str:
    """The version, such as v1.36.3, at which the tool's go.mod requires the program's module."""
    text = (TOOLS / program.tool / "go.mod").read_text()
    for line in re.finditer(r"^(?:require)?\s+(\S+) (v\S+)(?: // indirect)?$", text, re.MULTILINE):
        module, version = line.groups()
        if program.package == module or program.package.startswith(f"{module}/"):
            return str(version)
    return ""


def sources(program: Program) -> Path:
    """The folder with the sources of the program's module, at the pinned version.

    Go fetches what its module cache lacks.

    Raises:
        ClusterError: Go does not find them.
    """
    module = program.package.partition("/cmd")[0]
    done = subprocess.run(
        ["go", "mod", "download", "-json", module],
        cwd=TOOLS / program.tool,
        env={**os.environ, **BUILD},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise ClusterError(f"no sources of {module}: {done.stderr.strip() or done.stdout.strip()}")
    return Path(json.loads(done.stdout)["Dir"])


def digest(tool: str) -> str:
    """12 hexadecimal digits that change with every source of the tool's programs."""
    state = hashlib.sha256(BUILD["GOFLAGS"].encode())
    for path in sorted((TOOLS / tool).iterdir()):
        if path.name in ("go.mod", "go.sum") or path.suffix == ".go":
            state.update(path.name.encode() + b"\0" + path.read_bytes())
    return state.hexdigest()[:12]


def _provide(program: Program, places: Places) -> Path:
    built = places.programs / f"{program.tool}-{digest(program.tool)}" / program.name
    if built.exists():
        return built
    if found := _on_path(program):
        return found
    built.parent.mkdir(parents=True, exist_ok=True)
    _build(program, built)
    return built


def _on_path(program: Program) -> Path | None:
    found = shutil.which(program.elsewhere or program.name) if program.asks_version else None
    if not found:
        return None
    done = subprocess.run(
        [found, *program.asks_version], capture_output=True, text=True, timeout=30, check=False
    )
    version = re.escape(pinned_version(program).removeprefix("v"))
    same = re.search(rf"(?<![\d.]){version}(?![\d.]*\d)", done.stdout)
    return Path(found).resolve() if same else None


def _build(program: Program, target: Path) -> None:
    if not shutil.which("go"):
        raise ClusterError(
            "Go is needed to build Kubernetes and was not found on PATH: install Go 1.26 or "
            "newer, or set KUBECONFIG to a cluster that you have"
        )
    progress = Progress(f"building {program.name} {pinned_version(program)}".rstrip())
    stale = _go(
        program,
        progress,
        "fetching modules",
        "list",
        "-deps",
        "-f",
        "{{if .Stale}}{{.ImportPath}}{{end}}",
        program.package,
    )
    flags = "-s -w"
    if program.version_variable:
        flags += f" -X {program.version_variable}={pinned_version(program)}"
    partial = target.with_name(target.name + ".partial")
    _go(
        program,
        progress,
        f"packages of {stale}",
        "build",
        "-v",
        "-ldflags",
        flags,
        "-o",
        str(partial),
        program.package,
    )
    partial.replace(target)
    progress.done()


def _go(program: Program, progress: Progress, unit: str, *arguments: str) -> int:
    """Run a go command. Returns the number of lines that it printed to standard output."""
    last: collections.deque[str] = collections.deque(maxlen=20)
    lines = 0
    with subprocess.Popen(
        [*POLITELY, "go", *arguments],
        cwd=TOOLS / program.tool,
        env={**os.environ, **BUILD},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as process:
        for line in process.stdout or ():
            last.append(line)
            lines += not line.startswith("go: ")
            progress.show(f"{lines} {unit}")
    if process.returncode:
        said = "".join(last).rstrip()
        raise ClusterError(f"building {program.name} in {TOOLS / program.tool} failed:\n{said}")
    return lines
