"""Prompts given as embeddings have no token ids to bind a ticket to: their KV does not travel."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from contract import closing_engines, prompt
from test_scheduler_contract import released

pytestmark = pytest.mark.vllm

TOKENS = 40
HIDDEN = 64


@pytest.fixture
def engines() -> Iterator[Any]:
    yield from closing_engines()


def embeddings(**fields: Any) -> dict[str, Any]:
    """Arguments of a request whose prompt is embeddings."""
    return {"prompt_embeds": torch.full((TOKENS, HIDDEN), 0.25), **fields}


# Embeddings alone, and a chat whose token ids are placeholders where embeddings stand.
PROMPTS = [
    pytest.param(None, embeddings(), id="alone"),
    pytest.param(
        prompt(TOKENS), embeddings(prompt_is_token_ids=[True] * 8 + [False] * 32), id="mixed"
    ),
]


@pytest.mark.parametrize(("ids", "fields"), PROMPTS)
def test_prefill_makes_no_ticket_of_it_and_keeps_no_block(
    engines: Any, ids: list[int] | None, fields: dict[str, Any]
) -> None:
    prefill = engines("producer", prefixes=False)
    before = prefill.free_blocks()
    prefill.add("p0", ids and list(ids), {"do_remote_decode": True}, **fields)
    prefill.run(lambda: "p0" in prefill.finished)
    assert prefill.params["p0"] == {"do_remote_prefill": False, "no_ticket": "NoDigest"}
    prefill.step()
    assert prefill.free_blocks() == before
    role = prefill.connector._scheduler.prefill
    assert (role.leases.held, role.leases._armed) == (0, {})
    # The same engine hands prompts of token ids off.
    assert prefill.prefill("p1", prompt(TOKENS))["ticket"]


@pytest.mark.parametrize(("ids", "fields"), PROMPTS)
def test_decode_does_not_use_a_ticket_for_it_and_gives_the_lease_back(
    engines: Any, ids: list[int] | None, fields: dict[str, Any]
) -> None:
    """A ticket of the very token ids that a mixed prompt names is one of another prompt."""
    prefill, decode = engines("producer"), engines("consumer", prefixes=False)
    ticket = prefill.prefill("p0", prompt(TOKENS))
    decode.add("d0", ids and list(ids), ticket, **fields)
    decode.run(lambda: "d0" in decode.finished)
    assert not decode.parked(), "nothing was read"
    assert decode.tokens["d0"] == 1
    assert decode.total("decodes_without_transfer") == {"PromptMismatch": 1}
    assert released(prefill)
