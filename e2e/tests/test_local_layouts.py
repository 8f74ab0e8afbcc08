"""Engines of other layouts, from a manifest to tokens: pipeline stages, and a Mamba hybrid."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kv_load import moved, text
from local_run import LocalRun, manifest

from models.tiny import model_path

pytestmark = [pytest.mark.local, pytest.mark.timeout(900)]

# The admission rule EagerPipeline asks for this if an engine has pipeline stages.
PROFILED = ["--compilation-config", '{"mode":3,"backend":"eager"}']
HYBRID_BLOCK_TOKENS = 160  # vLLM's choice: a block of attention is as large as a state
HYBRID_BYTES_PER_TOKEN = 4 * 2 * 32 * 4  # of its one attention layer: heads x (K, V) x head size


def test_pipeline_stages_hand_over_to_one_rank(tmp_path: Path) -> None:
    document = manifest(
        engine={"extraArgs": ["--dtype", "float32", "--kv-cache-memory-bytes", "128M"]},
        prefill={"parallelism": {"pipeline": 2}, "engine": {"extraArgs": PROFILED}},
        decode={"engine": {"extraArgs": ["--enforce-eager"]}},
    )
    with LocalRun(document, tmp_path) as run:
        run.wait_ready()
        for seed in range(4):
            moved(run, text(20 + 10 * seed, 9000 + seed))


def test_a_mamba_hybrid_on_two_ranks_hands_over_to_one(tmp_path: Path) -> None:
    """With different tensor sizes, the layout of its states must allow a cut between ranks."""
    model: dict[str, Any] = {"source": {"hostPath": {"path": str(model_path("granite-hybrid"))}}}
    engine = {"prefixCaching": "Disabled"}
    ranks = {"parallelism": {"tensor": 2}}
    with LocalRun(manifest(model=model, engine=engine, prefill=ranks), tmp_path) as run:
        run.wait_ready()
        sizes = []
        for words in (20, 60):
            prompt = text(words, 9100 + words)
            reply = run.complete(prompt)
            assert reply.status == 200, reply.text
            assert reply.kv_path["outcome"] == "transferred", reply.kv_path
            assert reply.completion == run.complete(prompt, role="prefill").completion
            # The last token is decode's; the tokenizer has one token a byte.
            blocks = -(-(len(prompt) - 1) // HYBRID_BLOCK_TOKENS)
            sizes.append((blocks * HYBRID_BLOCK_TOKENS * HYBRID_BYTES_PER_TOKEN, reply.kv_path))
        (small, first), (large, second) = sizes
        assert large > small
        assert second["bytes"] - first["bytes"] == large - small
        assert first["bytes"] > small, "states moved beside the attention's KV"
