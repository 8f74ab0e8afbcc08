"""Real NIXL over memory that is registered in slices, on either side or on both."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
from nixl_prefill import Agents, PrefillProcess, patient
from transfer_rig import Decode, FakePeers

from pdcluster_connector.compat.shape import Memory
from pdcluster_connector.nixl_io.interface import Dlist, NixlError
from pdcluster_connector.nixl_io.nixl_agent import NixlAgent
from pdcluster_connector.plan.descriptors import Rows
from pdcluster_connector.plan.geometry import MemoryRange

pytestmark = pytest.mark.nixl

CACHE = {"kv_heads": 4, "layers": 3, "num_blocks": 64, "block_tokens": 16, "token_bytes": 32}
# A slice holds some nine blocks of an engine with one rank, and 39 of one with four.
KINDS: dict[str, dict[str, int]] = {"whole": {}, "sliced": {"slice_bytes": 20_001}}


@pytest.fixture(scope="module", params=list(KINDS))
def prefill(request: pytest.FixtureRequest) -> Iterator[PrefillProcess]:
    cache = {**CACHE, **KINDS[request.param]}
    process = PrefillProcess({"prefill-tp1/1": 1, "prefill-tp2/1": 2}, cache)
    shards = [shard for engine in process.metadata.values() for shard in engine.shards]
    assert [len(shard.seams) > 8 for shard in shards] == [request.param == "sliced"] * 3
    yield process
    process.end()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("engine", "tensor"), [("tp1", 1), ("tp2", 1), ("tp1", 2), ("tp2", 4)])
def test_reads_across_the_seams_are_right(
    prefill: PrefillProcess, engine: str, tensor: int, kind: str
) -> None:
    dice = random.Random(f"{engine} {tensor} {kind}")
    ours, theirs = (dice.sample(range(1, 64), 60) for _ in range(2))
    peers = FakePeers()
    peers.table.update(prefill.metadata)
    ticket = prefill.ticket(f"prefill-{engine}/1", 7, theirs, 950)
    for rank in range(tensor):
        agents = Agents()
        cache = {**CACHE, **KINDS[kind]}
        decode = Decode(agents, peers, rank=rank, tensor=tensor, options=patient(), **cache)  # type: ignore[arg-type]
        assert (len(decode.cache.memory) > 4) == (kind == "sliced")
        decode.cache.bytes[:] = 0xEE
        decode.receive(decode.request("r", ticket, ours, start=32))
        assert decode.wait("r").failed == {}
        assert decode.cache.wrong_tokens(7, ours, 32, 950) == []
        assert (np.delete(decode.cache.bytes, ours, axis=1) == 0xEE).all()
        assert decode.receiver.close()


def test_nixl_looks_up_a_strided_row_as_a_whole() -> None:
    """Why rows are split: should NIXL accept this one day, they need not be."""
    memory = np.zeros(1 << 16, np.uint8)
    start, half = memory.ctypes.data, memory.nbytes // 2
    agent = NixlAgent("seam")
    agent.register([MemoryRange(start, half), MemoryRange(start + half, half)])

    def prepare(first: int, count: int) -> Dlist:
        rows: Rows = np.array([[start + first, 4096, 0, 4096, count]], np.uint64)
        return agent.prepare(None, rows, Memory.DRAM)

    prepare(0, 8)
    prepare(half, 8)
    with pytest.raises(NixlError):
        prepare(0, 9)
    agent.close()
