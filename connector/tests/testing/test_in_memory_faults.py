"""The in-memory NIXL does what was asked of it, and the judge sees wrong bytes when there are any.

The connector believes NIXL: a transfer that is DONE has brought all its bytes, and the right ones.
Where NIXL itself lies about that, wrong bytes are believed; these tests show that they are seen.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
from left_open import open_handles

from pdcluster_connector.compat.reasons import Reason
from pdcluster_connector.nixl_io.interface import NixlErrorKind
from pdcluster_connector.testing.engines import DecodeEngine, PrefillEngine, Size
from pdcluster_connector.testing.judge import Judge, Verdict
from pdcluster_connector.testing.nixl import Behaviour, Fabric, Transfer

TOKENS, WORD_BYTES, PROBE_BYTES = 10, 8, 4096


class Pair:
    def __init__(self, **prefill: object) -> None:
        self.fabric = Fabric()
        self.prefill = PrefillEngine(self.fabric, size=Size(tensor=2), **prefill)  # type: ignore[arg-type]
        self.decode = DecodeEngine(self.fabric)

    def send(self, seed: int, request_id: str = "") -> str:
        request_id = request_id or f"r{seed}"
        params = self.prefill.compute(seed, TOKENS)
        self.decode.fetch(request_id, params, seed, TOKENS)
        return request_id

    def run(self, until: Callable[[], bool], seconds: float = 120.0) -> None:
        deadline = time.monotonic() + seconds
        while not until():
            assert time.monotonic() < deadline, "it did not happen"
            self.prefill.step()
            self.decode.step()
            time.sleep(0.001)

    def ended(self, request_id: str) -> None:
        self.run(lambda: self.decode.fetches[request_id].ended)

    def of_kv(self, behaviour: Behaviour) -> None:
        def behave(transfer: Transfer) -> Behaviour:
            kv = transfer.nbytes not in (WORD_BYTES, PROBE_BYTES)
            return behaviour if kv else Behaviour()

        self.fabric.behave = behave


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.decode.close()
    made.prefill.close()


@pytest.mark.parametrize(
    ("behaviour", "verdict"),
    [
        (Behaviour(), Verdict.RIGHT),
        (Behaviour(polls=5), Verdict.RIGHT),
        (Behaviour(delay=0.05), Verdict.RIGHT),
        (Behaviour(reorder=True), Verdict.RIGHT),
        (Behaviour(drop=True), Verdict.WRONG),
        (Behaviour(corrupt=True), Verdict.WRONG),
        (Behaviour(late=True), Verdict.WRONG),
    ],
    ids=str,
)
def test_a_verdict_for_each_behaviour(pair: Pair, behaviour: Behaviour, verdict: Verdict) -> None:
    pair.of_kv(behaviour)
    request_id = pair.send(1)
    pair.ended(request_id)
    judge = Judge()
    assert judge.judge("here", pair.decode, request_id) is verdict
    assert (judge.faults != {}) == (verdict is Verdict.WRONG)
    assert judge.table().splitlines()[-1] == f"| here | 1 {verdict} |"


def test_late_bytes_are_there_in_the_end(pair: Pair) -> None:
    pair.of_kv(Behaviour(late=True))
    request_id = pair.send(1)
    pair.ended(request_id)
    assert not pair.decode.right(request_id)
    assert pair.fabric.land() > 0
    assert pair.decode.right(request_id)


def test_a_delay_is_waited_for(pair: Pair) -> None:
    pair.of_kv(Behaviour(delay=0.3))
    begun = time.monotonic()
    pair.ended(pair.send(1))
    assert time.monotonic() - begun >= 0.3


def test_reordered_bytes_land_from_the_last_descriptor_on(pair: Pair) -> None:
    pair.of_kv(Behaviour(reorder=True, hang=True))
    request_id = pair.send(1)
    pair.run(lambda: len(pair.fabric.flying) == 2)
    transfer = pair.fabric.flying[0]
    assert [copy[0] for copy in transfer.copies] == sorted(
        (copy[0] for copy in transfer.copies), reverse=True
    )
    pair.fabric.land()
    pair.ended(request_id)
    assert pair.decode.right(request_id)


@pytest.mark.parametrize(
    ("nbytes", "reason"), [(WORD_BYTES, Reason.LEASE_LOST), (PROBE_BYTES, Reason.PROBE_CORRUPTED)]
)
def test_a_corrupted_read_of_no_kv_fails_the_receive(
    pair: Pair, nbytes: int, reason: Reason
) -> None:
    pair.fabric.behave = lambda t: Behaviour(corrupt=t.nbytes == nbytes)
    request_id = pair.send(1)
    pair.ended(request_id)
    failure = pair.decode.fetches[request_id].failure
    assert failure is not None
    assert failure.reason is reason


def test_a_transfer_that_the_transport_broke_leaves_no_handle(pair: Pair) -> None:
    pair.of_kv(Behaviour(poll_error=NixlErrorKind.TRANSPORT))
    request_id = pair.send(1)
    pair.ended(request_id)
    assert pair.decode.fetches[request_id].failure
    pair.run(lambda: open_handles(pair.fabric) == 0)


def test_a_cut_holds_up_and_mending_brings_everything(pair: Pair) -> None:
    pair.of_kv(Behaviour(hang=True))
    request_id = pair.send(1)
    pair.run(lambda: len(pair.fabric.flying) == 2)
    pair.fabric.cut(pair.prefill.engine_id, pair.decode.engine_id)
    assert pair.fabric.land() == 0
    with pair.fabric.lock:
        for transfer in pair.fabric.flying:
            transfer.behaviour = Behaviour()  # only the cut holds it up
    time.sleep(0.2)
    pair.decode.step()
    assert not pair.decode.fetches[request_id].ended
    pair.fabric.mend()
    pair.ended(request_id)
    assert pair.decode.right(request_id)


def test_a_frozen_engine_reports_nothing_while_its_bytes_land(pair: Pair) -> None:
    pair.of_kv(Behaviour(hang=True))
    request_id = pair.send(1)
    pair.run(lambda: len(pair.fabric.flying) == 2)
    pair.fabric.freeze(pair.decode.engine_id)
    pair.fabric.land()
    time.sleep(0.05)
    pair.decode.step()
    assert not pair.decode.fetches[request_id].ended
    pair.fabric.thaw(pair.decode.engine_id)
    pair.ended(request_id)
    assert pair.decode.right(request_id)


def test_dying_in_the_middle_of_a_transfer(pair: Pair) -> None:
    def dies(transfer: Transfer) -> Behaviour:
        if transfer.nbytes not in (WORD_BYTES, PROBE_BYTES):
            pair.fabric.kill(transfer.peer)
        return Behaviour()

    pair.fabric.behave = dies
    request_id = pair.send(1)
    pair.ended(request_id)
    failure = pair.decode.fetches[request_id].failure
    assert failure is not None
    assert failure.reason is Reason.BACKEND_ERROR


def test_a_ticket_is_used_once_and_by_its_prompt_only(pair: Pair) -> None:
    params = pair.prefill.compute(1, TOKENS)
    other = pair.decode.fetch("other", params, 2, TOKENS)
    assert other.failure is not None
    pair.decode.fetch("first", params, 1, TOKENS)
    pair.ended("first")
    assert pair.decode.right("first")
    again = pair.decode.fetch("again", params, 1, TOKENS)
    assert again.failure is not None
    changed = {**params, "ticket": params["ticket"][:-8] + "AAAAAAAA"}
    forged = pair.decode.fetch("forged", changed, 1, TOKENS)
    assert forged.failure is not None
    assert forged.failure.reason in {Reason.FORGED, Reason.TICKET_INVALID}


def test_an_engine_of_another_model_is_refused_in_the_handshake() -> None:
    fabric = Fabric()
    prefill = PrefillEngine(fabric, size=Size(layers=2))
    decode = DecodeEngine(fabric, size=Size(layers=4))
    try:
        fetch = decode.fetch("r", prefill.compute(1, TOKENS), 1, TOKENS)
        deadline = time.monotonic() + 120
        while not fetch.ended:
            assert time.monotonic() < deadline
            decode.step()
            time.sleep(0.001)
        assert fetch.failure is not None
        assert fetch.failure.reason is Reason.LAYER_MISMATCH
    finally:
        decode.close()
        prefill.close()


def test_an_abort_ends_when_nothing_is_under_way(pair: Pair) -> None:
    pair.of_kv(Behaviour(hang=True))
    request_id = pair.send(1)
    pair.run(lambda: len(pair.fabric.flying) == 2)
    pair.decode.abort(request_id)
    time.sleep(0.05)
    pair.decode.step()
    assert not pair.decode.fetches[request_id].ended
    pair.fabric.land()
    pair.ended(request_id)
    assert pair.decode.fetches[request_id].failure
