"""Start-up progress from a real engine's output."""

from __future__ import annotations

import pytest
from launched import HERE

from pdcluster_connector.launcher.engine.readiness import Progress, advance
from pdcluster_connector.protocol.launcher_documents import EngineState

BEGIN = Progress(EngineState.STARTING, "starting vLLM")


def test_a_real_start_passes_through_the_states_in_order():
    seen = [BEGIN]
    for line in (HERE / "logs" / "healthy.log").read_text().splitlines():
        after = advance(seen[-1], line)
        if after != seen[-1]:
            seen.append(after)
    assert [progress.state for progress in seen] == [
        EngineState.STARTING,
        EngineState.STARTING,
        EngineState.LOADING_WEIGHTS,
        EngineState.LOADING_WEIGHTS,
        EngineState.LOADING_WEIGHTS,
        EngineState.WARMING_UP,
        EngineState.WARMING_UP,
        EngineState.WARMING_UP,
    ]
    assert seen[4].message == "loading the model's weights: shard 1 of 1"
    assert seen[6].message == "KV cache for 2,097,152 tokens allocated; warming up"
    assert seen[-1].message == "starting the API server"


def test_a_line_never_leads_back():
    warm = Progress(EngineState.WARMING_UP, "…")
    assert advance(warm, "Starting to load model x") is warm


def test_no_line_makes_an_engine_ready():
    lines = (HERE / "logs" / "healthy.log").read_text().splitlines()
    assert all(advance(BEGIN, line).state is not EngineState.READY for line in lines)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "Loading safetensors checkpoint shards:  25% Completed | 2/8 [00:01<00:03,  1.9it/s]",
            "loading the model's weights: shard 2 of 8",
        ),
        (
            "Capturing CUDA graphs (decode, FULL):  43%|####3     | 15/35 [00:01<00:01, 14.1it/s]",
            "capturing CUDA graphs: 15 of 35",
        ),
        ("Fetching 12 files:  50%|#####     | 6/12", "downloading 12 files of the model: 50 %"),
    ],
)
def test_messages(line, message):
    assert advance(BEGIN, line).message == message
