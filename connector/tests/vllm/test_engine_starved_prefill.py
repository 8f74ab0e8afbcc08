"""A prefill engine without CPU time, and a decode engine of two ranks with many requests.

Each rank asks the side channel by itself, and all requests hang on its answers. None may fail
because an answer is late: the leases stand. docs/failures.md has the seconds that are printed.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fork_host import Answer, Engine

pytest.importorskip("vllm")

from engine_pair import Pair, connector_config, nothing_held, prompt

import machine
from models.tiny import model_path

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

LEASE = 60.0  # the default of leaseSeconds
REQUESTS = 14
SHARE = 0.05
STARVED_SECONDS = 60.0
TOKENS = 8
SEEDS = (3, 4)


class World:
    """Prefill has one rank, decode two. They move KV over TCP: so a stopped prefill moves none."""

    def __init__(self, engines: Callable[..., Engine]) -> None:
        options = {"model": str(model_path("llama")), "environment": {"UCX_TLS": "tcp"}}
        self.prefill = engines("p", connector_config("kv_producer", lease_seconds=LEASE), **options)
        self.decode = engines(
            "d",
            connector_config("kv_consumer", "fail", lease_seconds=LEASE),
            tensor_parallel_size=2,
            **options,
        )
        self.pair = Pair(self.prefill.wait_ready(), self.decode.wait_ready())
        self.history = {
            seed: self.prefill.generate(prompt(200, seed), TOKENS).tokens for seed in SEEDS
        }
        self._sent = 0

    def works(self) -> None:
        self._sent += 1
        self.pair.moves_soon(prompt(200, SEEDS[0]), self.history[SEEDS[0]], f"works {self._sent}")

    def tickets(self) -> list[tuple[int, str, dict[str, object]]]:
        """For each request the prompt's seed, a salt and a ticket."""
        found = []
        for number in range(REQUESTS):
            self._sent += 1
            seed, salt = SEEDS[number % len(SEEDS)], f"ticket {self._sent}"
            found.append((seed, salt, self.pair.ticket(prompt(200, seed), salt)))
        return found

    def send(self, tickets: list[tuple[int, str, dict[str, object]]]) -> dict[str, int]:
        """Send a request for each ticket; returns each request's seed by its id."""
        sent = {}
        for seed, salt, ticket in tickets:
            sent[self.decode.submit(prompt(200, seed), TOKENS, ticket, salt)] = seed
        return sent

    def answered(self, sent: dict[str, int]) -> list[str]:
        return [one for one in sent if self.decode.ask("answer", one) is not None]

    def all_live(self, sent: dict[str, int]) -> None:
        """Wait for all answers; each is of KV that came."""
        for request_id, seed in sent.items():
            answer: Answer = self.decode.answer(request_id)
            assert answer.finish_reason == "length", (answer, self.decode.tail())
            assert answer.tokens == self.history[seed]
            assert answer.path["outcome"] == "transferred"


@pytest.fixture(scope="module")
def world(engines: Callable[..., Engine]) -> Iterator[World]:
    made = World(engines)
    made.works()
    yield made
    for engine in (made.decode, made.prefill):
        engine.stop()


def test_requests_that_wait_for_a_stopped_prefill_all_live(world: World) -> None:
    tickets = world.tickets()
    world.prefill.freeze()
    try:
        sent = world.send(tickets)
        time.sleep(8)
        assert world.answered(sent) == [], "they wait"
    finally:
        os.killpg(world.prefill.pid, signal.SIGCONT)
    began = time.monotonic()
    world.all_live(sent)
    print(f"{REQUESTS} waiting, after a stop of 8 s: {time.monotonic() - began:.2f} s")
    world.works()
    nothing_held(world.prefill, world.decode)


@pytest.mark.soak
@pytest.mark.needs("quota")
def test_requests_of_a_prefill_with_a_twentieth_of_a_core_all_live(world: World) -> None:
    first, second = world.tickets(), world.tickets()
    with machine.slow_cgroup(SHARE, [world.prefill.pid]) as folder:
        began = time.monotonic()
        while throttled(folder) < 50:
            time.sleep(0.1)
        for when, tickets in (("soon", first), ("later", second)):
            sent, at = world.send(tickets), time.monotonic()
            world.all_live(sent)
            print(f"{REQUESTS}, {when}: the last one after {time.monotonic() - at:.2f} s")
            time.sleep(max(0.0, began + STARVED_SECONDS / 2 - time.monotonic()))
        time.sleep(max(0.0, began + STARVED_SECONDS - time.monotonic()))
        held_back = throttled(folder)
    assert held_back > STARVED_SECONDS / 0.1 / 2, "prefill had less than it wanted"
    world.works()
    nothing_held(world.prefill, world.decode)


def throttled(folder: Path) -> int:
    """In how many periods of 0.1 s the kernel has held a group back."""
    counts = dict(line.split() for line in (folder / "cpu.stat").read_text().splitlines())
    return int(counts["nr_throttled"])
