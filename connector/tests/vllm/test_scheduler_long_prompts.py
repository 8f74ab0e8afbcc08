"""Prompts whose digest takes several steps, under vLLM's own schedulers. Pieces are counted."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("vllm")

from contract import ContractEngine, closing_engines, prompt
from test_scheduler_contract import abort, messages_to_prefill
from test_scheduler_features import OFFLOADING, nothing_left

from pdcluster_connector.vllm.scheduler_side import prompt_digests

pytestmark = pytest.mark.vllm

PIECE, PIECES_IN_A_STEP, LONG = 16, 2, 400


@pytest.fixture
def plain_engines() -> Iterator[Any]:
    yield from closing_engines()


@pytest.fixture
def engines(plain_engines: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Engines to which a piece is 16 tokens, and which make two of them in a step."""
    pieces = 0
    take = prompt_digests.PromptDigest.take

    def counted(digest: prompt_digests.PromptDigest) -> None:
        nonlocal pieces
        pieces += 1
        take(digest)

    monkeypatch.setattr(prompt_digests.PromptDigest, "take", counted)
    monkeypatch.setattr(prompt_digests, "PIECE", PIECE)
    monkeypatch.setattr(prompt_digests, "SECONDS", float(PIECES_IN_A_STEP))

    def made(role: str, **options: Any) -> ContractEngine:
        engine: ContractEngine = plain_engines(role, **options)
        digests = engine.connector._scheduler._digests
        digests.clock, digests._seconds = lambda: float(pieces), float(PIECES_IN_A_STEP)
        engine.pieces = lambda: pieces  # type: ignore[attr-defined]
        return engine

    return made


def most_pieces(engine: Any, until: Any) -> int:
    """Step until something holds; return the most pieces of a step."""
    most = 0
    for _ in range(LONG):
        if until():
            return most
        before = engine.pieces()
        engine.step()
        most = max(most, engine.pieces() - before)
    raise AssertionError("nothing changes any more")


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("offloads", [False, True])
def test_a_long_prompt_holds_nobody_up(engines: Any, asynchronous: bool, offloads: bool) -> None:
    others = {"others": [OFFLOADING]} if offloads else {}
    prefill = engines("producer", **others)
    decode = engines("consumer", asynchronous=asynchronous, **others)
    short, runs, long = prompt(PIECE), prompt(PIECE, first=6), prompt(LONG, first=7)
    params = {name: prefill.prefill(name, text) for name, text in
              (("runs", runs), ("long", long), ("short", short))}  # fmt: skip
    decode.add("runs", runs, params["runs"], max_tokens=300)
    decode.run(lambda: "runs" in decode.parked())
    decode.land("runs")
    decode.run(lambda: decode.tokens.get("runs", 0) > 0)
    before = decode.pieces()
    decode.add("long", long, params["long"])
    assert decode.pieces() - before == 1
    decode.add("short", short, params["short"])
    decode.step()
    assert decode.parked() == {"short"}, "it passes the long one"
    tokens = decode.tokens["runs"]
    steps = 0
    while "long" not in decode.parked():
        before, steps = decode.pieces(), steps + 1
        assert steps < LONG
        assert "long" not in decode.step() or "long" in decode.parked()
        assert decode.pieces() - before <= PIECES_IN_A_STEP
    assert steps >= LONG / PIECE / PIECES_IN_A_STEP - 2
    assert decode.tokens["runs"] - tokens >= steps - 1, "no step was without a token"
    for name in ("long", "short"):
        decode.land(name)
    decode.run(lambda: {"long", "short"} <= set(decode.finished))
    assert decode.params["long"]["kv_path"]["outcome"] == "transferred"
    abort(decode, "runs")
    nothing_left(prefill, decode)


def test_another_long_prompt_is_not_admitted(engines: Any) -> None:
    prefill, decode = engines("producer"), engines("consumer")
    params = prefill.prefill("p0", prompt(LONG))
    another = [*prompt(LONG)[:-1], 3]
    decode.add("d0", another, params)
    most_pieces(decode, lambda: decode.finished or decode.parked())
    assert decode.pieces() == 2 * LONG / PIECE
    assert decode.params["d0"]["kv_path"]["reason"] == "PromptMismatch"
    nothing_left(prefill, decode)


def test_nothing_is_left_of_a_prompt_that_is_aborted_before_its_digest_is_there(
    engines: Any,
) -> None:
    prefill, decode = engines("producer"), engines("consumer")
    params = prefill.prefill("p0", prompt(LONG))
    decode.add("d0", prompt(LONG), params)
    decode.step()
    abort(decode, "d0")
    prefill.add("p1", prompt(LONG, first=9), {"do_remote_decode": True})
    abort(prefill, "p1")
    nothing_left(prefill, decode)
    gc.collect()
    assert not prefill.connector._scheduler.prefill._digests
    for engine in (prefill, decode):
        assert not engine.connector._scheduler._digests._unfinished


def test_without_a_key_decode_contacts_nobody_before_the_digest_is_there(
    engines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    insecure = {"allow_insecure": True, "ticket_key_file": None}
    prefill, decode = engines("producer", **insecure), engines("consumer", **insecure)
    params = prefill.prefill("p0", prompt(LONG))
    sent = messages_to_prefill(decode, monkeypatch)
    decode.add("d0", prompt(LONG), params)
    while decode.connector._scheduler.decode._requests["d0"].digest is not None:
        assert not sent
        assert decode.step() == []
    assert sent
    decode.run(lambda: "d0" in decode.parked())
    decode.land("d0")
    nothing_left(prefill, decode)


def test_prefill_digests_a_prompt_while_it_computes_it(engines: Any) -> None:
    prefill = engines("producer", max_tokens_per_step=PIECE)
    prefill.add("p0", prompt(LONG), {"do_remote_decode": True})
    assert most_pieces(prefill, lambda: "p0" in prefill.finished) == PIECES_IN_A_STEP
    assert prefill.pieces() == LONG / PIECE


def test_what_prefill_had_in_its_cache_gets_a_ticket_all_the_same(engines: Any) -> None:
    prefill, decode = engines("producer"), engines("consumer")
    prefill.prefill("p0", prompt(LONG))
    params = prefill.prefill("p1", prompt(LONG))
    decode.add("d0", prompt(LONG), params)
    decode.run(lambda: "d0" in decode.parked())


def test_a_ticket_that_another_request_uses_up_meanwhile_is_spent(engines: Any) -> None:
    insecure = {"allow_insecure": True, "ticket_key_file": None}
    prefill, decode = engines("producer", **insecure), engines("consumer", **insecure)
    params = prefill.prefill("p0", prompt(LONG))
    decode.add("d0", prompt(LONG), params)
    requests = decode.connector._scheduler.decode._requests
    for _ in range(4):
        decode.step()
    decode.add("d1", prompt(LONG), params)
    most_pieces(decode, lambda: requests["d0"].digest is None)
    decode.run(lambda: "d0" in decode.parked())
    decode.land("d0")
    decode.run(lambda: "d0" in decode.finished)
    assert requests["d1"].digest is not None
    most_pieces(decode, lambda: "d1" in decode.finished or decode.parked())
    assert not decode.parked()
    assert decode.params["d1"]["kv_path"]["reason"] == "TicketSpent"
    nothing_left(prefill, decode)
