"""What this machine has for ``pdcluster up``: gathered from the kernel's files, and judged."""

import os
import re
import resource
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pdcluster_connector.compat.findings import counted
from pdcluster_connector.host_memory import available_bytes
from pdcluster_operator.api.spec.types import Cluster
from pdcluster_operator.cli import plan
from pdcluster_operator.cli.cluster_checks import Row, Verdict, row
from pdcluster_operator.local import cluster as local_cluster
from pdcluster_operator.local.facts import ask_python, gather
from pdcluster_operator.local.preflight import Host, judge

GIB = 1 << 30
LEAST_SHM, LEAST_LOCKED = GIB, 64 << 20
UNLIMITED = resource.RLIM_INFINITY


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFacts:
    """What was found.

    Attributes:
        python, silence: the engines' Python; why it does not answer.
        cards: names of NVIDIA's GPUs, as the driver's files have them.
        rocm: how many AMD GPUs the kernel has.
        nics: RDMA ports, such as ``mlx5_0 port 1: ACTIVE, 400 Gb/sec (InfiniBand)``.
        ucx: UCX's transports that were installed with NIXL.
        peermem: whether the kernel lets NICs read GPU memory (nvidia_peermem).
        locked, shm, free: bytes: limit of locked memory, free in /dev/shm, free memory.
        ptrace: the kernel's yama/ptrace_scope; empty without it.
    """

    python: str
    silence: str
    host: Host
    cards: tuple[str, ...]
    rocm: int
    nics: tuple[str, ...]
    ucx: tuple[str, ...]
    peermem: bool
    locked: int
    shm: int
    free: int
    ptrace: str


def check_machine(document: Any, cluster: Cluster | None, *, from_flag: bool = False) -> list[Row]:
    """Return all rows; with a manifest, also what ``pdcluster up`` would refuse to start for.

    ``from_flag``: ``--model-dir`` named the model's folder.
    """
    environment = local_cluster.container_environment()
    rows = list(judged(look(environment)))
    if cluster is not None:
        lacks = judge(
            cluster,
            gather(
                document, cluster, plan.shipped_connector(), environment, local_cluster.POD_PORTS
            ),
            once=False,
            model_flag=from_flag,
        )
        rows += [
            Row(one.path, Verdict.MISSING, one.message, f"the manifest has {one.value}", one.remedy)
            for one in lacks
        ]
    return rows


def look(environment: Mapping[str, str], root: Path = Path("/")) -> MachineFacts:
    """Gather the facts; ``root`` is where the kernel's files are."""
    python, host, silence = ask_python(environment)
    cards = sorted(root.glob("proc/driver/nvidia/gpus/*/information"))
    models = (re.search(r"Model:\s*(.+)", _text(card)) for card in cards)
    kfd = root.glob("sys/class/kfd/kfd/topology/nodes/*/gpu_id")
    shm = os.statvfs(root / "dev/shm") if (root / "dev/shm").is_dir() else None
    return MachineFacts(
        python=python,
        silence=silence,
        host=host,
        cards=tuple(found[1] for found in models if found),
        rocm=sum(_text(one) not in ("", "0") for one in kfd),
        nics=tuple(map(_nic, sorted(root.glob("sys/class/infiniband/*/ports/*")))),
        ucx=_ucx(),
        peermem=(root / "sys/module/nvidia_peermem").is_dir(),
        locked=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        shm=shm.f_bavail * shm.f_frsize if shm else 0,
        free=available_bytes(),
        ptrace=_text(root / "proc/sys/kernel/yama/ptrace_scope"),
    )


def _text(file: Path) -> str:
    try:
        with file.open(encoding="utf-8", errors="replace") as opened:
            return opened.read(4096).strip()
    except OSError:
        return ""


def _nic(port: Path) -> str:
    state = _text(port / "state").partition(": ")[2] or "unknown"
    layer = _text(port / "link_layer") or "unknown"
    return f"{port.parent.parent.name} port {port.name}: {state}, {_text(port / 'rate')} ({layer})"


def _ucx() -> tuple[str, ...]:
    """Return the transports beside TCP and shared memory, which UCX always has."""
    found: set[str] = set()
    for wheel in ("nixl_cu13", "nixl_cu12", "nixl_rocm"):
        spec = find_spec(wheel)
        for folder in (spec.submodule_search_locations or ()) if spec else ():
            names = Path(folder).parent.glob(f"{wheel}.libs/ucx/libuct_*.so*")
            found |= {name.name.removeprefix("libuct_").partition(".")[0] for name in names}
    return tuple(sorted(found))


def judged(facts: MachineFacts) -> Iterator[Row]:
    """Yield a row for each thing that engines and their transfers need."""
    yield from _python(facts)
    yield from _gpus(facts)
    why = "without RDMA, KV goes over shared memory, NVLink or TCP"
    active = [nic for nic in facts.nics if ": ACTIVE" in nic]
    for nic in facts.nics:
        remedy = "Check the cable, the switch and the subnet manager."
        yield row("RDMA", nic in active, nic, why, remedy)
    if not facts.nics:
        yield row("RDMA", True, "no RDMA device; a single machine needs none", why)
    if active and facts.cards:
        yield row(
            "GPUDirect",
            facts.peermem,
            f"nvidia_peermem is {'' if facts.peermem else 'not '}loaded",
            "NICs read GPU memory by it or by DMA-BUF; otherwise KV goes through the host",
            "modprobe nvidia_peermem, or use a kernel with DMA-BUF.",
            Verdict.UNKNOWN,
        )
    yield row(
        "UCX",
        bool(facts.ucx),
        f"tcp, shared memory, {', '.join(facts.ucx)}" if facts.ucx else "no nixl in this Python",
        "NIXL moves KV over these transports",
        "It is the Python of this command; see the row nixl for that of the engines.",
        Verdict.UNKNOWN,
    )
    unlimited = facts.locked == UNLIMITED
    yield row(
        "locked memory",
        unlimited or not active or facts.locked >= LEAST_LOCKED,
        "no limit" if unlimited else f"{facts.locked >> 20} MiB (ulimit -l)",
        "RDMA locks the memory that it registers; TCP does not",
        "Raise it: ulimit -l unlimited.",
    )
    yield row(
        "shared memory",
        facts.shm >= LEAST_SHM,
        f"{facts.shm / GIB:.1f} GiB free in /dev/shm",
        "vLLM's processes and UCX exchange data there",
        "In docker, give --shm-size=8g.",
    )
    closed = facts.ptrace not in ("", "0")
    yield row(
        "process isolation",
        not closed,
        "one PID namespace" + (f", ptrace_scope {facts.ptrace}" if closed else ""),
        "engines read each other's memory only if the kernel lets them; otherwise KV goes over TCP",
        "sysctl kernel.yama.ptrace_scope=0 lets them, and every other process of the same user.",
    )
    yield row("memory", True, f"{facts.free / GIB:.1f} GiB free", "weights pass through it")


def _python(facts: MachineFacts) -> Iterator[Row]:
    remedy = "Correct that Python, or put another one first on PATH."
    found = f"{facts.python}: {facts.silence}" if facts.silence else facts.python
    why, host = "engines run in this Python", facts.host
    yield row("Python", not facts.silence, found, why, remedy, Verdict.MISSING)
    for name, wanted in host.supported.items():
        version = host.versions.get(name, "missing")
        right = version != "missing" and name not in host.unsupported
        why, remedy = f"the connector works with {name}{wanted}", f"pip install '{name}{wanted}'"
        yield row(name, right, version, why, f"{facts.python} -m {remedy}", Verdict.MISSING)


def _gpus(facts: MachineFacts) -> Iterator[Row]:
    why, count = "without one, only transfer.device: CPU runs here", facts.host.gpus or 0
    if count:
        names = f": {', '.join(sorted(set(facts.cards)))}" if facts.cards else ""
        yield row("GPUs", True, f"{counted(count, 'NVIDIA GPU')}{names}", why)
    else:
        found = facts.host.gpu_trouble or facts.silence or "none is visible"
        found = counted(facts.rocm, "AMD GPU") if facts.rocm else found
        remedy = "For engines on GPUs, install the driver; see nvidia-smi or rocm-smi."
        yield row("GPUs", facts.rocm > 0, found, why, remedy)
