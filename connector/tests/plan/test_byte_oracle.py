"""Every byte that a plan moves, against a reference that shares no code with the planner."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import settings
from labelled_engine import GUARD, Engine, execute
from wrong_plans import remade

from pdcluster_connector.plan.block_pairs import BlockList, pair_blocks
from pdcluster_connector.plan.peer_plan import plan_peer
from pdcluster_connector.plan.request_descriptors import descriptor_indices

SLICEABLE = ("LBHNC", "LBNHC", "BLHNC", "BLNHC", "BHLNC")
PACKED = ("LBHNC", "BLHNC", "BHLNC")
CASES_A_CHUNK, CHUNKS = 100, 10


@dataclass(frozen=True)
class Case:
    """One random pair of engines and one request.

    ``start`` is decode's prefix hit; ``shown`` is the first token of decode's block list.
    """

    prefill: dict
    decode: dict
    prompt: int
    start: int
    stop: int
    shown: int
    prefill_blocks: tuple[int, ...]
    decode_blocks: tuple[int, ...]


def random_case(rng: np.random.Generator) -> Case:
    def pick(values):
        return values[int(rng.integers(len(values)))]

    heads = pick([1, 2, 4, 8, 6])
    tensors = [1, 2, 3, 6] if heads == 6 else [1, 2, 4, 8]
    layers = int(rng.integers(1, 5))
    opaque = rng.random() < 0.4
    sizes = [pick([1, 2, 4, 8, 16])] * 2
    if not opaque and rng.random() < 0.6:
        sizes = pick([(4, 16), (16, 4), (2, 8), (8, 1), (1, 4), (6, 4), (4, 6), (16, 8)])
    prompt = int(rng.integers(1, 70))
    common = {"layers": layers, "heads": heads, "content": pick([1, 2, 4, 6]), "opaque": opaque}
    needed = [-(-prompt // size) for size in sizes]
    counts = [need + int(rng.integers(1, 8)) for need in needed]
    blocks = []
    for need, count in zip(needed, counts, strict=True):
        spare = int(rng.integers(0, count - need + 1))
        ids = rng.permutation(count)[: need + spare]
        blocks.append(tuple(int(i) for i in (np.sort(ids) if rng.random() < 0.3 else ids)))
    start = int(rng.integers(0, prompt // sizes[1] + 1)) * sizes[1] if rng.random() < 0.6 else 0
    stop = int(rng.integers(start, prompt + 1)) if rng.random() < 0.3 else prompt
    engines = [
        common
        | {
            "tensor": pick(tensors),
            "pipeline": pick([p for p in (1, 1, 2) if p <= layers]),
            "block_tokens": size,
            "num_blocks": count,
            "order": pick(PACKED if opaque else SLICEABLE),
            "address": int(rng.integers(1, 2**40)) * 4096,
            "seed": index,
        }
        for index, (size, count) in enumerate(zip(sizes, counts, strict=True))
    ]
    shown = start if rng.random() < 0.5 else 0
    return Case(*engines, prompt, start, stop, shown, *blocks)


def run_case(case: Case, spoil=None) -> int:
    """Plan, execute and check one case on all decode shards; returns the bytes moved."""
    prefill, decode = Engine(**case.prefill), Engine(**case.decode)
    prefill.store(case.prefill_blocks, case.prompt)
    before = decode.memory.copy()
    writes = np.zeros(decode.memory.size, np.int64)
    readable = np.zeros(prefill.memory.size, bool)
    for cells in prefill.cells.values():
        readable[cells[:, list(case.prefill_blocks)]] = True
    ours = BlockList(hide_before(case, case.prefill_blocks, prefill), prefill.block_tokens)
    skipped = case.shown // decode.block_tokens
    theirs = BlockList(case.decode_blocks[skipped:], decode.block_tokens, case.shown)
    moved = 0
    for shard in decode.shards:
        plan = plan_peer(shard, prefill.shards)
        slices = descriptor_indices(plan, pair_blocks(ours, theirs, case.start, case.stop))
        if spoil is not None:
            slices = [spoil(part) for part in slices]
        moved += execute(plan, slices, prefill, decode, writes=writes, readable=readable)
    decode.check_received(case.decode_blocks, case.start, case.stop, before, writes)
    return moved


def hide_before(case: Case, blocks: tuple[int, ...], engine: Engine) -> list[int]:
    """Blocks that lie wholly before the interval are not needed, so they may be null."""
    first = case.start // engine.block_tokens
    return [-1 if i < first and i % 2 else block for i, block in enumerate(blocks)]


def computed_bytes(case: Case) -> int:
    """Bytes of the interval over all decode ranks, in whole units, from the shapes alone."""
    engine = case.decode
    unit = math.gcd(case.prefill["block_tokens"], engine["block_tokens"])
    tokens = -(-(case.stop - case.start) // unit) * unit
    copies = max(engine["heads"], engine["tensor"])
    return tokens * engine["layers"] * copies * engine["content"]


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_random_engines(chunk: int) -> None:
    for number in range(CASES_A_CHUNK * settings().max_examples // 100):
        case = random_case(np.random.default_rng([chunk, number]))
        try:
            assert run_case(case) == computed_bytes(case)
        except Exception as error:
            error.add_note(f"chunk {chunk}, number {number}: {case}")
            raise


def test_the_random_cases_reach_every_kind_of_pair() -> None:
    cases = [
        random_case(np.random.default_rng([chunk, number]))
        for chunk in range(CHUNKS)
        for number in range(CASES_A_CHUNK)
    ]
    assert len(cases) >= 1000

    def seen(*fields):
        return {tuple(side[f] for f in fields for side in (c.prefill, c.decode)) for c in cases}

    powers = {1, 2, 4, 8}
    assert {(p, d) for p in powers for d in powers} <= seen("tensor")
    assert {(2, 3), (3, 2)} <= seen("tensor"), "sizes that don't divide each other"
    assert {(p, d) for p in (1, 2) for d in (1, 2)} <= seen("pipeline")
    assert {(p, d, False, False) for p in SLICEABLE for d in SLICEABLE} <= seen("order", "opaque")
    assert {(p, d, True, True) for p in PACKED for d in PACKED} <= seen("order", "opaque")
    assert {(4, 16), (16, 4), (6, 4), (4, 6)} <= seen("block_tokens")
    assert any(case.start and case.shown for case in cases)
    assert any(case.start == case.stop for case in cases)
    assert any(case.stop % case.decode["block_tokens"] for case in cases)


def engine(**fields) -> dict:
    base = {"layers": 2, "heads": 2, "content": 4, "tensor": 1, "pipeline": 1, "block_tokens": 16}
    base |= {"num_blocks": 40, "order": "LBHNC", "opaque": False, "address": 4096, "seed": 0}
    return base | fields


def test_a_prefix_hit_across_block_sizes_with_replicated_heads() -> None:
    """P TP4, block 16 -> D TP2, block 64; 2 KV heads; prompt 333; D already holds 64."""
    case = Case(
        prefill=engine(tensor=4, block_tokens=16, num_blocks=30),
        decode=engine(tensor=2, block_tokens=64, num_blocks=9, order="BLNHC", seed=1),
        prompt=333,
        start=64,
        stop=333,
        shown=0,
        prefill_blocks=tuple(np.random.default_rng(1).permutation(30)[:21].tolist()),
        decode_blocks=(8, 3, 1, 7, 0, 5),
    )
    assert run_case(case) == 272 * 2 * 2 * 4


def test_a_window_whose_head_blocks_are_null() -> None:
    """With a window of 128, prefill holds nothing before token 205 of 333."""
    blocks = np.random.default_rng(2).permutation(30)[:21].tolist()
    prefill = Engine(**engine(tensor=4, num_blocks=30))
    prefill.store(blocks, 333)
    decode = Engine(**engine(tensor=2, block_tokens=64, num_blocks=9, seed=1))
    window = 333 - 128
    held = [-1 if (i + 1) * 16 <= window else block for i, block in enumerate(blocks)]
    start = window // 16 * 16
    theirs = [-1, -1, -1, 7, 0, 5]
    before, writes = decode.memory.copy(), np.zeros(decode.memory.size, np.int64)
    for shard in decode.shards:
        plan = plan_peer(shard, prefill.shards)
        pairs = pair_blocks(BlockList(held, 16), BlockList(theirs, 64), start, 333)
        everything = np.ones(prefill.memory.size, bool)
        execute(
            plan,
            descriptor_indices(plan, pairs),
            prefill,
            decode,
            writes=writes,
            readable=everything,
        )
    decode.check_received(theirs, start, 333, before, writes)


def test_an_interval_at_any_token_in_units_of_one_token() -> None:
    """Blocks of 17 and of 16 tokens have no larger unit in common."""
    prefill = Engine(**engine(tensor=2, order="LBNHC", block_tokens=17))
    blocks = list(range(5, 12))
    prefill.store(blocks, 100)
    decode = Engine(**engine(seed=1))
    before, writes = decode.memory.copy(), np.zeros(decode.memory.size, np.int64)
    plan = plan_peer(decode.shards[0], prefill.shards)
    pairs = pair_blocks(BlockList(blocks, 17), BlockList(blocks, 16), 37, 91)
    everything = np.ones(prefill.memory.size, bool)
    moved = execute(
        plan, descriptor_indices(plan, pairs), prefill, decode, writes=writes, readable=everything
    )
    decode.check_received(blocks, 37, 91, before, writes)
    assert moved == 54 * 2 * 2 * 4 == writes.sum()


def shifted(part):
    return remade(part, decode_indices=np.roll(part.decode_indices, 1))


def shortened(part):
    return remade(
        part,
        prefill_indices=part.prefill_indices[:-1],
        decode_indices=part.decode_indices[:-1],
        nbytes=part.nbytes - 16 * 4,
    )


def doubled(part):
    return remade(
        part,
        prefill_indices=np.tile(part.prefill_indices, 2),
        decode_indices=np.tile(part.decode_indices, 2),
        nbytes=part.nbytes * 2,
    )


def strayed(part):
    decode = part.decode_indices.copy()
    decode[0] = 39  # block 39 of the first part: nobody's
    return remade(part, decode_indices=decode)


def peeped(part):
    prefill = part.prefill_indices.copy()
    prefill[0] = 39
    return remade(part, prefill_indices=prefill)


@pytest.mark.parametrize("spoil", [shifted, shortened, doubled, strayed, peeped])
def test_the_oracle_notices_a_wrong_plan(spoil) -> None:
    case = Case(
        prefill=engine(opaque=True, heads=1),
        decode=engine(opaque=True, heads=1, seed=1),
        prompt=50,
        start=0,
        stop=50,
        shown=0,
        prefill_blocks=(3, 8, 2, 5),
        decode_blocks=(1, 2, 6, 4),
    )
    assert run_case(case) == 4 * 16 * 2 * 4
    with pytest.raises(AssertionError):
        run_case(case, spoil)


def test_shards_are_apart_in_simulated_memory() -> None:
    """The guards are what makes 'nothing outside' mean something."""
    simulated = Engine(**engine(tensor=2))
    spans = sorted((int(c.min()), int(c.max())) for c in simulated.cells.values())
    assert spans[0][0] == GUARD
    assert spans[1][0] - spans[0][1] == GUARD + 1
