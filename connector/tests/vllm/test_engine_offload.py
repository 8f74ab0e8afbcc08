"""Real engines: prefill loads a prompt's KV from host memory, and decode gets it from prefill."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from fork_host import Engine

pytest.importorskip("vllm")

from engine_pair import Pair, connector_config, nothing_held, prompt

from models.tiny import model_path

pytestmark = pytest.mark.engine

TOKENS = 12
SHARED = prompt(200, 3)
LATER = [*SHARED, *prompt(90, 5)]
BLOCK = 32


def beside_offloading(ours: dict[str, Any]) -> dict[str, Any]:
    """As the operator writes it, but for the copy: vLLM's own needs a GPU."""
    offloading = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "cpu_bytes_to_use": 512 << 20,
            "spec_name": "HostTierSpec",
            "spec_module_path": "host_tier",
        },
    }
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "engine_id": ours.pop("engine_id"),
        "kv_buffer_device": "cpu",
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": {"connectors": [ours, offloading]},
    }


@pytest.mark.parametrize("tensor", [1, 2])
def test_prefill_loads_from_host_memory_what_it_hands_over(
    engines: Callable[..., Engine], tensor: int
) -> None:
    model = str(model_path("llama"))
    single = engines("single", model=model, enable_prefix_caching=False).wait_ready()
    expected = {len(tokens): single.generate(tokens, TOKENS).tokens for tokens in (SHARED, LATER)}
    single.stop()

    config = beside_offloading(connector_config("kv_producer"))
    prefill = engines("p", config, model=model, tensor_parallel_size=tensor)
    decodes = [engines("d", connector_config("kv_consumer"), model=model) for _ in range(2)]
    for engine in (prefill, *decodes):
        engine.wait_ready()
    answer = Pair(prefill, decodes[0]).generate(SHARED, TOKENS)
    assert (answer.path["outcome"], answer.tokens) == ("transferred", expected[len(SHARED)])
    assert prefill.ask("counters")["vllm:external_prefix_cache_hits"] == 0
    for number in range(5):  # in all of prefill's 255 blocks
        prefill.generate(prompt(1900, 10 + number), 1, salt=f"other {number}")

    answer = Pair(prefill, decodes[1]).generate(LATER, TOKENS)
    assert (answer.path["outcome"], answer.path["tokens"]) == ("transferred", len(LATER))
    assert answer.tokens == expected[len(LATER)]
    whole = len(SHARED) // BLOCK * BLOCK
    assert prefill.ask("counters")["vllm:external_prefix_cache_hits"] == whole
    nothing_held(prefill, *decodes)
    assert prefill.free_blocks() == 255
    # Both connectors' counts come through MultiConnector.
    assert prefill.metrics()["pdcluster_kv_leases_held"] == 0
    assert prefill.ask("counters")["vllm:kv_offload_load_bytes"] > 0
    assert not [name for name in prefill.metrics() if "step_faults" in name and "{" in name]
    assert prefill.ask("reset_cache"), "no lease is held"
    for engine in (prefill, *decodes):
        engine.stop()
