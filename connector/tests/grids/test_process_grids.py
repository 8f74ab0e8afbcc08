"""Every layout between real processes: a rank each, real NIXL agents, the real handshake.

One request goes from an engine of processes to another; each decode rank then looks at every
byte of its memory. What bytes are right is said by the oracle's model of a layout
(``modelled_engine``), which knows no planner; how many have to move is computed here by hand.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import pytest
from layout_cases import FULL, MAMBA, MLA, WINDOW, Case, named, paired
from modelled_engine import PAGES, Array, Grid, Group, Model
from process_grid import ProcessGrid
from wrong_plans import SPOILERS

pytestmark = pytest.mark.nixl

HEADS, UNIT = 4, 8  # KV heads; bytes of one head of one token
PAIR = 2 * HEADS * UNIT  # bytes of a token in two layers


def group(kind=FULL, layers=2, heads=HEADS, unit=UNIT, **more) -> Group:
    return Group(
        kind, tuple(f"{kind}.{i}" for i in range(layers)), (Array("", heads, unit),), **more
    )


@dataclass(frozen=True)
class Way:
    """A pair of engines, the bytes that have to move, and the rules beneath which they do."""

    name: str
    case: Case
    nbytes: int
    without: frozenset[str] = frozenset()


def same(size: int, order: str = "LBHNC") -> tuple[Grid, Grid]:
    return Grid(size, 1, order), Grid(size, 1, order)


def latents() -> Iterator[Way]:
    """Blocks 1 to 3 of the prompt of 50, two layers of 24 bytes a token, for each decode rank."""
    for tensors in ((2, 1), (1, 2)):
        case = paired([group(MLA, heads=1, unit=24)], [same(16)], tensors, tokens=50, start=16)
        yield Way(f"MLA, TP {tensors}", case, 48 * 2 * 24 * tensors[1])


def windows() -> Iterator[Way]:
    """Of 333 tokens decode has 48; the window of 64 begins at 269, in the block of 256."""
    groups = [group(), group(WINDOW, window=64)]
    for tensors in ((2, 1), (1, 2)):
        case = paired(
            groups, [same(16), same(16)], tensors, tokens=333, start=48, numbers=((0, 1), (1, 0))
        )
        assert [case.decode_blocks[1].count(0), case.prefill_blocks[1].count(0)] == [16, 16]
        yield Way(f"full and window, TP {tensors}", case, (336 - 48 + 336 - 256) * PAIR)


STATES = (Array("conv.x", 4, 6), Array("conv.b", 1, 3), Array("ssm", 4, 32))


def hybrids() -> Iterator[Way]:
    """Kernel blocks of 16, 34 of them in a block on prefill and 66 on decode.

    States are cut by heads; the one head of ``conv.b`` goes to each decode rank.
    """
    groups = [group(), Group(MAMBA, ("mamba.0", "mamba.1"), STATES)]
    grids = [(Grid(544, 34, PAGES), Grid(1056, 66, PAGES)), (Grid(544, 1, PAGES),) * 2]
    for tensors in ((2, 1), (1, 2)):
        case = paired(groups, grids, tensors, tokens=1500, prefixes=False)
        states = 2 * (4 * 6 + 3 * tensors[1] + 4 * 32)
        yield Way(f"hybrid 34 and 66, TP {tensors}", case, 1504 * PAIR + states)


def gated() -> Iterator[Way]:
    """As of a gated delta net: 2 heads of queries and of keys, 4 of values and recurrent states."""
    names = {"conv.q": (2, 6), "conv.k": (2, 6), "conv.v": (4, 9), "ssm": (4, 32)}
    arrays = tuple(Array(name, heads, unit) for name, (heads, unit) in names.items())
    groups = [group(), Group(MAMBA, ("linear.0", "linear.1"), arrays)]
    for tensors in ((2, 1), (1, 2)):
        case = paired(groups, [same(16), same(16)], tensors, tokens=50)
        states = 2 * sum(array.heads * array.unit for array in arrays)
        yield Way(f"gated states, TP {tensors}", case, 64 * PAIR + states)


def sizes() -> Iterator[Way]:
    """Prefix hits of 128 and of 80 tokens, the second one inside of prefill's block."""
    for blocks, start in (((16, 64), 128), ((64, 16), 80)):
        for orders, tensors in (
            (("LBHNC", "LBHNC"), (2, 1)),
            (("LBNHC", "LBNHC"), (1, 2)),
            (("BLNHC", "LBHNC"), (1, 1)),
        ):
            grid = Grid(blocks[0], 1, orders[0]), Grid(blocks[1], 1, orders[1])
            case = paired([group()], [grid], tensors, tokens=333, start=start)
            name = f"blocks {blocks}, {orders}, TP {tensors}"
            yield Way(name, case, (336 - start) * PAIR)
        # As from FLASH_ATTN_MLA to FLASHMLA or FLASHINFER_MLA: each decode rank needs the latent.
        for tensors in ((2, 1), (1, 2)):
            grid = Grid(blocks[0], 1, "LBHNC"), Grid(blocks[1], 1, "BLHNC")
            latent = group(MLA, heads=1, unit=24)
            case = paired([latent], [grid], tensors, tokens=333, start=start)
            name = f"MLA, blocks {blocks}, TP {tensors}"
            yield Way(name, case, (336 - start) * 2 * 24 * tensors[1])


def stages() -> Iterator[Way]:
    """Five layers over stages of three and two, or of one and four."""
    one, ragged, other = (0,) * 5, (0, 0, 0, 1, 1), (0, 1, 1, 1, 1)
    for spread, tensors in (((ragged, one), (2, 2)), ((one, other), (2, 1))):
        case = paired([group(layers=5)], [same(16)], tensors, tokens=100, start=32, stages=spread)
        yield Way(f"stages {spread}, TP {tensors}", case, (112 - 32) * 5 * HEADS * UNIT)


def coverage() -> Iterator[Way]:
    """P TP4, block 16, 2 heads held twice -> D TP2, block 64; tokens 64-332 of 333.

    Two layers, two heads, four bytes. The window of 128 begins at 205, in the block of 192.
    A hybrid is refused with prefix caching whatever is carried: below that rule, states too.
    """
    cell = 2 * 2 * 4
    tokens = 336 - 64
    yield Way("coverage", named(None, mamba=False), tokens * cell)
    window = (336 - 192) * cell
    yield Way("coverage with window", named(128, mamba=False), tokens * cell + window)
    states = 2 * (4 * 6 + 3 * 2 + 4 * 32)
    without = frozenset({"PrefixCachingHeterogeneousBlocks"})
    yield Way("coverage with states", named(None, mamba=True), tokens * cell + states, without)


def quantized() -> Iterator[Way]:
    """One byte an element: 16 of K and 16 of V of a head, heads or tokens outermost in a block."""
    for orders, tensors in (
        (("LBHNC", "LBHNC"), (2, 1)),
        (("LBNHC", "LBNHC"), (1, 2)),
        (("LBHNC", "LBNHC"), (1, 1)),
        (("BLNHC", "LBHNC"), (2, 1)),
    ):
        grid = Grid(16, 1, orders[0]), Grid(16, 1, orders[1])
        case = paired([group(unit=32)], [grid], tensors, tokens=50, start=16, dtype="fp8_e4m3")
        yield Way(f"fp8, {orders}, TP {tensors}", case, 48 * 2 * HEADS * 32)
    # As CPU_ATTN packs them, where its engines cannot run.
    for dtype in ("fp8_e4m3", "fp8_e5m2"):
        for tensors in ((1, 1), (2, 1), (1, 2)):
            case = fp8(dtype=dtype, tensors=tensors)
            yield Way(f"packed {dtype}, TP {tensors}", case, 48 * 2 * HEADS * 32)
    for tensors in ((1, 1), (2, 1)):
        yield Way(
            f"fp8 but for one layer, TP {tensors}",
            second_layer(128, "float32", tensors),
            48 * HEADS * 160,
        )


def fp8(
    layers: Sequence[Group] = (group(unit=32, opaque=True),),
    dtype: str = "fp8_e4m3",
    scales: str = "k=0.5,v=2.0",
    tensors: tuple[int, int] = (1, 1),
) -> Case:
    """Two layers whose blocks are packed, with one byte an element."""
    case = paired(layers, [same(16)] * len(layers), tensors, tokens=50, start=16)
    return replace(case, model=Model(tuple(layers), dtype, scales))


def second_layer(unit: int, dtype: str, tensors: tuple[int, int] = (1, 1)) -> Case:
    """The second layer may keep the model's float32, with four bytes an element."""
    first = Group(FULL, ("full.0",), (Array("", HEADS, 32),), opaque=True)
    second = Group(FULL, ("full.1",), (Array("", HEADS, unit),), opaque=True, dtype=dtype)
    return fp8((first, second), tensors=tensors)


def outermost() -> Iterator[Way]:
    """The layouts of transfer.kvLayout with blocks outermost, and one beside LBHNC."""
    for orders, tensors in (
        (("BLHNC", "BLHNC"), (2, 2)),
        (("BHLNC", "BHLNC"), (2, 1)),
        (("BHLNC", "BHLNC"), (1, 2)),
        (("LBHNC", "BHLNC"), (2, 1)),
    ):
        grid = Grid(16, 1, orders[0]), Grid(16, 1, orders[1])
        case = paired([group()], [grid], tensors, tokens=50, start=16)
        yield Way(f"{orders}, TP {tensors}", case, 48 * PAIR)


def scattered(kind=FULL, heads=HEADS, facts: str = "attention backend=FLASHINFER", **more) -> Group:
    """Two layers whose blocks hold their own scales; 24 bytes of a head of a token."""
    return group(kind, heads=heads, unit=24, whole=facts, **more)


def whole() -> Iterator[Way]:
    """As DeepSeek V3.2's indexer on other numbers of ranks, and as NVFP4 on equal ones."""
    for kind, heads, tensors in (
        (MLA, 1, (2, 1)), (MLA, 1, (1, 2)), (FULL, HEADS, (2, 2)), (FULL, HEADS, (1, 1)),
    ):  # fmt: skip
        grid = Grid(16, 1, "LBNHC"), Grid(16, 1, "BLNHC")
        case = paired([scattered(kind, heads)], [grid], tensors, tokens=50, start=16, dtype="nvfp4")
        times = tensors[1] if kind is MLA else 1
        yield Way(f"whole blocks, {kind}, TP {tensors}", case, 48 * 2 * heads * 24 * times)


MAKERS = (
    latents, windows, hybrids, sizes, stages, coverage, quantized, outermost, whole, gated
)  # fmt: skip
WAYS = [way for ways in MAKERS for way in ways()]


@pytest.fixture(scope="module")
def grid() -> Iterator[ProcessGrid]:
    made = ProcessGrid()
    yield made
    made.end()


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_every_byte_arrives_once_and_no_other_changes(grid: ProcessGrid, way: Way) -> None:
    outcome = grid.run(way.case, without=way.without)
    assert outcome.failures == {""}
    assert outcome.faults == (0, 0, 0)
    assert outcome.nbytes == way.nbytes


# NIXL itself refuses to exchange the runs of a hybrid's arrays, whose lengths differ.
WRONG = [
    (way, spoil)
    for way in (WAYS[0], WAYS[2], WAYS[4], WAYS[6], next(w for w in sizes() if "MLA" in w.name))
    for spoil in SPOILERS
    if spoil in ("halved", "doubled") or "hybrid" not in way.name
]


@pytest.mark.parametrize(("way", "spoil"), WRONG, ids=lambda value: getattr(value, "name", value))
def test_a_wrong_plan_is_noticed(grid: ProcessGrid, way: Way, spoil: str) -> None:
    outcome = grid.run(way.case, without=way.without, spoil=spoil)
    assert outcome.failures == {""}
    wrong, changed, uneven = (bool(count) for count in outcome.faults)
    assert wrong == (spoil != "doubled")
    assert changed == (spoil == "strayed")
    assert uneven == (spoil != "shifted")


def test_a_stage_that_published_nothing_is_named(grid: ProcessGrid) -> None:
    way = next(stages())
    outcome = grid.run(way.case, missing={(1, 0), (1, 1)})
    assert all("ShardMissing: rank (1, 0)" in failure for failure in outcome.failures)
    assert outcome.nbytes == 0
    assert outcome.faults == (0, 0, 0)


@pytest.mark.parametrize("without", [set(), {"BlockInteriorOpaque/size"}])
def test_packed_blocks_of_other_sizes_are_refused_with_nothing_posted(
    grid: ProcessGrid, without: set[str]
) -> None:
    """CPU_ATTN with blocks of 32 and 128: by the rule, and without it by the plan itself."""
    case = paired([group(opaque=True)], [(Grid(32), Grid(128))], (1, 1), tokens=333, start=128)
    outcome = grid.run(case, without=without)
    assert all(failure.startswith("BlockInteriorOpaque: ") for failure in outcome.failures)
    assert outcome.nbytes == 0
    assert outcome.faults == (0, 0, 0)


@pytest.mark.parametrize(
    ("prefill", "decode", "refusal"),
    [
        (fp8(), fp8(dtype="fp8_e5m2"), "KVDtypeMismatch: "),
        (fp8(), paired([group(unit=128)], [same(16)], (1, 1), tokens=50), "KVDtypeMismatch: "),
        (second_layer(32, ""), second_layer(128, "float32"), "KVDtypeMismatch: "),
        (fp8(), fp8(scales="k=0.7,v=2.0"), "KVScalesMismatch: "),
        (fp8(dtype="int8_per_token_head"), fp8(dtype="int8_per_token_head"), "LayoutUnsupported: "),
    ],
    ids=["the other fp8", "float32", "one layer of float32", "other scales", "a scale a token"],
)
def test_quantized_caches_that_differ_are_refused_with_nothing_posted(
    grid: ProcessGrid, prefill: Case, decode: Case, refusal: str
) -> None:
    outcome = grid.run(prefill, decode=decode)
    assert all(failure.startswith(refusal) for failure in outcome.failures), outcome.failures
    assert outcome.nbytes == 0
    assert outcome.faults == (0, 0, 0)


@pytest.mark.parametrize(
    ("decode", "tensors"),
    [
        (scattered(facts="attention backend=TRITON_ATTN"), (2, 2)),
        (scattered(facts=""), (2, 2)),
        (scattered(), (2, 1)),
    ],
    ids=["backend", "older", "ranks"],
)
def test_whole_blocks_that_differ_are_refused_with_nothing_posted(
    grid: ProcessGrid, decode: Group, tensors: tuple[int, int]
) -> None:
    ours, theirs = (
        paired([one], [same(16)], tensors, tokens=50, dtype="nvfp4")
        for one in (scattered(), decode)
    )
    outcome = grid.run(ours, decode=theirs)
    words = ("BlockInteriorOpaque: ", "LayoutUnsupported: ")
    assert all(failure.startswith(words) for failure in outcome.failures), outcome.failures
    assert outcome.nbytes == 0
    assert outcome.faults == (0, 0, 0)


@pytest.mark.parametrize("way", [way for way in WAYS if way.without], ids=lambda way: way.name)
def test_what_needs_a_rule_lifted_is_refused_by_it(grid: ProcessGrid, way: Way) -> None:
    """Once a layout is carried, it is no more shown beneath its rule, but as it is."""
    outcome = grid.run(way.case)
    reasons = {failure.partition(":")[0] for failure in outcome.failures}
    assert reasons == {rule.partition("/")[0] for rule in way.without}
    assert outcome.nbytes == 0
