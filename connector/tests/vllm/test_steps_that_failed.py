"""What an engine step left for the next one, or does once more, after an exception."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("vllm")

from contract import ContractEngine, closing_engines, prompt

pytestmark = pytest.mark.vllm

LATE = 7.0  # seconds between the two steps


@pytest.fixture
def decode() -> Iterator[ContractEngine]:
    """A decode engine that was handed a ticket; its clock goes as the test says."""
    engines = closing_engines()
    make = next(engines)
    prefill, made = make("producer"), make("consumer", policy="recompute")
    made.add("d0", prompt(40), prefill.prefill("p0", prompt(40)), max_tokens=2)
    yield made
    for _ in engines:
        pass


def fails_once(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
    works = getattr(owner, name)

    def fail(*_: Any, **__: Any) -> None:
        monkeypatch.setattr(owner, name, works)
        raise RuntimeError("as asked")

    monkeypatch.setattr(owner, name, fail)


def clock_of(decode: ContractEngine, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return by how much its clock is ahead, to be changed."""
    role, ahead = decode.connector._scheduler.decode, [0.0]
    for part in (role, role._tickets):
        monkeypatch.setattr(part, "clock", lambda: time.monotonic() + ahead[0])
    return ahead


def left(decode: ContractEngine) -> float:
    """For how many seconds the ticket's lease stands."""
    (lease,) = decode.connector._scheduler.decode._tickets.held.values()
    return float(lease.until - decode.connector._scheduler.decode.clock())


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("where", ["take_news", "renew_all"])
def test_a_receive_that_is_ordered_late_has_less_time_left(
    decode: ContractEngine, monkeypatch: pytest.MonkeyPatch, where: str, times: int
) -> None:
    ahead = clock_of(decode, monkeypatch)
    for _ in range(times):
        fails_once(monkeypatch, decode.connector._scheduler.decode._tickets, where)
        decode.step()
        assert not decode.parked()
        ahead[0] += LATE
    decode.step()
    seconds = decode.workers[0].parked["d0"].seconds
    assert left(decode) - times * LATE - 1.0 <= seconds <= left(decode) + 0.1


def test_an_acknowledgement_that_is_passed_on_late_lasts_less_long(
    decode: ContractEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead, tickets = clock_of(decode, monkeypatch), decode.connector._scheduler.decode._tickets
    decode.run(lambda: "d0" in decode.parked() and "d0" in decode.workers[0].renewed)
    (lease,) = tickets.held.values()
    tickets._renewed["d0"] = lease.until
    fails_once(monkeypatch, tickets, "renew_all")
    decode.step()
    ahead[0] += LATE
    decode.step()
    assert left(decode) - 1.0 <= decode.workers[0].renewed["d0"] <= left(decode) + 0.1


def test_bytes_are_counted_once_although_a_report_is_taken_in_twice(
    decode: ContractEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode.run(lambda: "d0" in decode.parked())
    fails_once(monkeypatch, decode.connector._scheduler.decode, "_settle")
    decode.land("d0")
    decode.run(lambda: "d0" in decode.finished)
    path = decode.params["d0"]["kv_path"]
    assert (path["outcome"], path["bytes"]) == ("transferred", 100 * len(decode.workers))
