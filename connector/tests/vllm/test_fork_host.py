"""The tests' own fork host: what it says of an engine's end, and of this processor."""

from __future__ import annotations

import re
import subprocess
import threading
from pathlib import Path

import pytest
from fork_host import Engine, ForkHost

import machine

# What torch asks a processor for before it takes kernels for AVX-512.
AVX512 = {"avx512f", "avx512bw", "avx512dq", "avx512vl"}


def test_engine_that_ends_while_one_looks_is_dead_and_no_error():
    for _ in range(100):
        process = subprocess.Popen(["sleep", "0.005"])
        reaper = threading.Thread(target=process.wait)
        reaper.start()
        engine = Engine("engine", process.pid, Path("none"), "none")
        while engine.alive():
            pass
        reaper.join()


@pytest.mark.engine
def test_fp8_is_lacked_only_where_the_processor_has_no_avx512(fork_host: ForkHost) -> None:
    """What vLLM answers is compared with what the kernel says of the processor."""
    flags = re.search(r"^flags\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    has_it = flags is not None and (set(flags[1].split()) >= AVX512 or "amx_tile" in flags[1])
    forced_off = "fp8" in machine.without()
    assert bool(fork_host.refusal_of_fp8) == (forced_off or not has_it)
    assert bool(machine.lacks("fp8")) == (forced_off or not has_it)
