"""Simulated engines whose every byte carries a label, and a reference that knows no planner.

Memory is an array with one int32 per byte, so that each (layer, token, head, byte) of a
request has a label of its own and no two can be mistaken for one another. The reference goes
by the definition of a layout alone: an array of positions in the physical order of the axes,
seen in the logical order [layer, block, head, token, byte].
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from pdcluster_connector.plan.geometry import Region, Shard
from pdcluster_connector.plan.peer_plan import PeerPlan
from pdcluster_connector.plan.request_descriptors import SourceIndices

GUARD = 64  # bytes between shards that nothing may touch


def heads_of(rank: int, tensor: int, heads: int) -> list[int]:
    """Which global KV heads a tensor rank holds, spelled out head by head."""
    if heads >= tensor:
        return [head for head in range(heads) if head // (heads // tensor) == rank]
    return [rank // (tensor // heads)]


def layers_of(rank: int, pipeline: int, layers: int) -> list[int]:
    """Which layers a pipeline rank holds; the last one takes the remainder."""
    return [layer for layer in range(layers) if min(layer * pipeline // layers, pipeline) == rank]


@dataclass
class Engine:
    """One engine's caches in one array.

    ``order`` names the physical order of the axes from the outermost in: L(ayer) B(lock)
    H(ead) N (token) C (byte). ``opaque`` scrambles each (block, head)'s inside.
    """

    layers: int
    heads: int
    content: int
    tensor: int
    pipeline: int
    block_tokens: int
    num_blocks: int
    order: str
    opaque: bool
    address: int
    seed: int
    name: str = "model.layers"
    shards: list[Shard] = field(default_factory=list)
    cells: dict[tuple[int, int], np.ndarray] = field(default_factory=dict)
    memory: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))

    def __post_init__(self) -> None:
        used = GUARD
        # All shards scramble alike: the packing is the backend's, not the rank's.
        scramble = np.random.default_rng(77).permutation(self.block_tokens * self.content)
        for pp in range(self.pipeline):
            layers = layers_of(pp, self.pipeline, self.layers)
            for tp in range(self.tensor):
                heads = heads_of(tp, self.tensor, self.heads)
                sizes = {
                    "L": len(layers),
                    "B": self.num_blocks,
                    "H": len(heads),
                    "N": self.block_tokens,
                    "C": self.content,
                }
                physical = [sizes[axis] for axis in self.order]
                count = int(np.prod(physical))
                cells = (used + np.arange(count)).reshape(physical)
                cells = cells.transpose([self.order.index(axis) for axis in "LBHNC"])
                self.shards.append(self._shard((pp, tp), layers, heads, cells))
                if self.opaque:
                    units = cells.reshape(*cells.shape[:3], -1)[..., scramble]
                    cells = units.reshape(cells.shape)
                self.cells[pp, tp] = cells
                used += count + GUARD
        # Garbage: negative, and different in every byte of both engines.
        self.memory = -1 - self.seed - 2 * np.arange(used, dtype=np.int32)

    def _shard(
        self, rank: tuple[int, int], layers: list[int], heads: list[int], cells: np.ndarray
    ) -> Shard:
        strides = [stride // cells.itemsize for stride in cells.strides]
        regions = tuple(
            Region(
                layer=f"{self.name}.{layer}",
                base=self.address + int(cells[index, 0, 0, 0, 0]),
                num_blocks=self.num_blocks,
                block_stride=strides[1],
                block_tokens=self.block_tokens,
                head_start=heads[0],
                head_stop=heads[-1] + 1,
                head_stride=strides[2],
                token_stride=None if self.opaque else strides[3],
                token_bytes=self.content,
            )
            for index, layer in enumerate(layers)
        )
        return Shard(rank, regions)

    def labels(self, rank: tuple[int, int], tokens: np.ndarray) -> np.ndarray:
        """The labels [token, layer, head, byte] of one shard's bytes, all of them at least 0."""
        layers = layers_of(rank[0], self.pipeline, self.layers)
        heads = heads_of(rank[1], self.tensor, self.heads)
        token, layer, head, byte = np.ix_(tokens, layers, heads, range(self.content))
        return ((token * self.layers + layer) * self.heads + head) * self.content + byte

    def where(self, rank: tuple[int, int], blocks: Sequence[int], tokens: np.ndarray) -> np.ndarray:
        """Positions [token, layer, head, byte] in one shard; ``blocks`` from token 0 on."""
        block = np.asarray(blocks, int)[tokens // self.block_tokens]
        # An index array for each of two axes that are not neighbours: numpy puts them first.
        return self.cells[rank][:, block, :, tokens % self.block_tokens, :]

    def store(self, blocks: Sequence[int], tokens: int) -> None:
        """Do what prefill does: write the tokens [0, tokens) of all layers and heads."""
        for rank, held, at in self._each(blocks, 0, tokens):
            self.memory[at] = self.labels(rank, held)

    def _each(
        self, blocks: Sequence[int], start: int, stop: int
    ) -> Iterator[tuple[tuple[int, int], np.ndarray, np.ndarray]]:
        """Each rank with the tokens of the interval that it holds, and where they lie."""
        tokens = np.arange(start, stop)
        tokens = tokens[np.asarray(blocks, int)[tokens // self.block_tokens] >= 0]
        for rank in self.cells:
            yield rank, tokens, self.where(rank, blocks, tokens)

    def check_received(
        self, blocks: Sequence[int], start: int, stop: int, before: np.ndarray, writes: np.ndarray
    ) -> None:
        """Compare with the definition: each needed byte right and written once, no other.

        Behind ``stop``, the rest of the last block may hold anything; nothing else changes.
        """
        needed = np.zeros(self.memory.size, bool)
        for rank, tokens, at in self._each(blocks, start, stop):
            np.testing.assert_array_equal(self.memory[at], self.labels(rank, tokens))
            needed[at] = True
        assert (writes[needed] == 1).all(), "a needed byte was not written exactly once"
        tail = np.zeros(self.memory.size, bool)
        end = -(-stop // self.block_tokens) * self.block_tokens
        for _, _, at in self._each(blocks, stop, end if stop > start else stop):
            tail[at] = True
        assert (writes[tail] <= 1).all(), "a byte of the tail was written twice"
        outside = ~needed & ~tail
        assert not writes[outside].any(), "a byte outside the request's blocks was written"
        np.testing.assert_array_equal(self.memory[outside], before[outside])


def execute(
    plan: PeerPlan,
    slices: Sequence[SourceIndices],
    prefill: Engine,
    decode: Engine,
    *,
    writes: np.ndarray,
    readable: np.ndarray,
) -> int:
    """Copy as NIXL would, from the rows as NIXL reads them; returns the bytes copied."""
    total = 0
    for part in slices:
        source = plan.sources[part.source]
        assert part.prefill_indices.dtype == part.decode_indices.dtype == np.int32
        reads = descriptors(source.prefill_rows, part.prefill_indices)
        lands = descriptors(source.decode_rows, part.decode_indices)
        assert np.array_equal(reads[1], lands[1])
        take, put = bytes_of(*reads) - prefill.address, bytes_of(*lands) - decode.address
        assert readable[take].all(), "a byte was read that is not the request's"
        writes += np.bincount(put, minlength=writes.size)
        decode.memory[put] = prefill.memory[take]
        assert take.size == part.nbytes
        total += take.size
    return total


def descriptors(rows: np.ndarray, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    assert rows.dtype == np.uint64
    table = rows.astype(np.int64)
    ends = np.cumsum(table[:, 4])
    assert indices.size == 0 or (indices.min() >= 0 and indices.max() < ends[-1])
    row = np.searchsorted(ends, indices, side="right")
    element = indices - (ends[row] - table[row, 4])
    return table[row, 0] + element * table[row, 3], table[row, 1]


def bytes_of(address: np.ndarray, length: np.ndarray) -> np.ndarray:
    start = np.repeat(address - (np.cumsum(length) - length), length)
    return start + np.arange(start.size)
