"""What a prefill engine's scheduler side gives away, and when: tickets, and blocks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import tracing
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.request import RequestStatus

from pdcluster_connector.protocol.messages import LeaseRequest
from pdcluster_connector.protocol.prompt_outcomes import no_ticket
from pdcluster_connector.protocol.ticket import Ticket, ticket_of
from pdcluster_connector.sidechannel.lease_desk import LeaseDesk
from pdcluster_connector.testing.engines import KEYS
from pdcluster_connector.vllm.config import parse_options
from pdcluster_connector.vllm.kv_caches.groups import CacheGroup
from pdcluster_connector.vllm.metrics import StatsCollector
from pdcluster_connector.vllm.scheduler_side.prefill import PrefillRole
from pdcluster_connector.vllm.scheduler_side.prompt_digests import PromptDigests, digest_of_prompt
from pdcluster_connector.vllm.step_messages import StepOrders
from ticket_key import KEY_FILE

pytestmark = pytest.mark.vllm

BLOCK, TOKENS, SECONDS = 16, 40, 10.0
BLOCKS = ([5, 6, 7],)
HEADERS = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}


class Prefill:
    """A prefill role with one group of full attention; the test sets the time."""

    def __init__(self) -> None:
        self.now = 0.0
        self.desk = LeaseDesk(SECONDS, lambda: self.now)
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
        self.role = PrefillRole(
            "p/1", parse_options({"ticket_key_file": KEY_FILE}), BLOCK, [CacheGroup(spec)], (1, 1),
            StatsCollector(), self.desk, lambda: KEYS, PromptDigests(),
        )  # fmt: skip

    def release(self, request_id: str, token: int) -> None:
        self.desk.answer(LeaseRequest("p/1", "d/1", releases=((request_id, token),)))

    def take(self) -> tuple[list[str], dict[int, int]]:
        """(requests that are reported as sent, lease words to write) of one step."""
        orders = StepOrders()
        self.role.take(orders)
        return orders.sent, orders.lease_words

    def token(self, request_id: str) -> int:
        place = self.desk.place(request_id)
        assert place is not None
        return place[0]


def request(computed: int = TOKENS, status: Any = RequestStatus.FINISHED_LENGTH_CAPPED) -> Any:
    return SimpleNamespace(
        request_id="r", kv_transfer_params={"do_remote_decode": True}, status=status,
        num_computed_tokens=computed, num_prompt_tokens=TOKENS, mm_features=[], lora_request=None,
        prompt_token_ids=list(range(TOKENS)), prompt_embeds=None, trace_headers=HEADERS,
    )  # fmt: skip


@pytest.mark.parametrize("computed", [0, 1, TOKENS - 1])
def test_a_prompt_that_lacks_one_token_gets_no_ticket(computed: int) -> None:
    prefill = Prefill()
    prefill.role.scheduled(request())
    assert prefill.role.finished(request(computed), BLOCKS) == (False, no_ticket("NotFinished"))
    assert prefill.desk.place("r") is None, "and no lease"


@pytest.mark.parametrize("computed", [TOKENS, TOKENS + 1])
def test_a_prompt_that_is_computed_gets_a_ticket_of_all_its_tokens(computed: int) -> None:
    prefill = Prefill()
    prefill.role.scheduled(request())
    token = prefill.token("r")
    kept, params = prefill.role.finished(request(computed), BLOCKS)
    assert kept
    ticket = ticket_of(params, KEYS)
    assert isinstance(ticket, Ticket)
    assert (ticket.tokens, ticket.token, list(ticket.blocks)) == (TOKENS, token, [(5, 6, 7)])


@pytest.mark.parametrize("status", [RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_ERROR])
def test_a_request_that_did_not_end_by_itself_gets_no_ticket(status: Any) -> None:
    prefill = Prefill()
    prefill.role.scheduled(request())
    assert prefill.role.finished(request(status=status), BLOCKS) == (
        False,
        no_ticket("NotFinished"),
    )
    other = request(status=status)
    other.kv_transfer_params = None
    assert prefill.role.finished(other, BLOCKS) == (False, None), "it asked for none"


def test_a_request_whose_blocks_vllm_does_not_keep_is_not_reported_as_sent() -> None:
    """A lease may end while its request runs: vLLM would free the blocks under it."""
    prefill = Prefill()
    prefill.role.scheduled(request())
    prefill.release("r", prefill.token("r"))
    sent, words = prefill.take()
    assert sent == []
    assert list(words.values()) == [0], "its word is cleared nevertheless"
    assert prefill.role.finished(request(), BLOCKS) == (False, no_ticket("LeaseEnded"))


def test_a_request_that_is_forgotten_has_no_lease_and_is_not_reported_as_sent() -> None:
    """Its blocks are freed at once, so no decode engine may renew or read under its ticket."""
    prefill = Prefill()
    prefill.role.scheduled(request())
    assert prefill.role.finished(request(), BLOCKS)[0]
    prefill.role.forget("r")
    assert (prefill.desk.place("r"), prefill.role.leases.held) == (None, 0)
    sent, words = prefill.take()
    assert (sent, list(words.values())) == ([], [0])
    prefill.now += 2 * SECONDS
    assert prefill.take() == ([], {})


@pytest.mark.parametrize("released", [True, False])
def test_a_request_is_reported_as_sent_once(released: bool) -> None:
    prefill = Prefill()
    prefill.role.scheduled(request())
    token = prefill.token("r")
    assert prefill.role.finished(request(), BLOCKS)[0]
    assert prefill.take()[0] == []
    if released:
        prefill.release("r", token)
    else:
        prefill.now += SECONDS
    sent, words = prefill.take()
    assert sent == ["r"]
    assert list(words.values()) == [0]
    assert prefill.take() == ([], {})


def test_the_time_until_decode_claims_a_lease_is_counted() -> None:
    prefill = Prefill()
    prefill.role.scheduled(request())
    assert prefill.role.finished(request(), BLOCKS)[0]
    prefill.now += 2.5
    claim = ("r", prefill.token("r"))
    prefill.desk.answer(LeaseRequest("p/1", "d/1", renewals=(claim,)))
    prefill.take()
    stats = prefill.role.stats.take()
    assert stats is not None
    assert stats.data["handover_seconds"] == {"": [2.5]}


def image(offset: int, mm_hash: str | None = "a", identifier: str = "lora:a") -> Any:
    return SimpleNamespace(
        mm_position=SimpleNamespace(offset=offset), mm_hash=mm_hash, identifier=identifier
    )


def digest(*images: Any, tokens: int = TOKENS, adapter: str | None = None) -> bytes | None:
    """Of a prompt whose placeholders are the same tokens whatever the images are."""
    asked = request()
    asked.mm_features = list(images)
    asked.lora_request = None if adapter is None else SimpleNamespace(lora_name=adapter)
    made = digest_of_prompt(asked, tokens)
    return made and made.value()


def test_another_image_or_another_place_of_it_is_another_prompt() -> None:
    prompts = [
        digest(),
        digest(image(4)),
        digest(image(4, "b")),
        digest(image(5)),
        digest(image(4), image(9)),
        digest(image(4), image(9, "b")),
        digest(image(4, "b"), image(9)),
        digest(image(4), adapter="lora"),
        digest(image(4, None, "x")),
    ]
    assert len(set(prompts)) == len(prompts)
    assert digest(image(4)) == digest(image(4, identifier="another")), "the content's hash counts"


def test_an_image_counts_if_its_first_token_is_among_those_of_the_ticket() -> None:
    assert digest(image(9), tokens=9) == digest(tokens=9)
    assert digest(image(8), tokens=9) != digest(tokens=9)


@pytest.mark.parametrize("works", [True, False])
def test_a_span_that_cannot_be_recorded_costs_no_request(
    works: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = []

    def record(name: str, begun: int, ended: int, attributes: Any, context: Any) -> None:
        recorded.append((name, attributes))
        assert begun <= ended
        assert context is not None
        if not works:
            raise OSError("no exporter")

    monkeypatch.setattr(tracing, "instrument_manual", record)
    prefill = Prefill()
    prefill.role.scheduled(request())
    prefill.role.finished(request(), BLOCKS)
    prefill.now = SECONDS + 1
    assert prefill.take()[0] == ["r"]
    assert recorded == [("pdcluster.kv_lease", {"pdcluster.outcome": "expired"})]
    assert prefill.take()[0] == []
