"""The way of one receive on the transfer thread: through few files, and as docs/design.md says."""

from __future__ import annotations

import threading
from types import FrameType
from typing import Any

from transfer_rig import Decode, FakePeers, Prefill, eventually

import pdcluster_connector
from design_walk import Calls, happened, rows
from pdcluster_connector.testing.nixl import Behaviour, Fabric
from pdcluster_connector.transfer.options import ReceiverOptions

CACHE = {"kv_heads": 4, "layers": 2, "num_blocks": 32, "block_tokens": 4, "token_bytes": 4}
HOME = pdcluster_connector.__path__[0]
MOST_FILES = 9
OF_NIXL = "Fabric."  # stands in for what NIXL does by itself


class Walk:
    """The calls into the connector's own files on threads that start while it is active.

    It begins with the call ``first``: a thread may still be in its turn for the receive before.
    What is due by the clock may fall into a receive, so the walk with the fewest files counts.
    """

    def __init__(self, first: tuple[str, str]) -> None:
        self.calls: list[tuple[str, str]] = []
        self.hops = 0
        self.on = False
        self._first = first
        self._best: tuple[int, list[tuple[str, str]], int] | None = None

    def begin(self, *, on: bool) -> None:
        self.calls, self.hops, self.on = [], 0, on

    def end(self) -> None:
        """Keep the better of this walk and those before."""
        if self.on:
            self.on = False
            found = len(self.files), self.calls, self.hops
            self._best = min(self._best or found, found)
            _, self.calls, self.hops = self._best

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if not self.on or event != "call" or not frame.f_code.co_filename.startswith(HOME):
            return
        name = frame.f_code.co_filename[len(HOME) + 1 :]
        if frame.f_code.co_name.startswith("<") or frame.f_code.co_qualname.startswith(OF_NIXL):
            return
        if not self.calls and (name, frame.f_code.co_qualname) != self._first:
            return
        caller = frame.f_back.f_code.co_filename if frame.f_back else ""
        self.hops += caller != frame.f_code.co_filename and caller.startswith(HOME)
        self.calls.append((name, frame.f_code.co_qualname))

    @property
    def files(self) -> list[str]:
        return sorted({name for name, _ in self.calls})


def test_a_warm_receive_reads_few_files_in_the_order_of_the_design() -> None:
    fabric, peers, walk = Fabric(), FakePeers(), Walk(rows("request")["7"][0])
    prefill = Prefill(fabric, **CACHE)
    peers.table[prefill.engine_id] = prefill.metadata
    threading.setprofile(walk)
    try:
        decode = Decode(fabric, peers, **CACHE)
        for seed in (1, 2, 3, 4):  # the first one meets the peer
            ticket = prefill.ticket(seed, [3 * seed, 3 * seed + 1, 3 * seed + 2], 10)
            blocks = [31 - 3 * seed, 30 - 3 * seed, 29 - 3 * seed]
            walk.begin(on=seed > 1)
            decode.receive(decode.request(f"r{seed}", ticket, blocks))
            assert f"r{seed}" in decode.wait(f"r{seed}").received
            walk.end()
    finally:
        threading.setprofile(None)
        decode.receiver.close()
    print(f"{len(walk.files)} files, {walk.hops} hops, {len(walk.calls)} calls")
    for name in walk.files:
        print(name, sorted({function for file, function in walk.calls if file == name}))
    assert len(walk.files) <= MOST_FILES
    memory = {  # stands in for the agent of NIXL
        ("nixl_io/nixl_agent.py", "NixlAgent.read"): (
            "testing/nixl.py", "InMemoryAgent.read",
        )
    }  # fmt: skip
    happened(walk.calls, "request", "7", "9", "10", "11", but=("NixlAgent.read",))
    happened(walk.calls, "request", "10", instead=memory)
    happened(walk.calls, "request", "12", only=("Receive.on", "ReceiveExecutor._report"))
    happened(walk.calls, "request", "CONNECT", "POST", "FENCE", "REPORT")


def test_a_transfer_that_hangs_has_the_agent_destroyed() -> None:
    fabric, peers = Fabric(), FakePeers()
    prefill = Prefill(fabric, **CACHE)
    peers.table[prefill.engine_id] = prefill.metadata
    options = ReceiverOptions(drain_deadline_seconds=0.01)
    with Calls("request") as calls:
        decode = Decode(fabric, peers, options=options, **CACHE)
        for seed in (1, 2):  # the first one meets the peer
            fabric.behave = lambda _, seed=seed: Behaviour(hang=seed == 2)
            ticket = prefill.ticket(seed, [3 * seed, 3 * seed + 1, 3 * seed + 2], 10)
            decode.receive(decode.request(f"r{seed}", ticket, [3, 4, 5]))
            if seed == 1:
                decode.wait("r1")
        eventually(lambda: fabric.flying)
        decode.abandon("r2")
        eventually(lambda: ("transfer/agent_rebuild.py", "AgentRebuild.ask") in calls.seen)
    decode.receiver.close()
    happened(calls.seen, "request", "DESTROY_AGENT")
