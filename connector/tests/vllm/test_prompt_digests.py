"""The digest of a prompt: what it tells apart, and how little of it is made at a time."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from pdcluster_connector.protocol.ticket import DIGEST_BYTES
from pdcluster_connector.vllm.scheduler_side import prompt_digests
from pdcluster_connector.vllm.scheduler_side.prompt_digests import (
    PIECE,
    PromptDigest,
    PromptDigests,
)


def prompt_digest(tokens: Any, contents: Iterable[str] = (), lora: str | None = None) -> bytes:
    return PromptDigest(tokens, len(tokens), contents, lora).value()


def test_digest_tells_prompts_apart() -> None:
    digests = {
        prompt_digest([1, 2, 3]),
        prompt_digest([1, 2, 4]),
        prompt_digest([1, 2]),
        prompt_digest([]),
        prompt_digest([1, 2, 3], ["a"]),
        prompt_digest([1, 2, 3], ["b"]),
        prompt_digest([1, 2, 3], ["a", "b"]),
        prompt_digest([1, 2, 3], ["ab"]),
        prompt_digest([1, 2, 3], lora="a"),
        prompt_digest([1, 2, 3], lora=""),
    }
    assert len(digests) == 10
    assert all(len(digest) == DIGEST_BYTES for digest in digests)


def test_the_digest_of_a_prompt_stays_the_same() -> None:
    """Prefill and decode may run two releases of the connector: both must compute this."""

    def expected(*parts: bytes, tokens: list[int]) -> bytes:
        whole = len(b"".join(token.to_bytes(8, "little") for token in tokens))
        text = whole.to_bytes(8, "little")
        text += b"".join(token.to_bytes(8, "little", signed=True) for token in tokens)
        for part in parts:
            text += len(part).to_bytes(8, "little") + part
        return blake2b(text, digest_size=16, person=b"pdcluster-prompt").digest()

    assert prompt_digest([1, 2, 300]) == expected(b"\0", tokens=[1, 2, 300])
    assert prompt_digest([]) == expected(b"\0", tokens=[])
    assert prompt_digest([7], ["i", "jk"], "l") == expected(b"\1l", b"i", b"jk", tokens=[7])
    assert prompt_digest([7], [], "") == expected(b"\1", tokens=[7])


def test_any_text_of_a_client_has_a_digest() -> None:
    """JSON may hold half of a surrogate pair, which UTF-8 cannot."""
    half = "\ud800"
    assert prompt_digest([1], [half]) != prompt_digest([1], [])
    assert prompt_digest([1], [], half) != prompt_digest([1], [], "")


def test_digest_does_not_depend_on_the_container() -> None:
    expected = prompt_digest([5, 6, 7])
    assert prompt_digest((5, 6, 7)) == expected
    assert prompt_digest(np.array([5, 6, 7], np.int32)) == expected


@given(st.lists(st.integers(0, 200_000), min_size=1, max_size=50), st.data())
def test_one_changed_token_changes_the_digest(tokens: list[int], data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(tokens) - 1))
    changed = [*tokens]
    changed[at] += 1
    assert prompt_digest(changed) != prompt_digest(tokens)


@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=40), st.integers(1, 50), st.data())
def test_pieces_of_any_size_make_the_same_digest(
    tokens: list[int], piece: int, data: st.DataObject
) -> None:
    count = data.draw(st.integers(0, len(tokens)))
    digest = PromptDigest(tokens, count)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prompt_digests, "PIECE", piece)
        for taken in range(data.draw(st.integers(0, -(-count // piece)))):
            digest.take()
            assert digest.left == max(0, count - (taken + 1) * piece)
        assert digest.value() == digest.value() == prompt_digest(tokens[:count])


class Steps:
    """Digests of invented requests; the clock goes on with each piece."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, pieces_in_a_step: int) -> None:
        self.pieces = 0
        take = PromptDigest.take

        def counted(digest: PromptDigest) -> None:
            self.pieces += 1
            take(digest)

        monkeypatch.setattr(PromptDigest, "take", counted)
        monkeypatch.setattr(prompt_digests, "SECONDS", float(pieces_in_a_step))
        self.digests = PromptDigests(lambda: float(self.pieces))

    def begin(self, pieces: int) -> PromptDigest:
        request: Any = SimpleNamespace(
            prompt_token_ids=[7] * pieces * PIECE, prompt_embeds=None, mm_features=[],
            lora_request=None,
        )  # fmt: skip
        digest = self.digests.begin(request, pieces * PIECE)
        assert digest is not None
        return digest

    def step(self) -> int:
        """How many pieces are made in a step."""
        before = self.pieces
        self.digests.step()
        return self.pieces - before


def test_a_long_prompt_is_digested_over_several_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch, pieces_in_a_step=8)
    long = steps.begin(24)
    assert steps.pieces == 4
    assert [steps.step() for _ in range(4)] == [8, 8, 4, 0]
    assert long.left == 0
    assert long.value() == prompt_digest([7] * 24 * PIECE)


def test_prompts_that_arrive_together_share_the_time_of_a_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps = Steps(monkeypatch, pieces_in_a_step=8)
    many = [steps.begin(20) for _ in range(6)]
    assert [20 - one.left // PIECE for one in many] == [4, 2, 1, 1, 1, 1]
    short = steps.begin(1)
    assert short.left == 0, "a prompt of one piece waits for none"


def test_a_short_prompt_waits_for_no_long_one(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch, pieces_in_a_step=4)
    long, short = steps.begin(50), steps.begin(4)
    assert steps.step() == 4
    assert (short.left, long.left) == (0, 47 * PIECE)


def test_what_its_request_no_longer_holds_is_not_digested(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch, pieces_in_a_step=4)
    digest = steps.begin(50)
    assert steps.step() == 4
    del digest
    assert steps.step() == 0


def test_a_prompt_with_a_token_that_is_none_equals_no_prompt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its request does not wait for ever, and the others go on."""
    steps = Steps(monkeypatch, pieces_in_a_step=4)
    other, *wrong = steps.begin(40), steps.begin(30), steps.begin(30)
    for one in wrong:
        one._token_ids = [2**63] * 30 * PIECE  # type: ignore[assignment]
    while other.left:
        steps.step()
    assert [one.left for one in wrong] == [0, 0]
    assert wrong[0].value() != wrong[1].value()
    assert prompt_digest([1, 2**63]) != prompt_digest([1, 2**63])
