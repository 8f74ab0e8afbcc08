"""Which heads a rank holds, for layers with another number of heads than the model states."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from hypothesis import given, strategies as st
from registered_caches import full, vllm_config

from pdcluster_connector.compat.shape import LayerKind
from pdcluster_connector.vllm.kv_caches.layers import heads_of, stated_totals

pytestmark = pytest.mark.vllm

TOTALS = st.sampled_from([1, 2, 4, 8])
SIZES = st.sampled_from([1, 2, 4, 8, 16])


class Fields:
    """A Hugging Face configuration."""

    def __init__(self, **fields: Any) -> None:
        self.fields = fields

    def to_dict(self) -> dict[str, Any]:
        return self.fields


def config(tensor: int, total: int, **fields: Any) -> Any:
    made = vllm_config(tensor=tensor, total_heads=total)
    made.model_config.hf_text_config = Fields(num_key_value_heads=total, **fields)
    return made


def held(rank: int, tensor: int, total: int) -> set[int]:
    """The heads that vLLM's QKVParallelLinear gives a rank."""
    if tensor > total:
        return {rank // (tensor // total)}
    return set(range(rank * total // tensor, (rank + 1) * total // tensor))


def claimed(tensor: int, stated: int, own: int, more: frozenset[int]) -> tuple[int, dict]:
    """What each rank says of a layer with ``own`` heads: the total, and by head whose it holds."""
    made = config(tensor, stated, swa_num_key_value_heads=own, layers=[{"kv_heads": sorted(more)}])
    totals, heads = set(), {}
    for rank in range(tensor):
        spec = full(max(1, own // tensor))
        total, first, stop = heads_of(spec, LayerKind.FULL_ATTENTION, made, rank)
        totals.add(total)
        real = sorted(held(rank, tensor, own))
        assert stop - first == len(real)
        for number, head in zip(range(first, stop), real, strict=True):
            heads.setdefault(number, set()).add(head)
    [total] = totals
    return total, heads


@given(sizes=st.tuples(SIZES, SIZES), stated=TOTALS, own=TOTALS, more=st.frozensets(TOTALS))
def test_engines_that_agree_about_a_layer_mean_the_same_heads(
    sizes: tuple[int, int], stated: int, own: int, more: frozenset[int]
) -> None:
    """If their totals differ, they are refused (LayerMismatch)."""
    prefill, decode = (claimed(size, stated, own, more) for size in sizes)
    if prefill[0] == decode[0]:
        assert prefill[1] == decode[1]
        assert all(len(heads) == 1 for heads in prefill[1].values())
    else:
        assert sizes[0] != sizes[1], "equal sizes can always exchange KV"


@given(size=SIZES, total=TOTALS)
def test_a_model_whose_layers_are_alike_states_its_heads(size: int, total: int) -> None:
    assert claimed(size, total, total, frozenset())[0] == total


@pytest.mark.parametrize(
    ("tensor", "own", "total"),
    [(2, 4, 4), (4, 4, 4), (8, 4, 4), (4, 16, 16), (16, 4, 16), (16, 16, 16)],
)
def test_layers_with_fewer_heads_than_the_others(tensor: int, own: int, total: int) -> None:
    """Gemma 4 has 16 KV heads in its windows and 4 elsewhere."""
    made = config(tensor, 16, num_global_key_value_heads=4)
    found = heads_of(full(max(1, own // tensor)), LayerKind.FULL_ATTENTION, made, 0)
    assert found is not None
    assert found[0] == total


def test_every_place_in_which_a_number_of_heads_is_stated() -> None:
    made = config(
        1,
        8,
        swa_num_key_value_heads=2,
        attention_other_setting={"num_attention_groups": 3},
        num_kv_heads_of_layers=[4, 5],
        num_attention_heads=64,
        use_kv_heads=True,
    )
    assert stated_totals(made) == {8, 2, 3, 4, 5}
    made.model_config.model_arch_config = SimpleNamespace(
        per_layer_overrides=[{"total_num_kv_heads": 6, "head_size": 128}, {}]
    )
    draft = config(1, 16, n_head_kv=32).model_config
    made.speculative_config = SimpleNamespace(draft_model_config=draft)
    assert stated_totals(made) == {8, 2, 3, 4, 5, 6, 16, 32}


@dataclass
class Attention:
    n_heads_in_group: int | None


@dataclass
class Block:
    attention: Attention


def test_layers_that_say_how_many_query_heads_share_a_kv_head() -> None:
    """Nemotron-NAS: its configuration holds an object for each layer. Some have no attention."""
    layers = [Block(Attention(number)) for number in (8, 16, None)]
    made = config(8, 8)
    made.model_config.hf_text_config = Fields(num_attention_heads=64, block_configs=layers)
    assert stated_totals(made) == {8, 4}
    spec = full(1)
    assert heads_of(spec, LayerKind.FULL_ATTENTION, made, 5) == (8, 5, 6), "8 and 4 fit"
    made.parallel_config.tensor_parallel_size = 4
    assert heads_of(spec, LayerKind.FULL_ATTENTION, made, 3) == (4, 3, 4)


def test_fields_that_hold_no_number() -> None:
    """transformers' default configuration of Nemotron has None; others have a list, one a layer."""
    made = config(1, 8)
    made.model_config.get_total_num_kv_heads = lambda: None
    fields = {"num_key_value_heads": None, "num_attention_heads": [32, 64]}
    made.model_config.hf_text_config = Fields(**fields, layers=[{"n_heads_in_group": 8}])
    assert stated_totals(made) == {4, 8}


def test_a_configuration_that_contains_itself_ends() -> None:
    circle: dict[str, Any] = {"num_kv_heads": 4}
    circle["other"] = circle
    made = config(1, 8)
    made.model_config.hf_text_config = Fields(**circle)
    assert stated_totals(made) == {8, 4}
