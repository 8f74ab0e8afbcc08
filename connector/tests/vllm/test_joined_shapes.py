"""An engine's shape from its pipeline ranks'."""

from __future__ import annotations

import pickle

import pytest
from msgspec.structs import replace

pytest.importorskip("vllm")

from pdcluster_connector.compat.shape import EngineShape, GroupShape, LayerKind, LayerShape, Memory
from pdcluster_connector.vllm.joined_shape import HandshakeError, join_shapes

pytestmark = pytest.mark.vllm

NOTHING = (GroupShape(LayerKind.FULL_ATTENTION, 32), GroupShape(LayerKind.MAMBA, 1024))


def rank(name: str, group: int = 0, ratio: int = 2) -> EngineShape:
    kind = NOTHING[group].kind
    groups = tuple(
        replace(shape, kernel_blocks_per_block=ratio) if i == group == 0 else shape
        for i, shape in enumerate(NOTHING)
    )
    return EngineShape(
        model="m", kv_dtype="float32", block_size=32, kernel_blocks_per_block=ratio,
        prefix_caching=True, pipeline=2, memory=Memory.DRAM, token_sliceable=False,
        packing="CPU_ATTN/vec", layers=(LayerShape(name, kind, group, 4, 256),), groups=groups,
    )  # fmt: skip


STATES = replace(
    rank("b", 1), kv_dtype=None, kernel_blocks_per_block=None, token_sliceable=None, packing=None
)


def join_stages(*stages: EngineShape) -> EngineShape:
    return join_shapes({(stage, 0): shape for stage, shape in enumerate(stages)})


def test_layers_of_all_stages_in_their_order() -> None:
    joined = join_stages(rank("b"), rank("a"))
    assert [layer.name for layer in joined.layers or ()] == ["b", "a"]
    assert joined.kernel_blocks_per_block == 2
    assert pickle.loads(pickle.dumps(joined)) == joined, "as it goes between processes"


@pytest.mark.parametrize("order", [1, -1])
def test_a_group_is_described_by_a_rank_that_has_layers_of_it(order: int) -> None:
    joined = join_stages(*[rank("a"), STATES][::order])
    assert joined.groups == (replace(NOTHING[0], kernel_blocks_per_block=2), NOTHING[1])
    assert (joined.kv_dtype, joined.kernel_blocks_per_block) == ("float32", 2)
    assert (joined.token_sliceable, joined.packing) == (False, "CPU_ATTN/vec")


def test_ranks_that_contradict_each_other_are_named_with_both_values() -> None:
    with pytest.raises(
        HandshakeError, match=r"rank \(1, 0\) has kv_dtype float16, .* has float32;"
    ):
        join_stages(rank("a"), replace(rank("b"), kv_dtype="float16"))


@pytest.mark.parametrize("field", ["model", "draft"])
@pytest.mark.parametrize("place", [(0, 1), (1, 0)])
def test_ranks_with_other_weights_do_not_serve(field: str, place: tuple[int, int]) -> None:
    ours, theirs = (replace(rank("a"), **{field: digest}) for digest in ("x", "y"))
    assert getattr(join_shapes({(0, 0): ours, place: ours}), field) == "x"
    with pytest.raises(HandshakeError, match=rf"has {field} y, rank \(0, 0\) has x; .* files"):
        join_shapes({(0, 0): ours, place: theirs})


def test_tensor_ranks_of_a_stage_agree_about_what_another_stage_may_have() -> None:
    amx = replace(rank("a"), packing="CPU_ATTN/amx")
    joined = join_shapes({(0, 0): amx, (0, 1): amx, (1, 0): rank("b"), (1, 1): rank("b")})
    assert joined.packing == "CPU_ATTN/amx+CPU_ATTN/vec"
    with pytest.raises(HandshakeError, match=r"rank \(0, 1\) has packing .*vec, rank \(0, 0\)"):
        join_shapes({(0, 0): amx, (0, 1): rank("a")})


def test_joining_what_is_joined_changes_nothing() -> None:
    joined = join_stages(rank("a"), STATES)
    assert join_shapes({(0, 0): joined, (1, 0): joined}) == joined


def test_one_stage_that_cannot_be_cut_makes_an_engine_that_cannot() -> None:
    sliceable = replace(rank("a"), token_sliceable=True, packing=None)
    joined = join_stages(sliceable, rank("b"))
    assert (joined.token_sliceable, joined.packing) == (False, "CPU_ATTN/vec")
