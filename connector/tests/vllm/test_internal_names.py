"""What a client learns of the engines behind its answer, by vLLM's own scheduler."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("vllm")

from contract import ContractEngine, closing_engines, prompt

from pdcluster_connector.protocol.kv_path import FAILURE_HEADER, KEY_PARAMETER, key_of

pytestmark = pytest.mark.vllm

NAMES = {"prefill", "decode", "message"}


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Engines whose launcher gave them a token."""
    monkeypatch.setenv("PDCLUSTER_CONTROL_TOKEN", "secret")
    yield from closing_engines()


def pair(engines: Any, *, shown: bool) -> tuple[ContractEngine, ContractEngine]:
    return engines("producer"), engines("consumer", show_internal_names=shown)


def path(both: tuple[ContractEngine, ContractEngine], number: int, **params: str) -> dict[str, Any]:
    """``kv_path`` of one request, which is sent with these parameters too."""
    prefill, decode = both
    name = f"r{number}"
    tokens = [token + 50 * number for token in prompt(40)]
    ticket = prefill.prefill(name, tokens)
    decode.add(name, tokens, {**ticket, **params})
    decode.run(lambda: name in decode.parked())
    decode.land(name)
    decode.run(lambda: name in decode.finished)
    return dict(decode.params[name]["kv_path"])


def test_a_client_learns_what_moved_and_the_canary_between_whom(engines: Any) -> None:
    both = pair(engines, shown=False)
    seen = path(both, 0)
    assert NAMES.isdisjoint(seen)
    assert (seen["outcome"], seen["tokens"], seen["blocks"]) == ("transferred", 40, 3)
    assert seen["bytes"] > 0
    assert NAMES.isdisjoint(path(both, 1, **{KEY_PARAMETER: "guess"}))
    assert NAMES.isdisjoint(path(both, 2, **{KEY_PARAMETER: ""}))
    named = path(both, 3, **{KEY_PARAMETER: key_of("secret")})
    assert (named["prefill"], named["decode"]) == tuple(one.engine_id for one in both)


def test_names_are_shown_where_the_spec_says_so(engines: Any) -> None:
    both = pair(engines, shown=True)
    named = path(both, 0)
    assert (named["prefill"], named["decode"]) == tuple(one.engine_id for one in both)


def test_the_client_of_a_failed_request_learns_the_reason_and_no_name(engines: Any) -> None:
    prefill, decode = pair(engines, shown=False)
    decode.add("r", prompt(40), prefill.prefill("r", prompt(40)))
    decode.run(lambda: "r" in decode.parked())
    decode.land("r", reason="PeerRestarted")
    decode.run(lambda: "r" in decode.finished)
    assert decode.headers["r"] == {FAILURE_HEADER: "KV was not received: PeerRestarted (request r)"}
