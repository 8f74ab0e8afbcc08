"""A prefill engine that is stopped, cut off or killed while requests wait for its KV.

Each fault meets a decode engine of each policy. docs/failures.md has the seconds that are printed.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator

import pytest
from fork_host import Answer, Engine

pytest.importorskip("vllm")

from engine_pair import Pair, connector_config, nothing_held, prompt

from models.tiny import model_path
from pdcluster_connector.sidechannel.handshake import SILENT_SECONDS

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]

TOKENS = 8
BOUND = 2.0
LOADED = 1.5  # what a machine with two busy cores may add
Sent = dict[str, tuple[Engine, str]]


class World:
    """A prefill engine, and a decode engine for each policy."""

    def __init__(self, engines: Callable[..., Engine]) -> None:
        self.model = str(model_path("llama"))
        self._engines = engines
        self.prefill = self.start_prefill()
        self.decodes = {
            policy: engines("d", connector_config("kv_consumer", policy), model=self.model)
            for policy in ("fail", "recompute")
        }
        for engine in (self.prefill, *self.decodes.values()):
            engine.wait_ready()
        self._salts = 0
        self._seeds: dict[str, int] = {}
        self.history: dict[int, list[int]] = {}
        for seed in (3, 4):
            self.history[seed] = self.prefill.generate(prompt(200, seed), TOKENS).tokens

    def start_prefill(self) -> Engine:
        return self._engines("p", connector_config("kv_producer"), model=self.model)

    def works(self) -> None:
        """KV moves to each decode engine."""
        for decode in self.decodes.values():
            self._salts += 1
            Pair(self.prefill, decode).moves_soon(prompt(200, 3), self.history[3], str(self._salts))

    def tickets(self, seed: int) -> dict[str, tuple[str, dict[str, object]]]:
        """A salt and a ticket for each decode engine."""
        found = {}
        for policy, decode in self.decodes.items():
            self._salts += 1
            salt = f"ticket {self._salts}"
            found[policy] = salt, Pair(self.prefill, decode).ticket(prompt(200, seed), salt)
        return found

    def send(self, seed: int, tickets: dict[str, tuple[str, dict[str, object]]]) -> Sent:
        sent = {}
        for policy, (salt, ticket) in tickets.items():
            decode = self.decodes[policy]
            request_id = decode.submit(prompt(200, seed), TOKENS, ticket, salt)
            sent[policy] = decode, request_id
            self._seeds[request_id] = seed
        return sent

    def ends(self, what: str, sent: Sent, began: float | None = None) -> dict[str, float]:
        """Judge each answer; returns after how many seconds it came, from ``began`` or now on."""
        began = time.monotonic() if began is None else began
        left, took = dict(sent), {}
        while left:
            for policy, (decode, request_id) in list(left.items()):
                if (found := decode.ask("answer", request_id)) is not None:
                    took[policy] = round(time.monotonic() - began, 2)
                    self._judge(policy, request_id, Answer(*found))
                    del left[policy]
            assert time.monotonic() - began < 60, f"{what}: {left} have no answer"
            time.sleep(0.01)
        print(f"{what}: {took}")
        return took

    def _judge(self, policy: str, request_id: str, answer: Answer) -> None:
        expected = self.history[self._seeds[request_id]]
        if policy == "fail" and answer.finish_reason == "error":
            assert answer.tokens == []
        else:
            assert answer.tokens == expected
        self.last = {**getattr(self, "last", {}), policy: answer}

    def lived(self) -> bool:
        """Whether the last answers are of KV that came."""
        return all(a.path.get("outcome") == "transferred" for a in self.last.values())

    def gave_up(self, *reasons: str) -> None:
        """The last request failed, or was computed on decode, because KV did not come."""
        assert self.last["fail"].finish_reason == "error"
        path = self.last["recompute"].path
        assert path["outcome"] == "failed", path
        assert path["reason"] in reasons, path


@pytest.fixture(scope="module")
def world(engines: Callable[..., Engine]) -> Iterator[World]:
    made = World(engines)
    made.works()
    yield made
    for engine in (*made.decodes.values(), made.prefill):
        engine.stop()


@pytest.mark.parametrize("seconds", [8.0, 20.0])
def test_what_waits_for_a_stopped_prefill_lives_and_what_comes_later_is_answered_soon(
    world: World, seconds: float
) -> None:
    early, late = world.tickets(3), world.tickets(4)
    began = time.monotonic()
    world.prefill.freeze()
    try:
        waiting = world.send(3, early)
        time.sleep(SILENT_SECONDS + 1.5)
        took = world.ends("new, after 6.5 s of silence", world.send(4, late))
        assert max(took.values()) <= BOUND + LOADED
        world.gave_up("SideChannelUnreachable")
        time.sleep(max(0.0, began + seconds - time.monotonic()))
        assert not any(d.ask("answer", one) for d, one in waiting.values()), "they wait"
    finally:
        os.killpg(world.prefill.pid, signal.SIGCONT)
    world.ends(f"waiting, after a stop of {seconds:.0f} s", waiting)
    assert world.lived()
    world.works()
    nothing_held(world.prefill, *world.decodes.values())


def test_a_side_channel_that_drops_all_packets_is_a_silent_prefill(world: World) -> None:
    early, late = world.tickets(3), world.tickets(4)
    for decode in world.decodes.values():
        decode.ask("cut", True)
    waiting = world.send(3, early)
    time.sleep(SILENT_SECONDS + 1.5)
    took = world.ends("new, after 6.5 s without packets", world.send(4, late))
    assert max(took.values()) <= BOUND + LOADED
    world.gave_up("SideChannelUnreachable")
    for decode in world.decodes.values():
        decode.ask("cut", False)
    world.ends("waiting, after packets flow again", waiting)
    assert world.lived()
    world.works()
    nothing_held(world.prefill, *world.decodes.values())


def test_what_waits_for_a_killed_prefill_is_answered_soon(world: World) -> None:
    early, late = world.tickets(3), world.tickets(4)
    world.prefill.freeze()
    waiting = world.send(3, early)
    time.sleep(1)
    assert not any(d.ask("answer", one) for d, one in waiting.values()), "they wait"
    began = time.monotonic()
    world.prefill.kill()
    took = world.ends("waiting, after a kill", waiting, began)
    assert max(took.values()) <= BOUND + LOADED
    world.gave_up("SideChannelUnreachable", "PeerRestarted", "BackendError")
    took = world.ends("new, after a kill", world.send(4, late))
    assert max(took.values()) <= BOUND + LOADED
    world.gave_up("SideChannelUnreachable", "PeerRestarted")
    world.prefill = world.start_prefill().wait_ready()
    world.works()
    nothing_held(world.prefill, *world.decodes.values())
