"""Real CPU engines of each layout: tokens, bytes, and the KV itself, byte by byte.

Expected bytes are computed here from the model's dimensions alone. What a receive brought is
compared with what prefill's caches hold, both read through the tensors that the engines compute
with (``cache_hook``), before decode computes anything on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from fork_host import Engine

pytest.importorskip("vllm")

from engine_pair import Pair, connector_config, prompt

from models.tiny import model_path

pytestmark = pytest.mark.engine

FLOAT = 4
TOKENS = 8
HIT = 288
CHUNK = 512
LENGTHS = (2, 33, 95, 159, 320, 700)  # 95 and 159: a window of 64 or 128 begins with a block's end


@dataclass(frozen=True)
class Kind:
    """A layer kind: ``heads`` of ``head_bytes`` a token; without tokens: a state."""

    heads: int
    head_bytes: int
    window: int | None = None
    state: bool = False

    def expected(self, start: int, stop: int, block: int, tensor: int) -> int:
        """Bytes that all decode ranks receive of one layer."""
        heads = max(self.heads, tensor)
        if self.state:
            return heads * self.head_bytes
        first = start if self.window is None else max(start, stop - self.window + 1)
        return (-(-stop // block) - first // block) * block * heads * self.head_bytes


FULL = Kind(4, 2 * 32 * FLOAT)
LATENT = Kind(1, (512 + 64) * FLOAT)
FP8 = Kind(4, 2 * 32)
CONV = Kind(8, 64 * 3 * FLOAT, state=True)
SSM = Kind(8, 64 * 64 * FLOAT, state=True)


def mamba(groups: int) -> list[Kind]:
    return [CONV, *[Kind(groups, 64 * 3 * FLOAT, state=True)] * 2, SSM]


def windows(size: int) -> Kind:
    return Kind(4, 2 * 32 * FLOAT, window=size)


@dataclass(frozen=True)
class Case:
    """``prefill`` and ``decode`` are (pipeline, tensor) sizes; ``kinds`` all layers' arrays.

    ``groups``: of a Mamba layer's B and C.
    """

    model: str
    prefill: tuple[int, int]
    decode: tuple[int, int]
    kinds: list[Kind]
    block: int = 32
    leaves_last: bool = False
    same_tokens: bool = True
    prefixes: bool = True
    groups: int = 1
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        sizes = ["x".join(map(str, shape)) for shape in (self.prefill, self.decode)]
        words = [self.model, f"{sizes[0]}to{sizes[1]}", self.options.get("kv_cache_dtype", "")]
        return "-".join(filter(None, words))

    def engine(self, shape: tuple[int, int]) -> dict[str, Any]:
        return {
            "model": str(model_path(self.model)),
            "max_num_batched_tokens": CHUNK,
            "pipeline_parallel_size": shape[0],
            "tensor_parallel_size": shape[1],
            **self.options,
        }

    def expected(self, start: int, stop: int) -> int:
        sizes = [kind.expected(start, stop, self.block, self.decode[1]) for kind in self.kinds]
        return sum(sizes)

    def heads(self, name: str) -> int:
        """Heads of what ``cache_hook`` calls ``name``, over all tensor ranks."""
        attention = max(kind.heads for kind in self.kinds if not kind.state)
        if not any(kind.state for kind in self.kinds):
            attention = self.kinds[int(name.split("layers.")[1].split(".", maxsplit=1)[0])].heads
        parts = {"x": CONV.heads, "b": self.groups, "c": self.groups, "ssm": SSM.heads}
        return parts.get(name.rpartition(" ")[2], attention)


NO_PREFIXES = {"enable_prefix_caching": False}  # vLLM's CPU Mamba2 dies with it
MLA = {"attention_backend": "CPU_MLA"}
HYBRID = {"block": 160, "leaves_last": True, "prefixes": False, "options": NO_PREFIXES}
E5M2 = {"kv_cache_dtype": "fp8_e5m2"}
SKIPS_ONE = {"kv_cache_dtype": "fp8", "kv_cache_dtype_skip_layers": ["1"]}

OWN_HEADS = [Kind(8, 2 * 32 * FLOAT, window=64), Kind(4, 2 * 64 * FLOAT)]
MIMO = [Kind(2, 2 * 32 * FLOAT, window=128), Kind(1, 2 * 32 * FLOAT)] * 2
MORE_HEADS = [Kind(1, 2 * 64 * FLOAT, window=64), Kind(2, 2 * 64 * FLOAT)] * 2

CASES = [
    Case("llama", (2, 1), (1, 1), [FULL] * 4),
    Case("llama", (1, 2), (2, 1), [FULL] * 4),
    Case("mistral-window", (1, 1), (1, 1), [windows(128)] * 4, leaves_last=True),
    Case("gemma3-hybrid", (1, 2), (1, 1), [windows(64), FULL] * 2, leaves_last=True),
    Case("gpt-oss", (1, 1), (1, 1), [windows(64), FULL] * 2, leaves_last=True),
    Case("gemma4-own-heads", (1, 2), (1, 1), OWN_HEADS, leaves_last=True),
    Case("gemma4-own-heads", (1, 1), (1, 2), OWN_HEADS, leaves_last=True),
    # The model states one KV head. Of four ranks, two hold the same of a layer with two heads.
    Case("gemma4-more-heads", (1, 2), (1, 4), MORE_HEADS, leaves_last=True),
    Case("mimo-own-heads", (1, 2), (1, 4), MIMO, leaves_last=True),
    Case("deepseek-mla", (1, 1), (1, 1), [LATENT] * 4, block=16, prefixes=False, options=MLA),
    # With MLA this random model's tokens differ between tensor parallel sizes by themselves.
    Case("deepseek-mla", (1, 2), (1, 1), [LATENT] * 4, block=16, same_tokens=False,
         prefixes=False, options=MLA),
    Case("granite-hybrid", (1, 1), (1, 1), [FULL, *mamba(2) * 3], groups=2, **HYBRID),
    Case("granite-hybrid", (1, 2), (1, 1), [FULL, *mamba(2) * 3], groups=2, **HYBRID),
    Case("granite-one-group", (1, 2), (1, 1), [FULL, *mamba(1) * 3], **HYBRID),
    Case("granite-one-group", (1, 1), (1, 2), [FULL, *mamba(1) * 3], **HYBRID),
    # fp8, with scales of 1.0 and with the checkpoint's.
    Case("llama", (1, 1), (1, 1), [FP8, FULL, FP8, FP8], options=SKIPS_ONE),
    Case("llama", (1, 2), (1, 1), [FP8] * 4, options=E5M2),
    Case("llama-fp8-kv", (1, 1), (1, 1), [FP8] * 4),
    Case("llama-fp8-kv", (1, 2), (1, 1), [FP8] * 4),
    Case("llama-fp8-kv", (1, 1), (1, 2), [FP8] * 4),
]  # fmt: skip


WARM = prompt(320, 55)


def prompts_of(case: Case) -> dict[str, list[int]]:
    prompts = {f"{length} tokens": prompt(length, i) for i, length in enumerate(LENGTHS)}
    if case.prefixes:
        prompts["a prefix hit"] = WARM[:HIT] + prompt(97, 77)
    if case.leaves_last:
        prompts["one token"] = prompt(1, 5)
    if case.leaves_last and case.prefixes:
        prompts["a whole hit"] = WARM[: HIT + 1]  # the ticket ends where decode's blocks do
    return prompts


Expected = dict[str, tuple[list[int], list[int] | None]]  # by name: prompt, tokens


def references(engines: Callable[..., Engine], case: Case) -> Expected:
    """Prompts, and the greedy tokens of a single engine without connector.

    CPU_MLA computes one token in another way than several, and decode computes a prompt's last
    token by itself: the single engine's own first token is that last token then.
    """
    if not case.same_tokens:
        return {name: (tokens, None) for name, tokens in prompts_of(case).items()}
    options = {**case.engine((1, 1)), "enable_prefix_caching": False}
    single = engines("single", **options).wait_ready()
    expected: Expected = {}
    for name, tokens in prompts_of(case).items():
        made = single.generate(tokens, TOKENS + 1).tokens
        if case.options == MLA:
            expected[name] = (tokens + made[:1], made[1:])
        else:
            expected[name] = (tokens, made[:-1])
    single.stop()
    return expected


FP8_MARK = pytest.mark.needs("fp8")


@pytest.fixture(
    scope="module",
    params=[pytest.param(case, marks=FP8_MARK if FP8 in case.kinds else ()) for case in CASES],
    ids=str,
)
def running(request: Any, engines: Callable[..., Engine]) -> Iterator[tuple[Case, Pair, Expected]]:
    case: Case = request.param
    expected = (
        references(engines, case) if case.same_tokens else {}
    )  # before the pair: memory is short where all this runs
    prefill = engines("p", connector_config("kv_producer"), **case.engine(case.prefill))
    decode = engines("d", connector_config("kv_consumer"), **case.engine(case.decode))
    yield case, Pair(prefill.wait_ready(), decode.wait_ready()), expected
    prefill.stop()
    decode.stop()


def assemble(
    case: Case, ranks: list[Any], tensor: int, stop: int
) -> dict[str, dict[int, np.ndarray]]:
    """Layers of all ranks, each block with all of its heads.

    The last block of attention has room after the last token. Another layer may have used it
    before, with heads of which each rank has its own. What ranks with the same heads hold there
    is masked where it differs.
    """
    whole: dict[str, dict[int, np.ndarray]] = {}
    for (_, rank), layers in sorted(ranks, key=lambda item: item[0]):
        for name, blocks in layers.items():
            replicas = max(1, tensor // case.heads(name))
            for position, heads in blocks.items():
                known = whole.setdefault(name, {}).get(position)
                if known is None:
                    whole[name][position] = heads
                elif rank % replicas == 0:
                    whole[name][position] = np.ma.concatenate([known, heads])
                else:
                    other = np.zeros(known.shape, bool)
                    other[-len(heads) :] = known[-len(heads) :] != heads
                    has_room = " " not in name and position == stop // case.block
                    assert has_room or not other.any(), "replicas differ"
                    whole[name][position] = np.ma.masked_where(other, known)
    return whole


def check_kv(case: Case, held: list[Any], received: list[Any], start: int, stop: int) -> int:
    """Compare each byte that was received with prefill's; returns how many all ranks got."""
    theirs = assemble(case, held, case.prefill[1], stop)
    ours = assemble(case, received, case.decode[1], stop)
    assert ours.keys() == theirs.keys()
    compared = 0
    for name, blocks in ours.items():
        assert blocks, name
        for position, bytes_ in blocks.items():
            assert np.ma.allequal(bytes_, theirs[name][position]), (name, position)
            compared += bytes_.nbytes * max(1, case.decode[1] // case.heads(name))
        assert any(bytes_.any() for bytes_ in blocks.values()), f"{name} is all zeros"
    attention = [blocks for name, blocks in ours.items() if len(blocks) > 1 or 0 not in blocks]
    for blocks in attention:
        assert max(blocks) == (stop - 1) // case.block
    return compared


def handed_over(
    case: Case, pair: Pair, tokens: list[int], start: int, stop: int, name: str
) -> tuple[list[int], list[Any]]:
    """Send one prompt through both; returns decode's tokens, and what prefill's ranks held."""
    params = pair.ticket(tokens)
    held = pair.prefill.ask("held_kv", params["remote_block_ids"])
    request_id = pair.decode.submit(tokens, TOKENS, params)
    answer = pair.decode.answer(request_id)
    assert answer.path["outcome"] == "transferred", (name, answer.path)
    assert answer.path["tokens"] == stop - start, name
    received = pair.decode.ask("received_kv", request_id)
    compared = check_kv(case, held, received, start, stop)
    assert answer.path["bytes"] == case.expected(start, stop) == compared, name
    return answer.tokens, held


def test_tokens_bytes_and_the_kv_itself(
    running: tuple[Case, Pair, Expected],
) -> None:
    case, pair, expected = running
    pair.decode.generate(WARM, 1)
    for name, (tokens, greedy) in expected.items():
        stop = len(tokens) - case.leaves_last
        if stop == 0:  # nothing is left to hand over
            answer = pair.prefill.generate(tokens, 1, {"do_remote_decode": True})
            assert "ticket" not in (answer.params or {})
            assert pair.decode.generate(tokens, TOKENS).tokens == greedy
            continue
        if name == "a whole hit":
            answer = pair.generate(tokens, TOKENS)
            assert (answer.path["outcome"], answer.path["reason"]) == ("local", "PrefixHit")
            assert answer.tokens == greedy
            continue
        start = HIT if name == "a prefix hit" else 0
        made, _ = handed_over(case, pair, tokens, start, stop, name)
        assert greedy is None or made == greedy, name


def test_afterwards_nothing_is_held(running: tuple[Case, Pair, Expected]) -> None:
    _, pair, _ = running
    pair.check_nothing_held()
    for engine in (pair.prefill, pair.decode):
        assert not [name for name in engine.metrics() if "failures" in name or "faults" in name]
