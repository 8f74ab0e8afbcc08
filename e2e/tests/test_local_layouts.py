"""A Mamba hybrid of two ranks, from a manifest to tokens.

Pipeline stages are in test_local_api_key.py: one start of engines shows both.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kv_load import text
from local_run import LocalRun, manifest, tensor

from models.tiny import model_path

pytestmark = [pytest.mark.local, pytest.mark.timeout(900)]

HYBRID_BLOCK_TOKENS = 160  # vLLM's choice: a block of attention is as large as a state
HYBRID_BYTES_PER_TOKEN = 4 * 2 * 32 * 4  # of its one attention layer: heads x (K, V) x head size


def test_a_mamba_hybrid_on_two_ranks_hands_over_to_one(tmp_path: Path) -> None:
    """With different tensor sizes, the layout of its states must allow a cut between ranks."""
    model: dict[str, Any] = {"source": {"hostPath": {"path": str(model_path("granite-hybrid"))}}}
    engine = {"prefixCaching": "Disabled"}
    with LocalRun(manifest(model=model, engine=engine, prefill=tensor(2)), tmp_path) as run:
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
