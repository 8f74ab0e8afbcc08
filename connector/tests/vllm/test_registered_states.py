"""A Mamba layer's states: which heads and groups of the model a rank's page holds, and where."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

import torch
from registered_caches import BLOCK, BLOCKS, NAMES, copy, page_views, vllm_config
from vllm.model_executor.layers.mamba import mamba_utils
from vllm.model_executor.layers.mamba.gdn import kimi_gdn_linear_attn, olmo_gdn_linear_attn
from vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn import KimiGatedDeltaNetAttention
from vllm.model_executor.layers.mamba.gdn.olmo_gdn_linear_attn import (
    OlmoHybridGatedDeltaNetAttention,
)
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.model_executor.layers.mamba.mamba_mixer2 import mamba_v2_sharded_weight_loader
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, MambaSpec

from pdcluster_connector.compat.check import check, refused
from pdcluster_connector.compat.shape import PartShape
from pdcluster_connector.plan.block_pairs import EngineBlocks, GroupBlocks, groups_of
from pdcluster_connector.plan.peer_plan import plan_peer
from pdcluster_connector.plan.request_descriptors import plan_request
from pdcluster_connector.vllm.kv_caches import layers as states
from pdcluster_connector.vllm.kv_caches.registration import Registration, register

pytestmark = pytest.mark.vllm

MAMBA2 = MambaSpec(
    block_size=BLOCK, shapes=((4 * 16 + 2 * 2 * 8, 3), (4, 16, 8)),
    dtypes=(torch.float32, torch.float32), page_size_padded=8192,
)  # fmt: skip


def test_mamba_states_are_cut_into_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Second of two ranks: 4 heads of 16 channels, 2 groups of 8; conv rows 3."""
    monkeypatch.setattr(states, "is_conv_state_dim_first", lambda: True)
    views, placed = page_views(MAMBA2)
    config = KVCacheConfig(BLOCKS, [placed], [KVCacheGroupSpec(NAMES, MAMBA2)])
    made = register(views, config, vllm_config(tensor=2), (0, 1), "digest")
    assert made.shape.layers is not None
    assert made.shape.layers[0].parts == (
        PartShape("conv.x", 8, 16 * 3 * 4, "float32"),
        PartShape("conv.b", 4, 8 * 3 * 4, "float32"),
        PartShape("conv.c", 4, 8 * 3 * 4, "float32"),
        PartShape("ssm", 8, 16 * 8 * 4, "float32"),
    )
    # What a layer sees in its states, found again by the regions' arithmetic.
    pages = views[NAMES[1]].squeeze(dim=(1, 2))
    conv = pages[:, : 96 * 3 * 4].view(torch.float32).view(BLOCKS, 96, 3)
    ssm = pages[:, 96 * 3 * 4 : 96 * 3 * 4 + 4 * 16 * 8 * 4].view(torch.float32)
    conv[5, 64 + 16 + 8, 0], ssm.view(BLOCKS, 4, 16, 8)[5, 3, 0, 0] = 7.0, 9.0
    regions = {r.part: r for r in made.shard.regions if r.layer == NAMES[1]}
    raw = torch.empty(0, dtype=torch.int8).set_(pages.untyped_storage())
    memory = np.frombuffer(raw.numpy(), dtype=np.uint8)
    for part, head, value in (("conv.c", 3, 7.0), ("ssm", 7, 9.0)):
        region = regions[part]
        at = region.base + 5 * region.block_stride
        at += (head - region.head_start) * region.head_stride - raw.data_ptr()
        assert memory[at : at + 4].view(np.float32)[0] == value, part


def test_states_in_another_order_are_moved_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states, "is_conv_state_dim_first", lambda: False)
    views, placed = page_views(MAMBA2)
    config = KVCacheConfig(BLOCKS, [placed], [KVCacheGroupSpec(NAMES, MAMBA2)])
    made = register(views, config, vllm_config(), (0, 0), "digest")
    assert made.shape.layers is not None
    assert [part.name for part in made.shape.layers[0].parts] == ["state0.SD", "state1.SD"]
    assert (
        sum(region.token_bytes for region in made.shard.regions)
        == 2 * MAMBA2.state_content_size_bytes
    )


# One B/C group, of which vLLM gives every rank a copy.

HEADS, HEAD_DIM, STATE, ROWS = 8, 16, 8, 3


def one_group(tensor: int) -> MambaSpec:
    """The states of one of ``tensor`` ranks of a model with one group."""
    heads = HEADS // tensor
    return MambaSpec(
        block_size=BLOCK,
        shapes=((heads * HEAD_DIM + 2 * STATE, ROWS), (heads, HEAD_DIM, STATE)),
        dtypes=(torch.float32, torch.float32),
        page_size_padded=8192,
    )


def ranks(tensor: int, groups: int | None = 1) -> list[tuple[Registration, dict[str, Any]]]:
    """Every rank of an engine; ``groups``: what its layers' norms say."""
    found = []
    for rank in range(tensor):
        spec = one_group(tensor)
        views, placed = page_views(spec)
        config = vllm_config(tensor=tensor)
        mixer = SimpleNamespace(norm=SimpleNamespace(n_groups=groups) if groups else None)
        config.compilation_config.static_forward_context = dict.fromkeys(NAMES, mixer)
        caches = KVCacheConfig(BLOCKS, [placed], [KVCacheGroupSpec(NAMES, spec)])
        found.append((register(views, caches, config, (0, rank), "digest"), views))
    return found


def layer_states(view: Any, slot: int, tensor: int) -> dict[str, Any]:
    """A rank's states as vLLM's layer cuts them out of its page: (head or group, ...)."""
    heads = HEADS // tensor
    channels = heads * HEAD_DIM + 2 * STATE
    page = view.squeeze(dim=(1, 2))[slot]
    conv = page[: channels * ROWS * 4].view(torch.float32).view(channels, ROWS)
    size = heads * HEAD_DIM * STATE * 4
    ssm = page[channels * ROWS * 4 :][:size].view(torch.float32)
    x, b, c = conv.split([heads * HEAD_DIM, STATE, STATE])
    return {
        "x": x.view(heads, HEAD_DIM, ROWS),
        "b": b[None],
        "c": c[None],
        "ssm": ssm.view(heads, HEAD_DIM, STATE),
    }


@pytest.fixture(autouse=True)
def _channels_first(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (states, mamba_utils):  # vLLM's own gives the shapes
        monkeypatch.setattr(module, "is_conv_state_dim_first", lambda: True)


@pytest.mark.parametrize("tensor", [1, 2, 4])
def test_one_group_is_one_group_on_any_number_of_ranks(tensor: int) -> None:
    made = [rank for rank, _ in ranks(tensor)]
    for rank in made:
        assert rank.shape.layers is not None
        assert rank.shape.layers[0].parts == (
            PartShape("conv.x", HEADS, HEAD_DIM * ROWS * 4, "float32"),
            PartShape("conv.b", 1, STATE * ROWS * 4, "float32"),
            PartShape("conv.c", 1, STATE * ROWS * 4, "float32"),
            PartShape("ssm", HEADS, HEAD_DIM * STATE * 4, "float32"),
        )
    held = [
        {r.part: (r.head_start, r.head_stop) for r in rank.shard.regions if r.layer == NAMES[0]}
        for rank in made
    ]
    share = HEADS // tensor
    for number, parts in enumerate(held):
        own = (number * share, (number + 1) * share)
        assert parts == {"conv.x": own, "conv.b": (0, 1), "conv.c": (0, 1), "ssm": own}


def move(ours: Any, theirs: Any) -> None:
    """Carry slot 4 of all of prefill's ranks to slot 2 of all of decode's."""
    shapes = ours[0][0].shape, theirs[0][0].shape
    assert refused(check(*shapes)) is None
    for made, _ in theirs:
        plan = plan_peer(made.shard, [peer.shard for peer, _ in ours])
        lists = [
            EngineBlocks(groups_of(shape), [GroupBlocks((slot,))])
            for shape, slot in zip(shapes, (4, 2), strict=True)
        ]
        for part in plan_request(plan, *lists, start=0, stop=9, tokens=9):
            copy(plan, part)


@pytest.mark.parametrize(("prefill", "decode"), [(2, 1), (1, 2), (4, 2), (2, 4), (2, 2)])
def test_states_with_one_group_arrive_at_other_tensor_sizes(prefill: int, decode: int) -> None:
    """Every rank of decode gets its heads and the whole group; slot 4 goes to slot 2."""
    random = torch.Generator().manual_seed(3)
    whole = {
        name: {
            "x": torch.randn(HEADS, HEAD_DIM, ROWS, generator=random),
            "b": torch.randn(1, STATE, ROWS, generator=random),
            "c": torch.randn(1, STATE, ROWS, generator=random),
            "ssm": torch.randn(HEADS, HEAD_DIM, STATE, generator=random),
        }
        for name in NAMES
    }

    def share(name: str, part: str, rank: int, tensor: int) -> Any:
        heads = HEADS // tensor
        return whole[name][part] if part in "bc" else whole[name][part][rank * heads :][:heads]

    ours, theirs = ranks(prefill), ranks(decode)
    for rank, (_, views) in enumerate(ours):
        for name in NAMES:
            for part, states_ in layer_states(views[name], 4, prefill).items():
                states_.copy_(share(name, part, rank, prefill))
    move(ours, theirs)
    for rank, (_, views) in enumerate(theirs):
        for name in NAMES:
            for part, states_ in layer_states(views[name], 2, decode).items():
                assert torch.equal(states_, share(name, part, rank, decode)), (name, part)
            pages = views[name].squeeze(dim=(1, 2))
            used = one_group(decode).state_content_size_bytes
            assert not pages[[s for s in range(BLOCKS) if s != 2]].any()
            assert not pages[2, used:].any(), "behind the states"


def test_a_rank_s_one_group_can_also_be_its_share_of_several() -> None:
    (made, _) = ranks(2, groups=2)[1]
    regions = {region.part: region for region in made.shard.regions}
    assert made.shape.layers is not None
    assert made.shape.layers[0].parts[1].heads == 2
    assert (regions["conv.b"].head_start, regions["conv.b"].head_stop) == (1, 2)
    found = refused(check(made.shape, ranks(2)[1][0].shape))
    assert found is not None
    assert found.rule == "LayerMismatch"
    assert "conv.b: 2 heads" in found.message


@pytest.mark.parametrize("groups", [None, 3])
def test_states_whose_groups_are_not_known_are_moved_whole(groups: int | None) -> None:
    (made, _) = ranks(2, groups)[1]
    assert made.shape.layers is not None
    assert [part.name for part in made.shape.layers[0].parts] == ["state0.DS", "state1.DS"]
    assert refused(check(made.shape, made.shape)) is None
    found = refused(check(made.shape, ranks(1)[0][0].shape))
    assert found is not None
    assert found.rule == "LayerMismatch"


def test_more_arrays_than_mamba2_has_are_moved_whole() -> None:
    """vLLM can keep rings of recent inputs behind the two states."""
    spec = one_group(1)
    rings = MambaSpec(
        block_size=BLOCK, shapes=(*spec.shapes, (HEADS, 4, HEAD_DIM)),
        dtypes=(*spec.dtypes, torch.float32), page_size_padded=16384,
    )  # fmt: skip
    views, placed = page_views(rings)
    caches = KVCacheConfig(BLOCKS, [placed], [KVCacheGroupSpec(NAMES, rings)])
    made = register(views, caches, vllm_config(), (0, 0), "digest")
    assert made.shape.layers is not None
    assert [part.name for part in made.shape.layers[0].parts] == [
        "state0.DS", "state1.DS", "state2.DS"
    ]  # fmt: skip


# Linear attention: queries, keys and values of a rank, one after the other.

KEYS, VALUES, KEY, VALUE = 4, 8, 8, 16
LINEAR = {
    "qwen": (QwenGatedDeltaNetAttention, KEYS, KEY, VALUE),
    "olmo": (OlmoHybridGatedDeltaNetAttention, KEYS, KEY, VALUE),
    "kimi": (KimiGatedDeltaNetAttention, VALUES, VALUE, VALUE),
}


def linear_spec(kind: str, tensor: int, keys: int = 0) -> MambaSpec:
    """What one of ``tensor`` ranks keeps, by vLLM's own arithmetic."""
    _, count, key, value = LINEAR[kind]
    calculate = MambaStateShapeCalculator
    sizes = (
        calculate.kda_state_shape(tensor, VALUES, value)
        if kind == "kimi"
        else calculate.gated_delta_net_state_shape(tensor, keys or count, VALUES, key, value, 4)
    )
    return MambaSpec(
        block_size=BLOCK, shapes=sizes, dtypes=(torch.float32, torch.float32),
        page_size_padded=65536, mamba_type=MambaAttentionBackendEnum.GDN_ATTN,
    )  # fmt: skip


def linear(
    kind: str, tensor: int, mixer: type | None = None, keys: int = 0
) -> list[tuple[Registration, dict[str, Any]]]:
    """Every rank of an engine whose layers are of vLLM's class, or of ``mixer``."""
    found = []
    for rank in range(tensor):
        spec = linear_spec(kind, tensor, keys)
        views, placed = page_views(spec)
        config = vllm_config(tensor=tensor)
        module = object.__new__(mixer or LINEAR[kind][0])
        config.compilation_config.static_forward_context = dict.fromkeys(NAMES, module)
        caches = KVCacheConfig(BLOCKS, [placed], [KVCacheGroupSpec(NAMES, spec)])
        found.append((register(views, caches, config, (0, rank), "digest"), views))
    return found


def linear_states(kind: str, view: Any, slot: int, tensor: int) -> tuple[Any, Any]:
    """A rank's conv state (channels, rows) and its recurrent state, in its page."""
    conv, heads = linear_spec(kind, tensor).shapes
    page, size = view.squeeze(dim=(1, 2))[slot], np.prod(conv) * 4
    rest = page[size : size + np.prod(heads) * 4]
    return page[:size].view(torch.float32).view(conv), rest.view(torch.float32).view(heads)


def loaded(kind: str, whole: Any, tensor: int, rank: int) -> Any:
    """The channels that vLLM's own loader gives a rank of a weight of the conv."""
    _, keys, key, value = LINEAR[kind]
    sizes = [keys * key, keys * key, VALUES * value]
    param = torch.nn.Parameter(torch.empty(whole.shape[0] // tensor, 1, whole.shape[1]), False)
    if kind == "qwen":
        mamba_v2_sharded_weight_loader([(size, 0, False) for size in sizes], tensor, rank)(
            param, whole
        )
    else:
        module = kimi_gdn_linear_attn if kind == "kimi" else olmo_gdn_linear_attn
        load = module._make_fused_conv1d_weight_loader(sizes, tensor, rank)
        for number, part in enumerate(whole.split(sizes)):
            load(param, part, number)
    return param.data.squeeze(1)


@pytest.mark.parametrize("kind", LINEAR)
@pytest.mark.parametrize(("prefill", "decode"), [(2, 1), (1, 2), (4, 2), (1, 4), (2, 2)])
def test_states_of_linear_attention_arrive_at_other_tensor_sizes(
    kind: str, prefill: int, decode: int
) -> None:
    """Each rank of decode holds the channels that vLLM's loader gives it; slot 4 goes to 2."""
    random = torch.Generator().manual_seed(11)
    channels, rows = linear_spec(kind, 1).shapes[0]
    conv = {name: torch.randn(channels, rows, generator=random) for name in NAMES}
    state = {name: torch.randn(linear_spec(kind, 1).shapes[1], generator=random) for name in NAMES}
    ours, theirs = linear(kind, prefill), linear(kind, decode)

    def share(name: str, tensor: int, rank: int) -> tuple[Any, Any]:
        heads = VALUES // tensor
        return loaded(kind, conv[name], tensor, rank), state[name][rank * heads :][:heads]

    for rank, (_, views) in enumerate(ours):
        for name in NAMES:
            held = linear_states(kind, views[name], 4, prefill)
            for place, content in zip(held, share(name, prefill, rank), strict=True):
                place.copy_(content)
    move(ours, theirs)
    for rank, (_, views) in enumerate(theirs):
        for name in NAMES:
            held = linear_states(kind, views[name], 2, decode)
            for place, content in zip(held, share(name, decode, rank), strict=True):
                assert torch.equal(place, content), name
            pages = views[name].squeeze(dim=(1, 2))
            used = linear_spec(kind, decode).state_content_size_bytes
            assert not pages[[s for s in range(BLOCKS) if s != 2]].any()
            assert not pages[2, used:].any(), "behind the states"


@pytest.mark.parametrize(("prefill", "decode"), [(2, 1), (1, 4), (4, 2)])
def test_a_state_that_every_rank_holds_whole_comes_from_one_of_them(
    prefill: int, decode: int
) -> None:
    """A short conv of which vLLM does not divide the channels (``tp_replicated``)."""
    spec = MambaSpec(
        block_size=BLOCK, shapes=MambaStateShapeCalculator.short_conv_state_shape(1, 64, 4),
        dtypes=(torch.float32,), tp_replicated=True, page_size_padded=1024,
        mamba_type=MambaAttentionBackendEnum.SHORT_CONV,
    )  # fmt: skip

    def side(tensor: int) -> list[tuple[Registration, dict[str, Any]]]:
        found = []
        for rank in range(tensor):
            views, placed = page_views(spec)
            caches = KVCacheConfig(BLOCKS, [placed], [KVCacheGroupSpec(NAMES, spec)])
            config = vllm_config(tensor=tensor)
            found.append((register(views, caches, config, (0, rank), "digest"), views))
        return found

    ours, theirs = side(prefill), side(decode)
    content = torch.randint(0, 100, (spec.state_content_size_bytes,), dtype=torch.int8) + 1
    for _, views in ours:
        for name in NAMES:
            views[name].squeeze(dim=(1, 2))[4, : content.numel()] = content
    shapes = ours[0][0].shape, theirs[0][0].shape
    assert refused(check(*shapes)) is None
    for made, views in theirs:
        plan = plan_peer(made.shard, [peer.shard for peer, _ in ours])
        assert len(plan.sources) == 1
        lists = [
            EngineBlocks(groups_of(shape), [GroupBlocks((slot,))])
            for shape, slot in zip(shapes, (4, 2), strict=True)
        ]
        for part in plan_request(plan, *lists, start=0, stop=9, tokens=9):
            copy(plan, part)
        for name in NAMES:
            pages = views[name].squeeze(dim=(1, 2))
            assert torch.equal(pages[2, : content.numel()], content)
            assert not pages[[s for s in range(BLOCKS) if s != 2]].any()


class Stranger(torch.nn.Module):
    """A layer of linear attention whose order nobody has looked at."""


@pytest.mark.parametrize("why", ["order", "class", "half a head"])
@pytest.mark.parametrize("kind", LINEAR)
def test_states_that_cannot_be_cut_go_between_equal_tensor_sizes_alone(
    kind: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if why == "half a head" and kind == "kimi":
        return  # its keys are as many as its values, and vLLM divides these
    for module in (states, mamba_utils):
        monkeypatch.setattr(module, "is_conv_state_dim_first", lambda: why != "order")
    mixer = Stranger if why == "class" else None
    keys = 1 if why == "half a head" else 0
    shapes = [linear(kind, tensor, mixer, keys)[0][0].shape for tensor in (1, 2)]
    for shape in shapes:
        assert refused(check(shape, shape)) is None
    for pair in (shapes, shapes[::-1]):
        found = refused(check(*pair))
        assert found is not None
        assert found.rule == "LayerMismatch"
        assert "tensor parallel size" in found.remedy


def test_speculation_on_decode_alone_gives_it_other_states() -> None:
    """vLLM keeps the inputs of drafted tokens too: decode's conv states are larger."""
    shapes = []
    for drafted in (0, 3):
        spec = MambaSpec(
            block_size=BLOCK, dtypes=(torch.float32, torch.float32), page_size_padded=16384,
            shapes=MambaStateShapeCalculator.mamba2_state_shape(
                1, HEADS * HEAD_DIM, 1, HEADS, HEAD_DIM, STATE, ROWS + 1, num_spec=drafted
            ),
        )  # fmt: skip
        views, placed = page_views(spec)
        caches = KVCacheConfig(BLOCKS, [placed], [KVCacheGroupSpec(NAMES, spec)])
        shapes.append(register(views, caches, vllm_config(), (0, 0), "digest").shape)
    assert refused(check(shapes[0], shapes[0])) is None
    found = refused(check(*shapes))
    assert found is not None
    assert found.rule == "LayerMismatch"
