"""Real NIXL over TCP: a stopped prefill engine goes on when its reader's blocks are another's.

The abort comes while 512 blocks are under way from an engine that is stopped. The drain deadline
ends the wait: the reading agent is destroyed, and only then the blocks may go to another request.
"""

from __future__ import annotations

import signal
import time

import numpy as np
import pytest
from nixl_prefill import Agents, PrefillProcess
from transfer_rig import Decode, FakePeers, eventually

from pdcluster_connector.protocol.ticket import Ticket
from pdcluster_connector.transfer.options import ReceiverOptions

pytestmark = [pytest.mark.nixl, pytest.mark.soak]

BLOCKS, BLOCK_TOKENS, RANKS = 512, 16, 2
TOKENS = BLOCKS * BLOCK_TOKENS
CACHE = {"kv_heads": 4, "layers": 2, "block_tokens": BLOCK_TOKENS, "token_bytes": 256}
DRAIN_SECONDS, GOES_ON_AFTER, WATCHED_SECONDS = 5.0, 20.0, 10.0


class Rig:
    """Two prefill engines in processes of their own, and the ranks of one decode engine here."""

    def __init__(self) -> None:
        cache = CACHE | {"num_blocks": BLOCKS + 8}
        self.stopped = PrefillProcess({"stopped/1": RANKS}, cache)
        self.healthy = PrefillProcess({"healthy/1": RANKS}, cache)
        peers = FakePeers()
        peers.table.update(self.stopped.metadata | self.healthy.metadata)
        options = ReceiverOptions(drain_deadline_seconds=DRAIN_SECONDS, probe_seconds=20)
        self.decodes = [
            Decode(Agents(), peers, rank=rank, tensor=RANKS, options=options, **cache)  # type: ignore[arg-type]
            for rank in range(RANKS)
        ]
        self.blocks = list(range(1, BLOCKS + 1))

    def receive(self, request_id: str, ticket: Ticket) -> None:
        for decode in self.decodes:
            decode.receive(decode.request(request_id, ticket, self.blocks, lease=120))

    def right(self, request_id: str, seed: int, tokens: int) -> None:
        for decode in self.decodes:
            results = decode.wait(request_id, timeout=60)
            assert request_id in results.received, results.failed
            assert decode.cache.wrong_tokens(seed, self.blocks, 0, tokens) == []

    def abort(self, request_id: str) -> None:
        """Have it reported by every rank, and not before nothing can write any more."""
        for decode in self.decodes:
            eventually(lambda decode=decode: bool(decode.receiver._executor.transfers))
        time.sleep(0.5)
        for decode in self.decodes:
            decode.abandon(request_id)
        aborted_at = time.monotonic()
        for decode in self.decodes:
            results = decode.wait(request_id, timeout=60)
            assert time.monotonic() - aborted_at >= DRAIN_SECONDS - 0.5
            assert results.abandoned == results.failed.keys() == {request_id}
            assert not decode.receiver._executor.transfers
            assert decode.receiver._connections.by_engine == {}, "the agent was not destroyed"

    def nothing_changes(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        before = [decode.cache.bytes.copy() for decode in self.decodes]
        while time.monotonic() < until:
            for decode, known in zip(self.decodes, before, strict=True):
                changed = np.count_nonzero(decode.cache.bytes != known)
                assert changed == 0, f"{changed} bytes changed"
                decode.take()
            time.sleep(0.5)

    def end(self) -> None:
        for decode in self.decodes:
            assert decode.receiver.close()
        for process in (self.stopped, self.healthy):
            process.end()


def test_late_bytes_of_an_aborted_request_reach_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    rig = Rig()
    try:
        rig.receive("warm", rig.stopped.ticket("stopped/1", 1, rig.blocks, TOKENS))
        rig.right("warm", 1, TOKENS)
        ticket = rig.stopped.ticket("stopped/1", 2, rig.blocks, TOKENS)
        rig.stopped.signal(signal.SIGSTOP)
        stopped_at = time.monotonic()
        rig.receive("aborted", ticket)
        rig.abort("aborted")

        # The engine has the blocks back, and gives them to another request.
        rig.receive("other", rig.healthy.ticket("healthy/1", 3, rig.blocks, TOKENS))
        rig.right("other", 3, TOKENS)
        rig.nothing_changes(stopped_at + GOES_ON_AFTER - time.monotonic())
        rig.stopped.signal(signal.SIGCONT)
        rig.nothing_changes(WATCHED_SECONDS)
        for decode in rig.decodes:
            assert decode.cache.wrong_tokens(3, rig.blocks, 0, TOKENS) == []
            assert decode.reported == ["warm", "aborted", "other"]
            assert decode.fatal == []
    finally:
        rig.stopped.signal(signal.SIGCONT)
        rig.end()
