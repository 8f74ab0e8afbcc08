"""The fence over real NIXL: prefill gives blocks away after they were read, and before."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Literal

import pytest
from nixl_prefill import PrefillProcess, patient
from transfer_rig import Decode, FakePeers, eventually

from design_walk import Calls, happened
from pdcluster_connector.compat.reasons import Reason
from pdcluster_connector.nixl_io.interface import Dlist, Handle, Indices
from pdcluster_connector.nixl_io.nixl_agent import NixlAgent

pytestmark = pytest.mark.nixl

CACHE = {"kv_heads": 4, "layers": 4, "num_blocks": 96, "block_tokens": 16, "token_bytes": 32}
ENGINE = "prefill/1"
SEED, TOKENS = 9, 64
BLOCKS, OWN = [5, 9, 6, 7], [40, 41, 44, 43]


class Watched(NixlAgent):
    """Real NIXL, but the end of a KV transfer is seen only when the test says so."""

    hide = threading.Event()

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.data: set[Handle] = set()
        self.landed = threading.Event()

    def read(
        self, local: Dlist, local_indices: Indices, remote: Dlist, remote_indices: Indices
    ) -> Handle:
        handle = super().read(local, local_indices, remote, remote_indices)
        if len(local_indices) > 1:
            self.data.add(handle)
        return handle

    def state(self, handle: Handle) -> Literal["DONE", "PROC"]:
        state = super().state(handle)
        if handle in self.data and state == "DONE":
            self.landed.set()
            return "PROC" if self.hide.is_set() else "DONE"
        return state


class Rig:
    calls: Calls

    def __init__(self) -> None:
        self.prefill = PrefillProcess({ENGINE: 2}, CACHE)
        self.agents: list[Watched] = []
        peers = FakePeers()
        peers.table.update(self.prefill.metadata)
        self.decode = Decode(self, peers, options=patient(), **CACHE)  # type: ignore[arg-type]

    def agent(self, name: str) -> Watched:
        self.agents.append(Watched(name))
        return self.agents[-1]

    def send(self, request_id: str, *, hide: bool) -> None:
        self.agents[-1].landed.clear()
        Watched.hide.set() if hide else Watched.hide.clear()
        ticket = self.prefill.ticket(ENGINE, SEED, BLOCKS, TOKENS)
        self.decode.receive(self.decode.request(request_id, ticket, OWN))

    def right(self) -> bool:
        return self.decode.cache.wrong_tokens(SEED, OWN, 0, TOKENS) == []


@pytest.fixture
def rig() -> Iterator[Rig]:
    with Calls("request") as calls:
        made = Rig()
        made.calls = calls  # its transfer thread goes on to tell of them
    yield made
    Watched.hide.clear()
    assert made.decode.receiver.close()
    made.prefill.end()


def test_blocks_given_away_between_data_and_fence_are_found_out(rig: Rig) -> None:
    """50 times. The data is right by chance, and nobody can know that."""
    for run in range(50):
        rig.send(f"r{run}", hide=True)
        eventually(rig.agents[-1].landed.is_set)
        rig.prefill.give_up(ENGINE, SEED, BLOCKS, TOKENS)
        Watched.hide.clear()
        failure = rig.decode.wait(f"r{run}").failed[f"r{run}"]
        assert failure.reason is Reason.LEASE_LOST
    rig.send("last", hide=False)
    assert "last" in rig.decode.wait("last").received
    assert rig.right()


def test_a_lease_that_stands_never_fails(rig: Rig) -> None:
    for run in range(50):
        rig.send(f"r{run}", hide=False)
        assert f"r{run}" in rig.decode.wait(f"r{run}").received
        assert rig.right()
    happened(rig.calls.seen, "request", "10")
