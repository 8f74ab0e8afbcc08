"""One engine's statement about itself: what contradicts itself is found and named."""

from __future__ import annotations

import dataclasses
import re

import msgspec
import pytest
from msgspec.structs import replace

from pdcluster_connector.compat.findings import Finding, Verdict
from pdcluster_connector.compat.reasons import Reason
from pdcluster_connector.compat.shape import (
    EngineShape,
    GroupShape,
    LayerKind,
    LayerShape,
    PartShape,
)
from pdcluster_connector.plan.geometry import MemoryRange, Region
from pdcluster_connector.protocol import messages as m
from pdcluster_connector.protocol.failure import failure_of, refusal_of
from pdcluster_connector.protocol.validation import contradictions

SHAPE = EngineShape(
    kv_dtype="float32",
    tensor=2,
    layers=tuple(LayerShape(f"l{i}", LayerKind.FULL_ATTENTION, 0, 2, 64) for i in range(3)),
    groups=(GroupShape(LayerKind.FULL_ATTENTION, 32, 2),),
)
STATES = (PartShape("conv", 4, 96, "float32"), PartShape("ssm", 2, 512, "float32"))


def shard(tp: int, **change: object) -> m.ShardMetadata:
    regions = tuple(
        Region(f"l{i}", 1 << 30, 8, 1024, 16, tp, tp + 1, 1024, None, 64) for i in range(3)
    )
    value = m.ShardMetadata("p/1", (0, tp), "a", b"", regions, MemoryRange(4096, 64))
    return msgspec.structs.replace(value, **change)


def engine(*shards: m.ShardMetadata, shape: EngineShape = SHAPE) -> m.EngineMetadata:
    return m.EngineMetadata(1, "p/1", shape, shards)


def found_in(metadata: m.EngineMetadata) -> tuple[Finding, ...]:
    return tuple(contradictions(metadata))


def reasons(metadata: m.EngineMetadata) -> list[Reason]:
    findings = found_in(metadata)
    for one in findings:
        assert re.fullmatch("[a-z_, ]+", one.field), "the name of a field, not its value"
        assert one.remedy.endswith("."), "a sentence that says what to do"
        assert not one.message.endswith(".")
    return [finding.reason for finding in findings]


def test_sound_metadata_has_no_findings() -> None:
    assert reasons(engine(shard(0), shard(1))) == []


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        (engine(shard(0)), [Reason.SHARD_MISSING]),
        (engine(), [Reason.SHARD_MISSING] * 2 + [Reason.LAYER_MISMATCH] * 3),
        (engine(shard(0), shard(1), shard(1)), [Reason.ENGINE_ID_INCONSISTENT]),
        (engine(shard(0), shard(1), shard(2)), [Reason.ENGINE_ID_INCONSISTENT]),
        (engine(shard(0), shard(1, engine_id="q/2")), [Reason.ENGINE_ID_INCONSISTENT]),
        (
            engine(shard(0), shard(1), shape=replace(SHAPE, layers=SHAPE.layers[:2])),
            [Reason.LAYER_MISMATCH],
        ),
        (engine(shape=EngineShape(tensor=4096, pipeline=4096)), [Reason.LAYOUT_UNSUPPORTED]),
        (engine(shape=EngineShape(tensor=4096, pipeline=1)), [Reason.SHARD_MISSING] * 4096),
        (engine(shape=EngineShape(tensor=241, pipeline=17)), [Reason.LAYOUT_UNSUPPORTED]),
    ],
)
def test_contradictions(metadata: m.EngineMetadata, expected: list[Reason]) -> None:
    assert reasons(metadata) == expected


@pytest.mark.parametrize(
    ("stated", "expected"),
    [(4, "l3 of p/1: no shard holds it"), (2, "l2 of p/1: the shape does not")],
)
def test_a_layer_that_is_only_stated_or_only_held_is_named(stated: int, expected: str) -> None:
    names = tuple(LayerShape(f"l{i}", LayerKind.FULL_ATTENTION, 0, 2, 64) for i in range(stated))
    (found,) = found_in(engine(shard(0), shard(1), shape=replace(SHAPE, layers=names)))
    assert expected in found.message


def test_an_engine_that_says_no_layers_is_judged_by_the_rest() -> None:
    """A peer may send anything. The handshake refuses such an engine by a rule."""
    unknown = replace(SHAPE, layers=None)
    assert reasons(engine(shard(0), shard(1), shape=unknown)) == []
    assert reasons(engine(shard(0), shape=unknown)) == [Reason.SHARD_MISSING]


def test_attention_whose_k_and_v_lie_apart_is_sound() -> None:
    """Only a Mamba layer's bytes are counted over all heads of its parts."""
    parts = tuple(PartShape(name, 2, 32, "float32") for name in "kv")
    layer = LayerShape("l0", LayerKind.FULL_ATTENTION, 0, 2, 64, parts=parts)
    shards = [
        shard(tp, regions=tuple(
            Region("l0", base, 8, 1024, 16, tp, tp + 1, 512, None, 32, part=part)
            for base, part in ((1 << 30, "k"), (1 << 31, "v"))
        ))
        for tp in (0, 1)
    ]  # fmt: skip
    assert reasons(engine(*shards, shape=replace(SHAPE, layers=(layer,)))) == []


def test_a_layer_of_states_may_be_one_array() -> None:
    """Then it names no parts, and its bytes are those of the array."""
    layer = LayerShape("l0", LayerKind.MAMBA, 0, 1, 512)
    shape = replace(SHAPE, layers=(layer,), groups=(GroupShape(LayerKind.MAMBA, 544),))
    state = Region("l0", 1 << 30, 8, 512, 1, 0, 1, 512, None, 512)
    assert reasons(engine(*(shard(tp, regions=(state,)) for tp in (0, 1)), shape=shape)) == []


def contradictions_without_end() -> dict[str, m.EngineMetadata]:
    many = range(1000)
    named = tuple(LayerShape(f"n{i}", LayerKind.FULL_ATTENTION, 9, 2, 64) for i in many)
    ranks = replace(shard(0), regions=())
    return {
        "layers of no shard": engine(shard(0), shard(1), shape=replace(SHAPE, layers=named)),
        "ranks twice": engine(*(replace(ranks, rank=(0, i % 500)) for i in many)),
        "ranks outside": engine(*(replace(ranks, rank=(7, i)) for i in many)),
    }


@pytest.mark.parametrize("what", contradictions_without_end())
def test_the_first_of_many_contradictions_is_found_without_the_others(what: str) -> None:
    """A peer may send a hundred thousand of them."""
    metadata = contradictions_without_end()[what]
    assert next(contradictions(metadata)) == found_in(metadata)[0]


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (engine(shard(0)), "rank (0, 1) of p/1 has published no memory"),
        (
            engine(shard(0), shard(1), shard(2)),
            "rank (0, 2) is published twice or lies outside of pipeline 1 x tensor 2",
        ),
        (
            engine(shard(0), shard(1, engine_id="q/2")),
            "rank (0, 1) says that it belongs to q/2, its engine says p/1",
        ),
        (
            engine(shape=EngineShape(tensor=241, pipeline=17)),
            "pipeline 17 x tensor 241 is more than 4096 ranks",
        ),
    ],
)
def test_what_the_ranks_contradict_is_said_with_the_values(
    metadata: m.EngineMetadata, message: str
) -> None:
    assert found_in(metadata)[0].message == message


@pytest.mark.parametrize(
    "change",
    [
        {"head_stop": 0},
        {"head_stride": 0},
        {"block_stride": 0},
        {"token_bytes": 0},
        {"token_stride": 8},
        {"num_blocks": 2**31 - 1, "block_stride": 2**48},
        {"base": 2**63 - 1},
    ],
    ids=str,
)
def test_memory_that_cannot_exist(change: dict[str, object]) -> None:
    good = shard(0)
    bad = msgspec.structs.replace(good.regions[1], **change)
    regions = (good.regions[0], bad, good.regions[2])
    found = found_in(engine(msgspec.structs.replace(good, regions=regions), shard(1)))
    assert {finding.reason for finding in found} == {Reason.LAYOUT_UNSUPPORTED}
    [wrong] = [finding for finding in found if finding.field == "regions"]
    assert wrong.prefill_value == "l1"
    assert re.match(r"layer l1 of rank \(0, 0\): \w", wrong.message), wrong.message


def hybrid(*, tensor: int = 2, pipeline: int = 1) -> m.EngineMetadata:
    """Attention and Mamba layers; with two stages, one layer each."""
    shape = replace(
        SHAPE,
        tensor=tensor,
        pipeline=pipeline,
        layers=(
            SHAPE.layers[0],
            LayerShape("l1", LayerKind.MAMBA, 1, 1, 4 * 96 + 2 * 512, parts=STATES),
        ),
        groups=(*SHAPE.groups, GroupShape(LayerKind.MAMBA, 544)),
    )
    shards = []
    for pp in range(pipeline):
        for tp in range(tensor):
            attention = Region("l0", 1 << 30, 8, 1024, 16, tp, tp + 1, 1024, None, 64)
            states = (
                Region("l1", 1 << 31, 4, 1024, 1, 2 * tp, 2 * tp + 2, 96, None, 96, part="conv"),
                Region("l1", 1 << 32, 4, 1024, 1, tp, tp + 1, 512, None, 512, part="ssm"),
            )
            held = [attention, *(replace(state, group=1) for state in states)]
            held = held if pipeline == 1 else held[:1] if pp == 0 else held[1:]
            regions = tuple(held)
            shards.append(shard(tp, rank=(pp, tp), regions=regions))
    return engine(*shards, shape=shape)


@pytest.mark.parametrize("pipeline", [1, 2])
def test_groups_parts_and_stages_that_fit_together(pipeline: int) -> None:
    assert reasons(hybrid(pipeline=pipeline)) == []


def with_region(number: int, rank: int = 0, **change: object) -> m.EngineMetadata:
    metadata = hybrid()
    shards = list(metadata.shards)
    regions = list(shards[rank].regions)
    regions[number] = msgspec.structs.replace(regions[number], **change)
    shards[rank] = msgspec.structs.replace(shards[rank], regions=tuple(regions))
    return msgspec.structs.replace(metadata, shards=tuple(shards))


def with_shape(**change: object) -> m.EngineMetadata:
    shape = replace(hybrid().shape, **change)
    return msgspec.structs.replace(hybrid(), shape=shape)


def with_layer(number: int, **change: object) -> m.EngineMetadata:
    layers = list(hybrid().shape.layers or ())
    layers[number] = replace(layers[number], **change)
    return with_shape(layers=tuple(layers))


WHOLE = {"head_start": 0, "head_stop": 2, "block_stride": 4096}
UNEVEN = (GroupShape(LayerKind.FULL_ATTENTION, 33, 2), GroupShape(LayerKind.MAMBA, 9))


def two_stages_with_one_layer() -> m.EngineMetadata:
    metadata = hybrid(pipeline=2)
    first, last = metadata.shards[0], metadata.shards[2]
    both = msgspec.structs.replace(last, regions=(*first.regions, *last.regions))
    return msgspec.structs.replace(
        metadata, shards=(*metadata.shards[:2], both, *metadata.shards[3:])
    )


@pytest.mark.parametrize(
    ("metadata", "field", "values"),
    [
        (with_region(0, block_tokens=32), "block_tokens", ("16", "32")),
        (with_region(0, token_bytes=32), "token_bytes", ("64", "32")),
        (with_region(0, group=1), "group", ("0", "1")),
        (with_region(0, **WHOLE), "heads", ("[0, 1]", "[0, 2]")),
        (with_region(0, part="k"), "", ()),
        (with_region(1, part="conv.x"), "parts", ("'conv'", "'conv.x'")),
        (with_region(1, part="ssm"), "regions", ("2 regions", "ssm")),
        (with_region(2, token_bytes=256), "token_bytes", ("512", "256")),
        (with_region(0, block_tokens=8), "block_tokens", ("16", "8")),
        (with_layer(0, token_bytes=32), "token_bytes", ("32", "64")),
        (with_layer(0, token_bytes=128), "token_bytes", ("128", "64")),
        (with_region(0, 1, block_tokens=32), "block_tokens", ("16", "32")),
        (with_region(0, 1, token_bytes=32), "token_bytes", ("64", "32")),
        (with_region(0, 1, group=1), "group", ("0", "1")),
        (with_region(0, 1, **WHOLE), "heads", ("[1, 2]", "[0, 2]")),
        (with_region(1, 1, part="conv.x"), "parts", ("'conv'", "'conv.x'")),
        (with_region(1, 1, part="ssm"), "regions", ("2 regions", "ssm")),
        (with_region(2, 1, token_bytes=256), "token_bytes", ("512", "256")),
        (with_region(1, head_start=0, head_stop=1), "heads", ("[0, 2]", "[0, 1]")),
        (with_layer(1, token_bytes=9), "layers", ("9 bytes", "1408 bytes")),
        (with_layer(1, group=2), "layers", ("group 2", "2 groups")),
        (with_shape(groups=UNEVEN), "groups", ("33", "2 kernel blocks")),
        (two_stages_with_one_layer(), "regions", ("pipeline rank 0", "pipeline rank 1")),
    ],
)  # fmt: skip
def test_a_contradiction_names_the_field_and_both_values(
    metadata: m.EngineMetadata, field: str, values: tuple[str, ...]
) -> None:
    findings = found_in(metadata)
    if not field:
        assert findings == (), "one array may have any name"
        return
    found = [finding for finding in findings if finding.field == field]
    assert found, findings
    stated, also = found[0].message.partition(": the engine states ")[2].split(", and also ")
    assert values[0] in stated, found[0].message
    assert values[1] in also, found[0].message
    assert found[0].prefill_value == stated
    refusal = refusal_of(findings)
    assert refusal is not None
    assert refusal.message.startswith(findings[0].message.rstrip("."))
    assert refusal.prefill_value
    assert refusal.decode_value == "", "it is a fault of one engine, whatever the other one has"
    assert reasons(metadata)
    if field == "token_bytes":
        assert found[0].message.startswith(
            ("token_bytes of l", "token_bytes of conv", "token_bytes of ssm")
        ), found


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (
            with_region(1, part="ssm"),
            "regions of l1 of rank (0, 0): the engine states 2 regions, and also parts ['ssm']",
        ),
        (
            with_region(1, part="conv.x"),
            (
                "parts of l1 of rank (0, 0): the engine states ['conv', 'ssm'], and also "
                "['conv.x', 'ssm']"
            ),
        ),
        (
            with_region(1, head_start=0, head_stop=1),
            (
                "heads of l1 of rank (0, 0): the engine states 4 heads over 2 ranks, here [0, 2], "
                "and also [0, 1]"
            ),
        ),
    ],
    ids=["twice", "other parts", "heads"],
)
def test_a_contradiction_is_told_once(metadata: m.EngineMetadata, message: str) -> None:
    """Regions that do not belong to the stated parts are not compared with them."""
    assert [one.message for one in found_in(metadata)] == [message]


def test_the_group_that_contradicts_itself_is_named() -> None:
    [found] = [one for one in found_in(with_shape(groups=UNEVEN[::-1])) if one.field == "groups"]
    assert found.message.startswith("groups of group 1: the engine states block size 33")


def test_a_million_regions_are_refused_before_anything_is_made_of_them() -> None:
    one = msgspec.msgpack.encode(Region("l", 4096, 8, 64, 16, 0, 1, 64, None, 4))
    whole = m.encode(engine(shard(0, regions=())))
    empty = b"\xa7regions\x90"
    assert whole.count(empty) == 1
    count = 10**6
    raw = whole.replace(empty, b"\xa7regions\xdd" + count.to_bytes(4, "big") + one * count)
    value = m.decode_handshake_reply(raw)
    assert isinstance(value, m.Malformed)
    assert "100000" in value.message


def finding(verdict: Verdict) -> Finding:
    return Finding(
        Reason.BLOCK_INTERIOR_OPAQUE, verdict, "block_size", "16", "32", "differ.", "Fix."
    )


def test_a_refusal_becomes_a_failure_with_rule_and_both_values() -> None:
    refusal = refusal_of([finding(Verdict.UNKNOWN), finding(Verdict.REFUSED)])
    assert refusal is not None
    assert refusal.message == "differ. Fix."
    failure = failure_of(refusal)
    assert failure.reason is Reason.BLOCK_INTERIOR_OPAQUE
    assert "prefill: 16" in failure.message
    assert "decode: 32" in failure.message


@pytest.mark.parametrize(
    ("message", "added"),
    [
        ("block size differs (prefill 16, decode 32)", ""),
        ("decode has block size 32", " (prefill: 16)"),
        ("160 and 320 differ", " (prefill: 16; decode: 32)"),
    ],
)
def test_a_value_is_said_once(message: str, added: str) -> None:
    refusal = m.Refusal("BlockInteriorOpaque", message, "16", "32")
    assert failure_of(refusal).message == message + added


def test_equal_values_of_both_sides_are_said_once() -> None:
    model = "cafe0123"
    message = f"both engines run {model}"
    assert failure_of(m.Refusal("ModelMismatch", message, model, model)).message.count(model) == 1


def test_at_a_handshake_not_knowing_is_a_refusal() -> None:
    refusal = refusal_of([finding(Verdict.UNKNOWN)])
    assert refusal is not None
    assert "block_size" in refusal.message
    assert refusal_of([]) is None
    first = dataclasses.replace(finding(Verdict.UNKNOWN), field="kv_dtype")
    both = refusal_of([first, finding(Verdict.UNKNOWN)])
    assert both is not None
    assert "kv_dtype" in both.message, "the first of what is not known"


def test_a_reason_of_a_newer_peer_stays_in_the_text() -> None:
    failure = failure_of(m.Refusal("QuantumMismatch", "no"))
    assert failure.reason is Reason.PROTOCOL_VERSION_MISMATCH
    assert failure.message == "QuantumMismatch: no", "and no value, where none was sent"


def test_a_refusal_of_many_words_fits_into_a_message() -> None:
    """Layers and values come from both engines, and the peer reads 4096 characters of each."""
    words = "x" * 5000
    long = Finding(Reason.LAYER_MISMATCH, Verdict.REFUSED, "layers", words, words, words, "Fix.")
    refusal = refusal_of([long])
    assert refusal is not None
    assert m.decode_handshake_reply(m.encode(refusal)) == refusal
    assert {len(refusal.message), len(refusal.prefill_value), len(refusal.decode_value)} == {4096}


def test_heads_that_no_rule_spreads_over_the_ranks_are_left_to_that_rule() -> None:
    layers = tuple(replace(layer, kv_heads=3) for layer in SHAPE.layers or ())
    assert reasons(engine(shard(0), shard(1), shape=replace(SHAPE, layers=layers))) == []


@pytest.mark.parametrize(
    ("metadata", "field", "value", "remedy"),
    [
        (
            engine(shard(0), shard(1, engine_id="q/2")),
            "engine_id",
            "q/2",
            "Start every rank of an engine with the same engine_id.",
        ),
        (
            engine(shape=EngineShape(tensor=241, pipeline=17)),
            "pipeline, tensor",
            "17 x 241",
            "Use at most 4096 ranks an engine.",
        ),
        (
            engine(shard(0), shard(1), shard(2)),
            "rank",
            "(0, 2)",
            "Start every engine with an engine_id of its own.",
        ),
        (
            engine(shard(0)),
            "rank",
            "(0, 1)",
            "Look for that rank's worker in the engine's log.",
        ),
        (
            engine(shard(0), shard(1), shape=replace(SHAPE, layers=SHAPE.layers[:2])),
            "layers",
            "l2",
            "Use the same connector version in every rank of the engine.",
        ),
    ],
    ids=["engine id", "ranks", "rank outside", "rank absent", "layer"],
)
def test_what_is_wrong_with_an_engine_is_told_with_its_field_its_value_and_what_to_do(
    metadata: m.EngineMetadata, field: str, value: str, remedy: str
) -> None:
    found = found_in(metadata)[0]
    assert (found.field, found.prefill_value, found.decode_value) == (field, value, "")
    assert found.remedy == remedy
    assert found.verdict is Verdict.REFUSED


def test_only_the_first_impossible_region_of_a_shard_is_told() -> None:
    """A shard may have a hundred thousand of them."""
    regions = [replace(region, token_bytes=0) for region in shard(0).regions]
    good = shard(0).regions[0]
    bad = shard(0, regions=(good, *regions[1:]))
    found = [one for one in found_in(engine(bad, shard(1))) if one.field == "regions"]
    assert [one.prefill_value for one in found] == ["l1"]
    both = engine(bad, shard(1, regions=tuple(regions)))
    found = [one for one in found_in(both) if one.field == "regions"]
    assert [one.message for one in found] == [
        "layer l1 of rank (0, 0): token_bytes is 0",
        "layer l0 of rank (0, 1): token_bytes is 0",
    ]


def test_an_engine_that_names_no_groups_has_layers_of_its_own_sizes() -> None:
    assert reasons(engine(shard(0), shard(1), shape=replace(SHAPE, groups=None))) == []


def test_absent_ranks_are_told_in_their_order() -> None:
    found = found_in(engine(shape=EngineShape(tensor=64, pipeline=2)))
    ranks = [one.prefill_value for one in found if one.field == "rank"]
    assert ranks == [f"({stage}, {rank})" for stage in range(2) for rank in range(64)]


def test_layers_that_no_shard_holds_are_told_by_name() -> None:
    found = found_in(contradictions_without_end()["layers of no shard"])
    names = [one.prefill_value for one in found if one.reason is Reason.LAYER_MISMATCH]
    assert names[:8] == ["l0", "l1", "l2", "n0", "n1", "n10", "n100", "n101"]
