"""Real vLLM engines under the launcher, from the zip file.

One whose engine core is killed is in e2e/tests/test_local_pair.py.
"""

from __future__ import annotations

import itertools
import re
import signal
from pathlib import Path

import pytest
from launched import Launched, http, wait_for

from loopback import free_port
from models.tiny import model_path
from pdcluster_connector.launcher.engine.readiness import Progress, advance
from pdcluster_connector.protocol.launcher_documents import EngineState

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

SMALL = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    # One process less to import vLLM in: as on a GPU, the core's only rank is in the core.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}


@pytest.fixture(scope="module")
def tiny_llama() -> Path:
    return model_path("llama")


def engine_processes(engine: Launched) -> list[int]:
    """Every process of the engine's session."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/environ"):
        try:
            environment = stat.read_bytes()
        except OSError:
            continue
        if f"PDCLUSTER_CONTROL_URL={engine.url}".encode() in environment:
            found.append(int(stat.parent.name))
    return found


def start(launch, model: Path, cgroup: Path | None = None) -> Launched:
    return launch(
        cgroup=cgroup,
        runner="pdcluster_connector.launcher.vllm_shim",
        vllm=(
            str(model), "--host", "127.0.0.1", "--port", str(free_port()), "--enforce-eager",
            "--dtype", "float32", "--max-model-len", "512", "--served-model-name", "tiny",
            "--kv-cache-memory-bytes", "128M",
        ),
        PYTHONPATH="",
        **SMALL,
    )  # fmt: skip


def passed(engine: Launched) -> set[EngineState]:
    """The states that the launcher read out of this engine's lines."""
    lines = (engine.out + engine.err).splitlines()
    begin = Progress(EngineState.STARTING, "starting vLLM")
    return {progress.state for progress in itertools.accumulate(lines, advance, initial=begin)}


def test_a_real_engine_becomes_ready_and_leaves_nothing_behind(launch, tiny_llama):
    engine = start(launch, tiny_llama)
    wait_for(lambda: engine.state == "Ready" or engine.process.poll() is not None, 400)
    readyz = engine.ready()
    assert {EngineState.LOADING_WEIGHTS, EngineState.WARMING_UP} <= passed(engine)
    health = http(f"http://{readyz['side_channel']}/healthz")
    assert health[1]["engine_id"] == readyz["engine_id"], "vLLM loaded the connector from the zip"
    assert readyz["versions"]["vllm"].startswith("0.32.")
    body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True}
    status, answer = http(f"{readyz['api']}/v1/completions", body, "POST")
    assert status == 200, answer
    assert answer["usage"]["completion_tokens"] == 4
    assert len(engine_processes(engine)) >= 2
    engine.process.send_signal(signal.SIGTERM)
    assert engine.end(120) == 0
    assert engine_processes(engine) == []


def test_a_launcher_that_is_killed_takes_its_engine_along(launch, tiny_llama):
    engine = start(launch, tiny_llama)
    wait_for(lambda: len(engine_processes(engine)) >= 3, 300)
    engine.process.kill()
    engine.process.wait()
    wait_for(lambda: not engine_processes(engine))


@pytest.mark.needs("cgroup")
def test_a_real_engine_out_of_memory(launch, tiny_llama, small_cgroup):
    engine = start(launch, tiny_llama, small_cgroup)
    assert engine.end(400) in {1, 137}
    victim = r"vLLM's (API server|process EngineCore)"
    assert re.match(rf"out of memory: the kernel killed {victim}; raise the", engine.termination)
    assert engine_processes(engine) == []
