"""vLLM's other features beside a transfer, on real CPU engines with all of them on at once.

Tokens equal a single engine's, and afterwards nothing is held: blocks, requests, leases.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fork_host import Engine, EngineDiedError

from authority import Authority

pytest.importorskip("vllm")

from engine_pair import Pair, connector_config, leases_expired, nothing_held

from models.tiny import model_path

pytestmark = pytest.mark.engine

BLOCK = 32
TOKENS = 12
POOL = 16  # decode blocks, the null block included: a few requests preempt one another
LEASE = 15  # short enough to see unclaimed leases end
Adapter = tuple[str, int, str]


def prompt(length: int, seed: int) -> list[int]:
    return [3 + (seed * 131 + i * (7 + seed) + i * i // 5) % 250 for i in range(length)]


def write_adapter(folder: Path, seed: int) -> None:
    """A LoRA adapter for the tiny Llama whose effect nobody overlooks."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)
    sizes = {"q_proj": 256, "v_proj": 128}
    tensors = {}
    for layer in range(4):
        for name, out in sizes.items():
            key = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{key}.lora_A.weight"] = torch.randn(8, 256, generator=generator) / 16
            tensors[f"{key}.lora_B.weight"] = torch.randn(out, 8, generator=generator)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": list(sizes), "bias": "none",
        "task_type": "CAUSAL_LM", "base_model_name_or_path": "tiny", "modules_to_save": None,
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[Adapter]:
    root = tmp_path_factory.mktemp("adapters")
    made = []
    for number, name in enumerate(("red", "blue"), 1):
        write_adapter(root / name, number)
        made.append((name, number, str(root / name)))
    return made


# vLLM wants sampling for n > 1; of one candidate all children choose the same.
THREE: dict[str, Any] = {"n": 3, "temperature": 1.0, "top_k": 1}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 1}
DRAFT = {"method": "draft_model", "num_speculative_tokens": 3}
LORA: dict[str, Any] = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Authority, Path]:
    """Who signs the certificates of this module's engines."""
    return Authority(), tmp_path_factory.mktemp("tls")


@pytest.fixture(scope="module")
def pair(engines: Callable[..., Engine], secured: tuple[Authority, Path]) -> Iterator[Pair]:
    """Chunked prefill, prefix caching, LoRA, and TLS on the side channel; decode's pool is tiny.

    The certificates name roles. Those of other tests' engines name engines.
    """
    model = str(model_path("llama"))
    prefill = engines(
        "p", connector_config("kv_producer", secured=secured, by_role=True), model=model,
        max_num_batched_tokens=64, max_num_seqs=8, **LORA,
    )  # fmt: skip
    decode = engines(
        "d", connector_config("kv_consumer", secured=secured, by_role=True), model=model,
        max_num_batched_tokens=64, max_num_seqs=8, num_gpu_blocks_override=POOL, max_model_len=448,
        **LORA,
    )  # fmt: skip
    yield Pair(prefill.wait_ready(), decode.wait_ready())
    prefill.stop()
    decode.stop()


@pytest.fixture(scope="module")
def expected(engines: Callable[..., Engine]) -> Callable[..., list[int]]:
    """Greedy tokens of one engine that does everything itself."""
    single = engines(
        "single", model=str(model_path("llama")), enable_prefix_caching=False, **LORA
    ).wait_ready()

    def tokens(tokens_in: list[int], count: int = TOKENS, lora: Adapter | None = None) -> list[int]:
        return single.generate(tokens_in, count, lora=lora).tokens

    return tokens


@pytest.fixture(scope="module")
def brief(engines: Callable[..., Engine], secured: tuple[Authority, Path]) -> Engine:
    """A prefill engine whose leases end soon."""
    config = connector_config("kv_producer", secured=secured, by_role=True, lease_seconds=LEASE)
    return engines("b", config, model=str(model_path("llama")), **LORA).wait_ready()


def test_n_prefills_return_one_ticket_and_the_others_expire(
    pair: Pair, brief: Engine, expected: Callable[..., list[int]]
) -> None:
    """A router that sends ``n`` to prefill too: n leases, of which vLLM returns one.

    The others are seen to have ended in the last test.
    """
    tokens = prompt(80, 34)
    first = brief.generate(tokens, 1, {"do_remote_decode": True}, **THREE)
    assert len(first.choices) == 3
    answer = pair.decode.generate(tokens, TOKENS, first.params, **THREE)
    assert answer.choices == [expected(tokens)] * 3


def test_chunked_prefill_and_prefix_hits_on_both_sides(
    pair: Pair, expected: Callable[..., list[int]]
) -> None:
    base = prompt(300, 1)
    for tail in (prompt(40, 2), prompt(41, 3), []):
        tokens = base + tail
        answer = pair.generate(tokens, TOKENS)
        assert answer.tokens == expected(tokens)
        if tail:
            assert answer.path["outcome"] == "transferred"
    assert answer.path["tokens"] == 300 - 9 * BLOCK, "nine blocks of 300 tokens were hit"


@contextlib.contextmanager
def paused(engine: Engine) -> Iterator[None]:
    """The engine makes no step but those that it is asked for."""
    engine.ask("pause", True)
    yield
    engine.ask("pause", False)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def gone(engine: Engine, request_id: str) -> None:
    """Wait until the scheduler forgets a request."""
    until(lambda: engine.ask("status", request_id) == "")


def test_preemption_while_others_receive(pair: Pair, expected: Callable[..., list[int]]) -> None:
    before = pair.decode.ask("counters")["vllm:num_preemptions"]
    prompts = [prompt(90, 10 + i) for i in range(4)]
    tickets = [pair.ticket(tokens) for tokens in prompts]
    pair.decode.ask("hold", "POSTED")
    waiting = [
        pair.decode.submit(tokens, 40, params)
        for tokens, params in zip(prompts, tickets, strict=True)
    ]
    count = len(waiting)
    until(lambda: pair.decode.ask("stands", count, "POSTED"))
    until(lambda: pair.decode.ask("claimed") == count)
    with paused(pair.decode):  # all KV has come before one of them generates
        pair.decode.ask("release")
        until(lambda: pair.decode.ask("ended") == count)
    for tokens, request_id in zip(prompts, waiting, strict=True):
        answer = pair.decode.answer(request_id)
        assert answer.tokens == expected(tokens, 40)
        assert answer.path["outcome"] == "transferred"
    assert pair.decode.ask("counters")["vllm:num_preemptions"] > before


def test_lora_adapters_are_not_mixed(
    pair: Pair, expected: Callable[..., list[int]], adapters: list[Adapter]
) -> None:
    red, blue = adapters
    tokens = prompt(100, 20)
    wanted = {lora and lora[0]: expected(tokens, lora=lora) for lora in (None, red, blue)}
    assert len({tuple(t) for t in wanted.values()}) == 3, "the adapters do nothing"
    for lora in (red, None, blue):
        first = pair.prefill.generate(tokens, 1, {"do_remote_decode": True}, lora=lora)
        answer = pair.decode.generate(tokens, TOKENS, first.params, lora=lora)
        assert answer.tokens == wanted[lora and lora[0]], pair.decode.tail()
        assert answer.path["outcome"] == "transferred"
    for mine, theirs in ((red, blue), (None, red), (blue, None)):
        salt = f"{mine} {theirs}"
        first = pair.prefill.generate(tokens, 1, {"do_remote_decode": True}, salt, lora=theirs)
        answer = pair.decode.generate(tokens, TOKENS, first.params, salt, lora=mine)
        assert answer.tokens == wanted[mine and mine[0]]
        assert (answer.path["outcome"], answer.path["reason"]) == ("local", "PromptMismatch")


def test_one_ticket_for_n_children(pair: Pair, expected: Callable[..., list[int]]) -> None:
    tokens = prompt(100, 30)
    answer = pair.decode.generate(tokens, TOKENS, pair.ticket(tokens), **THREE)
    assert answer.choices == [expected(tokens)] * 3


def test_one_ticket_for_a_list_of_prompts(pair: Pair, expected: Callable[..., list[int]]) -> None:
    prompts = [prompt(90, 31), prompt(90, 32), prompt(70, 33)]
    params = pair.ticket(prompts[0])
    waiting = [pair.decode.submit(tokens, TOKENS, params) for tokens in prompts]
    answers = [pair.decode.answer(request_id) for request_id in waiting]
    assert [answer.tokens for answer in answers] == [expected(tokens) for tokens in prompts]
    reasons = [answer.path["reason"] for answer in answers]
    assert reasons[0] == ""
    # On a slow machine, the first one has read before the others come.
    assert set(reasons[1:]) <= {"PromptMismatch", "TicketSpent"}


def test_prompt_logprobs_are_computed_here(pair: Pair, expected: Callable[..., list[int]]) -> None:
    tokens = prompt(80, 35)
    answer = pair.decode.generate(tokens, TOKENS, pair.ticket(tokens), prompt_logprobs=0)
    assert answer.tokens == expected(tokens)
    assert (answer.path["outcome"], answer.path["reason"]) == ("local", "PrefixReadingOff")


@pytest.mark.parametrize(
    ("status", "computed"), [("WAITING", 0), ("RUNNING", 64), ("RUNNING", 256)]
)
def test_an_aborted_prefill_hands_nothing_out(pair: Pair, status: str, computed: int) -> None:
    with paused(pair.prefill):
        request_id = pair.prefill.submit(prompt(300, 40), 1, {"do_remote_decode": True}, status)
        pair.prefill.ask("advance", request_id, status, computed)
        pair.prefill.abort(request_id)
        pair.prefill.ask("step")
        assert pair.prefill.ask("status", request_id) == "", "no lease keeps its blocks"
        assert pair.prefill.ask("answer", request_id) is None


def test_a_client_that_hangs_up_after_prefills_answer_takes_no_ticket_away(
    pair: Pair, expected: Callable[..., list[int]]
) -> None:
    tokens = prompt(300, 41)
    params = pair.ticket(tokens)
    pair.prefill.abort(params["remote_request_id"])
    assert pair.prefill.ask("status", params["remote_request_id"]) == "FINISHED_LENGTH_CAPPED"
    answer = pair.decode.generate(tokens, TOKENS, params)
    assert answer.path["outcome"] == "transferred"
    assert answer.tokens == expected(tokens)
    gone(pair.prefill, params["remote_request_id"])


@pytest.mark.parametrize(
    ("status", "computed", "after"),
    [
        ("WAITING", 0, ""),
        ("WAITING_FOR_REMOTE_KVS", 0, "FINISHED_ABORTED"),  # its KV may still land in its blocks
        ("RUNNING", 303, ""),
    ],
)
def test_an_aborted_decode_gives_the_lease_back(
    pair: Pair, status: str, computed: int, after: str
) -> None:
    tokens = prompt(300, 42)
    params = pair.ticket(tokens, status)
    before = pair.decode.metrics()
    with paused(pair.decode):
        request_id = pair.decode.submit(tokens, 50, params, status)
        pair.decode.ask("advance", request_id, status, computed)
        pair.decode.abort(request_id)
        assert pair.decode.ask("status", request_id) == after
    gone(pair.decode, request_id)
    gone(pair.prefill, params["remote_request_id"])
    assert pair.decode.free_blocks() == POOL - 1
    known = {name: count for name, count in before.items() if "failures" in name}
    now = {name: count for name, count in pair.decode.metrics().items() if "failures" in name}
    assert now == known, "an abort is no fault of the KV path"


def test_a_reset_waits_for_leases(pair: Pair, expected: Callable[..., list[int]]) -> None:
    """Weight updates clear the caches: not while KV of the old weights can be fetched."""
    tokens = prompt(100, 50)
    nothing_held(pair.prefill, pair.decode)
    params = pair.ticket(tokens)
    assert pair.prefill.ask("reset_cache") is False
    answer = pair.decode.generate(tokens, TOKENS, params)
    assert answer.path["outcome"] == "transferred"
    nothing_held(pair.prefill)
    assert pair.prefill.ask("reset_cache") is True
    assert pair.decode.ask("reset_cache") is True
    again = pair.generate(tokens, TOKENS)
    assert again.tokens == answer.tokens == expected(tokens)
    assert again.path["tokens"] == 100, "decode's prefix cache was not cleared"


def test_speculation_on_decode_alone(
    engines: Callable[..., Engine],
    secured: tuple[Authority, Path],
    pair: Pair,
    expected: Callable[..., list[int]],
) -> None:
    decode = engines(
        "n", connector_config("kv_consumer", secured=secured, by_role=True),
        model=str(model_path("llama")), max_num_seqs=8, speculative_config=NGRAM, **LORA,
    ).wait_ready()  # fmt: skip
    for seed in range(4):
        tokens = prompt(100, 60 + seed)
        answer = Pair(pair.prefill, decode).generate(tokens, 60)
        assert answer.tokens == expected(tokens, 60), decode.tail()
        assert answer.path["outcome"] == "transferred"
    counters = decode.ask("counters")
    drafted = counters["vllm:spec_decode_num_draft_tokens"]
    assert drafted > counters["vllm:spec_decode_num_accepted_tokens"] > 0
    nothing_held(decode)
    assert decode.free_blocks() == 255
    decode.stop()


def test_speculation_with_a_draft_model(
    engines: Callable[..., Engine],
    secured: tuple[Authority, Path],
    pair: Pair,
    expected: Callable[..., list[int]],
) -> None:
    """Its layers have KV of their own, which moves too where both engines have it."""
    draft = {**DRAFT, "model": str(model_path("llama-finetuned"))}
    llm = {"model": str(model_path("llama")), "max_num_seqs": 8, "speculative_config": draft}
    prefill = engines("dp", connector_config("kv_producer", secured=secured, by_role=True), **llm)
    decode = engines(
        "dd", connector_config("kv_consumer", "recompute", secured=secured, by_role=True), **llm
    )
    drafting = Pair(prefill.wait_ready(), decode.wait_ready())
    for seed in range(4):
        tokens = prompt(100, 70 + seed)
        answer = drafting.generate(tokens, 60)
        assert answer.tokens == expected(tokens, 60), decode.tail()
        assert answer.path["outcome"] == "transferred"
        plain = pair.generate(tokens)
        assert answer.path["bytes"] == 2 * plain.path["bytes"], "as many layers as the model"
    counters = decode.ask("counters")
    drafted = counters["vllm:spec_decode_num_draft_tokens"]
    assert drafted > counters["vllm:spec_decode_num_accepted_tokens"] > 0
    tokens = prompt(100, 75)
    answer = Pair(pair.prefill, decode).generate(tokens, TOKENS)
    assert (answer.path["outcome"], answer.path["reason"]) == ("failed", "LayerMismatch")
    assert answer.tokens == expected(tokens)
    other = engines(
        "do", connector_config("kv_consumer", "recompute", secured=secured, by_role=True),
        **{**llm, "speculative_config": {**DRAFT, "model": str(model_path("llama"))}},
    ).wait_ready()  # fmt: skip
    answer = Pair(prefill, other).generate(tokens, TOKENS)
    assert (answer.path["outcome"], answer.path["reason"]) == ("failed", "ModelMismatch")
    assert "the draft model differs: prefill draft_model " in answer.path["message"]
    assert answer.tokens == expected(tokens)
    nothing_held(prefill, decode, other)
    for engine in (prefill, decode, other):
        assert engine.free_blocks() == 255
        engine.stop()


def test_afterwards_nothing_is_held(pair: Pair, brief: Engine) -> None:
    nothing_held(pair.prefill, pair.decode, brief)
    assert (pair.prefill.free_blocks(), pair.decode.free_blocks()) == (255, POOL - 1)
    assert brief.free_blocks() == 255
    for prefill in (pair.prefill, brief):
        assert prefill.metrics()["pdcluster_kv_leases_held"] == 0
    assert leases_expired(pair.prefill) == 0, "each was given back"
    assert leases_expired(brief) >= 2, "two of n=3 prefills come to nothing"
    for engine in (pair.prefill, pair.decode, brief):
        assert not [name for name in engine.metrics() if "step_faults" in name]


def test_ranks_that_disagree_about_the_engine_never_serve(engines: Callable[..., Engine]) -> None:
    config = connector_config("kv_producer")
    config["kv_connector"] = "Stranger"
    config["kv_connector_module_path"] = "stranger"
    engine = engines("s", config, model=str(model_path("llama")))
    with pytest.raises(EngineDiedError, match=r"EngineIdInconsistent: rank \(0, 0\)"):
        engine.wait_ready()
