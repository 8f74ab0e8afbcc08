"""What ``pdcluster check`` says of answers and metrics of real engines.

``recorded_check.json`` holds them: vLLM 0.32 on CPU with a tiny random Llama, one prompt of 1,008
characters through the router, the same one to decode alone, and another one to decode alone.
"""

from __future__ import annotations

import copy
import io
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, strategies as st
from rich.console import Console

from pdcluster_connector.protocol.prompt_outcomes import LocalReason
from pdcluster_operator.cli import check, engine_metrics, once
from pdcluster_operator.cli.answers import read_answer
from pdcluster_operator.cli.check_facts import (
    PHASES,
    QUESTION,
    Check,
    Generation,
    KVPath,
    compare,
    default_prompt,
    generation,
    kv_path,
    moved,
    phases,
    words_of,
)
from pdcluster_operator.cli.engine_metrics import added, between, busy, read_page, received
from pdcluster_operator.cli.exits import Exit
from pdcluster_operator.cli.once import describe_path
from pdcluster_operator.cli.output import document
from pdcluster_operator.runtime.interfaces import Key

RECORDED: dict[str, Any] = json.loads(Path(__file__).with_name("recorded_check.json").read_text())
PREFILL, DECODE = "default.tiny.prefill.aaaaa.0", "default.tiny.decode.bbbbb.0"


def read(document: Any) -> Generation:
    return generation(read_answer(json.dumps(document).encode()))


OURS, ALONE, OTHER = (read(RECORDED[one]) for one in ("ours", "alone", "other"))
PAGES = {
    role: tuple(read_page(RECORDED[when][role]) for when in ("before", "after"))
    for role in ("prefill", "decode")
}


def test_a_real_answer_is_read() -> None:
    assert len(OURS.tokens) == len(OURS.logprobs) == len(OURS.best) == len(OURS.texts) == 16
    assert all(isinstance(token, int) for token in OURS.tokens)
    assert OURS.prompt_tokens == len(RECORDED["prompt"]), "one token a letter"
    assert OURS.path["outcome"] == "transferred"
    assert read({}) == Generation("", (), (), (), (), 0, {})


def test_the_pages_of_real_engines_say_what_moved_and_where() -> None:
    before, after = PAGES["decode"]
    assert received(before, after) == OURS.path["bytes"] > 0
    total = between(before, after, engine_metrics.RECEIVE_SECONDS, "total")
    assert total is not None
    assert total.seconds == pytest.approx(OURS.path["seconds"], abs=1e-5)
    assert busy({"a": before, "b": before}, {"a": after, "b": before}) == ["a"]
    assert between(after, after, engine_metrics.REQUEST_SECONDS) is None
    assert between(after, before, engine_metrics.REQUEST_SECONDS) is None, "it has restarted"
    doubled = between(
        added([before, before]), added([after, after]), "vllm:e2e_request_latency_seconds"
    )
    assert doubled is not None
    assert doubled.count == 2
    assert read_page("vllm:e2e_request_latency_seconds_sum{ 7") == {}


def test_the_way_is_the_answers_own() -> None:
    path = kv_path(OURS.path, 0, (), ())
    assert moved(path)
    assert path.prefill.startswith("default.tiny.prefill.")
    assert path.decode.startswith("default.tiny.decode.")
    assert (path.bytes, path.blocks) == (OURS.path["bytes"], OURS.path["blocks"])
    assert path.gigabytes_per_second == pytest.approx(path.bytes / path.seconds / 1e9, rel=0.01)


def test_engines_that_the_answer_does_not_name_are_those_that_were_busy() -> None:
    hidden = OURS.path | {"prefill": None, "decode": None}
    path = kv_path(hidden, 0, [PREFILL], [DECODE])
    assert (path.prefill, path.decode) == (PREFILL, DECODE)
    path = kv_path(hidden, 0, [PREFILL, "other"], [])
    assert (path.prefill, path.decode) == ("", ""), "two were busy: it may be either"


def test_without_a_path_in_the_answer_the_metrics_tell() -> None:
    assert moved(kv_path({}, 4096, [], []))
    assert kv_path({}, 4096, [], []).bytes == 4096
    assert not moved(kv_path({}, 0, [], []))
    assert not moved(kv_path({"outcome": "transferred", "bytes": 0}, 9, [], []))


def test_the_phases_of_a_real_request_add_up() -> None:
    found = phases(RECORDED["whole"], PAGES["prefill"], PAGES["decode"], 16)
    ms = {phase.name: phase.milliseconds for phase in found}
    assert list(ms) == list(PHASES)
    assert all(phase.mean_of == 1 for phase in found)
    parts = ms["prefill"] + ms["decode"] + ms["routerAndNetwork"]
    assert parts == pytest.approx(ms["whole"], abs=0.1)
    inner = ms["kvConnect"] + ms["kvRead"] + ms["kvCheck"]
    assert inner == pytest.approx(ms["kvReceive"], abs=0.1)
    assert ms["firstToken"] + ms["furtherTokens"] == pytest.approx(ms["decode"], rel=0.1)


def test_with_other_requests_meanwhile_the_phases_are_means() -> None:
    before, after = PAGES["decode"]
    twice = before, added([after, after, {key: -value for key, value in before.items()}])
    found = phases(1.0, PAGES["prefill"], twice, 16)
    of = {phase.name: phase.mean_of for phase in found}
    assert of["decode"] == of["kvReceive"] == 2
    assert of["prefill"] == 1
    assert "routerAndNetwork" not in of, "a mean of others cannot be taken from this request's time"
    [whole] = phases(1.0, ({}, {}), ({}, {}), 16)
    assert (whole.name, whole.milliseconds) == ("whole", 1000.0)


def test_tokens_of_prefill_and_decode_are_those_of_decode_alone() -> None:
    found = compare(OURS, ALONE, DECODE)
    assert found.equal
    assert words_of(found) == (
        "equal to those of decode/0 alone: 16 of 16; log-probabilities differ by 0.0000 at most"
    )


def test_other_tokens_are_told_from_rounding() -> None:
    found = compare(OURS, OTHER, DECODE)
    assert not found.equal
    assert found.first_difference is not None
    assert not found.explained_by_rounding
    assert words_of(found).startswith("decode/0 alone generates another token at place ")
    assert words_of(found).endswith(
        "log-probabilities differ by up to 0.36, which rounding does not explain"
    ), "the two tokens are near, but what led to them is not"


@pytest.mark.parametrize(
    ("gap", "said"),
    [
        (9990.0, "it takes its own for more than a million times as likely, which"),
        (0.01, "takes both for nearly as likely (1.01 to 1)"),
        (1.0, "it takes its own for 2.7 times as likely, which rounding does not explain"),
        (None, "one of the 5 most likely, which rounding does not explain"),
    ],
)
def test_a_token_in_the_place_of_another_is_rounding_if_both_are_near(
    gap: float | None, said: str
) -> None:
    """Decode alone generates a token beside ours at place 4, with the same candidates."""
    at, rival = 3, "rival"
    best = {text: value for text, value in ALONE.best[at].items() if text != ALONE.texts[at]}
    if gap is not None:
        best[ALONE.texts[at]] = ALONE.logprobs[at]
    told = replace(
        ALONE,
        tokens=(*ALONE.tokens[:at], 0, *ALONE.tokens[at + 1 :]),
        texts=(*ALONE.texts[:at], rival, *ALONE.texts[at + 1 :]),
        logprobs=(*ALONE.logprobs[:at], ALONE.logprobs[at] + (gap or 0), *ALONE.logprobs[at + 1 :]),
        best=(*ALONE.best[:at], best, *ALONE.best[at + 1 :]),
    )
    found = compare(OURS, told, DECODE)
    assert (found.first_difference, found.gap) == (at, gap and pytest.approx(gap))
    assert found.explained_by_rounding is (gap == 0.01)
    assert said in words_of(found)


def test_equal_tokens_of_other_log_probabilities_are_told() -> None:
    best = tuple({text: value - 1 for text, value in one.items()} for one in ALONE.best)
    said = words_of(compare(OURS, replace(ALONE, best=best), DECODE))
    assert said.endswith("differ by 1.0000 at most, which is more than rounding explains")


def test_answers_of_other_lengths_and_without_ids_are_compared_too() -> None:
    short = replace(OURS, tokens=OURS.tokens[:9])
    assert compare(OURS, short, "").first_difference == 9
    bare = Generation("same", (), (), (), (), 0, {})
    assert compare(bare, bare, "").equal
    assert words_of(compare(bare, bare, "")) == "equal to those of decode alone: 1 of 1"
    assert not compare(bare, replace(bare, text="other"), "").equal


@given(st.none() | st.integers(1, 256), st.none() | st.integers(1, 4000), st.integers(1, 64))
def test_the_prompt_fills_blocks_and_fits(
    block: int | None, limit: int | None, tokens: int
) -> None:
    text = default_prompt(block, limit, tokens)
    assert text
    if limit is not None and limit > tokens + 1:
        assert len(text) + tokens < limit, "no tokenizer makes more tokens than letters"
    if limit is None:
        assert len(text) >= 5 * 3 * (block or 128)
        assert text.endswith(QUESTION) or len(text) < len(QUESTION)


def result(path: KVPath, found: Any, *, local: bool = False) -> Check:
    return check.judge(
        Key("default", "tiny"),
        Check(
            name="tiny", namespace="default", verdict="", kv_moved=moved(path), prompt_characters=1,
            prompt_tokens=1, answer="", answer_tokens=16, kv_path=path, phases=[], comparison=found,
        ),
        local=local,
    )  # fmt: skip


def test_the_verdict_and_the_exit_code() -> None:
    path = kv_path(OURS.path, 0, (), ())
    good = result(path, compare(OURS, ALONE, DECODE))
    assert good.verdict == (
        "KV moved from prefill/0 to decode/0, and decode alone generates the same tokens"
    )
    assert (check.exit_of(good), good.next) == (Exit.DONE, "")
    wrong = result(path, compare(OURS, OTHER, DECODE))
    assert "but decode alone generates other tokens. " in wrong.verdict
    assert "other weights" in wrong.verdict
    assert check.exit_of(wrong) is Exit.REQUEST_FAILED
    assert wrong.next.startswith(
        "kubectl get statefulsets -l pdcluster.dev/cluster=tiny -n default"
    )


@pytest.mark.parametrize(
    ("answer", "found"),
    [(OURS.path, OTHER), ({"outcome": "local", "reason": "NoTicket"}, ALONE)],
    ids=["other tokens", "KV did not move"],
)
def test_a_local_run_is_told_a_command_that_finds_it(answer: dict, found: Any) -> None:
    told = result(kv_path(answer, 0, (), ()), compare(OURS, found, DECODE), local=True)
    assert "--local" in told.next.split()
    assert "-n" not in told.next.split()


@pytest.mark.parametrize("reason", ["NoTicket", "ShortPrompt", "LeaseExpired", "Forged"])
def test_kv_that_did_not_move_has_its_reason_and_the_next_command(reason: str) -> None:
    path = kv_path({"outcome": "local", "reason": reason}, 0, (), ())
    found = result(path, compare(OURS, ALONE, DECODE))
    assert check.exit_of(found) is Exit.KV_DID_NOT_MOVE
    assert f"({reason})" in found.verdict
    assert "tiny" in found.next or reason == LocalReason.SHORT_PROMPT


def places(document: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place of a JSON document, as the keys that lead to it."""
    yield at
    lists = enumerate(document if isinstance(document, list) else ())
    for key, part in document.items() if isinstance(document, dict) else lists:
        yield from places(part, (*at, key))


def replaced(document: Any, at: tuple[Any, ...], value: Any) -> Any:
    if not at:
        return value
    copied = copy.copy(document)
    copied[at[0]] = replaced(document[at[0]], at[1:], value)
    return copied


NUMBERS = [0, -1, 1e9, 1e308, -1e308, 5e-324, 2**53, 2**63, 2**64, 10**400, -9999.0, -9999.5]
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.sampled_from(NUMBERS) | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
PLACES = [at for at in places(RECORDED["ours"]) if len(at) < 2 or at[:2] != ("choices", 0)]
TOKENS = [at for at in places(RECORDED["ours"]) if at[:2] == ("choices", 0)]


@example(("choices", 0, "logprobs", "top_logprobs"), None, True)
@given(st.sampled_from(PLACES) | st.sampled_from(TOKENS), ANYTHING, st.booleans())
def test_any_answer_is_refused_where_it_is_read_or_judged(
    at: tuple[Any, ...], value: Any, is_ours: bool
) -> None:
    """An answer that is read has a verdict, in text and as a document of JSON."""
    try:
        told = read(replaced(RECORDED["ours"], at, value))
    except ValueError:
        return
    ours, alone = (told, OTHER) if is_ours else (OTHER, told)
    path = kv_path(ours.path, 7, [PREFILL], [])
    found = result(path, compare(ours, alone, DECODE))
    found.answer, found.prompt_tokens = ours.text, ours.prompt_tokens
    console = Console(file=io.StringIO())
    check.show(console, found)
    assert "tokens:" in console.file.getvalue()  # type: ignore[attr-defined]
    json.dumps(document(found), allow_nan=False)
    describe_path(once.Answer(ours.text, 1, ours.path, 0))


@pytest.mark.parametrize(
    ("at", "value", "said"),
    [
        (("choices",), [1], "Expected `object`, got `int` - at `$.choices[0]`"),
        (("choices", 0, "token_ids"), 5, "got `int` - at `$.choices[0].token_ids`"),
        (("choices", 0, "logprobs", "token_logprobs", 2), 1e6, "token_logprobs[2]`"),
        (("kv_transfer_params", "kv_path", "bytes"), "many", "at `$.kv_transfer_params.kv_path."),
        (("usage",), [], "at `$.usage`"),
    ],
)
def test_a_wrong_shape_is_named_with_its_place(at: tuple[Any, ...], value: Any, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        read(replaced(RECORDED["ours"], at, value))


def test_a_token_without_candidates_is_no_wrong_shape() -> None:
    at = ("choices", 0, "logprobs")
    bare = replaced(RECORDED["ours"], (*at, "top_logprobs"), [None] * 16)
    bare = replaced(bare, (*at, "token_logprobs"), [None] * 16)
    found = compare(read(RECORDED["other"]), read(bare), DECODE)
    assert (found.equal, found.gap, found.logprob_difference) == (False, None, None)
