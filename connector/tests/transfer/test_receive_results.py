"""What the engine step is told of receives that have ended: outcomes, times and counts."""

from __future__ import annotations

import pytest

from pdcluster_connector.compat.reasons import Reason
from pdcluster_connector.protocol.failure import Failure
from pdcluster_connector.protocol.receive_order import Receipt
from pdcluster_connector.transfer.measures import ReceiveResults
from pdcluster_connector.transfer.options import ReceiverOptions
from pdcluster_connector.transfer.receive_machine import (
    Event,
    Failed,
    Landed,
    Opened,
    Receive,
    Signal,
)

DATA, WORD = 0, 1
GONE = Failure(Reason.PEER_RESTARTED, "gone")


def ended(request_id: str, *events: tuple[float, Event]) -> Receive:
    machine = Receive(request_id, 1000.0, 5.0, 300.0, claimed=True)
    for now, event in events:
        machine.on(event, now)
    assert machine.finished
    return machine


def received(request_id: str, began: float, *phases: float) -> Receive:
    """A receive whose handshake, posting, transfer and fence ended so long after it began."""
    shaken, posted, landed, fenced = (began + seconds for seconds in phases)
    return ended(
        request_id,
        (began, Signal.STARTED),
        (shaken, Signal.CONNECTED),
        (shaken, Opened(DATA)),
        (posted, Signal.POSTED),
        (landed, Landed(DATA)),
        (landed, Opened(WORD)),
        (landed, Signal.POSTED),
        (fenced, Landed(WORD)),
    )


def test_each_phase_lasts_from_the_one_before_and_the_total_from_the_beginning() -> None:
    results = ReceiveResults()
    results.add(received("a", 100.0, 1.0, 1.5, 4.0, 4.25), 4096, "p/1")
    assert results.received == {"a": Receipt(4096, 4.25)}
    results.add(received("b", 200.0, 2.0, 2.25, 8.0, 9.0), 1024, "p/1")
    assert results.received["b"] == Receipt(1024, 9.0)
    assert results.phase_seconds == {
        "handshake": [1.0, 2.0],
        "post": [0.5, 0.25],
        "transfer": [3.0, 6.0],
        "fence": [0.25, 1.0],
        "total": [4.25, 9.0],
    }
    assert results.finished == {"a", "b"}
    assert results.failed == {}
    results.add(received("c", 300.0, 1.0, 1.0, 1.5, 1.5), 64, "q/1")
    assert results.links == {"p/1": (5120, 9.0), "q/1": (64, 0.5)}


def test_what_the_engine_gave_up_is_known_among_the_failures() -> None:
    results = ReceiveResults()
    expired = Failure(Reason.LEASE_EXPIRED, "late")
    for request_id, failure in (("a", GONE), ("b", GONE), ("c", expired)):
        results.add(ended(request_id, (1.0, Signal.STARTED), (2.0, Failed(failure))), 512, "p/1")
    results.add(ended("d", (1.0, Signal.STARTED), (2.0, Signal.ABANDONED)), 512, "p/1")
    assert results.abandoned == {"d"}
    assert results.failed == {
        "a": GONE,
        "b": GONE,
        "c": expired,
        "d": Failure(Reason.TRANSFER_STALLED, "given up by the engine before all data had landed"),
    }
    assert (results.received, results.links) == ({}, {}), "what did not arrive whole is not counted"


@pytest.mark.parametrize("event", [Failed(GONE), Signal.ABANDONED], ids=["failed", "given up"])
def test_a_result_is_something_to_tell_however_it_ended(event: Event) -> None:
    results = ReceiveResults()
    results.add(ended("a", (1.0, Signal.STARTED), (2.0, event)), 0, "p/1")
    assert results.finished == {"a"}


def test_a_worker_that_ends_says_why_in_its_last_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The launcher tells of it, and starts the engine anew."""
    statuses: list[int] = []
    monkeypatch.setattr("os._exit", statuses.append)
    ReceiverOptions().fatal("a transfer cannot be stopped")
    assert statuses == [70], "EX_SOFTWARE: a fault of the program"
    assert [record.getMessage() for record in caplog.records] == [
        "the worker ends: a transfer cannot be stopped"
    ]
