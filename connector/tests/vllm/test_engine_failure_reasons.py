"""What a client gets, and after how many seconds, where the tests of a silent prefill do not look.

Errors of NIXL, refused pairs, and leases that end before decode has read. KV moves over TCP, as it
does between pods without RDMA. docs/failures.md has the seconds that are printed.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator

import pytest
from fork_host import Engine

pytest.importorskip("vllm")

from engine_pair import nothing_held, prompt
from two_policies import BOUND, LOADED, World

from pdcluster_connector.transfer.receive_machine import State

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]

LEASE = 10.0


@pytest.fixture(scope="module")
def world(engines: Callable[..., Engine]) -> Iterator[World]:
    made = World(engines, lease=LEASE, environment={"UCX_TLS": "tcp"})
    made.works()
    yield made
    made.stop()


def reset_nixl(world: World) -> None:
    for decode in world.decodes.values():
        assert decode.ask("reset_nixl", world.prefill.pid, world.port) > 0


def come_to(world: World, state: State, seed: int) -> dict[str, tuple[Engine, str]]:
    """Send requests that stand in a state of their receive, until they are released."""
    tickets = world.tickets(seed)
    for decode in world.decodes.values():
        decode.ask("hold", state.name)
    sent = world.send(seed, tickets)
    for decode in world.decodes.values():
        deadline = time.monotonic() + 60
        while not decode.ask("stands", 1, state.name):
            assert time.monotonic() < deadline, state
            time.sleep(0.01)
    return sent


def test_an_error_of_nixl_before_a_read(world: World) -> None:
    tickets = world.tickets(3)
    reset_nixl(world)
    took = world.ends("NIXL reports an error", world.send(3, tickets))
    assert max(took.values()) <= BOUND + LOADED
    world.gave_up("BackendError")
    world.works()
    nothing_held(world.prefill, *world.decodes.values())


def test_a_pair_that_is_refused(world: World) -> None:
    """The second request meets a refusal that is known already."""
    other = world.start_prefill(block_size=64).wait_ready()
    for which in ("first", "second"):
        sent = world.send(3, world.tickets(3, other))
        took = world.ends(f"the pair is refused, {which} request", sent)
        assert max(took.values()) <= BOUND + LOADED
        world.gave_up("BlockInteriorOpaque")
    nothing_held(other, *world.decodes.values())
    other.stop()
    world.works()


def test_a_lease_that_ends_while_decode_stands_still(world: World) -> None:
    """Prefill has computed other prompts in the blocks when decode goes on."""
    sent = come_to(world, State.NEW, 3)
    for decode in world.decodes.values():
        decode.freeze()
    try:
        nothing_held(world.prefill)
        for seed in range(5):
            world.prefill.generate(prompt(1900, 10 + seed), 1)
    finally:
        for decode in world.decodes.values():
            os.killpg(decode.pid, signal.SIGCONT)
    began = time.monotonic()
    for decode in world.decodes.values():
        decode.ask("release")
    took = world.ends("the lease had ended when decode went on", sent, began)
    assert max(took.values()) <= BOUND + LOADED
    world.gave_up("LeaseExpired", "LeaseLost")
    world.works()
    nothing_held(world.prefill, *world.decodes.values())


def test_a_lease_that_ends_while_prefill_acknowledges_nothing(world: World) -> None:
    for decode in world.decodes.values():
        decode.ask("cut", True)
    try:
        tickets, began = world.tickets(3), time.monotonic()
        took = world.ends("the lease ends, no claim was acknowledged", world.send(3, tickets))
        assert time.monotonic() - began <= LEASE + BOUND + LOADED
    finally:
        for decode in world.decodes.values():
            decode.ask("cut", False)
    print(f"after {max(took.values()) - LEASE:.2f} s more than the lease")
    world.gave_up("LeaseExpired")
    world.works()
    nothing_held(world.prefill, *world.decodes.values())
