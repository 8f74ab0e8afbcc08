"""Data-parallel ranks under vLLM's own scheduler: what is said to a rank reaches that rank."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("vllm")

from contract import ContractEngine, closing_engines, prompt

from loopback import free_port

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
    return prefill.connector._scheduler.prefill.leases_held


def test_each_rank_has_a_side_channel_and_says_so_in_its_tickets(engines: Any) -> None:
    for rank, prefill in enumerate(ranks_of(engines, "producer")):
        port = prefill.port + rank
        params = prefill.prefill("p0", prompt(40))
        assert (params["remote_engine_id"], params["remote_port"]) == (prefill.engine_id, port)
        assert prefill.engine_id.endswith(f"_dp{rank}")
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=5) as answer:
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
    ranks = ranks_of(engines, "producer", lease_seconds=1)
    decode = engines("consumer")
    for number, prefill in enumerate(ranks):
        ticket = prefill.prefill("p0", prompt(40, number))
        decode.add(f"d{number}", prompt(40, number), ticket)
    decode.run(lambda: decode.parked() == {"d0", "d1"})
    until = time.monotonic() + 2.5
    while time.monotonic() < until:
        for engine in (*ranks, decode):
            engine.step()
        time.sleep(0.01)
    assert [held(prefill) for prefill in ranks] == [1, 1]
