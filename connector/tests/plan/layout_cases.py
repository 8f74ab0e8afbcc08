"""Random pairs of engines and one request between them, and what must come of it."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import pytest
from hypothesis import settings
from labelled_engine import execute
from modelled_engine import PAGES, Array, Grid, Group, Layout, Model, Modelled

from pdcluster_connector.compat.check import check
from pdcluster_connector.compat.findings import Finding
from pdcluster_connector.compat.shape import LayerKind
from pdcluster_connector.plan.peer_plan import plan_peer
from pdcluster_connector.plan.request_descriptors import plan_request

FULL, WINDOW = LayerKind.FULL_ATTENTION, LayerKind.SLIDING_WINDOW
MLA, MAMBA = LayerKind.MLA, LayerKind.MAMBA

# Orders in which vLLM may lay out [layer, block, head, token, content]; a packed inside keeps a
# head's tokens and content together.
SLICEABLE = ("LBHNC", "LBNHC", "BLHNC", "BLNHC", "BHLNC", "LHBNC", PAGES)
PACKED = ("LBHNC", "BLHNC", "BHLNC", PAGES)
SIZES = ((4, 4), (8, 4), (4, 8), (2, 8), (16, 4), (4, 16), (6, 4), (4, 6), (1, 4), (16, 16))
RATIOS = ((1, 1), (2, 1), (1, 2), (2, 2), (3, 5), (5, 3), (4, 2))
TENSORS = {1: (1, 2, 4), 2: (1, 2, 4), 4: (1, 2, 4, 8), 6: (1, 2, 3, 6)}
DTYPES = {"float32": (4, ""), "bfloat16": (2, ""), "fp8_e4m3": (1, "k=0.5,v=2.0"),
          "fp8_e5m2": (1, "k=1.0,v=1.0"), "nvfp4": (1, "k=0.5,v=2.0")}  # fmt: skip

T = TypeVar("T")
Pick = Callable[[Sequence[T]], T]
Menu = tuple[tuple[LayerKind, ...], ...]  # the kinds of a model's groups, one of them a case


@dataclass(frozen=True)
class Case:
    """``start``: decode's prefix hit; ``shown``: blocks left out of decode's lists, by group."""

    model: Model
    prefill: Layout
    decode: Layout
    tokens: int
    start: int
    stop: int
    prefill_blocks: tuple[tuple[int, ...], ...]
    decode_blocks: tuple[tuple[int, ...], ...]
    shown: tuple[int, ...]


def kinds_of(case: Case) -> set[LayerKind]:
    return {group.kind for group in case.model.groups}


class Choices:
    """The choices that a case is made of: random, or given ones and the first of all others."""

    def __init__(self, seed: str = "", given: Sequence[int] | None = None) -> None:
        self._random = random.Random(seed)
        self._given = given
        self.made: list[int] = []

    def pick(self, values: Sequence[T]) -> T:
        if self._given is None:
            index = self._random.randrange(len(values))
        else:
            at = len(self.made)
            index = min(self._given[at] if at < len(self._given) else 0, len(values) - 1)
        self.made.append(index)
        return values[index]


def chunks(pure: int, soaked: int) -> list[object]:
    """Return the numbers of chunks of cases; those from ``pure`` on are left to ``make soak``."""
    return [
        pytest.param(number, marks=pytest.mark.soak if number >= pure else ())
        for number in range(soaked)
    ]


def each(menu: Menu, name: str, count: int, test: Callable[[Case], None]) -> None:
    """Run ``test`` on ``count`` random cases; a failure is shown for the smallest case found.

    `make fast` draws a quarter of them, as it does of hypothesis' examples.
    """
    for number in range(count * settings().max_examples // 100):
        choices = Choices(f"{name} {number}")
        case = build(choices.pick, menu)
        try:
            test(case)
        except Exception:  # noqa: BLE001  whatever it is, a smaller case may show it too
            smaller = shrunk(menu, choices.made, test)
            raise AssertionError(f"{name} {number}, shrunk: {smaller}") from failure(test, smaller)


def shrunk(menu: Menu, made: Sequence[int], test: Callable[[Case], None]) -> Case:
    """Return a case that fails too, none of whose choices can be lowered or left out."""
    best = list(made)
    progress = True
    while progress:
        progress = False
        for at in range(len(best)):
            for lower in dict.fromkeys((0, best[at] // 2, best[at] - 1)):
                tried = [*best[:at], lower, *best[at + 1 :]]
                if 0 <= lower < best[at] and _fails(menu, tried, test):
                    best, progress = tried, True
                    break
    return build(Choices(given=best).pick, menu)


def _fails(menu: Menu, made: Sequence[int], test: Callable[[Case], None]) -> bool:
    return failure(test, build(Choices(given=made).pick, menu)) is not None


def failure(test: Callable[[Case], None], case: Case) -> Exception | None:
    try:
        test(case)
    except Exception as error:  # noqa: BLE001
        return error
    return None


def build(pick: Pick, menu: Menu) -> Case:
    """Build a case from choices; the first choice of everything is the simplest."""
    kinds = pick(menu)
    dtype = pick(list(DTYPES)[:-1])
    heads = pick((2, 1, 4, 6))
    opaque = pick((False, False, True))
    window = pick((5, 8, 13, 21)) if WINDOW in kinds else None
    model = Model(
        tuple(
            _group(pick, i, kind, pick((heads, 2, 1)) if i else heads, dtype, opaque, window)
            for i, kind in enumerate(kinds)
        ),
        dtype,
        DTYPES[dtype][1],
    )
    layers = sum(len(group.layers) for group in model.groups)
    paged = len(kinds) > 1
    sizes = [_grids(pick, kind, opaque, paged) for kind in kinds]
    tokens = pick(range(1, 64))
    lcm = math.lcm(*(d.block_size for (_, d), kind in zip(sizes, kinds, strict=True)
                     if kind is not MAMBA))  # fmt: skip
    start = pick(range(tokens // lcm + 1)) * lcm
    ragged = MAMBA not in kinds and pick((False, False, True))
    stop = pick(range(start, tokens + 1)) if ragged else tokens
    grids = [tuple(pair[side] for pair in sizes) for side in (0, 1)]
    lists, layouts = [], []
    for side, length in ((0, tokens), (1, stop)):
        blocks, used = _blocks(pick, model, grids[side], length, stop + (side or pick((1, 0))))
        lists.append(blocks)
        layouts.append(
            Layout(
                tensor=pick(_tensors(model, heads)),
                stages=_stages(pick, layers),
                grids=grids[side],
                numbers=pick(_NUMBERS[len(kinds)]),
                blocks=used + pick((1, 3)),
                address=(side + 1) * 2**40 + pick((0, 4096, 2**33)),
                data=pick((1, 2)),
                prefix_caching=pick((True, False)),
            )
        )
    shown = tuple(
        start // grid.block_size if kind is not MAMBA and pick((False, True)) else 0
        for grid, kind in zip(grids[1], kinds, strict=True)
    )
    return Case(model, *layouts, tokens, start, stop, *lists, shown)


_NUMBERS = {1: ((0,),), 2: ((0, 1), (1, 0)), 3: ((0, 1, 2), (2, 0, 1))}


def _group(
    pick: Pick,
    index: int,
    kind: LayerKind,
    heads: int,
    dtype: str,
    opaque: bool,
    window: int | None,
) -> Group:
    layers = tuple(f"layers.{index}.{number}" for number in range(pick((1, 2, 3))))
    if kind is MAMBA:
        replicated = 1 if heads != 4 else pick((1, 4))
        units = pick(((2, 1, 3), (4, 4, 8)))
        names = ("conv.x", "conv.b", "ssm")
        arrays = tuple(
            Array(name, replicated if name == "conv.b" else heads, unit)
            for name, unit in zip(names, units, strict=True)
        )
        return Group(kind, layers, arrays)
    size = DTYPES[dtype][0]
    if kind is MLA:
        return Group(kind, layers, (Array("", 1, 3 * size),), None, opaque)
    if pick((True, True, False)):
        arrays = (Array("", heads, 2 * size),)
    else:
        arrays = (Array("k", heads, size), Array("v", heads, 2 * size))
    return Group(kind, layers, arrays, window if kind is WINDOW else None, opaque)


def _grids(pick: Pick, kind: LayerKind, opaque: bool, paged: bool) -> tuple[Grid, Grid]:
    orders = PACKED if opaque else SLICEABLE
    if kind is MAMBA:
        orders = ("BLHNC", "LBHNC", PAGES)
        return tuple(Grid(pick((16, 48)), 1, pick(orders)) for _ in range(2))
    kernel = pick(SIZES)
    if opaque:
        kernel = (kernel[0], kernel[0])
    ratio = pick(RATIOS)
    return tuple(
        Grid(kernel[side] * ratio[side], ratio[side], pick(orders if paged else orders[:-1]))
        for side in (0, 1)
    )


def _tensors(model: Model, heads: int) -> tuple[int, ...]:
    """Return the sizes that every array of the model allows."""
    counts = {array.heads for group in model.groups for array in group.arrays}
    return tuple(
        size
        for size in TENSORS[heads]
        if all(count % size == 0 or size % count == 0 for count in counts)
    )


def _stages(pick: Pick, layers: int) -> tuple[int, ...]:
    """Return each layer's pipeline rank; stages need not be equal, nor in the layers' order."""
    pipeline = pick([size for size in (1, 2, 3) if size <= layers])
    if pipeline == 1:
        return (0,) * layers
    turn = pick((True, False))
    cut = sorted({pick(range(1, layers)) for _ in range(pipeline - 1)})
    blocked = tuple(sum(layer >= edge for edge in cut) for layer in range(layers))
    return tuple(layer % pipeline for layer in range(layers)) if turn else blocked


def _blocks(
    pick: Pick, model: Model, grids: Sequence[Grid], length: int, seen: int
) -> tuple[tuple[tuple[int, ...], ...], int]:
    """Return one block list a group, from one pool of ids, and the number of ids used.

    vLLM has let go of blocks that lie before the window of token ``seen``: the one that comes
    next, or on prefill perhaps still the last one that it computed.
    """
    counts = []
    for group, grid in zip(model.groups, grids, strict=True):
        more = pick((0, 0, 1))
        counts.append(1 if group.kind is MAMBA else -(-length // grid.block_size) + more)
    total = sum(counts) + 1
    shuffle = pick((0, 1, 2, 3))
    ids = list(range(1, total))
    if shuffle:
        np.random.default_rng(shuffle).shuffle(ids)
    lists = []
    for group, grid, count in zip(model.groups, grids, counts, strict=True):
        own, ids = ids[:count], ids[count:]
        if group.window is not None and pick((True, False)):
            gone = seen - group.window
            own = [0 if (i + 1) * grid.block_size <= gone else b for i, b in enumerate(own)]
        lists.append(tuple(int(block) for block in own))
    return tuple(lists), total


def paired(
    groups: Sequence[Group],
    grids: Sequence[tuple[Grid, Grid]],
    tensors: tuple[int, int],
    *,
    tokens: int,
    start: int = 0,
    stages: tuple[tuple[int, ...], tuple[int, ...]] | None = None,
    numbers: tuple[tuple[int, ...], tuple[int, ...]] | None = None,
    prefixes: bool = True,
    dtype: str = "float32",
) -> Case:
    """Return a case of one's own: sizes of prefill and decode, block ids shuffled.

    Blocks before a window are null on both sides, as vLLM has let go of them.
    """
    layers = sum(len(group.layers) for group in groups)
    lists, layouts = [], []
    for side in (0, 1):
        used, own = 1, []
        for group, pair in zip(groups, grids, strict=True):
            grid = pair[side]
            count = 1 if group.kind is MAMBA else -(-tokens // grid.block_size)
            ids = used + np.random.default_rng(used).permutation(count)
            gone = tokens + side - (group.window or 2 * tokens)
            own.append(
                tuple(0 if (i + 1) * grid.block_size <= gone else int(b) for i, b in enumerate(ids))
            )
            used += count
        lists.append(tuple(own))
        layouts.append(
            Layout(
                tensor=tensors[side],
                stages=stages[side] if stages else (0,) * layers,
                grids=tuple(pair[side] for pair in grids),
                numbers=numbers[side] if numbers else tuple(range(len(groups))),
                blocks=used + 2,
                address=(side + 1) << 40,
                prefix_caching=prefixes,
            )
        )
    model = Model(tuple(groups), dtype, DTYPES[dtype][1])
    return Case(model, *layouts, tokens, start, tokens, *lists, (0,) * len(groups))


def named(window: int | None, mamba: bool) -> Case:
    """Return P TP4, block 16 -> D TP2, block 64; 2 KV heads; prompt 333; D holds 64 tokens."""
    groups = [Group(FULL, ("full.0", "full.1"), (Array("", 2, 4),))]
    grids = [(Grid(16), Grid(64))]
    if window is not None:
        groups.append(Group(WINDOW, ("swa.0", "swa.1"), (Array("", 2, 4),), window))
        grids.append((Grid(16), Grid(64)))
    if mamba:
        arrays = (Array("conv.x", 4, 6), Array("conv.b", 1, 3), Array("ssm", 4, 32))
        groups.append(Group(MAMBA, ("mamba.0", "mamba.1"), arrays))
        grids.append((Grid(544), Grid(1056)))
    return paired(groups, grids, (4, 2), tokens=333, start=64)


def run(case: Case, spoil: Callable[..., object] | None = None) -> int:
    """Plan, execute and check a case on all decode shards; returns the bytes moved."""
    prefill = Modelled(case.model, case.prefill, 0)
    decode = Modelled(case.model, case.decode, 1)
    prefill.store(case.prefill_blocks, case.tokens)
    before = decode.memory.copy()
    writes = np.zeros(decode.memory.size, np.int64)
    readable = prefill.held_bytes(case.prefill_blocks)
    ours = prefill.blocks(case.prefill_blocks)
    theirs = decode.blocks(case.decode_blocks, case.shown)
    moved = 0
    for shard in decode.shards:
        plan = plan_peer(shard, prefill.shards)
        held = {region.layer for region in shard.regions}
        for source in plan.sources:
            (peer,) = [p for p in prefill.shards if p.rank == source.rank]
            assert held & {region.layer for region in peer.regions}, "a rank without its layers"
        slices = plan_request(
            plan, ours, theirs, start=case.start, stop=case.stop, tokens=case.tokens
        )
        if spoil is not None:
            slices = [spoil(part) for part in slices]
        moved += execute(plan, slices, prefill, decode, writes=writes, readable=readable)
    check_received(case, decode, before, writes)
    return moved


def check_received(case: Case, decode: Modelled, before: np.ndarray, writes: np.ndarray) -> None:
    """Compare with the definition: each needed byte right and written once, no other."""
    needed, spare, labels = wanted(case, decode)
    wrong = np.flatnonzero(needed & (decode.memory != labels))
    assert not wrong.size, f"wrong bytes at {wrong[:8]} in {decode.where(wrong[0])}"
    assert (writes[needed] == 1).all(), "a needed byte was not written exactly once"
    assert (writes[spare] <= 1).all(), "a byte beside the interval was written twice"
    outside = ~needed & ~spare
    assert not writes[outside].any(), "a byte outside the request's blocks was written"
    assert (decode.memory[outside] == before[outside]).all()


def wanted(
    case: Case, decode: Modelled, rank: tuple[int, int] | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return, by byte: whether it is needed, whether it may be written, and a needed one's label.

    The rest of the request's last kernel block may hold anything, and so may, before a window,
    what shares a kernel block with it; but nothing before ``start``, which others may read.
    ``rank``: only what that rank needs.
    """
    needed = np.zeros(decode.memory.size, bool)
    spare = np.zeros(decode.memory.size, bool)
    labels = np.zeros(decode.memory.size, np.int32)
    for cell in decode.cells if case.stop > case.start else ():
        if rank not in (None, cell.rank):
            continue
        group, grid = case.model.groups[cell.group], case.decode.grids[cell.group]
        blocks = case.decode_blocks[cell.group]
        first, low = case.start, case.start
        if group.window is not None:
            first = max(case.start, case.stop - group.window + 1)
            low = max(case.start, first - grid.kernel)
        tokens = decode.tokens(cell.group, blocks, first, case.stop)
        if group.kind is not MAMBA:
            assert len(tokens) == case.stop - first, "the case itself is wrong"
            end = min(-(-case.stop // grid.kernel) * grid.kernel, len(blocks) * grid.block_size)
            around = decode.tokens(cell.group, blocks, low, end)
            spare[decode.positions(cell, blocks, around)] = True
        at = decode.positions(cell, blocks, tokens)
        labels[at] = case.model.labels(cell.layer, cell.array, tokens, cell.heads)
        needed[at] = True
    return needed, spare & ~needed, labels


def findings(case: Case) -> tuple[Finding, ...]:
    """Return what the rules say of the case's engines."""
    shapes = [Modelled(case.model, side, 0).shape() for side in (case.prefill, case.decode)]
    return check(*shapes)
