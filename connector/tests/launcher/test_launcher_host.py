"""What an engine would find on a machine, asked without vLLM and with a driver that answers."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys

import pytest

from pdcluster_connector.launcher import installed_versions
from pdcluster_connector.launcher.installed_versions import visible_gpus

HEAVY = {"vllm", "torch", "nixl", "aiohttp"}


class Driver:
    """libcuda with the two calls that are asked of it."""

    def __init__(self, start: int, count: int, code: int = 0) -> None:
        self._start, self._count, self._code = start, count, code

    def cuInit(self, flags: int) -> int:  # noqa: N802 - CUDA's name
        assert flags == 0
        return self._start

    def cuDeviceGetCount(self, into) -> int:  # noqa: N802 - CUDA's name
        ctypes.cast(into, ctypes.POINTER(ctypes.c_int))[0] = self._count
        return self._code


@pytest.mark.parametrize(
    ("driver", "count", "words"),
    [
        (Driver(0, 8), 8, ""),
        (Driver(0, 0), 0, ""),
        (Driver(100, 0), 0, "shows no GPU to this process"),
        (Driver(999, 0), None, "cuInit ends with 999"),
        (Driver(0, 0, 3), None, "it ends with 3"),
    ],
)
def test_the_driver_is_asked(driver, count, words):
    found, trouble = visible_gpus(lambda _: driver)
    assert found == count
    assert words in trouble
    assert bool(trouble) is (words != "")


def test_a_machine_without_the_driver():
    def load(name: str):
        raise OSError(name)

    count, trouble = visible_gpus(load)
    assert count is None
    assert "libcuda.so.1 is not installed" in trouble


def test_the_whole_document_without_a_heavy_import():
    code = (
        "import runpy, sys; runpy.run_module('pdcluster_connector.launcher.installed_versions', "
        "run_name='__main__'); "
        f"assert not {HEAVY!r} & set(sys.modules), sys.modules.keys()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    document = json.loads(done.stdout)
    assert document["versions"] == installed_versions.installed()
    assert document["supported"] == installed_versions.ranges()
    assert document["unsupported"] == []
    assert document["gpus"] is None or document["gpus"] >= 0
