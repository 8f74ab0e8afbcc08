"""Our scheduler side under vLLM's own scheduler: every state a request can be in."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

pytest.importorskip("vllm")

from contract import BLOCK, ContractEngine, closing_engines, prompt, stood_still
from real_worker import RealWorker
from vllm.v1.request import RequestStatus

from pdcluster_connector.compat.reasons import Reason
from pdcluster_connector.protocol.failure import Failure
from pdcluster_connector.protocol.kv_path import FAILURE_HEADER
from pdcluster_connector.protocol.ticket import Ticket, encode, ticket_of
from pdcluster_connector.sidechannel import lease_client, peers
from pdcluster_connector.sidechannel.ticket_key_file import ROTATION_SECONDS, parse_keys
from pdcluster_connector.testing.nixl import Fabric
from pdcluster_connector.vllm.step_messages import StepReport
from pdcluster_connector.vllm.worker_side.worker import WorkerRole
from ticket_key import KEYS

pytestmark = pytest.mark.vllm


@pytest.fixture
def engines() -> Iterator[Any]:
    yield from closing_engines()


@pytest.fixture
def pair(engines: Any) -> tuple[ContractEngine, ContractEngine]:
    return engines("producer"), engines("consumer")


def abort(engine: ContractEngine, request_id: str) -> None:
    engine.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)


def released(prefill: ContractEngine) -> bool:
    """Step prefill until every rank has reported its one hand-off as sent."""
    prefill.run(lambda: not prefill.scheduler.requests)
    return all(len(worker.sent) == len(set(worker.sent)) for worker in prefill.workers)


def test_hand_off_from_ticket_to_release(pair: Any) -> None:
    prefill, decode = pair
    before = prefill.free_blocks()
    params = prefill.prefill("p0", prompt(40))
    assert params["do_remote_prefill"] is True
    assert params["remote_request_id"] == "p0"
    assert prefill.free_blocks() == before - 3, "blocks are kept for decode"
    prefill.step()
    assert prefill.total("leases_held") == 1

    decode.add("d0", prompt(40), params, max_tokens=2)
    decode.run(lambda: "d0" in decode.parked())
    order = decode.workers[0].parked["d0"]
    assert (order.start, order.stop, order.blocks[0].first_token) == (0, 40, 0)
    assert order.ticket.request_id == "p0"
    assert len(order.blocks[0].blocks) == len(order.ticket.blocks[0]) == 3
    for _ in range(3):
        assert decode.step() == [], "a parked request computes nothing"
    decode.land("d0", ranks=[1])
    decode.step()
    decode.step()
    assert "d0" not in decode.tokens, "one rank of two is not enough"
    decode.land("d0", ranks=[0])
    decode.run(lambda: "d0" in decode.finished)
    assert decode.tokens["d0"] == 2
    path = decode.params["d0"]["kv_path"]
    assert path["prefill"] == prefill.engine_id
    assert path["decode"] == decode.engine_id
    assert path["outcome"] == "transferred"
    assert (path["tokens"], path["blocks"], path["bytes"]) == (40, 3, 200)
    assert path["seconds"] == 1.25, "the slowest rank's"
    assert released(prefill)
    assert all(worker.sent == ["p0"] for worker in prefill.workers)
    assert prefill.free_blocks() == before
    assert prefill.total("leases_held") == 0
    assert decode.total("decodes_without_transfer") == {}


def test_the_claims_of_all_new_requests_go_with_their_first_step(
    pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease_client, "UNSENT_SECONDS", 3600.0)
    prefill, decode = pair
    tickets = [prefill.prefill(f"p{number}", prompt(40)) for number in range(3)]
    for number, params in enumerate(tickets):
        decode.add(f"d{number}", prompt(40), params)
    leases, deadline = prefill.connector._scheduler._leases, time.monotonic() + 60
    assert [one.readers for one in leases._granted.values()] == [set()] * 3
    decode.step()
    while not all(one.readers for one in leases._granted.values()):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_releases_wait_only_while_receives_are_under_way(
    pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An idle prefill engine makes steps until its last lease has ended, which costs it time."""
    prefill, decode = pair
    monkeypatch.setattr(lease_client, "GATHER_SECONDS", 3600.0)
    client = decode.connector._scheduler._lease_client
    for number in range(3):
        tokens = prompt(40, first=number)
        decode.add(f"d{number}", tokens, prefill.prefill(f"p{number}", tokens))
    decode.run(lambda: len(decode.parked()) == 3)
    leases = prefill.connector._scheduler.prefill.leases
    decode.run(lambda: all(lease.readers for lease in leases._granted.values()))  # they are claimed
    for number in range(3):
        assert sum(is_release for *_, is_release in client._asked) == number
        decode.land(f"d{number}")
        decode.run(lambda one=f"d{number}": one in decode.finished)
    assert released(prefill)
    assert prefill.total("leases_expired") == 0


def test_matching_has_no_side_effects(pair: Any) -> None:
    prefill, decode = pair
    params = prefill.prefill("p0", prompt(40))
    request = decode.add("d0", prompt(40), params)
    asked = [decode.connector.get_num_new_matched_tokens(request, 16) for _ in range(5)]
    assert asked == [(24, True)] * 5
    assert decode.connector.get_num_new_matched_tokens(request, 40) == (0, False)
    decode.run(lambda: "d0" in decode.parked())
    assert decode.workers[0].parked["d0"].start == 0


def test_of_a_local_prefix_hit_only_the_rest_is_read(pair: Any) -> None:
    prefill, decode = pair
    decode.add("warm", prompt(64), None)
    decode.run(lambda: "warm" in decode.finished)
    params = prefill.prefill("p0", prompt(49))
    decode.add("d0", prompt(49), params, max_tokens=2)
    decode.run(lambda: "d0" in decode.parked())
    order = decode.workers[0].parked["d0"]
    assert (order.start, order.stop, order.blocks[0].first_token) == (48, 49, 48), (
        "only what is missing"
    )
    decode.land("d0")
    decode.run(lambda: "d0" in decode.finished)
    params = prefill.prefill("p1", prompt(48))
    # vLLM always computes the last token itself, so 47 of 48 tokens are a hit of 2 blocks.
    decode.add("d1", prompt(48), params)
    decode.run(lambda: "d1" in decode.parked())
    decode.land("d1")
    decode.run(lambda: "d1" in decode.finished)
    decode.run(lambda: "d1" in decode.finished)
    assert decode.total("decodes_without_transfer") == {"NoTicket": 1}
    assert released(prefill)


@pytest.mark.parametrize("moment", ["before scheduling", "parked", "received", "decoding"])
def test_abort_in_every_state(pair: Any, moment: str) -> None:
    prefill, decode = pair
    before = decode.free_blocks()
    params = prefill.prefill("p0", prompt(40))
    decode.add("d0", prompt(40), params, max_tokens=50)
    if moment == "before scheduling":
        abort(decode, "d0")
    else:
        decode.run(lambda: "d0" in decode.parked())
        if moment == "parked":
            abort(decode, "d0")
            decode.step()
            assert [worker.abandoned for worker in decode.workers] == [["d0"], ["d0"]]
            assert decode.free_blocks() < before, "data may still land in its blocks"
            decode.land("d0", ranks=[0], reason="TransferStalled")
            decode.step()
            assert decode.free_blocks() < before, "one rank is not through yet"
            held = decode.connector._scheduler.decode._tickets.held
            assert len(held) == 1, "prefill must not reuse the blocks that it reads"
            decode.land("d0", ranks=[1], reason="TransferStalled")
            decode.step()
            decode.step()
            assert [worker.abandoned for worker in decode.workers] == [["d0"], ["d0"]], "told twice"
        else:
            decode.land("d0")
            decode.step()
            if moment == "decoding":
                decode.run(lambda: decode.tokens.get("d0", 0) > 3)
            abort(decode, "d0")
            assert [worker.abandoned for worker in decode.workers] == [[], []]
    decode.run(lambda: not decode.scheduler.requests)
    assert decode.free_blocks() == before
    assert released(prefill)
    assert decode.connector._scheduler.decode._requests == {}
    assert decode.connector._scheduler.decode._aborted == {}
    assert len(decode.connector._scheduler.decode._tickets.held) == 0


def test_a_parked_request_that_vllm_schedules_again_is_received_once(pair: Any) -> None:
    prefill, decode = pair
    decode.add("d0", prompt(40), prefill.prefill("p0", prompt(40)))
    decode.run(lambda: "d0" in decode.parked())
    request, role = decode.scheduler.requests["d0"], decode.connector._scheduler.decode
    for external_tokens in (0, 40):
        role.scheduled(request, ([1, 2, 3],), external_tokens)
    decode.step()
    assert len(role._tickets.held) == 1
    decode.land("d0")
    decode.run(lambda: "d0" in decode.finished)
    assert decode.params["d0"]["kv_path"]["outcome"] == "transferred"
    assert decode.prompts() == {("transferred", ""): 1}
    assert released(prefill)


def test_a_request_that_the_serving_layer_rejects_releases_its_ticket(pair: Any) -> None:
    prefill, decode = pair
    params = prefill.prefill("p0", prompt(40))
    # AsyncLLM.notify_kv_transfer_request_rejected: one token of prompt, aborted at once.
    request = decode.add("d0", [0], params, abort_immediately=True)
    assert request.abort_immediately
    abort(decode, "d0")
    assert released(prefill)
    decode.run(lambda: not decode.scheduler.requests)
    assert decode.total("decodes_without_transfer") == {}, "nothing was decoded"


def test_without_a_key_prefill_keeps_the_blocks_of_a_rejected_request_for_one_lease(
    engines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Anybody may have made its ticket, so decode sends nothing to the host that it names."""
    insecure = {"allow_insecure": True, "ticket_key_file": None}
    prefill, decode = engines("producer", **insecure), engines("consumer", **insecure)
    now, before, desk = [1000.0], prefill.free_blocks(), prefill.connector._scheduler._leases
    monkeypatch.setattr(desk, "_clock", lambda: now[0])
    params = prefill.prefill("p0", prompt(40))
    sent = messages_to_prefill(decode, monkeypatch)
    decode.add("d0", [0], params, abort_immediately=True)
    abort(decode, "d0")
    decode.run(lambda: not decode.scheduler.requests)
    assert sent == []
    now[0] += prefill.connector._scheduler._options.lease_seconds - 0.01
    for _ in range(3):
        prefill.step()
    assert (desk.held, prefill.free_blocks()) == (1, before - 3)
    now[0] += 0.01
    assert released(prefill)
    assert prefill.free_blocks() == before
    assert prefill.total("leases_expired") == 1


def test_preemption_does_not_load_again(engines: Any) -> None:
    prefill = engines("producer")
    decode = engines("consumer", blocks=9)
    for i in range(2):
        params = prefill.prefill(f"p{i}", prompt(46, first=i))
        decode.add(f"d{i}", prompt(46, first=i), params, max_tokens=40)
    decode.run(lambda: decode.parked() == {"d0", "d1"})
    decode.land("d0")
    decode.land("d1")
    preempted = set()

    def done() -> bool:
        preempted.update(
            r.request_id for r in decode.scheduler.requests.values() if r.num_preemptions
        )
        assert decode.parked() == set(), "loaded again"
        return len(decode.finished) == 2

    decode.step()
    decode.run(done)
    assert preempted, "the pool was large enough; the test shows nothing"
    assert decode.tokens == {"d0": 40, "d1": 40}
    for i in range(2):
        assert decode.params[f"d{i}"]["kv_path"]["outcome"] == "transferred"
    assert released(prefill)


@pytest.mark.parametrize(("blocks", "victim"), [(7, "p1 for p0"), (8, "p1 for itself")])
def test_preempted_prefill_hands_off_once(engines: Any, blocks: int, victim: str) -> None:
    """Two prompts of four blocks grow side by side in a pool of six or seven."""
    prefill, decode = engines("producer", blocks=blocks), engines("consumer")
    before = prefill.free_blocks()
    # A step computes one block of each: otherwise p0 is through before p1 begins.
    prefill.scheduler.scheduler_config.long_prefill_token_threshold = BLOCK
    prompts = {name: prompt(60, first=i) for i, name in enumerate(("p0", "p1"))}
    first, second = (
        prefill.add(name, tokens, {"do_remote_decode": True}) for name, tokens in prompts.items()
    )
    prefill.run(lambda: second.num_preemptions > 0)
    assert (first.num_preemptions, second.num_preemptions) == (0, 1), victim
    prefill.run(lambda: "p0" in prefill.finished)
    for _ in range(3):
        prefill.step()
    assert "p1" not in prefill.finished, "p0's lease holds the blocks that it needs"
    assert prefill.total("leases_held") == 1

    for name, tokens in prompts.items():
        prefill.run(lambda name=name: name in prefill.finished)
        params = prefill.params[name]
        ticket = ticket_of(params, KEYS)
        held = prefill.scheduler.kv_cache_manager.get_block_ids(name)
        assert [list(ids) for ids in ticket.blocks] == [list(ids) for ids in held]
        decode.add(f"d-{name}", tokens, params, max_tokens=2)
        decode.run(lambda name=name: f"d-{name}" in decode.parked())
        decode.land(f"d-{name}")
        decode.run(lambda name=name: f"d-{name}" in decode.finished)
        assert decode.params[f"d-{name}"]["kv_path"]["outcome"] == "transferred"
    assert released(prefill)
    assert [worker.sent for worker in prefill.workers] == [["p0", "p1"]] * 2
    assert prefill.free_blocks() == before


@pytest.mark.parametrize("policy", ["fail", "recompute"])
@pytest.mark.parametrize("bad_rank", [0, 1])
def test_a_failed_receive_follows_the_policy(engines: Any, policy: str, bad_rank: int) -> None:
    prefill = engines("producer")
    decode = engines("consumer", policy=policy)
    before = decode.free_blocks()
    params = prefill.prefill("p0", prompt(40))
    decode.add("d0", prompt(40), params, max_tokens=3)
    decode.run(lambda: "d0" in decode.parked())
    decode.land("d0", ranks=[bad_rank], reason="BackendError")
    decode.step()
    assert "d0" not in decode.finished, "the other rank may still receive"
    decode.step()
    assert [worker.abandoned for worker in decode.workers] == [["d0"], ["d0"]]
    decode.land("d0", ranks=[1 - bad_rank])
    decode.run(lambda: "d0" in decode.finished)
    if policy == "fail":
        assert decode.finished["d0"] == "error"
        assert decode.tokens["d0"] == 0
        why = decode.headers["d0"][FAILURE_HEADER]
        link = f"from {prefill.engine_id} to {decode.engine_id}"
        assert why == f"KV was not received: BackendError, {link} (request d0)"
    else:
        assert decode.tokens["d0"] == 3
        assert decode.headers["d0"] is None
        path = decode.params["d0"]["kv_path"]
        assert (path["outcome"], path["reason"]) == ("failed", "BackendError")
    decode.run(lambda: not decode.scheduler.requests)
    assert decode.free_blocks() == before
    assert released(prefill)
    decode.step()
    assert [worker.abandoned for worker in decode.workers] == [["d0"], ["d0"]]


PROVEN_FALSE = (
    Reason.TICKET_INVALID,
    Reason.UNSIGNED,
    Reason.FORGED,
    Reason.AUDIENCE_MISMATCH,
)


def messages_to_prefill(
    decode: ContractEngine, monkeypatch: pytest.MonkeyPatch
) -> list[tuple[Any, ...]]:
    """What decode tells prefill engines from now on."""
    sent: list[tuple[Any, ...]] = []
    client = decode.connector._scheduler._lease_client
    for name in ("renew", "release"):
        tell = getattr(client, name)
        monkeypatch.setattr(
            client, name, lambda *words, tell=tell: (sent.append(words), tell(*words))
        )
    return sent


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("prompt", "PromptMismatch"),
        ("ticket", Reason.TICKET_INVALID),
        ("signature", Reason.FORGED),
        ("blocks", Reason.FORGED),
        ("no signature", Reason.UNSIGNED),
        ("audience", Reason.AUDIENCE_MISMATCH),
        ("no ticket", Reason.TICKET_INVALID),
        ("no params", "NoTicket"),
    ],
)
def test_a_ticket_that_does_not_fit_is_not_used(
    pair: Any, change: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = pair
    params: dict[str, Any] | None = prefill.prefill("p0", prompt(40))
    tokens = prompt(40)
    if change == "prompt":
        tokens[3] += 1
    elif change == "ticket":
        params = {**params, "ticket": params["ticket"][:-10]}
    elif change in ("signature", "blocks", "no signature", "audience"):
        true = ticket_of(params, KEYS)
        assert isinstance(true, Ticket)
        changed, keys = {
            "signature": ({}, parse_keys(b"ab" * 32)),
            "blocks": ({"blocks": ((1, 2, 3),)}, parse_keys(b"ab" * 32)),
            "no signature": ({"blocks": ((1, 2, 3),)}, None),
            "audience": ({"audience": "another"}, KEYS),
        }[change]
        params = {**params, "ticket": encode(msgspec.structs.replace(true, **changed), keys)}
    elif change == "no ticket":
        params = {"do_remote_prefill": True}
    else:
        params = None
    sent = messages_to_prefill(decode, monkeypatch)
    decode.add("d0", tokens, params)
    decode.run(lambda: "d0" in decode.finished)
    path = decode.params["d0"]["kv_path"]
    assert (path["outcome"], path["reason"]) == ("local", reason)
    assert bool(path["message"]) == (reason in PROVEN_FALSE)
    decode.step()
    assert decode.total("decodes_without_transfer") == {reason: 1}
    if change == "prompt":
        assert released(prefill), "what an engine of ours has signed is released, though unused"
    else:
        assert not sent, "nobody is told about a ticket that no engine of ours has signed"


def handed_over(
    prefill: ContractEngine, request_id: str, tokens: list[int], ahead: float
) -> dict[str, Any]:
    """A ticket of a prefill engine beside which decode's clock is ahead by so many seconds."""
    real = time.time
    with pytest.MonkeyPatch.context() as prefills:
        prefills.setattr(time, "time", lambda: real() - ahead)
        return prefill.prefill(request_id, tokens)


@pytest.mark.parametrize("ahead", [0.0, -3600.0, -61.0, 61.0, 3600.0])
def test_no_transfer_depends_on_the_clocks_of_two_machines(pair: Any, ahead: float) -> None:
    prefill, decode = pair
    for number in range(3):
        tokens, name = prompt(40 + number), f"d{number}"
        decode.add(name, tokens, handed_over(prefill, f"p{number}", tokens, ahead))
        decode.run(lambda name=name: name in decode.parked() or name in decode.finished)
        assert name in decode.parked()
        decode.land(name)
        decode.run(lambda name=name: name in decode.finished)
        assert decode.params[name]["kv_path"]["outcome"] == "transferred"
    assert released(prefill)


@pytest.mark.parametrize("ahead", [0.0, -3600.0, 3600.0])
def test_a_ticket_whose_lease_is_over_is_refused_by_prefill_whatever_decodes_clock_shows(
    engines: Any, ahead: float
) -> None:
    """The policy is ``fail``: a receive would end the request with an error."""
    prefill, decode = engines("producer", lease_seconds=1.0), engines("consumer")
    decode.add("before", prompt(33), handed_over(prefill, "p", prompt(33), ahead))
    decode.run(lambda: "before" in decode.parked())
    decode.land("before")
    decode.run(lambda: "before" in decode.finished)
    params = handed_over(prefill, "p0", prompt(40), ahead)
    prefill.run(lambda: not prefill.scheduler.requests)
    time.sleep(0.5)  # decode knows prefill's clock only as well as tickets are quick
    decode.add("d0", prompt(40), params)
    decode.run(lambda: "d0" in decode.finished or "d0" in decode.parked())
    assert "d0" in decode.finished, "it waits for KV that is gone"
    path = decode.params["d0"]["kv_path"]
    assert (path["outcome"], path["reason"]) == ("local", Reason.LEASE_EXPIRED)
    assert path["message"] == "prefill's lease had ended before this engine asked for it"
    decode.step()
    assert decode.total("decodes_without_transfer")[Reason.LEASE_EXPIRED] == 1


def test_a_ticket_that_is_over_fails_by_its_reason_where_prefills_clock_is_not_known(
    engines: Any,
) -> None:
    prefill, decode = engines("producer", lease_seconds=1.0), engines("consumer")
    params = prefill.prefill("p0", prompt(40))
    prefill.run(lambda: not prefill.scheduler.requests)
    decode.add("d0", prompt(40), params)
    decode.run(lambda: "d0" in decode.workers[0].lost or "d0" in decode.finished)
    if "d0" in decode.workers[0].lost:
        assert decode.workers[0].lost["d0"].reason is Reason.LEASE_EXPIRED
    else:  # prefill's answer came before vLLM asked
        assert decode.params["d0"]["kv_path"]["reason"] == Reason.LEASE_EXPIRED


@pytest.mark.parametrize("change", ["prompt", ""])
def test_without_a_key_only_a_ticket_that_is_used_makes_decode_connect(
    engines: Any,
    change: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Nothing proves its host and port; at least the client must know the whole prompt."""
    insecure = {"allow_insecure": True, "ticket_key_file": None}
    with caplog.at_level(logging.WARNING):
        prefill, decode = engines("producer", **insecure), engines("consumer", **insecure)
    assert caplog.text.count("tickets are not signed: there is no ticket_key_file") == 2
    params = prefill.prefill("p0", prompt(40))
    sent = messages_to_prefill(decode, monkeypatch)
    decode.add("d0", prompt(40, first=9 if change == "prompt" else 5), params)
    if change:
        decode.run(lambda: "d0" in decode.finished)
        assert not sent
    else:
        decode.run(lambda: "d0" in decode.parked())
        decode.land("d0")
        decode.run(lambda: "d0" in decode.finished)
        assert decode.params["d0"]["kv_path"]["outcome"] == "transferred"
        assert released(prefill)


def test_keys_that_are_replaced_cost_no_transfer(engines: Any, tmp_path: Path) -> None:
    """Prefill has the new file first, then decode. When both files are old, the new key signs."""
    old, new = "0a" * 32, "0b" * 32
    files = {role: tmp_path / role for role in ("producer", "consumer")}
    for file in files.values():
        file.write_text(old)
    pair = {role: engines(role, ticket_key_file=str(file)) for role, file in files.items()}
    prefill, decode = pair["producer"], pair["consumer"]
    roles = {"producer": prefill.connector._scheduler.prefill.keys,
             "consumer": decode.connector._scheduler.decode.keys}  # fmt: skip

    def write(role: str, *keys: str, age: float = 0.0) -> None:
        files[role].write_text("\n".join(keys))
        written = time.time() - age
        os.utime(files[role], (written, written))
        roles[role]._content._looked = 0.0  # five seconds have passed

    def signed_with(name: str) -> str:
        params = prefill.prefill(name, prompt(40))
        decode.add(name, prompt(40), params)
        decode.run(lambda: name in decode.parked())
        decode.land(name)
        decode.run(lambda: name in decode.finished)
        assert decode.params[name]["kv_path"]["outcome"] == "transferred"
        readers = {key: parse_keys(key.encode()) for key in (old, new)}
        found = [
            key for key, keys in readers.items() if isinstance(ticket_of(params, keys), Ticket)
        ]
        assert len(found) == 1
        return found[0]

    assert signed_with("a") == old
    kept = prefill.prefill("kept", prompt(40))
    write("producer", new, old)
    assert signed_with("b") == old
    write("consumer", new, old)
    assert signed_with("c") == old
    write("producer", new, old, age=ROTATION_SECONDS)
    assert signed_with("d") == new
    decode.add("kept", prompt(40), kept)
    decode.run(lambda: "kept" in decode.parked())
    decode.land("kept")
    write("consumer", new, age=ROTATION_SECONDS)
    assert signed_with("e") == new
    assert decode.total("decodes_without_transfer") == {}


def test_a_routers_id_of_the_transfer_is_repeated(pair: Any) -> None:
    prefill, decode = pair
    prefill.add("p0", prompt(40), {"do_remote_decode": True, "transfer_id": "t-1"})
    prefill.run(lambda: "p0" in prefill.finished)
    params = prefill.params["p0"]
    assert params["transfer_id"] == "t-1"
    decode.add("d0", prompt(40), params)
    decode.run(lambda: "d0" in decode.parked())
    decode.land("d0")
    decode.run(lambda: "d0" in decode.finished)
    assert decode.params["d0"]["transfer_id"] == "t-1"
    assert decode.params["d0"]["kv_path"]["outcome"] == "transferred"


def test_one_ticket_for_several_requests(pair: Any) -> None:
    """``n=2`` and ``prompt=[A, B]``: vLLM hands one ticket to all of them."""
    prefill, decode = pair
    params = prefill.prefill("p0", prompt(40))
    decode.add("same0", prompt(40), params)
    decode.add("same1", prompt(40), params)
    decode.add("other", prompt(40, first=9), params)
    decode.run(lambda: decode.parked() == {"same0", "same1"} and "other" in decode.finished)
    decode.land("same0")
    decode.run(lambda: "same0" in decode.finished)
    for _ in range(30):
        prefill.step()
        time.sleep(0.005)
    assert prefill.scheduler.requests, "released while same1 still reads"
    decode.land("same1")
    decode.run(lambda: "same1" in decode.finished)
    assert released(prefill)
    decode.add("late", prompt(40), params)
    decode.run(lambda: "late" in decode.finished)
    assert decode.params["late"]["kv_path"]["reason"] == "TicketSpent"
    assert decode.total("decodes_without_transfer") == {"PromptMismatch": 1, "TicketSpent": 1}


def test_all_ranks_are_told_of_a_peer_that_the_first_one_finds_gone(pair: Any) -> None:
    _, decode = pair
    gone = {"ns.c.prefill.r.0/1": Failure(Reason.PEER_RESTARTED, "another one listens there now")}
    decode.workers[0].found_gone = dict(gone)
    decode.step()
    decode.step()
    assert [worker.told_gone for worker in decode.workers] == [gone, gone]
    for worker in decode.workers:
        worker.told_gone = {}
    decode.step()
    assert not any(worker.told_gone for worker in decode.workers), "told twice"


def test_the_first_rank_reports_a_peer_that_is_silent(
    engines: Any, one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other ranks ask rarely: until they hear of it, they would post reads that hang."""
    monkeypatch.setattr(
        "pdcluster_connector.vllm.worker_side.worker.nixl_agent.NixlAgent",
        lambda name, **_: Fabric().agent(name),
    )
    connector = RealWorker(engines("consumer", ranks=1, publish=False), 0.0).connector
    assert connector._worker is not None
    book, silent = connector._worker._peers, Failure(Reason.SIDE_CHANNEL_UNREACHABLE, "no answer")
    assert book is not None
    peers.call(book._silence_listeners, "e/1", silent)
    report = connector.build_connector_worker_meta()
    connector.shutdown()
    assert report == StepReport({}, {"e/1": silent})


def test_the_agent_that_serves_memory_of_a_gpu_is_told_so(
    engines: Any, one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[bool] = []
    serving: list[bool] = []
    make = WorkerRole._new_agent

    def agent(name: str, *, serves_gpu: bool, **_: Any) -> Any:
        told.append(serves_gpu)
        return Fabric().agent(name)

    def noted(worker: WorkerRole, threads: int, *, serves: bool = False) -> Any:
        serving.append(serves)
        return make(worker, threads, serves=serves)

    monkeypatch.setattr(WorkerRole, "_new_agent", noted)
    monkeypatch.setattr("pdcluster_connector.vllm.worker_side.worker.nixl_agent.NixlAgent", agent)
    connector = RealWorker(engines("producer", ranks=1, publish=False), 0.0).connector
    worker = connector._worker
    assert worker is not None
    worker._device = torch.device("cuda")
    assert serving == [True], "whose KV peers read"
    worker._new_agent(0, serves=True)
    worker._new_agent(4)
    connector.shutdown()
    assert told == [False, True, False]


def test_an_unclaimed_lease_expires_and_is_counted(engines: Any) -> None:
    prefill = engines("producer", lease_seconds=1)
    before = prefill.free_blocks()
    prefill.prefill("p0", prompt(40))
    started = time.monotonic()
    prefill.run(lambda: not prefill.scheduler.requests)
    assert time.monotonic() - started > 0.8
    assert prefill.free_blocks() == before
    assert prefill.total("leases_expired") == 1
    assert all(worker.sent == ["p0"] for worker in prefill.workers)


def test_decode_renews_while_it_waits(engines: Any) -> None:
    while True:
        prefill = engines("producer", lease_seconds=3)
        decode = engines("consumer", lease_seconds=60)  # prefill's own lease decides
        params = prefill.prefill("p0", prompt(40))
        decode.add("d0", prompt(40), params)
        if not stood_still(4.5, decode, prefill):
            break
    assert prefill.total("leases_held") == 1, "expired although decode still waits"
    decode.land("d0")
    decode.run(lambda: "d0" in decode.finished)
    assert released(prefill)
    assert prefill.total("leases_expired") == 0


def test_an_aborted_prefill_holds_nothing(engines: Any) -> None:
    prefill = engines("producer", max_tokens_per_step=16)
    before = prefill.free_blocks()
    prefill.add("p0", prompt(60), {"do_remote_decode": True})
    prefill.step()
    abort(prefill, "p0")
    prefill.run(lambda: not prefill.scheduler.requests)
    assert prefill.free_blocks() == before
    role = prefill.connector._scheduler.prefill
    assert role.leases.held == 0
    assert role.leases._armed == {}
    for _ in range(3):
        prefill.step()
    assert all(worker.sent == [] for worker in prefill.workers)


@pytest.mark.parametrize("method", ["arrived", "matched", "scheduled", "orders", "finished"])
def test_an_exception_costs_a_request_and_not_the_engine(pair: Any, method: str) -> None:
    prefill, decode = pair
    params = prefill.prefill("p0", prompt(40))
    role = decode.connector._scheduler
    broken = {"on": True}
    original = getattr(role, method)

    def explode(*args: Any) -> Any:
        if broken["on"]:
            raise KeyError("a fault that nobody thought of")
        return original(*args)

    setattr(role, method, explode)
    decode.add("d0", prompt(40), params, max_tokens=2)
    for _ in range(5):
        decode.step()
    broken["on"] = method == "finished"
    if method in ("orders", "finished"):
        decode.run(lambda: "d0" in decode.parked())
        decode.land("d0")
    decode.run(lambda: not decode.scheduler.requests)
    broken["on"] = False
    decode.step()
    assert role.decode._requests == {}
    # A request that could not be taken in has no known ticket: its lease ends by itself.
    assert method == "arrived" or released(prefill)
    assert sum(decode.total("step_faults").values()) >= 1
    if method == "scheduled":
        assert decode.finished["d0"] == "error"
    elif method != "finished":
        assert decode.tokens["d0"] == 2
    decode.add("d1", prompt(20), None, max_tokens=2)
    decode.run(lambda: "d1" in decode.finished)
    assert decode.tokens["d1"] == 2


def test_block_size_of_the_harness() -> None:
    assert BLOCK == 16, "the numbers above count blocks of 16 tokens"
