"""Checks before an engine starts: what is here, and what admission cannot see.

Each problem becomes one sentence.

vLLM finds most of these problems too, but only after half a minute, and it reports them at the end
of a long traceback. Which vLLM, NIXL and torch an image holds is found without importing them.
"""

import errno
import json
import os
import re
import socket
import stat
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Final

from pdcluster_connector.compat.findings import counted
from pdcluster_connector.host_memory import GIB, MIB, available_bytes
from pdcluster_connector.launcher import arguments, installed_versions
from pdcluster_connector.protocol import api_key

_WEIGHTS: Final = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
_CONFIGS: Final = ("config.json", "params.json")
_REPOSITORY: Final = re.compile(r"[\w.-]+(/[\w.-]+)?")
# vLLM's message rings between its processes are sparse files of up to 240 MiB; this much of them
# is in use once an engine serves.
_SHM_PER_PROCESS: Final = 24 * MIB
_PLUGIN: Final = "libplugin_LIBFABRIC.so"
_LOAD: Final = "import ctypes, sys; ctypes.CDLL(sys.argv[1])"


@dataclass(frozen=True, slots=True)
class Port:
    """An address that this pod is about to bind, its use, and the flag that changes it."""

    host: str
    port: int
    use: str
    remedy: str


def problems(
    command: arguments.EngineCommand,
    found: Mapping[str, str],
    environment: Mapping[str, str],
    launcher: Sequence[Port],
    shm: Path = Path("/dev/shm"),  # noqa: S108 - where POSIX shared memory is
) -> list[str]:
    """Return everything that prevents the start of this engine; empty if nothing does.

    Args:
        command: the engine's command line.
        found: versions, from :func:`.installed_versions.installed`.
        environment: of the engine.
        launcher: the launcher's own addresses.
        shm: the shared-memory file system.
    """
    told = installed_versions.version_problems(found, environment)
    key = environment.get(api_key.VARIABLE)
    if key is not None and (wrong := api_key.problem(key)) is not None:
        told.append(wrong)
    told += model_problems(command.model, command.load_format)
    told += cache_problems(command.arguments, environment)
    for port in (*launcher, *_engine_ports(command)):
        told += port_problems(port)
    workers = command.tensor * command.pipeline * command.data // command.nodes or 1
    told += shm_problems(shm, workers)
    told += offload_problems(command.offload_folder)
    if "LIBFABRIC" in command.backends:
        told += libfabric_problems(libfabric_plugins(environment), environment)
    if found.get("vllm", "").endswith("+cpu"):
        told += memory_problems(command, environment, workers, available_bytes())
    return told


def model_problems(model: str, load_format: str = "auto") -> Iterator[str]:
    """Tell what is wrong with a model's folder. A repository's name is not looked at."""
    folder = Path(model).expanduser()
    if not (model.startswith(("/", ".", "~")) or folder.exists()):
        return
    if folder.is_file():
        return  # a single GGUF file
    if not folder.is_dir():
        yield (
            f"the model folder {model} does not exist; mount it, or correct spec.model.source (the "
            "first argument after --)"
        )
        return
    try:
        names = os.listdir(folder)
        config = next((name for name in _CONFIGS if name in names), None)
        text = (folder / config).read_bytes() if config else b"{}"
    except OSError as error:
        yield (
            f"the model folder {model} cannot be read ({_why(error)}); give uid {os.getuid()} "
            "read access to it"
        )
        return
    if config is None:
        yield (
            f"the model folder {model} holds no config.json; point to the folder of the model "
            "itself, with its config, tokenizer and weights"
        )
        return
    try:
        json.loads(text)
    except ValueError as error:
        yield f"{folder / config} is not valid JSON ({error}); copy the model again"
    unreadable = [path for path in _weights(folder) if not os.access(path, os.R_OK)]
    if unreadable:
        yield f"{unreadable[0]} cannot be read by uid {os.getuid()}; correct its permissions"
    elif load_format in {"auto", "safetensors"} and not _weights(folder):
        yield (
            f"the model folder {model} holds no weights ({', '.join(_WEIGHTS)}); copy them "
            "there, or pass --load-format dummy for random ones"
        )


def cache_problems(arguments: Sequence[str], environment: Mapping[str, str]) -> Iterator[str]:
    """Whether the Hub's cache holds a model that may not be downloaded now.

    vLLM says only that it cannot reach the Hub. Only a cache that ``HF_HUB_CACHE`` names is looked
    at, as for engines whose weights a Job has downloaded.

    Args:
        arguments: for ``vllm serve``: the model first.
    """
    model, cache = arguments[0], environment.get("HF_HUB_CACHE", "")
    offline = environment.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}
    flags = dict(pairwise(arguments))
    elsewhere = "--download-dir" in flags or os.path.exists(model)
    if not (cache and offline and _REPOSITORY.fullmatch(model)) or elsewhere:
        return
    home = Path(cache) / f"models--{model.replace('/', '--')}"
    revision = flags.get("--revision", "main")
    with suppress(OSError):  # else it is a commit
        revision = (home / "refs" / revision).read_text().strip()
    folder = home / "snapshots" / revision
    # A snapshot consists of links, which stay if what they point to is removed.
    found = [path for path in _weights(folder) if path.exists()]
    dummy = flags.get("--load-format") == "dummy"
    if any((folder / name).exists() for name in _CONFIGS) and (found or dummy):
        return
    of = f", revision {flags['--revision']}" if "--revision" in flags else ""
    yield (
        f"the cache {cache} does not hold the weights of {model}{of}, and HF_HUB_OFFLINE forbids "
        "to download them; if a Job downloads them (model.cache.downloadedBy), delete that Job: "
        "the operator makes it again"
    )


def port_problems(port: Port) -> Iterator[str]:
    """Try whether an address can be bound, as a server would bind it."""
    family = socket.AF_INET6 if ":" in port.host else socket.AF_INET
    where = f"{port.host or '0.0.0.0'}:{port.port}"  # noqa: S104 - named, not bound to
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((port.host, port.port))
            probe.listen(1)
    except socket.gaierror:
        yield f"{port.host!r} ({port.use}) is not an address of this machine; {port.remedy}"
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            yield f"port {where} ({port.use}) is in use by another process; end it or {port.remedy}"
        elif error.errno == errno.EADDRNOTAVAIL:
            yield f"{port.host} ({port.use}) is not an address of this machine; {port.remedy}"
        else:
            yield f"{where} ({port.use}) cannot be bound: {_why(error)}; {port.remedy}"


def shm_problems(shm: Path, workers: int) -> Iterator[str]:
    """Whether shared memory has room for the messages of ``workers`` processes."""
    needed = _SHM_PER_PROCESS * (workers + 1)
    try:
        status = os.statvfs(shm)
    except OSError as error:
        yield f"{shm} is not there ({_why(error)}); mount a memory-backed volume at {shm}"
        return
    size, free = status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize
    if size < needed:
        yield (
            f"{shm} has {size // MIB} MiB, but {counted(workers, 'worker')} must have at least "
            f"{needed // MIB} MiB; "
            "raise its size (in a pod: sizeLimit of the emptyDir mounted there)"
        )
    elif free < needed:
        yield (
            f"{shm} is full: {free // MIB} of {size // MIB} MiB are free, but "
            f"{counted(workers, 'worker')} must have at least {needed // MIB} MiB; remove the "
            "files that ended processes left there"
        )


def libfabric_plugins(environment: Mapping[str, str]) -> list[Path]:
    """Return NIXL's plugins for libfabric: the user's, and those of the wheels that are here."""
    folders = [Path(named)] if (named := environment.get("NIXL_PLUGIN_DIR")) else []
    for wheel in ("nixl_cu13", "nixl_cu12", "nixl_rocm"):
        spec = find_spec(wheel)
        places = (spec.submodule_search_locations or ()) if spec else ()
        folders += [Path(one).with_name(f".{wheel}.mesonpy.libs") / "plugins" for one in places]
    return [plugin for folder in folders if (plugin := folder / _PLUGIN).exists()]


def libfabric_problems(plugins: Iterable[Path], environment: Mapping[str, str]) -> Iterator[str]:
    """Whether libfabric is here, and the one that a plugin was built for.

    NIXL's wheels do not hold it. Other libraries are not judged: vLLM brings those of CUDA along.
    Another process loads the plugin, because libfabric starts as soon as it is loaded.
    """
    found = ""
    for plugin in plugins:
        done = subprocess.run(
            [sys.executable, "-c", _LOAD, str(plugin)],
            env=dict(environment), capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode == 0:
            return
        why = done.stderr.strip().rpartition("OSError: ")[2].partition(" (required by ")[0]
        found = why if "libfabric" in why else found
    if found:
        yield (
            f"NIXL cannot load its backend LIBFABRIC ({found}); use an image with the libfabric "
            "that its NIXL was built for, or write spec.transfer.backends: [UCX]"
        )


def offload_problems(folder: str) -> Iterator[str]:
    """Make the folder for vLLM's file of offloaded KV. Nobody else may put another file there."""
    if not folder:
        return
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        status = os.lstat(folder)
    except OSError as error:
        yield f"{folder}, for offloaded KV, cannot be made ({_why(error)}); remove what is there"
        return
    if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
        yield f"{folder}, for offloaded KV, is open to another user of this machine; remove it"


def memory_problems(
    command: arguments.EngineCommand, environment: Mapping[str, str], workers: int, available: int
) -> Iterator[str]:
    """Whether ``available`` bytes hold the weights and the KV cache of a CPU engine."""
    text = environment.get("VLLM_CPU_KVCACHE_SPACE", "")
    if not text:
        return
    if not text.isdecimal():
        yield f"VLLM_CPU_KVCACHE_SPACE is {text!r}; it must be a whole number of GiB"
        return
    cache = int(text) * GIB * workers
    weights = sum(path.stat().st_size for path in _weights(Path(command.model)))
    if cache + weights > available:
        yield (
            f"not enough memory: the KV cache needs {cache / GIB:.1f} GiB (VLLM_CPU_KVCACHE_SPACE="
            f"{text} for each of {counted(workers, 'worker')}) and the weights "
            f"{weights / GIB:.1f} GiB, but {available / GIB:.1f} GiB are available; "
            "lower VLLM_CPU_KVCACHE_SPACE, or raise the memory limit"
        )


def _engine_ports(command: arguments.EngineCommand) -> Sequence[Port]:
    api = Port(command.host, command.port, "the engine's API", "pass another --port")
    side = [
        Port(
            command.side_channel_host,
            command.side_channel_port + rank,
            "the connector's side channel" + (f" of data-parallel rank {rank}" if rank else ""),
            "set another side_channel_port in --kv-transfer-config",
        )
        for rank in command.data_ranks
    ]
    return [api, *side] if command.is_leader else side


def _weights(folder: Path) -> list[Path]:
    return [path for pattern in _WEIGHTS for path in folder.glob(pattern)]


def _why(error: OSError) -> str:
    return (error.strerror or str(error)).lower()
