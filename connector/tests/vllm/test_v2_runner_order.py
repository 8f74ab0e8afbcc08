"""Both roles below vLLM's V2 model runner, which starts loads after the forward pass.

What each step has to do, and in which order, is checked in every step of every test by V2Rank.
Words against blocks that are written again: test_lease_words_in_steps.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

import vllm
from contract import closing_engines, prompt
from v2_runner import V2Rank, drive
from vllm.v1.request import RequestStatus

from pdcluster_connector.protocol.messages import LeaseRequest
from pdcluster_connector.protocol.ticket import Ticket, decode
from ticket_key import KEYS

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("one_rank")]


@pytest.fixture
def engines() -> Iterator[Any]:
    yield from closing_engines()


def step_with(rank: V2Rank, name: str) -> list[str]:
    """The names of what happened in the one step that has such an event."""
    (found,) = [step for step in rank.steps if any(event[0] == name for event in step)]
    return [event[0] for event in found]


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("busy", [False, True])
def test_a_word_is_written_before_the_ticket_and_cleared_before_sent_is_reported(
    engines: Any, monkeypatch: pytest.MonkeyPatch, asynchronous: bool, busy: bool
) -> None:
    """The release comes in steps with a forward pass, or in steps without one."""
    engine = engines("producer", asynchronous=asynchronous, prefixes=False)
    ranks = drive(engine, monkeypatch)
    free = engine.free_blocks()
    params = engine.prefill("p", prompt(40))
    ticket = decode(params["ticket"], KEYS)
    assert isinstance(ticket, Ticket)
    for rank in ranks:
        assert rank.words == {ticket.fence_slot: ticket.token}
        assert step_with(rank, "words") == ["forward", "words", "reported"]
        rank.steps.clear()
    if busy:
        engine.add("other", prompt(40, first=9), max_tokens=500)
        engine.step()
    engine.connector._scheduler._leases.answer(
        LeaseRequest(engine.engine_id, "d/1", (("p", ticket.token),))
    )
    engine.run(lambda: "p" not in engine.scheduler.requests)
    for rank in ranks:
        assert rank.words == {ticket.fence_slot: 0}
        assert step_with(rank, "words") == ["forward"] * busy + ["words", "reported"]
        (reported,) = [step[-1] for step in rank.steps if step[-1][1]]
        assert reported[1] == {"p"}
    if not busy:
        assert engine.free_blocks() == free


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("busy", [False, True])
def test_a_receive_is_posted_once_and_its_end_is_reported(
    engines: Any, monkeypatch: pytest.MonkeyPatch, asynchronous: bool, busy: bool
) -> None:
    """Also in steps without a forward pass. The claim's answer comes before the forward pass."""
    prefill = engines("producer")
    engine = engines("consumer", asynchronous=asynchronous, prefixes=False)
    ranks = drive(engine, monkeypatch)
    params = prefill.prefill("p", prompt(40))
    if busy:
        engine.add("other", prompt(40, first=9), max_tokens=900)
        engine.step()
    engine.add("d", prompt(40), params, max_tokens=3)
    engine.run(lambda: happened(ranks[0], "leases"))
    for rank in ranks:
        names = [name for name in step_with(rank, "receive") if not name.startswith("leases")]
        assert names == ["forward"] * busy + ["receive", "reported"]
        assert step_with(rank, "leases")[0] == "leases"
    for number, rank in enumerate(ranks):
        rank.land("d")
        engine.step()
        assert "d" not in engine.finished, f"only {number + 1} of 2 ranks"
    engine.run(lambda: "d" in engine.finished)
    assert engine.tokens["d"] == 3
    assert engine.params["d"]["kv_path"]["outcome"] == "transferred"
    for rank in ranks:
        assert sum("d" in step[-1][2] for step in rank.steps) == 1


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_abort_without_a_forward_pass_is_not_lost(
    engines: Any, monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    """Blocks stay vLLM's until every rank has reported the receive that was given up."""
    prefill = engines("producer")
    engine = engines("consumer", asynchronous=asynchronous, prefixes=False)
    ranks = drive(engine, monkeypatch)
    free = engine.free_blocks()
    engine.add("d", prompt(40), prefill.prefill("p", prompt(40)), max_tokens=3)
    engine.run(lambda: happened(ranks[0], "receive"))
    engine.scheduler.finish_requests("d", RequestStatus.FINISHED_ABORTED)
    engine.run(lambda: happened(ranks[0], "abandon"))
    for rank in ranks:
        assert step_with(rank, "abandon")[-2:] == ["abandon", "reported"]
        assert not happened(rank, "forward")
        assert engine.free_blocks() < free
        rank.give_up("d")
        engine.step()
    engine.run(lambda: engine.free_blocks() == free)


def happened(rank: V2Rank, name: str) -> bool:
    return any(event[0] == name for step in rank.steps for event in step)


def test_vllm_hands_tokens_out_before_its_drafter_has_run() -> None:
    """So a ticket may leave before the KV of EAGLE's layers is written, as docs/features.md says.

    If this fails, vLLM waits for its drafter, and the page's sentence can go.
    """
    page = Path(__file__).resolve().parents[3] / "docs" / "features.md"
    assert "a ticket may leave before the drafter has written its KV" in page.read_text()
    runner = Path(vllm.__file__).parent / "v1" / "worker" / "gpu" / "model_runner.py"
    source = runner.read_text()
    source = source[source.index("def sample_tokens(") :]
    assert source.index("async_output = AsyncOutput(") < source.index("self.speculator.propose(")
