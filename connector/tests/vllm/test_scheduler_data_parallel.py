"""Data-parallel ranks under vLLM's own scheduler: what is said to a rank reaches that rank."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from contract import ContractEngine, closing_engines, prompt, stood_still
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.parallel_sampling import ParentRequest

from loopback import free_port
from pdcluster_connector.compat.reasons import Reason
from pdcluster_connector.protocol.failure import Failure
from pdcluster_connector.sidechannel import lease_client

pytestmark = pytest.mark.vllm


@pytest.fixture
def engines() -> Iterator[Any]:
    yield from closing_engines()


def ranks_of(engines: Any, role: str, **options: Any) -> list[ContractEngine]:
    """Two data-parallel ranks of one engine: one base port, one incarnation."""
    port = free_port()
    return [engines(role, port=port, data_rank=rank, **options) for rank in range(2)]


def held(prefill: ContractEngine) -> int:
    assert prefill.connector._scheduler is not None
    return prefill.connector._scheduler.prefill.leases.held


def test_each_rank_has_a_side_channel_and_says_so_in_its_tickets(engines: Any) -> None:
    for rank, prefill in enumerate(ranks_of(engines, "producer")):
        port = prefill.port + rank
        params = prefill.prefill("p0", prompt(40))
        assert (params["remote_engine_id"], params["remote_port"]) == (prefill.engine_id, port)
        assert prefill.engine_id.endswith(f"_dp{rank}")
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=60) as answer:
            assert json.loads(answer.read())["engine_id"] == prefill.engine_id


def received(decode: ContractEngine, ticket: dict[str, Any], prefill: ContractEngine) -> None:
    """Let a decode rank have the KV of a prefill rank, until that one has let go of it."""
    decode.add("d0", prompt(40), ticket)
    decode.run(lambda: "d0" in decode.parked())
    decode.land("d0")
    decode.run(lambda: "d0" in decode.finished)
    path = decode.params["d0"]["kv_path"]
    assert path["outcome"] == "transferred"
    assert (path["prefill"], path["decode"]) == (prefill.engine_id, decode.engine_id)
    prefill.run(lambda: not prefill.scheduler.requests)


def test_a_lease_ends_on_the_rank_that_granted_it_and_on_no_other(engines: Any) -> None:
    first, second = ranks_of(engines, "producer")
    decoders = ranks_of(engines, "consumer")
    # The same request id on both ranks: they know nothing of each other.
    tickets = [rank.prefill("p0", prompt(40)) for rank in (first, second)]
    assert (held(first), held(second)) == (1, 1)
    received(decoders[0], tickets[1], second)
    first.step()
    assert (held(first), held(second)) == (1, 0), "another rank's lease of the same name goes on"
    received(decoders[1], tickets[0], first)
    assert held(first) == 0
    assert first.total("leases_expired") == second.total("leases_expired") == 0


def test_one_decode_renews_the_leases_of_both_ranks(engines: Any) -> None:
    while True:
        ranks = ranks_of(engines, "producer", lease_seconds=3)
        decode = engines("consumer")
        for number, prefill in enumerate(ranks):
            ticket = prefill.prefill("p0", prompt(40, number))
            decode.add(f"d{number}", prompt(40, number), ticket)
        if not stood_still(4.5, *ranks, decode):
            break
    assert decode.parked() == {"d0", "d1"}
    assert [held(prefill) for prefill in ranks] == [1, 1]


def choices(request_id: str, n: int) -> list[str]:
    """The ids of the requests that vLLM makes of one with ``n`` > 1."""
    parent = ParentRequest(
        SimpleNamespace(  # type: ignore[arg-type]
            request_id=request_id, external_req_id=request_id, params=SamplingParams(n=n)
        )
    )
    return [parent.get_child_info(index)[0] for index in range(n)]


def test_choices_of_one_request_read_on_all_ranks_of_a_decode_engine(engines: Any) -> None:
    prefill = engines("producer")
    ranks = ranks_of(engines, "consumer")
    ticket = prefill.prefill("p0", prompt(40))
    ids = choices("d0", 4)
    for number, request_id in enumerate(ids):
        ranks[number % 2].add(request_id, prompt(40), ticket)
    for number, rank in enumerate(ranks):
        rank.run(lambda rank=rank, number=number: rank.parked() == set(ids[number::2]))
    for number, rank in enumerate(ranks):
        assert held(prefill) == 1, "released while another rank reads"
        for request_id in ids[number::2]:
            rank.land(request_id)
        rank.run(lambda rank=rank, number=number: set(ids[number::2]) <= set(rank.finished))
        for _ in range(30):
            prefill.step()
            time.sleep(0.005)
    prefill.run(lambda: held(prefill) == 0)
    paths = [rank.params[i]["kv_path"] for rank in ranks for i in ids if i in rank.params]
    assert [path["outcome"] for path in paths] == ["transferred"] * 4


def test_the_releases_of_one_rank_wait_for_the_claims_of_another(
    engines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that stands still may have to claim the same ticket."""
    monkeypatch.setattr(lease_client, "GATHER_SECONDS", 3600.0)
    prefill, decode = engines("producer"), engines("consumer", data_rank=0)
    decode.add("d0", prompt(40), prefill.prefill("p0", prompt(40)))
    (lease,) = prefill.connector._scheduler.prefill.leases._granted.values()
    decode.run(lambda: "d0" in decode.parked() and bool(lease.readers))  # it is claimed
    decode.land("d0")
    decode.run(lambda: "d0" in decode.finished)
    decode.step()
    client = decode.connector._scheduler._lease_client
    assert [is_release for *_, is_release in client._asked] == [True]


@pytest.mark.parametrize("before", ["", "prefill was silent", "prefill is busy for a moment"])
def test_a_choice_that_comes_after_the_others_have_read_is_computed_and_does_not_fail(
    engines: Any, monkeypatch: pytest.MonkeyPatch, before: str
) -> None:
    """The engines' policy is ``fail``: a receive that cannot succeed would end the request."""
    prefill = engines("producer")
    first, second = ranks_of(engines, "consumer")
    ticket = prefill.prefill("p0", prompt(40))
    ids = choices("d0", 2)
    first.add(ids[0], prompt(40), ticket)
    first.run(lambda: first.parked() == {ids[0]})
    first.land(ids[0])
    first.run(lambda: ids[0] in first.finished)
    prefill.run(lambda: not prefill.scheduler.requests)
    if before == "prefill was silent":
        silence = Failure(Reason.SIDE_CHANNEL_UNREACHABLE, "no answer in time")
        second.workers[0].found_gone = {prefill.engine_id: silence}
        second.step()
    elif before:
        client = second.connector._scheduler._lease_client
        send = client._send

        async def not_yet(*_: Any) -> None:
            client._send = send

        monkeypatch.setattr(client, "_send", not_yet)
    second.add(ids[1], prompt(40), ticket)
    second.run(lambda: ids[1] in second.finished or ids[1] in second.parked())
    assert second.parked() == set()
    path = second.params[ids[1]]["kv_path"]
    assert (path["outcome"], path["reason"]) == ("local", "LeaseLost")
    assert "error" not in second.finished[ids[1]].lower()


def test_another_request_waits_for_no_claim(engines: Any, monkeypatch: Any) -> None:
    """Its claim travels beside the data."""
    prefill = engines("producer")
    decode = ranks_of(engines, "consumer")[0]
    ticket = prefill.prefill("p0", prompt(40))
    monkeypatch.setattr(decode.connector._scheduler._lease_client, "renew", lambda *_: None)
    (choice, _) = choices("d1", 2)
    decode.add("d0", prompt(40), ticket)
    decode.add(choice, prompt(40), ticket)
    for _ in range(5):
        decode.step()
    assert decode.parked() == {"d0"}


@pytest.mark.parametrize("prefill_is", ["gone", "restarted", "silent"])
def test_a_choice_does_not_wait_for_a_prefill_that_does_not_answer(
    engines: Any, monkeypatch: pytest.MonkeyPatch, prefill_is: str
) -> None:
    """Its receive ends as soon as that of any other request, and says why."""
    prefill = engines("producer")
    decode = ranks_of(engines, "consumer")[0]
    ticket = prefill.prefill("p0", prompt(40))
    if prefill_is == "gone":
        prefill.connector._scheduler._side_channel.stop()
    elif prefill_is == "restarted":
        prefill.connector._scheduler._side_channel.engine_id = f"{prefill.engine_id[:-1]}!"
    else:  # the first rank has noticed it, and the claim gets no answer
        silence = Failure(Reason.SIDE_CHANNEL_UNREACHABLE, "no answer in time")
        decode.workers[0].found_gone = {prefill.engine_id: silence}
        decode.step()
        monkeypatch.setattr(decode.connector._scheduler._lease_client, "renew", lambda *_: None)
    (choice, _) = choices("d0", 2)
    decode.add(choice, prompt(40), ticket)
    decode.run(lambda: choice in decode.parked() or choice in decode.finished)
    assert decode.parked() == {choice}, "it has waited for the lease's end"
    assert not decode.workers[0].parked[choice].claimed


def test_only_steps_beside_which_nothing_is_computed_may_wait(engines: Any) -> None:
    """With pipeline ranks and with async scheduling, steps are planned while one computes."""

    def idle(scheduled: list[int], **options: Any) -> list[bool]:
        scheduler = engines("consumer", **options).connector._scheduler
        return [scheduler.orders(tokens).idle for tokens in scheduled]

    assert idle([5, 0, 0, 0, 1, 0, 0]) == [False, False, True, True, False, False, True]
    assert (
        idle([5, 0, 0, 0, 0, 1, 0], stages=2, publish=False)
        == [False] * 3 + [True] * 2 + [False] * 2
    )


def test_ranks_that_make_their_steps_together_do_not_wait_in_them(engines: Any) -> None:
    scheduler = engines("consumer", together=2).connector._scheduler
    assert not any(scheduler.orders(0).idle for _ in range(5))
