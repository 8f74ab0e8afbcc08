"""Every rule: a pair that it refuses, and the nearest pair that it accepts."""

from __future__ import annotations

import re
from unittest import mock

import pytest
from msgspec.structs import replace

from pdcluster_connector.compat import check as judging
from pdcluster_connector.compat.check import RULES, check, check_engine, refused
from pdcluster_connector.compat.findings import Finding, Verdict
from pdcluster_connector.compat.reasons import Reason
from pdcluster_connector.compat.shape import (
    EngineShape,
    GroupShape,
    LayerKind,
    LayerShape,
    Memory,
    PartShape,
)
from pdcluster_connector.compat.shape_rules import SHAPE_RULES


def layers(count: int = 2, **changes) -> tuple[LayerShape, ...]:
    return tuple(
        replace(
            LayerShape(f"model.layers.{i}.attn", LayerKind.FULL_ATTENTION, 0, 4, 512), **changes
        )
        for i in range(count)
    )


def full(*groups: GroupShape, **changes) -> EngineShape:
    """A shape whose attention groups are ``groups``."""
    return replace(KNOWN, groups=groups, **changes)


# CPU engines as a handshake describes them: everything is known.
KNOWN = EngineShape(
    model="llama",
    kv_dtype="float32",
    block_size=32,
    kernel_blocks_per_block=1,
    prefix_caching=True,
    tensor=2,
    memory=Memory.DRAM,
    token_sliceable=False,
    packing="CPU_ATTN/vec16",
    layers=layers(),
    groups=(GroupShape(LayerKind.FULL_ATTENTION, 32),),
    layout="LBHNC",
    hybrid=False,
)


def blocks(shape: EngineShape, size: int, ratio: int = 1) -> EngineShape:
    """The same engine with other blocks in its attention groups."""
    groups = tuple(
        group
        if group.kind is LayerKind.MAMBA
        else replace(group, block_size=size, kernel_blocks_per_block=ratio)
        for group in shape.groups or ()
    )
    return replace(shape, block_size=size, kernel_blocks_per_block=ratio, groups=groups)


SLICEABLE = replace(KNOWN, token_sliceable=True, packing=None)
NO_PREFIXES = replace(KNOWN, prefix_caching=False)
ODD = layers(kv_heads=6)
FP8 = replace(KNOWN, kv_dtype="fp8_e4m3", layers=layers(scales="k=0.5,v=0.25"))
FACTS = {
    "attention backend": "FLASHINFER",
    "element type": "uint8",
    "bytes of a slot": "36",
    "outermost axis": "heads",
    "version of vLLM": "0.32.0",
    "kind of device": "cuda 10 0",
}


def facts(**changes: str) -> str:
    named = {name.replace("_", " "): value for name, value in changes.items()}
    return ",".join(f"{name}={value}" for name, value in {**FACTS, **named}.items())


SCALED = "k=0.5,v=0.25"
NVFP4 = replace(
    KNOWN, kv_dtype="nvfp4", packing="nvfp4", layers=layers(scales=SCALED, whole=facts())
)
WINDOW = replace(KNOWN, layers=layers(kind=LayerKind.SLIDING_WINDOW, window=128))
MLA = replace(KNOWN, layers=layers(kind=LayerKind.MLA, kv_heads=1))
PARTS = (
    PartShape("conv.x", 8, 768, "float32"),
    PartShape("conv.b", 1, 384, "float32"),
    PartShape("ssm", 8, 4096, "float32"),
)
STATE = LayerShape("model.layers.1.mixer", LayerKind.MAMBA, 1, 1, 39296, parts=PARTS)
HYBRID = blocks(
    replace(
        SLICEABLE,
        layers=(layers()[0], STATE),
        groups=(GroupShape(LayerKind.FULL_ATTENTION, 32), GroupShape(LayerKind.MAMBA, 544)),
    ),
    544,
    34,
)


def state(**changes) -> EngineShape:
    return replace(HYBRID, layers=(layers()[0], replace(STATE, **changes)))


# rule -> (prefill, decode that is refused, nearest decode that is accepted); where prefill
# itself is at fault, the accepted decode is accepted with its own like.
PAIRS = {
    "ModelMismatch": (KNOWN, replace(KNOWN, model="mistral"), KNOWN),
    "KVDtypeMismatch": (KNOWN, replace(KNOWN, kv_dtype="bfloat16"), KNOWN),
    "KVDtypeMismatch/layer": (
        HYBRID,
        state(parts=(*PARTS[:2], replace(PARTS[2], dtype="bfloat16"))),
        HYBRID,
    ),
    "KVScalesMismatch": (FP8, replace(FP8, layers=layers(scales="k=0.5,v=0.5")), FP8),
    "ContextParallelUnsupported": (KNOWN, replace(KNOWN, context=2), replace(KNOWN, context=1)),
    "LayoutUnsupported/data-nodes": (
        KNOWN,
        replace(KNOWN, data=2, nodes=4),
        replace(KNOWN, data=4, nodes=2),
    ),
    "LayoutUnsupported/quantized": (
        replace(FP8, kv_dtype="fp8_per_token_head"),
        replace(FP8, kv_dtype="fp8_per_token_head"),
        FP8,
    ),
    "LayoutUnsupported/scales": (
        replace(FP8, layers=layers(scales=None)),
        replace(FP8, layers=layers(scales=None)),
        FP8,
    ),
    "LayoutUnsupported/layers": (
        replace(KNOWN, layers=layers(kind=LayerKind.OTHER)),
        replace(KNOWN, layers=layers(kind=LayerKind.OTHER)),
        MLA,
    ),
    "LayoutUnsupported/heads": (
        replace(KNOWN, layers=ODD),
        replace(KNOWN, layers=ODD, tensor=4),
        replace(KNOWN, layers=ODD, tensor=3),
    ),
    "LayoutUnsupported/asked": (
        replace(KNOWN, layout="LBHNC", asked_layout="LBHNC"),
        replace(KNOWN, layout="LBHNC", asked_layout="BHLNC"),
        replace(KNOWN, layout="BHLNC", asked_layout="BHLNC"),
    ),
    "LayoutUnsupported/empty": (KNOWN, replace(KNOWN, layers=()), KNOWN),
    "BlockInteriorOpaque/whole": (
        NVFP4,
        replace(NVFP4, layers=layers(scales=SCALED, whole=facts(kind_of_device="cuda 9 0"))),
        replace(NVFP4, pipeline=2),
    ),
    "BlockInteriorOpaque/size": (KNOWN, blocks(KNOWN, 128), blocks(KNOWN, 32)),
    "PrefixCachingHeterogeneousBlocks": (
        HYBRID,
        blocks(HYBRID, 1056, 66),
        replace(HYBRID, prefix_caching=False),
    ),
    "BlockInteriorOpaque/interior": (KNOWN, SLICEABLE, KNOWN),
    "BlockInteriorOpaque/packing": (KNOWN, replace(KNOWN, packing="CPU_ATTN/amx"), KNOWN),
    "LayerMismatch": (
        KNOWN,
        replace(KNOWN, layers=layers(3)),
        replace(KNOWN, layers=layers()[::-1]),
    ),
    "MemoryTypeUnsupported": (KNOWN, replace(KNOWN, memory=Memory.VRAM), KNOWN),
}


def test_every_rule_has_such_a_pair() -> None:
    assert list(PAIRS) == [rule.id for rule in RULES]


@pytest.mark.parametrize("rule", PAIRS)
def test_a_rule_refuses_its_pair_first_and_accepts_the_nearest_one(rule: str) -> None:
    prefill, clashing, nearest = PAIRS[rule]
    first = refused(check(prefill, clashing))
    assert first is not None
    assert first.rule == rule
    assert first.reason.value == rule.partition("/")[0]
    assert first.verdict is Verdict.REFUSED
    assert check(nearest if prefill == clashing else prefill, nearest) == ()


@pytest.mark.parametrize("rule", [rule for rule in PAIRS if rule != "LayoutUnsupported/heads"])
def test_a_rule_does_not_care_which_side_it_is(rule: str) -> None:
    prefill, clashing, nearest = PAIRS[rule]
    first = refused(check(clashing, prefill))
    assert first is not None
    assert first.rule == rule
    assert check(nearest, nearest if prefill == clashing else prefill) == ()


@pytest.mark.parametrize("rule", PAIRS)
def test_a_refusal_names_both_values_and_a_remedy(rule: str) -> None:
    prefill, clashing, _ = PAIRS[rule]
    first = refused(check(prefill, clashing))
    assert first is not None
    assert first.field in set(EngineShape.__struct_fields__)
    assert first.prefill_value
    assert first.prefill_value != first.decode_value or prefill == clashing
    assert first.message
    assert first.remedy
    assert "\n" not in first.message


SAID_OTHERWISE = {"BlockInteriorOpaque/interior", "LayerMismatch"}
TWO_SIDED = [r.id for r in RULES if r not in SHAPE_RULES and r.id not in SAID_OTHERWISE]


@pytest.mark.parametrize("rule", TWO_SIDED)
def test_a_message_gives_each_value_to_the_engine_that_has_it(rule: str) -> None:
    prefill, clashing, _ = PAIRS[rule]
    for pair in ((prefill, clashing), (clashing, prefill)):
        first = refused(check(*pair))
        assert first is not None
        values = f"prefill {first.prefill_value}, decode {first.decode_value}"
        assert values in first.message


def test_a_layer_that_differs_is_described_as_each_engine_has_it() -> None:
    first = refused(check(KNOWN, replace(KNOWN, layers=layers(kv_heads=8))))
    assert first is not None
    own = "model.layers.0.attn: full_attention, {} KV heads, 512 bytes a token and head"
    assert (first.prefill_value, first.decode_value) == (own.format(4), own.format(8))
    assert first.message == (
        f"layer model.layers.0.attn differs: prefill {own.format(4)}, decode {own.format(8)}"
    )


def test_another_draft_model_is_refused_by_name() -> None:
    pair = (replace(KNOWN, draft="eagle3 a"), replace(KNOWN, draft="eagle3 b"))
    first = refused(check(*pair))
    assert first is not None
    assert (first.rule, first.reason, first.field) == (
        "ModelMismatch", Reason.MODEL_MISMATCH, "draft",
    )  # fmt: skip
    assert first.message == "the draft model differs: prefill eagle3 a, decode eagle3 b"
    assert "--speculative-config" in first.remedy
    assert check(pair[0], pair[0]) == ()


def test_a_draft_model_that_an_older_engine_does_not_state_is_no_mismatch() -> None:
    """Its layers are compared as before, so a draft model of one side only is refused."""
    stated = replace(KNOWN, draft="eagle3 a", layers=layers(3))
    older = replace(stated, draft=None)
    assert check(stated, older) == check(older, stated) == check(older, older) == ()
    alone = refused(check(stated, KNOWN))
    assert alone is not None
    assert alone.rule == "LayerMismatch"


def test_of_another_model_with_another_draft_the_model_is_named() -> None:
    other = replace(KNOWN, model="mistral", draft="b")
    first = refused(check(replace(KNOWN, draft="a"), other))
    assert first is not None
    assert first.field == "model"


SIDES = {"prefill": "decode", "decode": "prefill"}
NULLABLE = [name for name in EngineShape.__struct_fields__ if getattr(EngineShape(), name) is None]


def mirrored(finding: Finding) -> tuple[object, ...]:
    """The finding as it should be when the two engines change their places."""
    words = re.findall(r"[-\w.]+", finding.message)
    return (
        finding.rule,
        finding.verdict,
        finding.field,
        finding.decode_value,
        finding.prefill_value,
        sorted(SIDES.get(word, word) for word in words),
    )


def told(finding: Finding) -> tuple[object, ...]:
    words = sorted(re.findall(r"[-\w.]+", finding.message))
    values = finding.prefill_value, finding.decode_value
    return finding.rule, finding.verdict, finding.field, *values, words


def holds_the_same_of_both_sides(prefill: EngineShape, decode: EngineShape) -> None:
    there, back = check(prefill, decode), check(decode, prefill)
    assert sorted(map(repr, map(mirrored, there))) == sorted(map(repr, map(told, back)))


@pytest.mark.parametrize("rule", PAIRS)
def test_no_value_is_told_of_the_wrong_side(rule: str) -> None:
    """Who looks at the wrong engine finds nothing wrong with it."""
    prefill, clashing, _ = PAIRS[rule]
    if prefill == clashing:
        clashing = KNOWN
    holds_the_same_of_both_sides(prefill, clashing)


@pytest.mark.parametrize("field", NULLABLE)
@pytest.mark.parametrize("rule", PAIRS)
def test_no_unknown_value_is_told_of_the_wrong_side(field: str, rule: str) -> None:
    prefill, clashing, _ = PAIRS[rule]
    holds_the_same_of_both_sides(prefill, replace(clashing, **{field: None}))
    holds_the_same_of_both_sides(replace(prefill, **{field: None}), clashing)


@pytest.mark.parametrize(
    ("decode", "message", "values"),
    [
        (
            layers(1),
            "layer model.layers.1.attn is absent on decode (2 and 1 layers)",
            (
                "model.layers.1.attn: full_attention, 4 KV heads, 512 bytes a token and head",
                "absent",
            ),
        ),
        (
            layers(3),
            "layer model.layers.2.attn is absent on prefill (2 and 3 layers)",
            (
                "absent",
                "model.layers.2.attn: full_attention, 4 KV heads, 512 bytes a token and head",
            ),
        ),
    ],
)
def test_a_layer_is_absent_on_the_side_that_lacks_it(decode, message, values) -> None:
    first = refused(check(KNOWN, replace(KNOWN, layers=decode)))
    assert first is not None
    assert first.message == message
    assert (first.prefill_value, first.decode_value) == values


def test_the_side_whose_blocks_are_packed_is_named() -> None:
    for pair, words in (
        ((KNOWN, SLICEABLE), "packed on prefill and ordered by token on decode"),
        ((SLICEABLE, KNOWN), "ordered by token on prefill and packed on decode"),
    ):
        first = refused(check(*pair))
        assert first is not None
        assert first.message == f"the inside of a block is {words}"


def test_the_side_that_names_a_layer_twice_is_named() -> None:
    double = replace(KNOWN, layers=(*layers(), layers()[0]))
    for pair, side in (((KNOWN, double), "decode"), ((double, KNOWN), "prefill")):
        first = refused(check(*pair))
        assert first is not None
        assert first.message == f"{side} names 3 layers but only 2 different ones"


def test_equal_engines_of_any_tensor_size_are_accepted() -> None:
    for prefill in (1, 2, 4, 8):
        for decode in (1, 2, 4, 8):
            pair = (replace(KNOWN, tensor=prefill), replace(KNOWN, tensor=decode))
            assert check(*pair) == ()


# What is unknown is never refused.

UNGROUPED = replace(KNOWN, groups=None)


@pytest.mark.parametrize(
    ("layout", "asked", "backend", "said"),
    [
        (None, "BHLNC", "CPU_ATTN", "CPU_ATTN, which has LBHNC, not BHLNC"),
        (None, "BHLNC", "B12X", "B12X, which has LBHNC and BLHNC, not BHLNC"),
        (None, "LBHNC", "TURBOQUANT", "TURBOQUANT, which has none of the layouts, not LBHNC"),
        ("LBHNC", "BHLNC", None, "KV in LBHNC, not in BHLNC"),
        ("LBHNC", "BHLNC", "FLASH_ATTN", "KV in LBHNC, not in BHLNC"),  # by the environment
        (None, "BHLNC", None, ""),  # vLLM chooses the backend
        (None, "BHLNC", "NEWEST", ""),
        ("BHLNC", "BHLNC", "CPU_ATTN", ""),  # what was registered counts
        ("BHLNC", None, "CPU_ATTN", ""),
    ],
)
@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_layout_is_judged_by_what_is_known_of_it(
    layout: str | None, asked: str | None, backend: str | None, said: str, side: str
) -> None:
    wrong = replace(KNOWN, layout=layout, asked_layout=asked, backend=backend)
    first = refused(check(*((wrong, KNOWN) if side == "prefill" else (KNOWN, wrong))))
    if not said:
        assert first is None
        return
    assert first is not None
    assert (first.rule, first.field) == ("LayoutUnsupported/asked", "asked_layout")
    assert first.message.startswith(f"{side} has {said}; ")


@pytest.mark.parametrize(
    "field",
    [name for name in EngineShape.__struct_fields__ if getattr(EngineShape(), name) is None],
)
@pytest.mark.parametrize("base", [KNOWN, SLICEABLE, UNGROUPED])
@pytest.mark.parametrize("side", ["prefill", "decode", "both"])
def test_an_unknown_field_is_never_a_refusal(field: str, base: EngineShape, side: str) -> None:
    unknown = replace(base, **{field: None})
    pair = (unknown if side != "decode" else base, unknown if side != "prefill" else base)
    findings = check(*pair)
    assert refused(findings) is None
    spare = {"prefix_caching", "groups", "layout", "hybrid", "draft", "asked_layout", "backend"}
    if base is SLICEABLE:
        spare |= {"packing"}
    if base is not UNGROUPED:
        spare |= {"block_size", "kernel_blocks_per_block"}
    if field in spare:
        assert findings == (), "not needed when everything else is known and equal"
    else:
        assert field in {finding.field for finding in findings}
        assert all("unknown" in (f.prefill_value, f.decode_value) for f in findings)


@pytest.mark.parametrize("packing", [None, "CPU_ATTN/amx"])
def test_the_order_of_packed_bytes_counts_only_if_both_sides_pack(packing: str | None) -> None:
    ordered = replace(SLICEABLE, packing=packing)
    for pair in ((KNOWN, ordered), (ordered, KNOWN)):
        assert {finding.rule for finding in check(*pair)} == {"BlockInteriorOpaque/interior"}


def test_other_scales_are_named_by_their_own_rule_alone() -> None:
    other = replace(FP8, layers=layers(scales="k=0.5,v=0.5"))
    assert [finding.rule for finding in check(FP8, other)] == ["KVScalesMismatch"]


def test_engines_of_which_nothing_is_known_are_undecided_in_each_field_once() -> None:
    findings = check(EngineShape(), EngineShape())
    assert {finding.verdict for finding in findings} == {Verdict.UNKNOWN}
    names = [finding.field for finding in findings]
    assert len(names) == len(set(names))
    assert {"model", "kv_dtype", "layers", "block_size", "memory", "token_sliceable"} <= set(names)


def test_an_unknown_field_is_reported_by_the_first_rule_that_needs_it() -> None:
    nothing = EngineShape()
    clashes = [(rule.id, clash.field) for rule in RULES if (clash := rule.test(nothing, nothing))]
    fields = [field for _, field in clashes]
    assert len(set(fields)) < len(fields), "several rules need the same field"
    for finding in check(nothing, nothing):
        assert finding.rule == next(rule for rule, field in clashes if field == finding.field)


def test_an_engine_without_data_parallelism_may_span_any_number_of_nodes() -> None:
    for nodes in (2, 3):
        several = replace(KNOWN, nodes=nodes)
        assert check(KNOWN, several) == check(several, KNOWN) == ()


def test_ranks_that_span_nodes_are_told_with_both_numbers() -> None:
    [found] = check(KNOWN, replace(KNOWN, data=3, nodes=4))
    assert found.message.startswith("decode has data parallel size 3 over 4 nodes; ")


def test_the_first_layer_whose_scales_are_not_known_is_named() -> None:
    known, unknown = layers(3, scales="k=1.0,v=1.0"), layers(3, scales=None)
    [found] = check_engine(replace(FP8, layers=(known[0], *unknown[1:])))
    assert "fp8_e4m3 KV without one known scale for a layer (model.layers.1.attn)" in found.message


def test_refusals_come_before_what_is_unknown() -> None:
    verdicts = [f.verdict for f in check(EngineShape(), EngineShape(data=2, nodes=4, context=2))]
    assert verdicts[:2] == [Verdict.REFUSED] * 2
    assert set(verdicts[2:]) == {Verdict.UNKNOWN}


# Blocks that differ: the mission's own rule, and its neighbours.

MAY_CACHE = [(True, True), (True, False), (False, True), (None, False), (False, None), (None, None)]


def sizes(block_sizes=(32, 128), caching=(True, True), **known) -> list[Finding]:
    """What is refused (or, failing that, open) about two specs with these block sizes."""
    shapes = [
        EngineShape(block_size=size, prefix_caching=prefixes, **known)
        for size, prefixes in zip(block_sizes, caching, strict=True)
    ]
    findings = check(*shapes)
    return [f for f in findings if f.verdict is Verdict.REFUSED] or list(findings)


@pytest.mark.parametrize("caching", [*MAY_CACHE, (False, False)])
@pytest.mark.parametrize("block_sizes", [(32, 128), (128, 32)])
def test_packed_blocks_that_differ_are_refused_whatever_is_cached(caching, block_sizes) -> None:
    (found,) = sizes(block_sizes, caching, token_sliceable=False)
    assert found.reason is Reason.BLOCK_INTERIOR_OPAQUE
    assert (found.prefill_value, found.decode_value) == tuple(map(str, block_sizes))
    assert all(str(size) in found.message for size in block_sizes)


@pytest.mark.parametrize("caching", MAY_CACHE)
@pytest.mark.parametrize("hybrid", [True, None])
def test_blocks_that_differ_where_prefixes_may_be_cached(caching, hybrid) -> None:
    """Refused where the model is known as a hybrid, or nothing is known of the blocks' inside."""
    (found,) = sizes(caching=caching, hybrid=hybrid)
    assert found.reason is Reason.PREFIX_CACHING_HETEROGENEOUS_BLOCKS
    assert (found.prefill_value, found.decode_value) == ("32", "128")
    assert sizes(caching=(False, False), hybrid=hybrid)[0].verdict is Verdict.UNKNOWN


@pytest.mark.parametrize("caching", MAY_CACHE)
@pytest.mark.parametrize(
    ("known", "why"),
    [
        ({"token_sliceable": True}, "whether the model has Mamba layers is not known"),
        ({"token_sliceable": True, "hybrid": True}, "the model has Mamba layers"),
        ({"hybrid": False}, "nothing says that a block can be cut by token"),
        ({}, "whether the model has Mamba layers is not known"),
    ],
)
def test_a_layout_that_is_not_known_is_refused_where_prefixes_may_be_cached(
    caching, known, why
) -> None:
    """A Nemotron hybrid of 544 and 1008 with FLASH_ATTN: the backend alone proves nothing."""
    (found,) = sizes((544, 1008), caching, **known)
    assert found.verdict is Verdict.REFUSED
    assert found.reason is Reason.PREFIX_CACHING_HETEROGENEOUS_BLOCKS
    assert why in found.message
    assert "attentionBackend" not in found.remedy, "naming a backend is no remedy"
    assert "prefixCaching: Disabled on both roles" in found.remedy


def test_only_a_layout_that_is_known_and_can_be_cut_lets_block_sizes_differ() -> None:
    found = sizes(token_sliceable=True, hybrid=False)
    assert {f.verdict for f in found} == {Verdict.UNKNOWN}
    assert check(replace(HYBRID, layers=None), blocks(HYBRID, 1008, 63))[0].verdict is (
        Verdict.REFUSED
    )


@pytest.mark.parametrize("size", [16, 64])
def test_blocks_of_attention_alone_that_can_be_cut_may_differ(size: int) -> None:
    assert check(SLICEABLE, blocks(SLICEABLE, size)) == ()
    assert check(blocks(SLICEABLE, size), SLICEABLE) == ()


@pytest.mark.parametrize("known", [{}, {"hybrid": False}, {"hybrid": True}])
def test_without_prefixes_the_handshake_tells_whether_blocks_may_differ(known) -> None:
    shapes = [EngineShape(block_size=size, prefix_caching=False, **known) for size in (32, 128)]
    found = check(*shapes)
    assert refused(found) is None
    assert "token_sliceable" in {finding.field for finding in found}


def test_packed_blocks_of_one_kernel_size_may_differ() -> None:
    assert check(blocks(NO_PREFIXES, 64, 2), NO_PREFIXES) == ()
    assert check(blocks(KNOWN, 64, 2), KNOWN) == ()


@pytest.mark.parametrize("sliceable", [True, False])
def test_kernel_blocks_of_a_hybrid_that_differ(sliceable: bool) -> None:
    """The 34 and 66 of a hybrid whose attention page fits another state on each side.

    Kernel blocks are equal, so it does not matter whether they can be cut.
    """
    packed = {} if sliceable else {"token_sliceable": False, "packing": "CPU_ATTN/vec16"}
    ours = replace(HYBRID, **packed)
    theirs = blocks(ours, 1056, 66)
    first = refused(check(ours, theirs))
    assert first is not None
    assert first.reason is Reason.PREFIX_CACHING_HETEROGENEOUS_BLOCKS
    assert (first.prefill_value, first.decode_value) == ("544", "1056")
    apart = [replace(shape, prefix_caching=False) for shape in (ours, theirs)]
    assert check(*apart) == ()


def test_a_ratio_is_compared_where_only_one_group_differs() -> None:
    """Engine-wide there is no one ratio then: the groups of the shared layers decide."""
    two = replace(
        KNOWN,
        kernel_blocks_per_block=None,
        layers=(layers()[0], replace(WINDOW.layers[1], group=1)),
        groups=(
            GroupShape(LayerKind.FULL_ATTENTION, 32, 2),
            GroupShape(LayerKind.SLIDING_WINDOW, 64, 4, 128),
        ),
    )
    other = replace(two, groups=(two.groups[0], replace(two.groups[1], kernel_blocks_per_block=2)))
    assert check(two, two) == ()
    first = refused(check(two, other))
    assert first is not None
    assert first.rule == "BlockInteriorOpaque/size"
    assert (first.field, first.prefill_value, first.decode_value) == (
        "kernel_blocks_per_block", "4", "2",
    )  # fmt: skip
    assert first.message.startswith(
        f"number of kernel blocks in a logical block of {two.layers[1].name} differs "
        "(prefill 4, decode 2)"
    )


def test_prefix_caching_on_one_side_with_equal_blocks_is_accepted() -> None:
    assert check(KNOWN, NO_PREFIXES) == ()
    assert check(NO_PREFIXES, KNOWN) == ()


@pytest.mark.parametrize("other", [None, False])
def test_one_engine_that_packs_its_blocks_is_enough_to_refuse_other_sizes(other) -> None:
    """Of the other one it may not be known yet."""
    packed = replace(blocks(NO_PREFIXES, 128), token_sliceable=False)
    unknown = replace(NO_PREFIXES, token_sliceable=other)
    for pair in ((packed, unknown), (unknown, packed)):
        first = refused(check(*pair))
        assert first is not None
        assert first.rule == "BlockInteriorOpaque/size"


@pytest.mark.parametrize("other", [None, False])
def test_blocks_that_can_be_cut_on_one_side_alone_may_not_differ(other) -> None:
    """Nothing is known of the other side's, or they are packed."""
    theirs = replace(blocks(SLICEABLE, 128), token_sliceable=other)
    for pair in ((SLICEABLE, theirs), (theirs, SLICEABLE)):
        assert refused(check(*pair)) is not None


def test_one_engine_that_names_mamba_layers_says_it_of_both() -> None:
    """The spec of the other one may not say what layers its model has."""
    ours, theirs = (EngineShape(block_size=size, token_sliceable=True) for size in (544, 1008))
    for pair in (
        (replace(ours, hybrid=True), theirs),
        (ours, replace(theirs, hybrid=True)),
        (replace(ours, hybrid=True), replace(theirs, hybrid=False)),
    ):
        first = refused(check(*pair))
        assert first is not None
        assert first.message.endswith("and the model has Mamba layers")
    half = refused(check(replace(ours, hybrid=False), theirs))
    assert half is not None
    assert half.message.endswith("whether the model has Mamba layers is not known")


@pytest.mark.parametrize("field", ["block_size", "kernel_blocks_per_block"])
def test_the_blocks_of_one_engine_that_are_not_known_leave_the_rule_open(field: str) -> None:
    silent = replace(KNOWN, groups=None, **{field: None})
    for pair in ((KNOWN, silent), (silent, KNOWN)):
        (found,) = check(*pair)
        assert (found.verdict, found.field) == (Verdict.UNKNOWN, field)


def test_layers_are_shown_as_their_number_and_their_kinds() -> None:
    hybrid = replace(HYBRID, layers=(replace(layers()[0], scales=None, dtype="fp8_e4m3"), STATE))
    [found] = check_engine(hybrid)
    assert found.rule == "LayoutUnsupported/scales"
    assert found.prefill_value == "2 layers of 2 groups (full_attention, mamba)"
    for number, shown in ((1, "1 layer of 1 group"), (3, "3 layers of 1 group")):
        [found] = check_engine(replace(FP8, layers=layers(number, scales=None)))
        assert found.prefill_value == f"{shown} (full_attention)"


def test_what_each_engine_s_prefix_caching_is_is_said_in_words() -> None:
    shapes = [
        EngineShape(block_size=size, prefix_caching=caching, hybrid=True)
        for size, caching in ((32, True), (128, False), (128, None))
    ]
    for decode, word in zip(shapes[1:], ("off", "unknown"), strict=True):
        first = refused(check(shapes[0], decode))
        assert first is not None
        assert f"(prefill on, decode {word})" in first.message


def test_scales_that_an_engine_has_not_or_does_not_know_are_said_so() -> None:
    for scales, word in (("", "none"), (None, "unknown")):
        first = refused(check(FP8, replace(FP8, layers=layers(scales=scales))))
        assert first is not None
        assert (first.rule, first.decode_value) == ("KVScalesMismatch", word)
        assert first.message == (
            "the KV scales of layer model.layers.0.attn differ: prefill k=0.5,v=0.25, "
            f"decode {word}"
        )


def test_the_state_whose_type_differs_is_named() -> None:
    other = state(parts=(*PARTS[:2], replace(PARTS[2], dtype="bfloat16")))
    first = refused(check(HYBRID, other))
    assert first is not None
    assert first.message == (
        "the dtype of layer model.layers.1.mixer ssm differs: prefill float32, decode bfloat16"
    )


# Layers.


@pytest.mark.parametrize(
    ("decode", "part"),
    [
        (layers(1), "absent on decode"),
        (layers(3), "absent on prefill"),
        (layers(kv_heads=8), "8 KV heads"),
        (layers(token_bytes=256), "256 bytes"),
        ((*layers(), layers()[0]), "only 2 different ones"),
        ((layers()[0], replace(layers()[1], name="mtp.0")), "mtp.0 is absent on prefill"),
    ],
)
def test_a_layer_that_differs_is_named(decode: tuple[LayerShape, ...], part: str) -> None:
    first = refused(check(KNOWN, replace(KNOWN, layers=decode)))
    assert first is not None
    assert first.reason is Reason.LAYER_MISMATCH
    assert part in first.message


@pytest.mark.parametrize(
    ("ours", "theirs"), [(128, 64), (64, 128), (128, None), (None, 128)], ids=str
)
def test_windows_that_differ_are_refused(ours: int | None, theirs: int | None) -> None:
    """KV of tokens that only one side still needs is there on one side only."""
    kind = LayerKind.SLIDING_WINDOW
    shapes = [replace(KNOWN, layers=layers(kind=kind, window=window)) for window in (ours, theirs)]
    first = refused(check(*shapes))
    assert first is not None
    assert first.reason is Reason.LAYER_MISMATCH
    for window in filter(None, (ours, theirs)):
        assert f"window {window}" in first.message
    assert check(shapes[0], shapes[0]) == ()


@pytest.mark.parametrize(
    "change",
    [
        {"kind": LayerKind.SLIDING_WINDOW},
        {"kv_heads": 2},
        {"token_bytes": 1024},
        {"window": 64},
        {"parts": (PartShape("a", 4, 128, "float32"),)},
    ],
    ids=str,
)
def test_one_layer_that_differs_in_anything_that_matters_is_refused(change) -> None:
    one = replace(KNOWN, layers=(layers()[0], replace(layers()[1], **change)))
    for pair in ((KNOWN, one), (one, KNOWN)):
        assert "LayerMismatch" in {found.rule for found in check(*pair)}


def test_groups_may_be_numbered_differently() -> None:
    renumbered = replace(
        HYBRID,
        layers=(replace(layers()[0], group=1), replace(STATE, group=0)),
        groups=HYBRID.groups[::-1],
    )
    assert check(HYBRID, renumbered) == ()


def test_the_blocks_of_states_may_differ() -> None:
    """Without prefix caching vLLM gives a state one block, as long as its longest request."""
    longer = replace(HYBRID, groups=(HYBRID.groups[0], GroupShape(LayerKind.MAMBA, 8192)))
    assert check(HYBRID, longer) == ()
    assert check(longer, HYBRID) == ()


def test_a_layer_of_a_group_that_is_not_described_is_no_error() -> None:
    """A peer may say so; the handshake refuses such an engine before the rules are asked."""
    stray = replace(KNOWN, layers=layers(group=1))
    assert check(stray, blocks(KNOWN, 32)) == ()


def test_the_types_of_states_are_free_as_long_as_they_are_equal() -> None:
    """The list of types that can be transferred is one of attention caches."""
    wide = state(dtype="float64", parts=tuple(replace(part, dtype="float64") for part in PARTS))
    assert check(wide, wide) == ()
    attention = replace(HYBRID, layers=(replace(layers()[0], dtype="float64"), STATE))
    (first, *_) = check_engine(attention)
    assert first.rule == "LayoutUnsupported/quantized"


def test_the_heads_of_states_are_divided_by_themselves() -> None:
    """Of the layer itself, one head is stated; the heads of its states are divided."""
    odd = replace(state(parts=(replace(PARTS[0], heads=6), *PARTS[1:])), tensor=4)
    (found,) = check_engine(odd)
    assert found.rule == "LayoutUnsupported/heads"
    assert "6 heads over tensor parallel size 4 (model.layers.1.mixer conv.x)" in found.message
    assert check_engine(replace(odd, tensor=2)) == ()


def test_states_in_another_cut_are_another_layer() -> None:
    whole = PartShape("conv", 2, 6912, "float32")
    first = refused(check(HYBRID, state(parts=(whole, PARTS[2]))))
    assert first is not None
    assert first.reason is Reason.LAYER_MISMATCH
    assert "conv.x: 8 heads" in first.message
    assert "conv: 2 heads" in first.message


def test_a_refusal_of_one_engine_s_own_layout_names_both_sides() -> None:
    first = refused(check(*[replace(FP8, kv_dtype="nvfp4")] * 2))
    assert first is not None
    both = "prefill has KV dtype nvfp4 ({0}) and decode has KV dtype nvfp4 ({0})"
    assert both.format("model.layers.0.attn") in first.message


@pytest.mark.parametrize(
    "dtype",
    ["int8_per_token_head", "fp8_per_token_head", "int4_per_token_head", "nvfp4", "fp8_ds_mla",
     "turboquant_k8v4", "uint8", "float13"],
)  # fmt: skip
@pytest.mark.parametrize("scales", ["", "k=1.0,v=1.0", None])
def test_a_type_whose_pages_are_not_known_is_refused_by_its_name(dtype: str, scales) -> None:
    """Also where only one layer has it, as an indexer's cache."""
    one = (layers()[0], replace(layers()[1], dtype=dtype, scales=scales))
    for engine in (
        replace(KNOWN, kv_dtype=dtype, layers=layers(scales=scales)),
        replace(KNOWN, layers=one),
    ):
        (first, *_) = check(engine, engine)
        assert first.rule == "LayoutUnsupported/quantized"
        assert dtype in first.message
        assert [f.rule for f in check_engine(engine)][:1] == [first.rule]


@pytest.mark.parametrize("fact", FACTS)
def test_blocks_with_their_own_scales_need_each_fact_to_be_equal(fact: str) -> None:
    """Also one that only one side states: an engine of another version may know more."""
    other = layers(scales=SCALED, whole=facts(**{fact.replace(" ", "_"): "other"}))
    [more] = {layer.whole for layer in other}
    absent = ",".join(one for one in facts().split(",") if not one.startswith(fact))
    for whole, value in ((more, "other"), (absent, "absent")):
        theirs = replace(NVFP4, layers=(NVFP4.layers[0], replace(NVFP4.layers[1], whole=whole)))
        for pair, values in (((NVFP4, theirs), (FACTS[fact], value)),
                             ((theirs, NVFP4), (value, FACTS[fact]))):  # fmt: skip
            [found] = check(*pair)
            assert found.rule == "BlockInteriorOpaque/whole"
            assert (found.prefill_value, found.decode_value) == values
            said = f"{fact} of layer model.layers.1.attn differs: prefill {values[0]}, decode "
            assert found.message.startswith(f"{said}{values[1]}; ")


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda e: replace(e, tensor=4), "tensor"),  # four heads: two a rank, or one
        (lambda e: blocks(e, 64, 2), "block_size"),  # kernel blocks of 32 as before
        (lambda e: replace(e, backend="TRITON_ATTN"), "kv_dtype"),
    ],
)
def test_blocks_with_their_own_scales_need_equal_heads_and_blocks(change, field: str) -> None:
    named = replace(NVFP4, backend="FLASHINFER")
    assert check(named, named) == ()
    for pair in ((named, change(named)), (change(named), named)):
        found = refused(check(*pair))
        assert found is not None
        assert found.field == field
        assert found.reason in {Reason.BLOCK_INTERIOR_OPAQUE, Reason.LAYOUT_UNSUPPORTED}


def test_ranks_that_hold_the_same_number_of_heads_may_be_of_different_number() -> None:
    """One head, on one rank or on both of two; and a latent on any number of ranks."""
    for heads, kind in ((1, LayerKind.FULL_ATTENTION), (1, LayerKind.MLA)):
        one = layers(kv_heads=heads, kind=kind, scales=SCALED, whole=facts())
        pair = [replace(NVFP4, layers=one, tensor=size) for size in (1, 4)]
        assert check(*pair) == check(*pair[::-1]) == ()


def test_a_manifest_s_types_with_their_own_scales_are_judged_by_what_it_says() -> None:
    """Backends and blocks are compared before any engine runs, and a backend is asked for."""
    spec = EngineShape(kv_dtype="nvfp4", block_size=16, backend="FLASHINFER")
    assert refused(check(spec, spec)) is None
    assert refused(check(spec, replace(spec, backend=None))) is None
    for change, field, rule in (
        ({"block_size": 32}, "block_size", "BlockInteriorOpaque/whole"),
        ({"backend": "FLASH_ATTN"}, "kv_dtype", "LayoutUnsupported/quantized"),
        ({"memory": Memory.DRAM}, "kv_dtype", "LayoutUnsupported/quantized"),
    ):
        found = refused(check(spec, replace(spec, **change)))
        assert found is not None
        assert (found.rule, found.field) == (rule, field)
    latents = EngineShape(kv_dtype="fp8_ds_mla", backend="FLASHMLA_SPARSE")
    found = refused(check(latents, replace(latents, backend="FLASHINFER_MLA_SPARSE_SM120")))
    assert found is not None
    assert (found.rule, found.field) == ("BlockInteriorOpaque/whole", "backend")


@pytest.mark.parametrize("dtype", ["float13", "uint8", "turboquant_k8v4", "int4_per_token_head"])
def test_what_a_newer_engine_states_of_a_type_that_is_not_known_here_does_not_count(
    dtype: str,
) -> None:
    newer = replace(NVFP4, kv_dtype=dtype)
    (first, *_) = check(newer, newer)
    assert first.rule == "LayoutUnsupported/quantized"


def test_one_scale_of_a_layer_beside_those_in_its_blocks_must_be_known_and_equal() -> None:
    other = replace(NVFP4, layers=layers(scales="k=0.5,v=0.5", whole=facts()))
    found = refused(check(NVFP4, other))
    assert found is not None
    assert found.rule == "KVScalesMismatch"
    for scales in ("", None):
        unknown = replace(NVFP4, layers=layers(scales=scales, whole=facts()))
        assert [one.rule for one in check(unknown, unknown)] == ["LayoutUnsupported/scales"]


def test_a_layer_that_one_side_leaves_out_of_the_quantisation_is_named() -> None:
    skipped = (FP8.layers[0], replace(FP8.layers[1], dtype="float32", scales=""))
    ours = replace(FP8, layers=skipped)
    assert check(ours, ours) == ()
    first = refused(check(ours, FP8))
    assert first is not None
    assert first.rule == "KVDtypeMismatch/layer"
    assert (first.prefill_value, first.decode_value) == ("float32", "fp8_e4m3")
    assert "model.layers.1.attn" in first.message


@pytest.mark.parametrize("dtype", ["fp8_e4m3", "fp8_e5m2"])
def test_quantized_kv_needs_scales_that_are_known_and_equal(dtype: str) -> None:
    def engine(scales):
        return replace(KNOWN, kv_dtype=dtype, layers=layers(scales=scales))

    assert check(engine("k=1.0,v=1.0"), engine("k=1.0,v=1.0")) == ()
    first = refused(check(engine("k=1.0,v=1.0"), engine("k=1.0,v=0.5")))
    assert first is not None
    assert first.rule == "KVScalesMismatch"
    assert (first.prefill_value, first.decode_value) == ("k=1.0,v=1.0", "k=1.0,v=0.5")
    for scales in ("", None):
        first = refused(check(engine(scales), engine(scales)))
        assert first is not None
        assert first.rule == "LayoutUnsupported/scales"


def test_a_layer_of_another_kind_is_refused_by_its_name() -> None:
    mixed = replace(KNOWN, layers=(layers()[0], replace(layers()[1], kind=LayerKind.OTHER)))
    first = refused(check(mixed, mixed))
    assert first is not None
    assert first.reason is Reason.LAYOUT_UNSUPPORTED
    assert "1 of 2, first model.layers.1.attn" in first.message
    unknown = (layers()[0], *layers(3, kind=LayerKind.OTHER)[1:])
    [found] = check_engine(replace(KNOWN, layers=unknown))
    assert "2 of 3, first model.layers.1.attn" in found.message


@pytest.mark.parametrize("engine", [WINDOW, MLA, HYBRID])
@pytest.mark.parametrize("sizes", [{}, {"tensor": 4}, {"pipeline": 3}])
def test_what_real_engines_have_shown_is_accepted(engine: EngineShape, sizes) -> None:
    assert check(engine, replace(engine, **sizes)) == ()
    assert check(replace(engine, **sizes), engine) == ()


# One engine by itself.


def test_an_engine_by_itself_is_judged_by_the_rules_that_need_no_peer() -> None:
    assert check_engine(KNOWN) == ()
    for rule in RULES:
        if rule in SHAPE_RULES:
            _, clashing, _ = PAIRS[rule.id]
            assert rule.id in {found.rule for found in check_engine(clashing)}
    assert check_engine(replace(KNOWN, block_size=None)) == ()


def test_causes_come_before_consequences() -> None:
    other = replace(blocks(KNOWN, 16), model="other", kv_dtype="float16", layers=layers(5))
    reasons = [finding.reason for finding in check(KNOWN, other)]
    assert reasons == [
        Reason.MODEL_MISMATCH,
        Reason.KV_DTYPE_MISMATCH,
        Reason.KV_DTYPE_MISMATCH,
        Reason.BLOCK_INTERIOR_OPAQUE,
        Reason.LAYER_MISMATCH,
    ]


@pytest.mark.parametrize("rule", ["scales", "layers", "heads", "empty"])
def test_one_engine_whose_layers_are_not_known_leaves_a_rule_open(rule: str) -> None:
    """The one that is known may be sound; nothing is said of the other one."""
    [test] = [each.test for each in RULES if each.id == f"LayoutUnsupported/{rule}"]
    unknown = replace(KNOWN, layers=None)
    assert test(KNOWN, KNOWN) is None
    for pair in ((KNOWN, unknown), (unknown, KNOWN)):
        clash = test(*pair)
        assert clash is not None
        assert clash.verdict is Verdict.UNKNOWN


def test_kernel_blocks_that_differ_are_cut_where_no_block_size_is_known() -> None:
    pair = [replace(KNOWN, block_size=None, groups=None, kernel_blocks_per_block=n) for n in (1, 2)]
    found = {finding.rule: finding.verdict for finding in check(*pair)}
    assert found["BlockInteriorOpaque/size"] is Verdict.REFUSED


def test_a_state_beside_quantized_attention_needs_no_scales() -> None:
    """It has its own type, whatever that of the KV cache is called."""
    hybrid = replace(
        HYBRID,
        kv_dtype="fp8_e4m3",
        layers=(replace(layers()[0], scales="k=0.5,v=0.25"), STATE),
    )
    assert check(hybrid, hybrid) == ()


def test_an_engine_without_a_single_head_is_refused() -> None:
    """A model's config may say so."""
    none = replace(KNOWN, layers=layers(kv_heads=0))
    assert "LayoutUnsupported/heads" in {finding.rule for finding in check_engine(none)}


@pytest.mark.parametrize(("size", "is_alike"), [(32, True), (16, False)])
def test_blocks_that_no_kernel_cuts_are_their_own_kernel_blocks(size: int, is_alike: bool) -> None:
    """64 tokens in two kernel blocks against 32 tokens of which no ratio is known."""
    cut = EngineShape(block_size=64, kernel_blocks_per_block=2, token_sliceable=False)
    whole = EngineShape(block_size=size, token_sliceable=False)
    for pair in ((cut, whole), (whole, cut)):
        rules = {found.rule for found in check(*pair) if found.verdict is Verdict.REFUSED}
        assert ("BlockInteriorOpaque/size" not in rules) is is_alike


def test_another_type_of_a_state_is_told_by_its_own_rule_alone() -> None:
    other = state(parts=(*PARTS[:2], replace(PARTS[2], dtype="bfloat16")))
    assert [found.rule for found in check(HYBRID, other)] == ["KVDtypeMismatch/layer"]


def test_layers_of_one_engine_that_are_not_known_are_told_with_the_number_of_the_other() -> None:
    [rule] = [each for each in RULES if each.id == "LayerMismatch"]
    unknown = replace(KNOWN, layers=None)
    for pair, values in (
        ((KNOWN, unknown), ("2 layers", "unknown")),
        ((unknown, KNOWN), ("unknown", "2 layers")),
    ):
        with mock.patch.object(judging, "RULES", (rule,)):
            [found] = check(*pair)
        assert found.verdict is Verdict.UNKNOWN
        assert (found.field, found.prefill_value, found.decode_value) == ("layers", *values)
