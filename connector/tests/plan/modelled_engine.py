"""Engines with any KV cache groups, simulated byte by byte from what a layout means.

A model is groups of layers; a layer is one or several arrays, each with heads of its own. An
engine lays a model out: ranks, grids of blocks, physical order. Every byte of every token has a
label of its own. Nothing here is taken from the planner but the types that it is fed with.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from labelled_engine import heads_of

from pdcluster_connector.compat.shape import (
    EngineShape,
    GroupShape,
    LayerKind,
    LayerShape,
    Memory,
    PartShape,
)
from pdcluster_connector.plan.block_pairs import EngineBlocks, GroupBlocks
from pdcluster_connector.plan.geometry import Region, Shard

PAGES = "pages"  # all groups' layers in one set of tensors, as vLLM's hybrid caches
APART = 16  # bytes between arrays that nothing may touch


@dataclass(frozen=True)
class Array:
    """``unit``: bytes of one head of one token (of one state, for Mamba)."""

    name: str
    heads: int
    unit: int


@dataclass(frozen=True)
class Group:
    """Layers that share a block list. ``dtype``: unquantised, in a model whose KV is fp8.

    ``whole``: the facts of blocks that hold their own scales. Their bytes lie in an order of the
    block's own, over all heads of a rank.
    """

    kind: LayerKind
    layers: tuple[str, ...]
    arrays: tuple[Array, ...]
    window: int | None = None
    opaque: bool = False
    dtype: str = ""
    whole: str = ""


@dataclass(frozen=True)
class Model:
    groups: tuple[Group, ...]
    dtype: str = "float32"
    scales: str = ""

    def labels(self, layer: str, array: Array, tokens: np.ndarray, heads: list[int]) -> np.ndarray:
        """Return [token, head, byte]: no two bytes of the model share a label."""
        first = 0
        for group in self.groups:
            for name in group.layers:
                for other in group.arrays:
                    if (name, other.name) == (layer, array.name):
                        cell = tokens[:, None] * array.heads + np.array(heads)
                        return first + cell[..., None] * array.unit + np.arange(array.unit)
                    first += 1 << 20
        raise KeyError(layer)


@dataclass(frozen=True)
class Grid:
    """One group's blocks in one engine, and the physical order of its axes (or PAGES)."""

    block_size: int
    ratio: int = 1
    order: str = "LBHNC"

    @property
    def kernel(self) -> int:
        return self.block_size // self.ratio


@dataclass(frozen=True)
class Layout:
    """How one engine lays a model out.

    ``stages`` is the pipeline rank of each layer, over all groups in order; ``numbers`` the
    index that each group of the model has in this engine.
    """

    tensor: int
    stages: tuple[int, ...]
    grids: tuple[Grid, ...]
    numbers: tuple[int, ...]
    blocks: int
    address: int
    data: int = 1
    prefix_caching: bool = True
    memory: Memory = Memory.DRAM

    @property
    def pipeline(self) -> int:
        return max(self.stages) + 1


@dataclass(frozen=True)
class Cell:
    """One array of one layer in one rank: ``at`` is [kernel block, head, token, byte]."""

    rank: tuple[int, int]
    group: int
    layer: str
    array: Array
    heads: list[int]
    at: np.ndarray
    region: Region


class Modelled:
    """One engine's memory, one int32 a byte, and the shards that it publishes."""

    def __init__(self, model: Model, layout: Layout, seed: int) -> None:
        self.model, self.layout, self.address = model, layout, layout.address
        self._used = APART
        self.cells: list[Cell] = []
        for pp in range(layout.pipeline):
            for tp in range(layout.tensor):
                self._rank((pp, tp))
        self.memory = -1 - seed - 2 * np.arange(self._used, dtype=np.int32)
        self.shards = [
            Shard((pp, tp), tuple(c.region for c in self.cells if c.rank == (pp, tp)))
            for pp in range(layout.pipeline)
            for tp in range(layout.tensor)
        ]

    def _rank(self, rank: tuple[int, int]) -> None:
        stages = iter(self.layout.stages)
        held = [[name for name in g.layers if next(stages) == rank[0]] for g in self.model.groups]
        paged = [g for g, grid in enumerate(self.layout.grids) if grid.order == PAGES]
        if paged:
            self._pages(rank, {g: held[g] for g in paged})
        for number, names in enumerate(held):
            if number not in paged and names:
                for array in self.model.groups[number].arrays:
                    self._ordered(rank, number, names, array)

    def _sizes(self, rank: tuple[int, int], group: int, array: Array) -> tuple[int, ...]:
        """Return (kernel blocks, heads, tokens, bytes) of an array in one rank."""
        grid = self.layout.grids[group]
        heads = len(heads_of(rank[1], self.layout.tensor, array.heads))
        return self.layout.blocks * grid.ratio, heads, self._kernel(group), array.unit

    def _kernel(self, group: int) -> int:
        mamba = self.model.groups[group].kind is LayerKind.MAMBA
        return 1 if mamba else self.layout.grids[group].kernel

    def _ordered(self, rank: tuple[int, int], group: int, names: list[str], array: Array) -> None:
        order = self.layout.grids[group].order
        sizes = dict(zip("LBHNC", (len(names), *self._sizes(rank, group, array)), strict=True))
        at = self._take(int(np.prod(list(sizes.values()))))
        at = at.reshape([sizes[axis] for axis in order])
        at = at.transpose([order.index(axis) for axis in "LBHNC"])
        for index, name in enumerate(names):
            self._add(rank, group, name, array, at[index])

    def _pages(self, rank: tuple[int, int], held: dict[int, list[str]]) -> None:
        """Lay layer i of every group on tensor i: block by block, the page of one of them."""
        needed = []
        for group in held:
            inner = sum(
                int(np.prod(self._sizes(rank, group, array)[1:]))
                for array in self.model.groups[group].arrays
            )
            needed.append(inner * self.layout.grids[group].ratio)
        ratios = [self.layout.grids[group].ratio for group in held]
        unit = int(np.lcm.reduce(ratios))
        page = -(-max(needed) // unit) * unit
        for slot in range(max(map(len, held.values()))):
            start = int(self._take(page * self.layout.blocks)[0])
            for group, names in held.items():
                if slot >= len(names):
                    continue
                offset, stride = start, page // self.layout.grids[group].ratio
                for array in self.model.groups[group].arrays:
                    blocks, heads, tokens, unit_bytes = self._sizes(rank, group, array)
                    inner = np.arange(heads * tokens * unit_bytes)
                    at = offset + np.add.outer(np.arange(blocks) * stride, inner)
                    at = at.reshape(blocks, heads, tokens, unit_bytes)
                    self._add(rank, group, names[slot], array, at)
                    offset += inner.size

    def _take(self, count: int) -> np.ndarray:
        at = np.arange(self._used, self._used + count)
        self._used += count + APART
        return at

    def _add(
        self, rank: tuple[int, int], group: int, name: str, array: Array, at: np.ndarray
    ) -> None:
        opaque = self.model.groups[group].opaque or bool(self.model.groups[group].whole)
        heads = heads_of(rank[1], self.layout.tensor, array.heads)
        steps = [int(at.take(1, axis).flat[0] - at.flat[0]) if at.shape[axis] > 1 else 0
                 for axis in range(3)]  # fmt: skip
        unit = at.shape[2] * at.shape[3]
        if whole := self.model.groups[group].whole:
            steps[1] = unit
        region = Region(
            layer=name,
            base=self.address + int(at[0, 0, 0, 0]),
            num_blocks=at.shape[0],
            block_stride=steps[0] or unit * at.shape[1],
            block_tokens=at.shape[2],
            head_start=heads[0],
            head_stop=heads[-1] + 1,
            head_stride=steps[1] or unit,
            token_stride=None if opaque else steps[2] or array.unit,
            token_bytes=array.unit,
            memory=self.layout.memory,
            group=self.layout.numbers[group],
            part=array.name,
        )
        if whole:  # all bytes of a block, in their order in memory, and then in another one
            inside = np.sort(at.reshape(at.shape[0], -1))
            at = inside[:, np.random.default_rng(7).permutation(inside.shape[1])].reshape(at.shape)
        elif opaque:  # all ranks of both engines scramble alike
            scramble = np.random.default_rng(7).permutation(unit)
            at = at.reshape(*at.shape[:2], unit)[..., scramble].reshape(at.shape)
        self.cells.append(Cell(rank, group, name, array, heads, at, region))

    def positions(self, cell: Cell, blocks: Sequence[int], tokens: np.ndarray) -> np.ndarray:
        """Return [token, head, byte] of tokens in one cell; ``blocks`` are from token 0 on."""
        if self.model.groups[cell.group].kind is LayerKind.MAMBA:
            return cell.at[blocks[0]].transpose(1, 0, 2)
        grid = self.layout.grids[cell.group]
        logical = np.array(blocks)[tokens // grid.block_size]
        kernel = logical * grid.ratio + tokens % grid.block_size // grid.kernel
        return cell.at[kernel, :, tokens % grid.kernel]

    def where(self, byte: int) -> str:
        """Return which array of which rank a byte belongs to."""
        owners = [cell for cell in self.cells if byte in cell.at]
        return ", ".join(f"{cell.layer} {cell.array.name} of rank {cell.rank}" for cell in owners)

    def store(
        self, held: Sequence[Sequence[int]], tokens: int, rank: tuple[int, int] | None = None
    ) -> None:
        """Do what prefill does: write every token whose block is held (0: not held).

        ``rank``: only what that rank writes.
        """
        for cell in self.cells:
            if rank not in (None, cell.rank):
                continue
            which = self.tokens(cell.group, held[cell.group], 0, tokens)
            at = self.positions(cell, held[cell.group], which)
            self.memory[at] = self.model.labels(cell.layer, cell.array, which, cell.heads)

    def tokens(self, group: int, blocks: Sequence[int], start: int, stop: int) -> np.ndarray:
        """Return the tokens of [start, stop) whose blocks are held; a state is token 0."""
        if self.model.groups[group].kind is LayerKind.MAMBA:
            return np.zeros(1, np.int64)
        tokens = np.arange(start, stop)
        return tokens[np.array(blocks)[tokens // self.layout.grids[group].block_size] > 0]

    def held_bytes(self, held: Sequence[Sequence[int]]) -> np.ndarray:
        """Return which bytes belong to a request's blocks."""
        mask = np.zeros(self.memory.size, bool)
        for cell in self.cells:
            ratio = self.layout.grids[cell.group].ratio
            ids = np.array([b for b in held[cell.group] if b > 0], np.int64)
            kernel = ids[:, None] * ratio + np.arange(ratio)
            mask[cell.at[kernel.ravel()]] = True
        return mask

    def blocks(
        self, held: Sequence[Sequence[int]], shown: Sequence[int] | None = None
    ) -> EngineBlocks:
        """Return a request's blocks as the planner takes them, in the engine's own numbering.

        ``shown`` is the number of blocks at each list's start that are left out.
        """
        shapes, lists = {}, {}
        for group, number in enumerate(self.layout.numbers):
            shapes[number] = self._group_shape(group)
            skip = shown[group] if shown else 0
            first = skip * self.layout.grids[group].block_size
            lists[number] = GroupBlocks(tuple(held[group][skip:]), first)
        ordered = range(len(shapes))
        return EngineBlocks([shapes[i] for i in ordered], [lists[i] for i in ordered])

    def _group_shape(self, group: int) -> GroupShape:
        spec, grid = self.model.groups[group], self.layout.grids[group]
        return GroupShape(spec.kind, grid.block_size, grid.ratio, spec.window)

    def shape(self) -> EngineShape:
        """Return what this engine says of itself at a handshake."""
        layout = self.layout
        attention = [
            (spec, grid)
            for spec, grid in zip(self.model.groups, layout.grids, strict=True)
            if spec.kind is not LayerKind.MAMBA
        ]
        ratios = {grid.ratio for _, grid in attention}
        opaque = any(spec.opaque or spec.whole for spec, _ in attention)
        groups = {n: self._group_shape(g) for g, n in enumerate(layout.numbers)}
        return EngineShape(
            model="model",
            kv_dtype=self.model.dtype,
            block_size=max((grid.block_size for _, grid in attention), default=16),
            kernel_blocks_per_block=ratios.pop() if len(ratios) == 1 else None,
            prefix_caching=layout.prefix_caching,
            tensor=layout.tensor,
            pipeline=layout.pipeline,
            data=layout.data,
            memory=layout.memory,
            token_sliceable=not opaque,
            packing="scrambled" if opaque else None,
            layers=tuple(self._layers()),
            groups=tuple(groups[i] for i in range(len(groups))),
        )

    def _layers(self) -> Iterator[LayerShape]:
        for index, group in enumerate(self.model.groups):
            mamba = group.kind is LayerKind.MAMBA
            whole = mamba or len(group.arrays) > 1
            parts = tuple(
                PartShape(array.name, array.heads, array.unit, "float32") for array in group.arrays
            )
            for name in group.layers:
                yield LayerShape(
                    name=name,
                    kind=group.kind,
                    group=self.layout.numbers[index],
                    kv_heads=1 if mamba else group.arrays[0].heads,
                    token_bytes=sum(a.unit * (a.heads if mamba else 1) for a in group.arrays),
                    window=group.window,
                    scales="" if mamba or group.dtype else self.model.scales,
                    dtype=group.dtype,
                    parts=parts if whole else (),
                    whole=group.whole,
                )
