"""Memory in slices: no descriptor crosses a seam, and no index changes by splitting rows."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from cache_orders import laid_out
from flat_rows import descriptors
from hypothesis import given, strategies as st
from layout_cases import FULL, MAMBA, WINDOW, Choices, build, chunks
from modelled_engine import Modelled

from pdcluster_connector.compat.reasons import Reason
from pdcluster_connector.plan import PlanError, slices
from pdcluster_connector.plan.geometry import Region, Shard
from pdcluster_connector.plan.peer_plan import plan_peer
from pdcluster_connector.plan.slices import joined, seams, sliced, split_rows

GIB = 2**30
ORDERS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")


@st.composite
def engines(draw: st.DrawFn) -> tuple[tuple[Region, ...], tuple[int, int], int]:
    """(regions, the allocation's span, the longest slice)."""
    order = draw(st.sampled_from(ORDERS))
    base = draw(st.sampled_from([0, 4096, 65536, 2**21, 4097])) + 2**30
    regions, size = laid_out(
        order, base, draw(st.integers(1, 5)), draw(st.integers(2, 40)), draw(st.integers(1, 4)),
        draw(st.sampled_from([1, 3, 16])), draw(st.sampled_from([8, 24, 256, 4096])),
        opaque=order.endswith("HNC") and order != "LHBNC" and draw(st.booleans()),
        gap=draw(st.sampled_from([0, 64])),
    )  # fmt: skip
    longest = max(region.block_stride for region in regions)
    return regions, (base, base + size), draw(st.integers(longest, max(longest, size)))


@given(engines())
def test_slices_cover_the_memory_and_cut_no_block(
    engine: tuple[tuple[Region, ...], tuple[int, int], int],
) -> None:
    regions, span, limit = engine
    slices = sliced(span, regions, limit)
    assert slices[0][0] == span[0]
    assert slices[-1][1] == span[1]
    assert all(one[1] == other[0] for one, other in pairwise(slices))
    assert all(start < stop for start, stop in slices)
    assert all(stop - start <= limit for start, stop in slices)
    # And every plan with an engine of another tensor size, cut at these seams, can be made.
    shard = Shard((0, 0), regions, seams(slices))
    for other in (regions, _one_head(regions)):
        decode = Shard((0, 0), other)
        plain = plan_peer(decode, [Shard((0, 0), regions)]).sources[0]
        cut = plan_peer(decode, [shard]).sources[0]
        assert (descriptors(cut.prefill_rows) == descriptors(plain.prefill_rows)).all()
        assert (cut.decode_rows == plain.decode_rows).all()
        for address, length, _, stride, count in cut.prefill_rows.tolist():
            end = address + (count - 1) * stride + length
            assert any(start <= address and end <= stop for start, stop in slices)


def _one_head(regions: tuple[Region, ...]) -> tuple[Region, ...]:
    first = regions[0]
    order = "LBHNC" if first.token_stride is None else "LBNHC"
    return laid_out(
        order, 2**40, len(regions), 7, 1, first.block_tokens, first.token_bytes,
        opaque=first.token_stride is None,
    )[0]  # fmt: skip


def test_a_real_cache_of_all_layers() -> None:
    """Llama 70B at TP 1, 64 GiB: 80 layers, 8 heads of 128 in 16 bits, blocks of 16 tokens."""
    regions, size = laid_out("LBHNC", 2**41, 80, 13_107, 8, 16, 512)
    assert size > 63 * GIB
    slices = sliced((2**41, 2**41 + size), regions)
    assert len(slices) == -(-size // (4 * GIB))
    assert all(stop - start <= 4 * GIB for start, stop in slices)
    assert all(start % 65536 == 0 for start, _ in slices), "blocks of 64 KiB: pages are not cut"
    blocks_outermost, size = laid_out("BLHNC", 2**41, 80, 13_107, 8, 16, 512)
    slices = sliced((2**41, 2**41 + size), blocks_outermost)
    assert {(start - 2**41) % (80 * 65536) for start, _ in slices} == {0}, "all layers of a block"


def test_seams_lie_between_pages_where_a_block_ends_there() -> None:
    regions, size = laid_out("LBHNC", 2**30, 1, 1000, 1, 16, 768)  # blocks of 12 KiB
    slices = sliced((2**30, 2**30 + size), regions, 1_000_000)
    assert all(start % 65536 == 0 for start, _ in slices)
    regions, size = laid_out("LBHNC", 2**30 + 512, 1, 1000, 1, 16, 768)
    slices = sliced((2**30 + 512, 2**30 + 512 + size), regions, 1_000_000)
    assert len(slices) > 10, "where no block begins a page, a seam cuts one"


def test_planes_that_are_no_whole_number_of_blocks_apart() -> None:
    """Each head has a plane of its own, and 64 bytes of padding behind it."""
    blocks, stride = 50, 1024
    plane = blocks * stride + 64
    region = Region("l", 2**30, blocks, stride, 16, 0, 3, plane, 64, 64)
    slices = sliced((2**30, 2**30 + 3 * plane), (region,), 10 * stride)
    assert len(slices) > 4, "the first plane is cut between its blocks"
    for start, _ in slices:
        offset = (start - 2**30) % plane
        assert offset % stride == 0 or offset > blocks * stride, "a seam cuts a block"


def test_a_block_that_is_longer_than_a_slice_stays_whole() -> None:
    """The seam is then the next one behind it, not one that was there before."""
    for base in (2**30, 2**30 + 512):
        regions, size = laid_out("LBHNC", base, 1, 20, 1, 16, 768)  # blocks of 12 KiB
        slices = sliced((base, base + size), regions, 5000)
        assert slices == [(base + n * 12_288, base + (n + 1) * 12_288) for n in range(20)]


def test_blocks_of_two_sizes_that_are_longer_than_a_slice_stay_whole() -> None:
    """The seam behind is the nearest one, whichever of the sizes it is of."""
    base, count = 2**30, 20
    first, size = laid_out("LBHNC", base, 1, count, 1, 16, 320)
    second, more = laid_out("LBHNC", base + size, 1, count, 1, 16, 448)
    slices = sliced((base, base + size + more), (*first, *second), 5000)
    assert [stop - start for start, stop in slices] == [16 * 320] * count + [16 * 448] * count


def test_small_memory_stays_whole() -> None:
    regions, size = laid_out("LBHNC", 2**30, 2, 100, 2, 16, 64)
    assert sliced((2**30, 2**30 + size), regions) == [(2**30, 2**30 + size)]
    assert sliced((2**30, 2**40), ()) == [(2**30, 2**40)], "of what nothing is known nothing is cut"


def test_regions_of_several_strides_in_one_allocation() -> None:
    """A hybrid's pages: attention in kernel blocks of 16 tokens, states a page each."""
    page = 66 * 16 * 512
    attention = laid_out("LBHNC", 2**30, 1, 66 * 50, 1, 16, 512)[0]
    states = laid_out("LBHNC", 2**30, 1, 50, 1, 1, page - 100, opaque=True)[0][0]
    states = Region(
        **{f: getattr(states, f) for f in Region.__slots__}
        | {"layer": "m", "block_stride": page, "token_bytes": page - 100, "head_stride": page - 100}
    )
    slices = sliced((2**30, 2**30 + 50 * page), (*attention, states), 3 * page + 17)
    assert [(start - 2**30) % page for start, _ in slices] == [0] * len(slices)
    assert max(stop - start for start, stop in slices) == 3 * page


@given(
    st.lists(st.tuples(st.integers(0, 200), st.integers(1, 80)), max_size=12).map(
        lambda pairs: [(start, start + size) for start, size in pairs]
    )
)
def test_joined_spans_cover_the_same_bytes_once(spans: list[tuple[int, int]]) -> None:
    def covered(of: list[tuple[int, int]]) -> set[int]:
        return {byte for start, stop in of for byte in range(start, stop)}

    found = joined(spans)
    assert covered(found) == covered(spans)
    assert sum(stop - start for start, stop in found) == len(covered(spans))
    for start, stop in spans:
        assert any(low <= start and stop <= high for low, high in found), "each in one span"


def test_neighbours_are_registered_apart_and_overlaps_together() -> None:
    """Two allocations may lie side by side. NIXL registers each by itself."""
    assert joined([(4, 8), (0, 4)]) == [(0, 4), (4, 8)]
    assert joined([(3, 8), (0, 4)]) == [(0, 8)]


@given(
    st.lists(
        st.tuples(st.integers(0, 500), st.integers(1, 9), st.integers(0, 9), st.integers(1, 20)),
        min_size=1, max_size=6,
    ),
    st.lists(st.integers(0, 900), max_size=20),
)  # fmt: skip
def test_splitting_keeps_every_element_or_refuses(
    drawn: list[tuple[int, int, int, int]], cuts: list[int]
) -> None:
    rows = np.array([(a, n, 3, n + gap, c) for a, n, gap, c in drawn], np.uint64)
    across = [
        cut for a, n, _, s, c in rows.tolist() for cut in cuts for k in range(c)
        if a + k * s < cut < a + k * s + n
    ]  # fmt: skip
    if across:
        with pytest.raises(PlanError) as caught:
            split_rows(rows, cuts, "prefill")
        assert caught.value.reason is Reason.LAYOUT_UNSUPPORTED
        return
    made = split_rows(rows, cuts, "prefill")
    assert (descriptors(made) == descriptors(rows)).all()
    for address, length, _, stride, count in made.tolist():
        end = address + (count - 1) * stride + length
        assert not any(address < cut < end for cut in cuts)


def test_rows_and_the_pieces_of_them_have_one_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = np.array([(100 * n, 10, 3, 10, 10) for n in range(8)], np.uint64)
    cuts = [100 * n + 50 for n in range(3)]
    monkeypatch.setattr(slices, "MOST_ROWS", 11)
    assert len(split_rows(rows, cuts, "prefill")) == 11
    monkeypatch.setattr(slices, "MOST_ROWS", 10)
    with pytest.raises(PlanError, match="too many slices"):
        split_rows(rows, cuts, "prefill")


def test_a_single_descriptor_that_lies_across_a_seam_is_refused() -> None:
    """A row of one descriptor repeats nothing: its stride is 0."""
    rows = np.array([(100, 50, 3, 0, 1)], np.uint64)
    assert (split_rows(rows, [100, 150], "decode") == rows).all()
    with pytest.raises(PlanError, match="decode's KV") as caught:
        split_rows(rows, [120], "decode")
    assert caught.value.reason is Reason.LAYOUT_UNSUPPORTED


def test_a_peer_cannot_make_rows_without_end() -> None:
    rows = np.array([(0, 1, 0, 1, 2**31 - 1)] * 1000, np.uint64)
    with pytest.raises(PlanError, match="too many slices"):
        split_rows(rows, range(1, 65_536), "prefill")
    uncut = np.array([(2**40, 1, 0, 1, 1)], np.uint64)
    many = np.concatenate([rows[:16], uncut])  # 2**20 + 1 rows
    with pytest.raises(PlanError, match="prefill's memory is registered in too many slices"):
        split_rows(many, range(1, 65_536), "prefill")


def test_each_shard_s_rows_are_cut_where_its_own_memory_is() -> None:
    """Prefill's two ranks and decode have slices of their own."""
    heads = [
        laid_out("LBHNC", base, 1, 10, number, 16, 8, first_head=first)[0]
        for base, number, first in ((2**30, 1, 0), (2**31, 1, 1), (2**32, 2, 0))
    ]
    seam = (2**30 + 3 * 128, 2**31 + 7 * 128, 2**32 + 5 * 256)
    first, second, decode = (
        Shard((0, rank), regions, (cut,))
        for rank, regions, cut in zip((0, 1, 0), heads, seam, strict=True)
    )
    plan = plan_peer(decode, [first, second])
    assert [source.rank for source in plan.sources] == [(0, 0), (0, 1)]
    rows = [(source.prefill_rows[:, 4], source.decode_rows[:, 4]) for source in plan.sources]
    assert [(ours.tolist(), theirs.tolist()) for ours, theirs in rows] == [
        ([3, 7], [5, 5]),
        ([7, 3], [5, 5]),
    ]
    for side, shards in (
        ("decode", (Shard((0, 0), heads[2], (2**32 + 1,)), first, second)),
        ("prefill", (decode, first, Shard((0, 1), heads[1], (2**31 + 1,)))),
    ):
        with pytest.raises(PlanError, match=f"one descriptor of {side}'s KV lies in two slices"):
            plan_peer(shards[0], shards[1:])


@pytest.mark.sampled
@pytest.mark.parametrize("number", chunks(30, 60))
def test_plans_of_random_engines_whose_memory_is_sliced(number: int) -> None:
    """Windows, states and pages shared by groups, as the oracle lays them out."""
    menu = ((FULL,), (FULL, WINDOW), (FULL, MAMBA))
    case = build(Choices(f"slices {number}").pick, menu)
    engine = Modelled(case.model, case.prefill, 0)
    span = engine.address, engine.address + engine.memory.size
    shards = [shard for shard in engine.shards if shard.regions]
    for shard in (*shards[:3], shards[-1]):
        limit = 3 * max(region.block_stride for region in shard.regions)
        slices = sliced(span, shard.regions, limit)
        own = Shard(shard.rank, shard.regions)
        plain = plan_peer(own, [own]).sources[0]
        cut = plan_peer(own, [Shard(shard.rank, shard.regions, seams(slices))]).sources[0]
        assert (descriptors(cut.prefill_rows) == descriptors(plain.prefill_rows)).all()
