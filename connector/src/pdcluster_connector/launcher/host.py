"""What an engine would find on this machine, as JSON, without importing vLLM.

Run ``python3 -m pdcluster_connector.launcher.host`` with the Python and the environment of the
engines. Local mode does so before it starts anything.
"""

import ctypes
import json
import os
from collections.abc import Callable
from typing import Any, Final

from pdcluster_connector.launcher.installed_versions import installed, ranges, unsupported

_CUDA_LIBRARY: Final = "libcuda.so.1"
_CUDA_ERROR_NO_DEVICE: Final = 100


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
