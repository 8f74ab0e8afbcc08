"""Real vLLM engines under the launcher, from the zip file."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from launched import Launched, http, wait_for

from loopback import free_port
from models.tiny import model_path

pytestmark = pytest.mark.engine

SMALL = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
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


def start(launch, model: Path, role: str = "prefill") -> Launched:
    return launch(
        role=role,
        runner="pdcluster_connector.launcher.vllm_shim",
        vllm=(
            str(model), "--host", "127.0.0.1", "--port", str(free_port()), "--enforce-eager",
            "--dtype", "float32", "--max-model-len", "512", "--served-model-name", "tiny",
        ),
        PYTHONPATH="",
        **SMALL,
    )  # fmt: skip


def wait_ready(*engines: Launched) -> list[dict]:
    def all_ready() -> bool:
        for engine in engines:
            if engine.process.poll() is not None:
                pytest.fail(f"an engine died: {engine.describe()}")
        return all(engine.state == "Ready" for engine in engines)

    wait_for(all_ready, 300)
    return [http(f"{engine.url}/readyz")[1] for engine in engines]


def test_a_real_engine_becomes_ready_and_leaves_nothing_behind(launch, tiny_llama):
    engine = start(launch, tiny_llama)
    seen: list[str] = []

    def loading() -> bool:
        if engine.state not in seen:
            seen.append(engine.state)
        return engine.state == "Ready" or engine.process.poll() is not None

    wait_for(loading, 300)
    (readyz,) = wait_ready(engine)
    assert "Starting" in seen
    assert "WarmingUp" in seen
    health = http(f"http://{readyz['side_channel']}/healthz")
    assert health[1]["engine_id"] == readyz["engine_id"]
    assert readyz["versions"]["vllm"].startswith("0.32.")
    body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True}
    status, answer = http(f"{readyz['api']}/v1/completions", body, "POST")
    assert status == 200, answer
    assert answer["usage"]["completion_tokens"] == 4
    assert len(engine_processes(engine)) >= 2
    engine.process.send_signal(signal.SIGTERM)
    assert engine.end(60) == 0
    assert engine_processes(engine) == []


def test_a_real_engine_that_cannot_start_says_why(launch, tiny_llama, tmp_path):
    broken = tmp_path / "broken"
    broken.mkdir()
    for path in tiny_llama.iterdir():
        (broken / path.name).write_bytes(path.read_bytes())
    weights = broken / "model.safetensors"
    os.truncate(weights, weights.stat().st_size // 2)
    engine = start(launch, broken)
    assert engine.end(240) == 1
    assert engine.termination.startswith("SafetensorError: Error while deserializing header")


def test_a_launcher_that_is_killed_takes_its_engine_along(launch, tiny_llama):
    engine = start(launch, tiny_llama)
    wait_for(lambda: len(engine_processes(engine)) >= 3, 120)
    began = time.monotonic()
    engine.process.kill()
    engine.process.wait()
    wait_for(lambda: not engine_processes(engine), 30)
    assert time.monotonic() - began < 30


def test_the_canary_proves_that_kv_moves_also_after_a_restart(launch, tiny_llama):
    prefill, decode = start(launch, tiny_llama), start(launch, tiny_llama, "decode")
    p, _ = wait_ready(prefill, decode)

    def tell(peer: dict, generation: int) -> None:
        entry = {key: peer[key] for key in ("engine", "engine_id", "side_channel", "api")}
        body = {"generation": generation, "model": "tiny", "peers": [entry]}
        assert http(f"{decode.url}/v1/peers", body, "PUT")[0] == 204

    def link() -> dict:
        (row,) = http(f"{decode.url}/v1/links")[1]["links"]
        return row

    def proven() -> bool:
        return link()["canary"]["state"] == "Passed"

    tell(p, 1)
    wait_for(proven, 60)
    row = link()
    assert (row["state"], row["shards"]) == ("Established", "1/1"), row
    assert row["prefill_engine_id"] == p["engine_id"]
    assert row["bytes_per_second"] > 0
    # Keys and values, float32, of 4 layers with 4 heads of 32, for every whole token block.
    moved = row["canary"]["bytes"]
    assert moved > 0
    assert moved % (2 * 4 * 4 * 4 * 32) == 0

    prefill.process.kill()
    prefill.process.wait()
    wait_for(lambda: link()["state"] == "Failed", 15)
    again = start(launch, tiny_llama)
    (q,) = wait_ready(again)
    assert q["engine_id"] != p["engine_id"]
    tell(q, 2)
    wait_for(lambda: link()["prefill_engine_id"] == q["engine_id"] and proven(), 60)
