"""What an engine on a CPU leaves alone so that its neighbours on the same cores can live."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

CODE = """
import ctypes
import pdcluster_connector.launcher.vllm_shim
from nixl._api import nixl_agent, nixl_agent_config

address = ctypes.cast(ctypes.CDLL(None).munmap, ctypes.c_void_p).value
before = ctypes.string_at(address, 16)
agent = nixl_agent("a", nixl_agent_config(backends=["UCX"]))
print("patched" if ctypes.string_at(address, 16) != before else "whole")
"""


@pytest.mark.nixl
@pytest.mark.vllm
@pytest.mark.parametrize(("asked", "munmap"), [(None, "whole"), ("bistro", "patched")])
def test_ucx_patches_libc_only_where_it_is_asked_to(asked: str | None, munmap: str) -> None:
    """It yields a million times while it does so, and Linux 6.18 charges a time slice for each."""
    environment = {k: v for k, v in os.environ.items() if k != "UCX_MEM_MMAP_HOOK_MODE"}
    if asked:
        environment["UCX_MEM_MMAP_HOOK_MODE"] = asked
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.stdout.split()[-1:] == [munmap], done.stdout + done.stderr
