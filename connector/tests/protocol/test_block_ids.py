"""Block ids in their compact form: nothing is lost, and nothing that was sent can cost much."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from pdcluster_connector.protocol.ticket import MAX_BLOCKS, BlockIds

HIGHEST = 2**31 - 1
EXAMPLES = settings().max_examples  # `make soak` asks for ten times as many
any_ids = st.lists(st.integers(-1, HIGHEST), max_size=60)
# As vLLM hands blocks out: runs up and down, and null blocks before a window.
runs = st.lists(
    st.tuples(st.integers(-1, HIGHEST - 700), st.sampled_from([-1, 0, 1, 2]), st.integers(1, 300)),
    max_size=6,
).map(
    lambda pieces: [
        max(-1, start + step * i) for start, step, count in pieces for i in range(count)
    ]
)


@settings(max_examples=2 * EXAMPLES)
@given(any_ids | runs)
def test_nothing_is_lost(ids: list[int]) -> None:
    made = BlockIds(ids)
    raw = made.packed()
    found = BlockIds.unpacked(raw)
    assert list(found) == ids
    assert found == made == tuple(ids)
    assert len(found) == len(ids)
    assert len(raw) <= 2 + 4 * len(ids)
    assert pickle.loads(pickle.dumps(found)) == ids
    assert np.asarray(found).dtype == np.int32


@settings(max_examples=5 * EXAMPLES)
@given(
    st.binary(max_size=80)
    | st.tuples(st.sampled_from([1, 2, 4]), st.sampled_from([0, 1, 2, 4]), st.binary(max_size=80))
    .map(lambda form: bytes(form[:2]) + form[2])
)  # fmt: skip
def test_any_bytes_are_ids_or_refused(raw: bytes) -> None:
    try:
        found = BlockIds.unpacked(raw)
    except ValueError:
        return
    assert len(found) <= MAX_BLOCKS
    assert all(-1 <= block <= HIGHEST for block in found)
    assert BlockIds.unpacked(found.packed()) == found


def test_a_run_costs_a_few_bytes() -> None:
    assert len(BlockIds(range(1, 62_501)).packed()) < 12
    assert len(BlockIds([0] * 60_000 + list(range(7, 300))).packed()) < 24


@pytest.mark.parametrize("counts", [[MAX_BLOCKS + 1], [2**32 - 1] * 50, [2**31, 2**31, 2**31]])
def test_what_would_unpack_to_too_much_is_refused(counts: list[int]) -> None:
    raw = bytes((1, 4)) + bytes([1] * len(counts)) + np.array(counts, "<u4").tobytes()
    with pytest.raises(ValueError, match="more than"):
        BlockIds.unpacked(raw)


@pytest.mark.parametrize("ids", [[-2], [2**31], ["x"], [[1]], [None], range(MAX_BLOCKS + 1)])
def test_what_is_no_list_of_ids_is_refused(ids: list[object]) -> None:
    with pytest.raises(ValueError, match="block ids"):
        BlockIds(ids)  # type: ignore[arg-type]


def test_they_do_not_change() -> None:
    source = np.array([1, 2, 3], np.int32)
    ids = BlockIds(source)
    with pytest.raises(ValueError, match="read-only"):
        np.asarray(ids)[0] = 9
    assert ids[0] == 1
    assert ids[1:] == [2, 3]
    assert ids != [1, 2]
    assert ids != "123"
    assert hash(ids) == hash((1, 2, 3))
    assert ids != 1, "what is no sequence is compared without an error"
    assert ids != {1, 2, 3}
    own = np.array(ids)
    own[0] = 9
    assert ids[0] == 1, "a copy may be written to"


@pytest.mark.parametrize("raw", [b"", b"\1", b"\2", b"\4", b"\0\0", b"\1\3", b"\2\0\1"])
def test_a_form_that_is_cut_off_is_refused(raw: bytes) -> None:
    with pytest.raises(ValueError, match="block ids"):
        BlockIds.unpacked(raw)


def test_a_run_that_is_longer_than_is_left_is_refused() -> None:
    run = BlockIds(range(1, 101)).packed()
    assert len(BlockIds.unpacked(run, 100)) == 100
    with pytest.raises(ValueError, match="100 block ids, more than 99"):
        BlockIds.unpacked(run, 99)


def test_scattered_ids_that_are_more_than_are_left_are_refused() -> None:
    scattered = BlockIds([number * number for number in range(100)]).packed()
    assert scattered[1] == 0, "no step is repeated"
    assert len(BlockIds.unpacked(scattered, 100)) == 100
    with pytest.raises(ValueError, match="100 block ids, more than 99"):
        BlockIds.unpacked(scattered, 99)


@pytest.mark.parametrize(
    ("ids", "size"),
    [
        ([], 2),
        ([127, -1], 4),  # steps of 127 and -128
        ([128, -1], 6),
        ([32_767, -1], 6),
        ([32_768, -1], 10),
        ([7] * 256, 6),  # 7 once, and 255 times no step
        ([7] * 257, 8),
        ([7] * 65_536, 8),
        ([7] * 65_537, 12),
    ],
    ids=lambda value: f"{len(value)} ids" if isinstance(value, list) else str(value),
)
def test_steps_and_counts_are_as_narrow_as_they_can_be(ids: list[int], size: int) -> None:
    """A ticket travels through a client, with every request."""
    assert len(BlockIds(ids).packed()) == size
    assert BlockIds.unpacked(BlockIds(ids).packed()) == ids


def test_a_group_has_1_048_576_blocks_and_no_more() -> None:
    """Engines of two versions agree about it."""
    most = np.zeros(2**20, np.int32)
    assert len(BlockIds(most)) == 2**20
    with pytest.raises(ValueError, match="1048577 block ids in one group, more than 1048576"):
        BlockIds(np.zeros(2**20 + 1, np.int32))


def test_ids_of_which_one_differs_are_others() -> None:
    assert BlockIds([1, 2, 3]) != BlockIds([1, 2, 4])
    assert BlockIds([1, 2, 3]) != BlockIds([1, 2])
    assert BlockIds([1, 2, 3]) == [1, 2, 3]
    assert BlockIds([1, 2, 3]) != [1, 2, 4]
