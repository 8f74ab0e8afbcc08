"""What is set of NIXL and UCX when an agent is made, and what its user has set."""

from __future__ import annotations

import os

import numpy as np
import pytest
from nixl_prefill import Agents, PrefillProcess, patient
from transfer_rig import Decode, FakePeers

from pdcluster_connector.nixl_io import nixl_agent
from pdcluster_connector.nixl_io.interface import NixlError, NixlErrorKind
from pdcluster_connector.nixl_io.nixl_agent import NixlAgent

pytestmark = pytest.mark.nixl

LIMIT = "UCX_RCACHE_MAX_UNRELEASED"


@pytest.mark.parametrize(("set_by_user", "expected"), [(None, "1024"), ("7", "7")])
def test_ucx_is_told_before_nixl_is_loaded(
    monkeypatch: pytest.MonkeyPatch, set_by_user: str | None, expected: str
) -> None:
    monkeypatch.delenv(LIMIT, raising=False)
    if set_by_user is not None:
        monkeypatch.setenv(LIMIT, set_by_user)
    found = []

    def load() -> None:
        found.append(os.environ.get(LIMIT))
        raise NixlError(NixlErrorKind.INVALID, "only looked at")

    monkeypatch.setattr(nixl_agent, "_load_nixl", load)
    with pytest.raises(NixlError):
        NixlAgent("a")
    assert found == [expected]


def test_threads_and_options_reach_the_backend() -> None:
    agents, threads = [], []
    for number in (0, 0, 3):  # UCX starts a thread of its own with the first
        before = len(os.listdir("/proc/self/task"))
        options = [("UCX", "num_workers", "2")] if number else []
        agents.append(NixlAgent(f"a{number}", num_threads=number, backend_options=options))
        threads.append(len(os.listdir("/proc/self/task")) - before)
    assert threads[2] - threads[1] == 3
    for agent in agents:
        agent.close()
    with pytest.raises(NixlError):
        NixlAgent("three", backend_options=[("UCX", "num_workers", "many")])


def test_large_reads_that_threads_share_are_right_to_the_byte() -> None:
    """1,024 descriptors are what NIXL's own setting begins to spread over its threads."""
    cache = {"kv_heads": 2, "layers": 4, "num_blocks": 520, "block_tokens": 16, "token_bytes": 64}
    prefill = PrefillProcess({"prefill/1": 2}, cache)
    peers = FakePeers()
    peers.table.update(prefill.metadata)

    class Threads(Agents):
        def agent(self, name: str) -> NixlAgent:
            return NixlAgent(name, num_threads=4)

    options = patient(descriptors_per_transfer=2048)
    decode = Decode(Threads(), peers, options=options, **cache)  # type: ignore[arg-type]
    blocks = np.random.default_rng(1).permutation(np.arange(1, 520))[:512].tolist()
    ticket = prefill.ticket("prefill/1", 9, blocks, 512 * 16)
    decode.receiver.receive([decode.request("r", ticket, blocks[::-1])])
    results = decode.wait("r")
    assert results.failed == {}
    assert results.received["r"].nbytes == 2 * 4 * 512 * 16 * 64
    assert decode.cache.wrong_tokens(9, blocks[::-1], 0, 512 * 16) == []
    assert decode.receiver.close()
    prefill.end()
