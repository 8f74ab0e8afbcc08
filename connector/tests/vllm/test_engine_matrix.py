"""Real CPU engines: decode's greedy tokens equal a single engine's, and every byte is counted.

The expected bytes are computed here from the model's dimensions alone: whole blocks of
``block tokens x layers x KV heads x (K + V) x head size x 4``, and every decode rank reads
its heads, also those that it shares with another rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from fork_host import Engine

pytest.importorskip("vllm")

from engine_pair import Pair, connector_config, prompt

from models.tiny import model_path

pytestmark = pytest.mark.engine

BLOCK = 32
LAYERS = 4
HEAD_SIZE = 32
FLOAT = 4
TOKENS = 12
CHUNK = 512  # prefill steps of at most so many tokens: the longest prompt takes three

LENGTHS = {
    "one token": 1,
    "a block less one": BLOCK - 1,
    "a block": BLOCK,
    "a block and one": BLOCK + 1,
    "3 blocks": 3 * BLOCK,
    "3 blocks and a half": 3 * BLOCK + BLOCK // 2,
    "10 blocks less one": 10 * BLOCK - 1,
    "40 blocks, prefilled in chunks": 40 * BLOCK,
}


PROMPTS = {name: prompt(length, i + 1) for i, (name, length) in enumerate(LENGTHS.items())}
SHARED = PROMPTS["10 blocks less one"][: 9 * BLOCK] + prompt(50, 77)


@dataclass(frozen=True)
class Case:
    model: str
    prefill_tp: int
    decode_tp: int
    kv_heads: int

    @property
    def bytes_per_block(self) -> int:
        """Over all decode ranks; heads are replicated where there are more ranks than heads."""
        heads = max(self.kv_heads, self.decode_tp)
        return BLOCK * LAYERS * heads * 2 * HEAD_SIZE * FLOAT


CASES = [
    Case("llama", 1, 1, 4),
    Case("llama", 2, 1, 4),
    Case("llama", 1, 2, 4),
    Case("llama-mqa", 2, 1, 1),
    Case("llama-mqa", 1, 2, 1),
]


@pytest.fixture(scope="module")
def reference(engines: Callable[..., Engine]) -> Callable[[str, list[int]], list[int]]:
    """Greedy tokens of a single engine without connector and without prefix caching."""
    singles: dict[str, Engine] = {}
    known: dict[tuple[str, tuple[int, ...]], list[int]] = {}

    def tokens(model: str, tokens_in: list[int]) -> list[int]:
        key = (model, tuple(tokens_in))
        if key not in known:
            if model not in singles:
                singles[model] = engines(
                    "single", model=str(model_path(model)), enable_prefix_caching=False
                ).wait_ready()
            known[key] = singles[model].generate(tokens_in, TOKENS).tokens
        return known[key]

    return tokens


@pytest.fixture(
    scope="module", params=CASES, ids=lambda c: f"{c.model}-{c.prefill_tp}to{c.decode_tp}"
)
def running(request: Any, engines: Callable[..., Engine]) -> Iterator[tuple[Case, Pair]]:
    case: Case = request.param
    model = str(model_path(case.model))
    prefill = engines(
        "p", connector_config("kv_producer"), model=model, max_num_batched_tokens=CHUNK,
        tensor_parallel_size=case.prefill_tp,
    )  # fmt: skip
    decode = engines(
        "d", connector_config("kv_consumer"), model=model, max_num_batched_tokens=CHUNK,
        tensor_parallel_size=case.decode_tp,
    )  # fmt: skip
    yield case, Pair(prefill.wait_ready(), decode.wait_ready())
    prefill.stop()
    decode.stop()


def blocks(tokens: int) -> int:
    return -(-tokens // BLOCK)


def test_greedy_tokens_and_bytes(
    running: tuple[Case, Pair], reference: Callable[[str, list[int]], list[int]]
) -> None:
    case, pair = running
    expected_bytes = 0
    for name, tokens in PROMPTS.items():
        answer = pair.generate(tokens, TOKENS)
        told = (name, answer.path, answer.finish_reason)
        assert answer.tokens == reference(case.model, tokens), (told, pair.decode.tail())
        path = answer.path
        assert path["outcome"] == "transferred", (name, path)
        assert path["tokens"] == len(tokens)
        assert path["blocks"] == blocks(len(tokens))
        assert path["bytes"] == blocks(len(tokens)) * case.bytes_per_block, name
        expected_bytes += path["bytes"]

    # A prefix hit on decode: nine blocks are there already.
    answer = pair.generate(SHARED, TOKENS)
    assert answer.tokens == reference(case.model, SHARED)
    assert answer.path["outcome"] == "transferred"
    assert answer.path["tokens"] == len(SHARED) - 9 * BLOCK
    assert answer.path["blocks"] == blocks(len(SHARED)) - 9
    assert answer.path["bytes"] == (blocks(len(SHARED)) - 9) * case.bytes_per_block
    expected_bytes += answer.path["bytes"]

    metrics = pair.decode.metrics()
    assert metrics["pdcluster_kv_received_bytes_total"] == expected_bytes
    receives = (len(PROMPTS) + 1) * case.decode_tp
    for phase in ("handshake", "post", "transfer", "total"):
        assert metrics[f"pdcluster_kv_receive_seconds_count{{phase={phase}}}"] == receives
    assert not [name for name in metrics if "failures" in name or "local_prompt_tokens" in name]
    outcomes = {name: n for name, n in metrics.items() if name.startswith("pdcluster_kv_prompts_t")}
    transferred = "pdcluster_kv_prompts_total{outcome=transferred,reason=}"
    assert outcomes == {transferred: len(PROMPTS) + 1}
    assert not [name for name in metrics if "step_faults" in name]


def test_many_requests_in_flight(
    running: tuple[Case, Pair], reference: Callable[[str, list[int]], list[int]]
) -> None:
    case, pair = running
    flying = []
    for round_ in range(3):
        for tokens in list(PROMPTS.values())[1:]:
            salt = f"round {round_}"
            first = pair.prefill.submit(tokens, 1, {"do_remote_decode": True}, salt)
            flying.append((tokens, salt, first))
    decoding = [
        (tokens, pair.decode.submit(tokens, TOKENS, pair.prefill.answer(first).params, salt))
        for tokens, salt, first in flying
    ]
    for tokens, request_id in decoding:
        answer = pair.decode.answer(request_id)
        assert answer.tokens == reference(case.model, tokens)
        assert answer.path["outcome"] == "transferred"
        assert answer.path["bytes"] == blocks(len(tokens)) * case.bytes_per_block


def test_afterwards_nothing_is_held(running: tuple[Case, Pair]) -> None:
    _, pair = running
    pair.check_nothing_held()
    assert pair.prefill.metrics()["pdcluster_kv_leases_held"] == 0
    assert pair.prefill.metrics()["pdcluster_kv_leases_expired_total"] == 0
