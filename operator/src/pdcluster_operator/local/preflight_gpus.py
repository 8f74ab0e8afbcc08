"""Whether the engines of a manifest fit on this machine's GPUs. Pure.

Local mode gives no engine a GPU of its own: each sees what ``CUDA_VISIBLE_DEVICES`` leaves, and
takes the first of them. Two engines on one GPU run only where both say how much of it they take.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from pdcluster_connector.compat.counted import counted
from pdcluster_operator.api.findings import FieldError
from pdcluster_operator.api.spec.enums import Device, Role
from pdcluster_operator.api.spec.resolve import Engine, resolve_engine
from pdcluster_operator.api.spec.types import Cluster

VISIBLE = "CUDA_VISIBLE_DEVICES"
SHARES = ("--gpu-memory-utilization", "--kv-cache-memory-bytes")
"""Flags that limit how much of a GPU an engine takes."""


class GpuLack(StrEnum):
    """Rules of this machine's GPUs."""

    NO_GPU = "NoGpu"
    TOO_FEW_GPUS = "TooFewGpus"
    GPUS_OVERLAP = "GpusOverlap"


@dataclass(frozen=True, slots=True)
class Gpus:
    """The GPUs that a process of this machine sees.

    Attributes:
        count: None where no driver could be asked.
        trouble: why there is none.
        chosen: ``CUDA_VISIBLE_DEVICES`` of this shell chose them; the machine may have more.
    """

    count: int | None
    trouble: str = ""
    chosen: bool = False


def gpu_findings(cluster: Cluster, gpus: Gpus) -> Iterator[FieldError]:
    """Yield why engines would not start on these GPUs; nothing for engines on CPUs."""
    if cluster.spec.transfer.device is not Device.CUDA:
        return
    if not gpus.count:
        yield FieldError(
            "spec.transfer.device",
            Device.CUDA.value,
            GpuLack.NO_GPU,
            f"engines need GPUs: {gpus.trouble or 'none is visible'}",
            f"Use a machine with GPUs (see {VISIBLE} and nvidia-smi), or set the device to CPU "
            "and install vLLM for CPUs.",
        )
        return
    # An engine that is not wanted takes no GPU.
    wanted = [role for role in Role if cluster.spec.role(role).replicas]
    engines = {role: resolve_engine(cluster, role) for role in wanted}
    small = list(_too_small(engines, gpus))
    yield from small or _overlapping(cluster, engines, gpus)


def _too_small(engines: dict[Role, Engine], gpus: Gpus) -> Iterator[FieldError]:
    for role, engine in engines.items():
        devices = _devices(engine, gpus)
        if _size(engine) > len(devices):
            yield FieldError(
                f"spec.{role}.parallelism",
                _sizes(engine),
                GpuLack.TOO_FEW_GPUS,
                f"an engine needs {counted(_size(engine), 'GPU')} and sees {len(devices)}",
                f"Lower the sizes, or let it see more ({VISIBLE}).",
            )


def _overlapping(cluster: Cluster, engines: dict[Role, Engine], gpus: Gpus) -> Iterator[FieldError]:
    """Yield one finding if several engines would take one GPU, and one of them takes all of it."""
    count = gpus.count or 0
    users: Counter[str] = Counter()
    needed = 0
    for role, engine in engines.items():
        replicas = cluster.spec.role(role).replicas
        needed += replicas * _size(engine)
        for device in _devices(engine, gpus)[: _size(engine)]:
            users[device] += replicas
    greedy = [role for role, engine in engines.items() if not any(map(engine.last, SHARES))]
    if not greedy or max(users.values(), default=0) < 2:
        return
    share = "tell both roles their share of it in extraArgs (--gpu-memory-utilization, 0.4)"
    if needed > count:
        rule, message = GpuLack.TOO_FEW_GPUS, f"the engines need {needed} GPUs and see {count}"
        remedy = f"Lower replicas or sizes, or share a GPU: {share}."
    else:
        rule = GpuLack.GPUS_OVERLAP
        message = "local mode assigns no GPUs: several engines would take the same one whole"
        remedy = (
            f"Set {VISIBLE} in the env of spec.prefill.engine and spec.decode.engine, or {share}."
        )
    yield FieldError(
        f"spec.{greedy[0]}.parallelism",
        _sizes(engines[greedy[0]]),
        rule,
        message,
        remedy,
        tuple(f"spec.{role}.replicas" for role in engines),
    )


def _devices(engine: Engine, gpus: Gpus) -> list[str]:
    """Return the GPUs that an engine sees; where it names none, the machine's are 0, 1, ….

    CUDA counts an empty list as none, and ends a list at the first number that there is no GPU
    for. So do we, where all GPUs of the machine were counted.
    """
    count = gpus.count or 0
    own = next((var.value for var in engine.env if var.name == VISIBLE), None)
    if own is None:
        return [str(device) for device in range(count)]
    named = [device.strip() for device in own.split(",") if device.strip()]
    if gpus.chosen:
        return named
    return list(
        itertools.takewhile(lambda device: not device.isdecimal() or int(device) < count, named)
    )


def _size(engine: Engine) -> int:
    parallel = engine.parallelism
    return parallel.tensor * parallel.pipeline * parallel.data


def _sizes(engine: Engine) -> str:
    parallel = engine.parallelism
    return f"tensor {parallel.tensor} x pipeline {parallel.pipeline} x data {parallel.data}"
