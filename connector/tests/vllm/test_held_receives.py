"""What holds the receives of real engines, shown on the in-memory NIXL, where it costs nothing.

It reaches into the receiver, so whoever changes that has to notice here and not when the slow tests
of real engines run.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import held_receives
import pytest
from transfer_rig import Decode, FakePeers, Prefill, eventually

from pdcluster_connector.testing.nixl import Fabric
from pdcluster_connector.transfer.receive_machine import State

CACHE = {"kv_heads": 4, "layers": 2, "num_blocks": 32, "block_tokens": 4, "token_bytes": 4}


Pair = tuple[Prefill, Decode, FakePeers]


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    fabric, peers = Fabric(), FakePeers()
    prefill = Prefill(fabric, **CACHE)
    peers.table[prefill.engine_id] = prefill.metadata
    decode = Decode(fabric, peers, **CACHE)
    monkeypatch.setattr(held_receives, "_receiver", lambda: decode.receiver)
    yield prefill, decode, peers
    held_receives.release()
    decode.receiver.close()


def test_a_receive_that_shakes_hands_while_they_are_released_goes_on(
    monkeypatch: pytest.MonkeyPatch, pair: Pair
) -> None:
    """Its state says so before it has asked the peer: the transfer thread may pause in between."""
    prefill, decode, peers = pair
    released = threading.Event()
    held_receives.hold(State.HANDSHAKE.name)
    connect = peers.connect

    def paused(*args: Any) -> None:
        released.wait(60)
        connect(*args)

    monkeypatch.setattr(peers, "connect", paused)
    ticket = prefill.ticket(1, [3, 4, 5], 10)
    decode.receive(decode.request("r", ticket, [28, 27, 26], lease=10.0))
    eventually(lambda: held_receives.stands(1, State.HANDSHAKE.name))
    held_receives.release()
    released.set()
    ended = decode.wait("r")
    assert "r" in ended.received, ended.failed


@pytest.mark.parametrize("state", [State.NEW, State.HANDSHAKE, State.POSTED, State.FENCE])
def test_receives_stand_in_a_state_until_they_are_released(pair: Pair, state: State) -> None:
    prefill, decode, _ = pair
    names = [f"{state.name}-{seed}" for seed in (1, 2)]
    warm = prefill.ticket(3, [9, 10, 11], 10)
    decode.receive(decode.request("warm", warm, [22, 21, 20]))
    assert "warm" in decode.wait("warm").received
    held_receives.hold(state.name)
    for seed, name in enumerate(names, 1):
        first = 3 * seed
        ticket = prefill.ticket(seed, range(first, first + 3), 10)
        blocks = [31 - first, 30 - first, 29 - first]
        decode.receive(decode.request(name, ticket, blocks))
    eventually(lambda: held_receives.stands(len(names), state.name), timeout=60)
    assert not decode.take().finished
    held_receives.release()
    ended = decode.wait(*names)
    assert set(names) <= set(ended.received), ended.failed
