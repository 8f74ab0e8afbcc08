"""Every rule: a pair that it refuses, and the nearest pair that it accepts."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from pdcluster_connector.compat.reasons import Reason
from pdcluster_connector.compat.rules import RULES, Verdict, check, check_engine, refused
from pdcluster_connector.compat.shape import EngineShape, LayerKind, LayerShape, Memory


def layers(count: int = 2, **changes) -> tuple[LayerShape, ...]:
    return tuple(
        replace(
            LayerShape(f"model.layers.{i}.attn", LayerKind.FULL_ATTENTION, 0, 4, 512), **changes
        )
        for i in range(count)
    )


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
)
SLICEABLE = replace(KNOWN, token_sliceable=True, packing=None)
NO_PREFIXES = replace(KNOWN, prefix_caching=False)
SLICEABLE_NO_PREFIXES = replace(SLICEABLE, prefix_caching=False)
ODD = layers(kv_heads=6)
FP8 = replace(KNOWN, kv_dtype="fp8_e4m3")

# rule -> (prefill, decode that is refused, nearest decode that is accepted); where prefill
# itself is at fault, the accepted decode is accepted with its own like.
PAIRS = {
    "ModelMismatch": (KNOWN, replace(KNOWN, model="mistral"), KNOWN),
    "KVDtypeMismatch": (KNOWN, replace(KNOWN, kv_dtype="bfloat16"), KNOWN),
    "ContextParallelUnsupported": (KNOWN, replace(KNOWN, context=2), replace(KNOWN, context=1)),
    "LayoutUnsupported/pipeline": (KNOWN, replace(KNOWN, pipeline=2), replace(KNOWN, tensor=1)),
    "LayoutUnsupported/data": (KNOWN, replace(KNOWN, data=2), replace(KNOWN, tensor=4)),
    "LayoutUnsupported/quantized": (
        FP8,
        FP8,
        replace(FP8, kv_dtype="float16"),
    ),
    "LayoutUnsupported/layers": (
        KNOWN,
        replace(KNOWN, layers=layers(kind=LayerKind.SLIDING_WINDOW, window=128)),
        KNOWN,
    ),
    "LayoutUnsupported/groups": (
        KNOWN,
        replace(KNOWN, layers=(layers()[0], replace(layers()[1], group=1))),
        KNOWN,
    ),
    "LayoutUnsupported/heads": (
        replace(KNOWN, layers=ODD),
        replace(KNOWN, layers=ODD, tensor=4),
        replace(KNOWN, layers=ODD, tensor=3),
    ),
    "LayoutUnsupported/empty": (KNOWN, replace(KNOWN, layers=()), KNOWN),
    "PrefixCachingHeterogeneousBlocks": (
        SLICEABLE,
        replace(SLICEABLE, block_size=128),
        replace(SLICEABLE, prefix_caching=False),
    ),
    "BlockInteriorOpaque/size": (NO_PREFIXES, replace(NO_PREFIXES, block_size=128), NO_PREFIXES),
    "BlockSizeMismatch": (
        SLICEABLE_NO_PREFIXES,
        replace(SLICEABLE_NO_PREFIXES, block_size=128),
        SLICEABLE_NO_PREFIXES,
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
    assert list(PAIRS) == sorted(PAIRS, key=[rule.id for rule in RULES].index)
    assert {rule.id for rule in RULES} == set(PAIRS)
    assert len({rule.id for rule in RULES}) == len(RULES)


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
    assert first.field in {field.name for field in fields(EngineShape)}
    assert first.prefill_value
    assert first.prefill_value != first.decode_value or prefill == clashing
    assert first.message
    assert first.remedy
    assert "\n" not in first.message


def test_equal_engines_of_any_tensor_size_are_accepted() -> None:
    for prefill in (1, 2, 4, 8):
        for decode in (1, 2, 4, 8):
            pair = (replace(KNOWN, tensor=prefill), replace(KNOWN, tensor=decode))
            assert check(*pair) == ()


# What is unknown is never refused.


@pytest.mark.parametrize(
    "field",
    [field.name for field in fields(EngineShape) if getattr(EngineShape(), field.name) is None],
)
@pytest.mark.parametrize("base", [KNOWN, SLICEABLE])
@pytest.mark.parametrize("side", ["prefill", "decode", "both"])
def test_an_unknown_field_is_never_a_refusal(field: str, base: EngineShape, side: str) -> None:
    unknown = replace(base, **{field: None})
    pair = (unknown if side != "decode" else base, unknown if side != "prefill" else base)
    findings = check(*pair)
    assert refused(findings) is None
    if field == "prefix_caching" or (base is SLICEABLE and field == "packing"):
        assert findings == (), "not needed when the blocks are equal and cut by token"
    else:
        assert field in {finding.field for finding in findings}
        assert all("unknown" in (f.prefill_value, f.decode_value) for f in findings)


def test_engines_of_which_nothing_is_known_are_undecided_in_each_field_once() -> None:
    findings = check(EngineShape(), EngineShape())
    assert {finding.verdict for finding in findings} == {Verdict.UNKNOWN}
    names = [finding.field for finding in findings]
    assert len(names) == len(set(names))
    assert {"model", "kv_dtype", "layers", "block_size", "memory", "token_sliceable"} <= set(names)


def test_refusals_come_before_what_is_unknown() -> None:
    verdicts = [f.verdict for f in check(EngineShape(), EngineShape(pipeline=2, context=2))]
    assert verdicts[:2] == [Verdict.REFUSED] * 2
    assert set(verdicts[2:]) == {Verdict.UNKNOWN}


# The mission's own rule.


@pytest.mark.parametrize("sliceable", [True, False, None])
@pytest.mark.parametrize(
    ("prefill", "decode", "may_cache"),
    [
        (True, True, True),
        (True, False, True),
        (False, True, True),
        (None, False, True),
        (False, None, True),
        (None, None, True),
        (False, False, False),
    ],
)
@pytest.mark.parametrize("sizes", [(32, 128), (128, 32)])
def test_block_sizes_that_differ_are_always_refused(
    prefill, decode, may_cache, sliceable, sizes
) -> None:
    findings = check(
        EngineShape(block_size=sizes[0], prefix_caching=prefill, token_sliceable=sliceable),
        EngineShape(block_size=sizes[1], prefix_caching=decode, token_sliceable=sliceable),
    )
    refusals = [finding for finding in findings if finding.verdict is Verdict.REFUSED]
    assert len(refusals) == 1, "one cause, one refusal"
    if may_cache:
        expected = Reason.PREFIX_CACHING_HETEROGENEOUS_BLOCKS
    elif sliceable is False:
        expected = Reason.BLOCK_INTERIOR_OPAQUE
    else:
        expected = Reason.BLOCK_SIZE_MISMATCH
    assert refusals[0].reason is expected
    assert (refusals[0].prefill_value, refusals[0].decode_value) == tuple(map(str, sizes))
    assert all(str(size) in refusals[0].message for size in sizes)


def test_kernel_blocks_that_differ_are_refused_like_block_sizes() -> None:
    """The 34 and 66 of a hybrid whose attention page fits another state on each side."""
    pair = (replace(KNOWN, kernel_blocks_per_block=34), replace(KNOWN, kernel_blocks_per_block=66))
    first = refused(check(*pair))
    assert first is not None
    assert first.reason is Reason.PREFIX_CACHING_HETEROGENEOUS_BLOCKS
    assert (first.field, first.prefill_value, first.decode_value) == (
        "kernel_blocks_per_block",
        "34",
        "66",
    )


def test_prefix_caching_on_one_side_with_equal_blocks_is_accepted() -> None:
    assert check(KNOWN, NO_PREFIXES) == ()
    assert check(NO_PREFIXES, KNOWN) == ()


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


def test_a_quantized_cache_is_refused_even_when_both_sides_agree() -> None:
    first = refused(check(FP8, FP8))
    assert first is not None
    assert first.rule == "LayoutUnsupported/quantized"
    assert "prefill has" in first.message
    assert "decode has" in first.message


@pytest.mark.parametrize(
    "kind", [LayerKind.SLIDING_WINDOW, LayerKind.MLA, LayerKind.MAMBA, LayerKind.OTHER]
)
def test_no_other_kind_of_layer_passes(kind: LayerKind) -> None:
    mixed = replace(KNOWN, layers=(layers()[0], replace(layers()[1], kind=kind)))
    first = refused(check(mixed, mixed))
    assert first is not None
    assert first.reason is Reason.LAYOUT_UNSUPPORTED
    assert "model.layers.1.attn" in first.message


# One engine by itself.


def test_an_engine_by_itself_is_judged_by_the_rules_that_need_no_peer() -> None:
    assert check_engine(KNOWN) == ()
    for rule in RULES:
        if rule.alone:
            _, clashing, _ = PAIRS[rule.id]
            found = refused(check_engine(clashing))
            assert found is not None
            assert found.rule == rule.id
    assert check_engine(replace(KNOWN, block_size=None)) == ()


def test_causes_come_before_consequences() -> None:
    other = replace(KNOWN, model="other", kv_dtype="float16", layers=layers(5), block_size=16)
    reasons = [finding.reason for finding in check(KNOWN, other)]
    assert reasons == [
        Reason.MODEL_MISMATCH,
        Reason.KV_DTYPE_MISMATCH,
        Reason.PREFIX_CACHING_HETEROGENEOUS_BLOCKS,
        Reason.LAYER_MISMATCH,
    ]
