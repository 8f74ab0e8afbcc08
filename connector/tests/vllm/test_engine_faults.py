"""Real CPU engines that must not or cannot exchange KV: refused by name, never wrong."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import pytest
from fork_host import Engine

pytest.importorskip("vllm")

from engine_pair import Pair, connector_config, leases_expired, nothing_held

from loopback import free_port
from models.tiny import model_path
from pdcluster_connector.compat.reasons import Reason
from pdcluster_connector.transfer.receive_machine import State

pytestmark = pytest.mark.engine

PROMPT = [3 + (i * 37 + i * i // 3) % 250 for i in range(100)]
TOKENS = 12
LEASE = 8.0


@pytest.fixture(scope="module")
def expected(engines: Callable[..., Engine]) -> Callable[[str], list[int]]:
    """Greedy tokens of a single engine for PROMPT."""
    known: dict[str, list[int]] = {}

    def tokens(model: str) -> list[int]:
        if model not in known:
            single = engines("single", model=str(model_path(model)), enable_prefix_caching=False)
            known[model] = single.wait_ready().generate(PROMPT, TOKENS).tokens
            single.stop()
        return known[model]

    return tokens


@pytest.fixture(scope="module")
def prefill(engines: Callable[..., Engine]) -> Engine:
    """A healthy prefill engine for all tests of this module."""
    return engines(
        "p", connector_config("kv_producer"), model=str(model_path("llama"))
    ).wait_ready()


def failures(engine: Engine) -> dict[str, float]:
    return {
        name.split("reason=")[1].rstrip("}"): value
        for name, value in engine.metrics().items()
        if name.startswith("pdcluster_kv_failures_total{")
    }


def labelled(engine: Engine, metric: str) -> dict[str, float]:
    """A metric's values by its labels."""
    return {
        name.partition("{")[2].rstrip("}"): value
        for name, value in engine.metrics().items()
        if name.startswith(metric + "{")
    }


def prompts(engine: Engine) -> dict[str, float]:
    counted = labelled(engine, "pdcluster_kv_prompts_total")
    return {labels.removeprefix("outcome="): value for labels, value in counted.items()}


REFUSED: list[tuple[str, str, dict[str, Any], str]] = [
    ("fail", "llama", {"block_size": 64}, "BlockInteriorOpaque"),
    ("recompute", "llama", {"block_size": 128}, "BlockInteriorOpaque"),
    (
        "recompute",
        "llama",
        {"block_size": 64, "enable_prefix_caching": False},
        "BlockInteriorOpaque",
    ),
    ("fail", "llama-finetuned", {}, "ModelMismatch"),
    ("recompute", "llama-finetuned", {}, "ModelMismatch"),
]


@pytest.mark.parametrize(("policy", "model", "options", "reason"), REFUSED)
def test_a_refused_pair_follows_the_policy_and_is_never_wrong(
    prefill: Engine, engines: Callable[..., Engine], expected: Callable[[str], list[int]],
    policy: str, model: str, options: dict[str, Any], reason: str,
) -> None:  # fmt: skip
    decode = engines(
        "d", connector_config("kv_consumer", policy), model=str(model_path(model)), **options
    ).wait_ready()
    pair, ended = Pair(prefill, decode), leases_expired(prefill)
    for _ in range(2):
        answer = pair.generate(PROMPT, TOKENS)
        if policy == "fail":
            assert answer.finish_reason == "error"
            assert answer.tokens == []
        else:
            assert answer.tokens == expected(model)
            assert answer.path["outcome"] == "failed"
            assert answer.path["reason"] == reason
            assert answer.path["bytes"] == 0
            assert "prefill" in answer.path["message"]
            assert "decode" in answer.path["message"]
    assert failures(decode) == {reason: 2}
    assert not decode.metrics().get("pdcluster_kv_received_bytes_total"), "nothing was posted"
    nothing_held(decode, prefill)
    assert leases_expired(prefill) == ended, "a refused ticket is released too"
    # The engine itself is well: what needs no KV from elsewhere is served.
    assert decode.generate(PROMPT, TOKENS, salt="alone").tokens == expected(model)
    # Each request is counted once, and so are the tokens that prefill should have brought.
    block, caches = options.get("block_size", 32), options.get("enable_prefix_caching", True)
    alone = "NoTicket" if len(PROMPT) >= block else "ShortPrompt"
    outcome = "failed" if policy == "fail" else "recomputed"
    assert prompts(decode) == {f"{outcome},reason={reason}": 2, f"local,reason={alone}": 1}
    tokens = {"reason=NoTicket": len(PROMPT)} if alone == "NoTicket" else {}
    if policy == "recompute":
        hit = (len(PROMPT) - 1) // block * block if caches else 0
        tokens[f"reason={reason}"] = 2 * len(PROMPT) - hit
    assert labelled(decode, "pdcluster_kv_local_prompt_tokens_total") == tokens
    decode.stop()


def test_windows_on_one_side_only_are_refused(engines: Callable[..., Engine]) -> None:
    """Without vLLM's hybrid manager, layers with a window keep all tokens as the others do."""
    path = str(model_path("gemma3-hybrid"))
    prefill = engines("p", connector_config("kv_producer"), model=path)
    decode = engines(
        "d", connector_config("kv_consumer", "recompute"), model=path,
        disable_hybrid_kv_cache_manager=True,
    )  # fmt: skip
    pair = Pair(prefill.wait_ready(), decode.wait_ready())
    answer = pair.generate(PROMPT, TOKENS)
    assert answer.tokens == decode.generate(PROMPT, TOKENS, salt="alone").tokens
    assert answer.path["outcome"] == "failed"
    assert answer.path["reason"] == "LayerMismatch"
    assert "sliding_window" in answer.path["message"]
    assert "full_attention" in answer.path["message"]
    for engine in (prefill, decode):
        assert engine.alive()
        engine.stop()


def test_other_rotary_embeddings_for_a_longer_context_are_refused(
    engines: Callable[..., Engine],
) -> None:
    """With LongRoPE, an engine that allows more tokens rotates the keys of short prompts too."""
    path = str(model_path("phi3-longrope"))
    prefill = engines("p", connector_config("kv_producer"), model=path, max_model_len=2048)
    decode = engines(
        "d", connector_config("kv_consumer", "recompute"), model=path, max_model_len=512
    )
    pair = Pair(prefill.wait_ready(), decode.wait_ready())
    alone = decode.generate(PROMPT, TOKENS, salt="alone").tokens
    assert prefill.generate(PROMPT, TOKENS, salt="alone").tokens != alone
    answer = pair.generate(PROMPT, TOKENS)
    assert answer.tokens == alone
    assert answer.path["outcome"] == "failed"
    assert answer.path["reason"] == "ModelMismatch"
    same = engines("p", connector_config("kv_producer"), model=path, max_model_len=256)
    answer = Pair(same.wait_ready(), decode).generate(PROMPT, TOKENS, salt="same")
    assert answer.path["outcome"] == "transferred", "below the original context, all are alike"
    assert answer.tokens == alone
    for engine in (prefill, decode, same):
        engine.stop()


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_decode_outlives_a_killed_prefill(
    engines: Callable[..., Engine], expected: Callable[[str], list[int]], policy: str
) -> None:
    model = str(model_path("llama"))
    port = free_port()
    prefill_config = functools.partial(connector_config, "kv_producer", side_channel_port=port)
    doomed = engines("p", prefill_config(lease_seconds=300), model=model)
    decode = engines("d", connector_config("kv_consumer", policy, lease_seconds=LEASE), model=model)
    pair = Pair(doomed.wait_ready(), decode.wait_ready())
    pair.moves_soon(PROMPT, expected("llama"), "before")
    before = sum(failures(decode).values())
    late, later = (pair.ticket(PROMPT, salt=salt) for salt in ("late", "later"))
    doomed.kill()
    # Prefill's lease ends after this has given up.
    answer = decode.generate(PROMPT, TOKENS, late, "late", timeout=150)
    if policy == "fail":
        assert answer.finish_reason == "error"
    else:
        assert answer.tokens == expected("llama")
        assert answer.path["outcome"] == "failed"
    assert sum(failures(decode).values()) == before + 1
    nothing_held(decode)
    assert decode.generate(PROMPT, TOKENS, salt="after").tokens == expected("llama")

    if policy == "recompute":  # its next start serves the same decode engine at once
        second = engines("p", prefill_config(), model=model).wait_ready()
        answer = decode.generate(PROMPT, TOKENS, later, "later")
        assert answer.tokens == expected("llama")
        # The same engine by name and address, but another start of it: its memory is new.
        assert (answer.path["outcome"], answer.path["reason"]) == ("failed", Reason.PEER_RESTARTED)
        Pair(second, decode).moves_soon(PROMPT, expected("llama"), "second")
        second.stop()
    decode.stop()


def test_decode_waits_for_a_prefill_that_is_killed_meanwhile(
    engines: Callable[..., Engine], expected: Callable[[str], list[int]], prefill: Engine
) -> None:
    """The handshake hangs: attempts go on until the lease's end, other peers are not delayed."""
    model = str(model_path("llama"))
    decode = engines(
        "d", connector_config("kv_consumer", "recompute", lease_seconds=LEASE), model=model
    )
    other = engines("p", connector_config("kv_producer"), model=model)
    pair = Pair(other.wait_ready(), decode.wait_ready())
    began = time.monotonic()
    params = pair.ticket(PROMPT)
    other.freeze()
    waiting = decode.submit(PROMPT, TOKENS, params)
    Pair(prefill, decode).moves_soon(PROMPT, expected("llama"), "healthy")
    answered = decode.ask("answer", waiting) is not None
    if time.monotonic() - began < LEASE:  # else the machine was too busy to tell
        assert not answered, "nothing to read from answers yet"
    other.kill()
    answer = decode.answer(waiting)
    assert answer.tokens == expected("llama")
    assert answer.path["reason"] == "SideChannelUnreachable"
    Pair(prefill, decode).moves_soon(PROMPT, expected("llama"), "after")
    decode.stop()


def test_aborted_requests_leave_nothing_behind(
    engines: Callable[..., Engine], expected: Callable[[str], list[int]], prefill: Engine
) -> None:
    """Each is aborted in another state of its receive."""
    decode = engines(
        "d", connector_config("kv_consumer"), model=str(model_path("llama"))
    ).wait_ready()
    pair, ended = Pair(prefill, decode), leases_expired(prefill)
    long_prompt = [3 + i * 11 % 250 for i in range(1200)]
    for state in (State.NEW, State.HANDSHAKE, State.POSTED, State.FENCE):
        # HANDSHAKE closes the connection itself; the others need one.
        pair.moves_soon(PROMPT, expected("llama"), state.name)
        params = pair.ticket(long_prompt, salt=f"abort {state.name}")
        decode.ask("hold", state.name)
        request_id = decode.submit(long_prompt, 200, params, f"abort {state.name}")
        deadline = time.monotonic() + 60
        while not decode.ask("stands", 1, state.name):
            assert time.monotonic() < deadline, state
        decode.abort(request_id)
        decode.ask("release")
    nothing_held(decode, prefill)
    assert leases_expired(prefill) == ended, "they were given back"
    assert decode.free_blocks() == 255
    assert failures(decode) == {}, "an abort is no fault of the KV path"
    assert pair.generate(PROMPT, TOKENS).path["outcome"] == "transferred"
    decode.stop()
