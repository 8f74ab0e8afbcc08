"""Each request of a decode engine is counted once, by vLLM's own scheduler."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("vllm")

from contract import BLOCK, ContractEngine, closing_engines, prompt
from vllm.v1.request import RequestStatus

pytestmark = pytest.mark.vllm


@pytest.fixture
def engines() -> Iterator[Any]:
    yield from closing_engines()


def done(decode: ContractEngine, request_id: str, *args: Any, **options: Any) -> None:
    decode.add(request_id, *args, **options)
    decode.run(lambda: request_id in decode.finished)
    decode.step()


def parked(decode: ContractEngine, request_id: str, *args: Any) -> None:
    decode.add(request_id, *args)
    decode.run(lambda: request_id in decode.parked())


def test_a_transfer_is_counted_and_no_token_of_it(engines: Any) -> None:
    prefill, decode = engines("producer"), engines("consumer")
    for number in range(3):
        tokens = prompt(40, first=number)
        parked(decode, f"d{number}", tokens, prefill.prefill(f"p{number}", tokens))
        decode.land(f"d{number}")
        decode.run(lambda one=f"d{number}": one in decode.finished)
    decode.step()
    assert decode.prompts() == {("transferred", ""): 3}
    assert decode.total("local_prompt_tokens") == {}


def test_a_prompt_that_came_without_a_ticket_is_a_fault_from_one_block_on(engines: Any) -> None:
    decode = engines("consumer", prefixes=False)
    done(decode, "long", prompt(BLOCK), None)
    done(decode, "short", prompt(BLOCK - 1), None)
    assert decode.prompts() == {("local", "NoTicket"): 1, ("local", "ShortPrompt"): 1}
    assert decode.total("local_prompt_tokens") == {"NoTicket": BLOCK}
    assert decode.params["short"]["kv_path"]["reason"] == "ShortPrompt"


def test_a_prompt_that_its_sender_wants_computed_here_is_no_fault(engines: Any) -> None:
    decode = engines("consumer", prefixes=False)
    done(decode, "asked", prompt(3 * BLOCK), {"local_prefill": True})
    assert decode.prompts() == {("local", "Requested"): 1}
    assert decode.total("local_prompt_tokens") == {}
    assert decode.params["asked"]["kv_path"]["reason"] == "Requested"


def test_a_prompt_that_the_router_sent_past_prefill_is_told_from_one_that_lost_its_ticket(
    engines: Any,
) -> None:
    decode = engines("consumer", prefixes=False, router_may_skip_prefill=True)
    done(decode, "skipped", prompt(3 * BLOCK), None)
    done(decode, "short", prompt(BLOCK - 1), None)
    done(decode, "lost", prompt(2 * BLOCK), {"do_remote_prefill": False})
    done(decode, "asked", prompt(BLOCK), {"local_prefill": True})
    assert decode.prompts() == {
        ("local", "LocalByRouter"): 1,
        ("local", "ShortPrompt"): 1,
        ("local", "NoTicket"): 1,
        ("local", "Requested"): 1,
    }
    assert decode.total("local_prompt_tokens") == {"NoTicket": 2 * BLOCK}
    assert decode.params["skipped"]["kv_path"]["reason"] == "LocalByRouter"


@pytest.mark.parametrize("fault", ["lease", "step"])
def test_a_prompt_whose_ticket_prefill_did_not_make_is_no_decision_of_the_router(
    engines: Any, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """llm-d's sidecar copies the ``kv_transfer_params`` of prefill's answer, null too."""
    prefill = engines("producer")
    decode = engines("consumer", prefixes=False, router_may_skip_prefill=True)
    role = prefill.connector._scheduler.prefill
    if fault == "lease":
        monkeypatch.setattr(role.leases, "grant", lambda *_: False)
    else:
        monkeypatch.setattr(role, "finished", None)
    answer = json.loads(json.dumps(prefill.prefill("p", prompt(3 * BLOCK))))
    done(decode, "d", prompt(3 * BLOCK), answer)
    assert decode.prompts() == {("local", "NoTicket"): 1}


def test_with_a_ticket_the_wish_counts_for_nothing(engines: Any) -> None:
    prefill, decode = engines("producer"), engines("consumer")
    params = prefill.prefill("p", prompt(40))
    parked(decode, "d", prompt(40), {**params, "local_prefill": True})
    done(decode, "bad", prompt(40, first=3), {**params, "ticket": "x", "local_prefill": True})
    assert ("local", "TicketInvalid") in decode.prompts()
    assert ("local", "Requested") not in decode.prompts()


def test_what_decode_has_in_its_own_prefix_cache_is_no_fault(engines: Any) -> None:
    decode = engines("consumer")
    done(decode, "first", prompt(50), None)
    done(decode, "again", prompt(50), None)  # 48 of 50 tokens are there
    done(decode, "longer", prompt(90), None)
    assert decode.prompts() == {("local", "NoTicket"): 2, ("local", "ShortPrompt"): 1}
    assert decode.total("local_prompt_tokens") == {"NoTicket": 50 + 90 - 48}


@pytest.mark.parametrize(("policy", "outcome"), [("fail", "failed"), ("recompute", "recomputed")])
def test_a_failed_transfer_is_counted_once(engines: Any, policy: str, outcome: str) -> None:
    prefill, decode = engines("producer"), engines("consumer", policy=policy)
    parked(decode, "d0", prompt(40), prefill.prefill("p0", prompt(40)))
    decode.land("d0", reason="TransferStalled")
    decode.run(lambda: "d0" in decode.finished)
    decode.step()
    assert decode.prompts() == {(outcome, "TransferStalled"): 1}
    computed = {"TransferStalled": 40} if policy == "recompute" else {}
    assert decode.total("local_prompt_tokens") == computed


def test_a_preempted_request_is_not_counted_again(engines: Any) -> None:
    decode = engines("consumer", blocks=8, prefixes=False)
    for name in ("a", "b"):
        decode.add(name, prompt(40), None, max_tokens=40)
    decode.run(lambda: {"a", "b"} <= set(decode.finished))
    decode.step()
    assert decode.scheduler.requests == {}
    assert decode.prompts() == {("local", "NoTicket"): 2}


def test_an_aborted_request_is_not_counted(engines: Any) -> None:
    prefill, decode = engines("producer"), engines("consumer")
    parked(decode, "d0", prompt(40), prefill.prefill("p0", prompt(40)))
    decode.scheduler.finish_requests("d0", RequestStatus.FINISHED_ABORTED)
    decode.land("d0")
    decode.run(lambda: not decode.scheduler.requests)
    decode.step()
    assert decode.prompts() == {}


def test_a_request_for_prefill_at_decode_is_a_prompt_without_a_ticket(engines: Any) -> None:
    """A client may ask an engine that hands nothing over. Its prompt waits its turn like others."""
    decode = engines("consumer", prefixes=False, local_tokens_per_step=BLOCK)
    decode.add("first", prompt(40), None, max_tokens=500)
    decode.run(lambda: decode.tokens.get("first", 0) > 2)
    for number in range(2):
        tokens = prompt(5 * BLOCK, first=number)
        decode.add(f"asks{number}", tokens, {"do_remote_decode": True}, max_tokens=2)
    while decode.tokens.get("asks0", 0) == 0:
        decode.step()
    assert "asks1" not in decode.tokens, "it keeps to the pace of local prompts"
    decode.run(lambda: "asks1" in decode.finished)
    assert decode.params["asks1"]["kv_path"]["reason"] == "NoTicket"
    decode.step()
    assert decode.prompts() == {("local", "NoTicket"): 3}
    assert decode.total("local_prompt_tokens") == {"NoTicket": 40 + 10 * BLOCK}
