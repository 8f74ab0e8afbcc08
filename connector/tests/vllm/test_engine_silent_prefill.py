"""A prefill engine that is stopped, cut off or killed while requests wait for its KV.

Each fault meets a decode engine of each policy. docs/failures.md has the seconds that are printed.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator

import pytest
from fork_host import Engine

pytest.importorskip("vllm")

from engine_pair import nothing_held
from two_policies import BOUND, LOADED, World

from pdcluster_connector.sidechannel.handshake import SILENT_SECONDS

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def world(engines: Callable[..., Engine]) -> Iterator[World]:
    made = World(engines)
    made.works()
    yield made
    made.stop()


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
        assert world.unanswered(waiting), "they wait"
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
    assert world.unanswered(waiting), "they wait"
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
