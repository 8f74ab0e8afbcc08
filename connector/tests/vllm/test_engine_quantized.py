"""Real CPU engines with quantised KV that must not be exchanged: refused by name, never wrong.

What is exchanged, byte by byte, is in ``test_engine_layouts``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from fork_host import Engine

pytest.importorskip("vllm")

from engine_pair import Pair, connector_config

from models.tiny import model_path

pytestmark = [pytest.mark.engine, pytest.mark.needs("fp8")]

PROMPT = [3 + (i * 37 + i * i // 3) % 250 for i in range(100)]
TOKENS = 12
FP8 = {"kv_cache_dtype": "fp8"}
E5M2 = {"kv_cache_dtype": "fp8_e5m2"}
PER_TOKEN = {"kv_cache_dtype": "int8_per_token_head"}
SKIPS_ONE = {"kv_cache_dtype_skip_layers": ["1"]}


@dataclass(frozen=True)
class Side:
    model: str
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return "-".join([self.model, *(str(value) for value in self.options.values())])


@pytest.mark.parametrize(
    ("prefill", "decode", "reason", "words"),
    [
        # Scales are weights of the checkpoint: others are another model.
        (Side("llama-fp8-kv"), Side("llama-fp8-kv-rescaled"), "ModelMismatch", ("digest",)),
        (Side("llama", FP8), Side("llama", E5M2), "KVDtypeMismatch", ("fp8_e4m3", "fp8_e5m2")),
        (Side("llama", FP8), Side("llama"), "KVDtypeMismatch", ("fp8_e4m3", "float32")),
        (
            Side("llama-fp8-kv"),
            Side("llama-fp8-kv", SKIPS_ONE),
            "KVDtypeMismatch",
            ("model.layers.1", "fp8_e4m3", "float32"),
        ),
        (
            Side("llama", PER_TOKEN),
            Side("llama", PER_TOKEN),
            "LayoutUnsupported",
            ("int8_per_token_head",),
        ),
    ],
    ids=str,
)
def test_what_cannot_be_exchanged_is_computed_here(
    engines: Callable[..., Engine], prefill: Side, decode: Side, reason: str, words: tuple[str, ...]
) -> None:
    ours = engines(
        "p",
        connector_config("kv_producer"),
        model=str(model_path(prefill.model)),
        **prefill.options,
    ).wait_ready()
    theirs = engines(
        "d", connector_config("kv_consumer", "recompute"), model=str(model_path(decode.model)),
        enable_prefix_caching=False, **decode.options,
    ).wait_ready()  # fmt: skip
    alone = theirs.generate(PROMPT, TOKENS).tokens
    answer = Pair(ours, theirs).generate(PROMPT, TOKENS)
    assert (answer.path["outcome"], answer.path["reason"]) == ("failed", reason)
    assert answer.path["bytes"] == 0
    assert all(word in answer.path["message"] for word in words), answer.path["message"]
    assert answer.tokens == alone


def test_a_layout_that_the_backend_does_not_have_is_refused(engines: Callable[..., Engine]) -> None:
    """vLLM warns in its log and takes LBHNC, the only one of CPU_ATTN."""
    asks, model = {"kv_layout": "BHLNC"}, str(model_path("llama"))
    ours = engines("p", connector_config("kv_producer", **asks), model=model).wait_ready()
    theirs = engines(
        "d", connector_config("kv_consumer", "recompute", **asks), model=model
    ).wait_ready()
    path = Pair(ours, theirs).generate(PROMPT, TOKENS).path
    assert (path["outcome"], path["reason"], path["bytes"]) == ("failed", "LayoutUnsupported", 0)
    assert "prefill has KV in LBHNC, not in BHLNC" in path["message"], path["message"]
    for engine in (ours, theirs):
        engine.stop()
