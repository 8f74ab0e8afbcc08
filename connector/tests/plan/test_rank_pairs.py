from __future__ import annotations

from collections import Counter

import pytest
from msgspec.structs import replace

from pdcluster_connector.compat.reasons import Reason
from pdcluster_connector.plan import PlanError
from pdcluster_connector.plan.geometry import Region, Shard
from pdcluster_connector.plan.rank_pairs import assign_sources, head_interval


def region(layer: int, start: int, stop: int) -> Region:
    return Region(f"layer{layer}", 4096, 8, 64 * (stop - start), 16, start, stop, 64, None, 4)


def shards(tensor: int, heads: int, pipeline: int = 1, layers: int = 2) -> list[Shard]:
    """Shards by their definition; layers are spread in turn, so not as the planner might guess."""
    found = []
    for pp in range(pipeline):
        for tp in range(tensor):
            start = tp * heads // tensor
            stop = start + max(1, heads // tensor)
            mine = [layer for layer in range(layers) if layer % pipeline == pp]
            found.append(Shard((pp, tp), tuple(region(layer, start, stop) for layer in mine)))
    return found


@pytest.mark.parametrize("heads", [1, 2, 4, 6, 8])
@pytest.mark.parametrize("tensor", [1, 2, 3, 4, 6, 8, 16])
def test_head_intervals_are_vllms(heads: int, tensor: int) -> None:
    if heads % tensor and tensor % heads:
        with pytest.raises(ValueError, match="KV heads"):
            head_interval(heads, tensor, 0)
        return
    held = Counter()
    for rank in range(tensor):
        start, stop = head_interval(heads, tensor, rank)
        held.update(range(start, stop))
    assert set(held) == set(range(heads))
    assert set(held.values()) == {max(1, tensor // heads)}, "every head is held equally often"


@pytest.mark.parametrize(
    ("heads", "tensor", "first"),
    [
        (2, 4, [0, 0, 1, 1]),
        (2, 8, [0, 0, 0, 0, 1, 1, 1, 1]),
        (3, 6, [0, 0, 1, 1, 2, 2]),
        (8, 2, [0, 4]),
    ],
)
def test_ranks_that_hold_the_same_head_are_neighbours(
    heads: int, tensor: int, first: list[int]
) -> None:
    """As vLLM 0.32 has it: QKVParallelLinear loads shard ``rank // num_kv_head_replicas``."""
    assert [head_interval(heads, tensor, rank)[0] for rank in range(tensor)] == first


@pytest.mark.parametrize(("heads", "tensor", "rank"), [(0, 1, 0), (4, 0, 0), (4, 2, 2), (4, 2, -1)])
def test_ranks_that_are_none(heads: int, tensor: int, rank: int) -> None:
    with pytest.raises(ValueError, match="KV heads"):
        head_interval(heads, tensor, rank)


@pytest.mark.parametrize("heads", [1, 2, 4, 8])
@pytest.mark.parametrize("prefill_tensor", [1, 2, 4, 8])
@pytest.mark.parametrize("decode_tensor", [1, 2, 4, 8])
@pytest.mark.parametrize("pipelines", [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_every_head_of_every_layer_has_one_source_that_holds_it(
    heads, prefill_tensor, decode_tensor, pipelines
) -> None:
    prefill = shards(prefill_tensor, heads, pipelines[0])
    for shard in shards(decode_tensor, heads, pipelines[1]):
        found = Counter()
        for item in assign_sources(shard, prefill):
            assert item.prefill in prefill[item.source].regions
            assert item.prefill.layer == item.decode.layer
            assert item.prefill.head_start <= item.head_start < item.head_stop
            assert item.head_stop <= item.prefill.head_stop
            found.update((item.decode.layer, h) for h in range(item.head_start, item.head_stop))
        wanted = Counter(
            (r.layer, head) for r in shard.regions for head in range(r.head_start, r.head_stop)
        )
        assert found == wanted


def test_decode_ranks_that_share_a_head_take_turns() -> None:
    prefill = shards(4, 1)
    sources = [assign_sources(shard, prefill)[0].source for shard in shards(8, 1)]
    assert Counter(sources) == {0: 2, 1: 2, 2: 2, 3: 2}


def test_the_choice_does_not_depend_on_the_order_of_the_shards() -> None:
    prefill = shards(8, 2)
    decode = shards(4, 2)[3]
    forward = [prefill[a.source].rank for a in assign_sources(decode, prefill)]
    prefill.reverse()
    assert [prefill[a.source].rank for a in assign_sources(decode, prefill)] == forward


def test_neighbouring_heads_of_one_shard_are_one_assignment() -> None:
    found = assign_sources(shards(1, 8)[0], shards(2, 8))
    assert [(a.source, a.head_start, a.head_stop) for a in found] == [(0, 0, 4), (1, 4, 8)] * 2


def refused(decode: Shard, prefill: list[Shard]) -> PlanError:
    with pytest.raises(PlanError) as caught:
        assign_sources(decode, prefill)
    return caught.value


def test_an_absent_shard_is_named_by_the_head_that_is_missed() -> None:
    prefill = shards(4, 4)
    error = refused(shards(1, 4)[0], [prefill[0], prefill[1], prefill[3]])
    assert error.reason is Reason.SHARD_MISSING
    assert "KV head 2" in error.message


def test_an_absent_layer_is_named() -> None:
    error = refused(shards(1, 4, layers=3)[0], shards(1, 4, layers=2))
    assert error.reason is Reason.LAYER_MISMATCH
    assert "layer2" in error.message


def test_layers_that_decode_lacks_are_left_out() -> None:
    found = assign_sources(shards(1, 4, layers=2)[0], shards(1, 4, layers=3))
    assert {a.decode.layer for a in found} == {"layer0", "layer1"}


def test_a_rank_given_twice_is_refused() -> None:
    prefill = shards(2, 4)
    error = refused(shards(1, 4)[0], [*prefill, prefill[0]])
    assert error.reason is Reason.ENGINE_ID_INCONSISTENT
    assert error.message == "two prefill shards have the same rank"


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_layer_given_twice_is_refused(side: str) -> None:
    lists = {"prefill": shards(1, 4), "decode": shards(1, 4)}
    shard = lists[side][0]
    lists[side] = [replace(shard, regions=shard.regions * 2)]
    error = refused(lists["decode"][0], lists["prefill"])
    assert error.reason is Reason.LAYER_MISMATCH
    assert error.message == f"{side} rank (0, 0) names a layer twice"


def test_overlapping_holders_cut_an_interval_only_where_the_source_changes() -> None:
    """Heads 0-1 on one shard and 1-2 on another: head 1 has two holders."""
    prefill = [Shard((0, 0), (region(0, 0, 2),)), Shard((0, 1), (region(0, 1, 3),))]
    decode = [Shard((0, rank), (region(0, 0, 3),)) for rank in range(2)]
    found = [
        [(a.source, a.head_start, a.head_stop) for a in assign_sources(shard, prefill)]
        for shard in decode
    ]
    assert found == [[(0, 0, 2), (1, 2, 3)], [(0, 0, 1), (1, 1, 3)]]


@pytest.mark.parametrize(("part", "name"), [("", "layer1"), ("ssm", "layer1 part ssm")])
def test_a_layer_that_prefill_lacks_is_named_with_its_part(part: str, name: str) -> None:
    (decode,) = shards(1, 2)
    decode = replace(decode, regions=tuple(replace(one, part=part) for one in decode.regions))
    prefill = replace(decode, regions=decode.regions[:1])
    with pytest.raises(PlanError) as caught:
        assign_sources(decode, [prefill])
    assert caught.value.reason is Reason.LAYER_MISMATCH
    assert caught.value.message == f"no prefill shard has layer {name}"
    few = replace(decode, regions=tuple(replace(one, head_stop=1) for one in decode.regions))
    with pytest.raises(PlanError) as caught:
        assign_sources(decode, [few])
    assert caught.value.reason is Reason.SHARD_MISSING
    said = f"no prefill shard holds KV head 1 of layer {name.replace('1', '0', 1)}"
    assert caught.value.message == said
