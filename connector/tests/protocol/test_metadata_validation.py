"""One engine's statement about itself: what contradicts itself is found and named."""

from __future__ import annotations

import msgspec
import pytest

from pdcluster_connector.compat.reasons import Reason
from pdcluster_connector.compat.rules import Finding, Verdict
from pdcluster_connector.compat.shape import EngineShape, LayerKind, LayerShape
from pdcluster_connector.plan.geometry import Region
from pdcluster_connector.protocol import messages as m
from pdcluster_connector.protocol.refusal import failure_of, refusal_of
from pdcluster_connector.protocol.validation import validate_metadata

SHAPE = EngineShape(
    tensor=2,
    layers=tuple(LayerShape(f"l{i}", LayerKind.FULL_ATTENTION, 0, 2, 64) for i in range(3)),
)


def shard(tp: int, **change: object) -> m.ShardMetadata:
    regions = tuple(
        m.from_region(Region(f"l{i}", 1 << 30, 8, 1024, 16, tp, tp + 1, 1024, None, 64))
        for i in range(3)
    )
    value = m.ShardMetadata("p/1", (0, tp), "a", b"", regions, m.ProbeRegion(4096, 64))
    return msgspec.structs.replace(value, **change)


def engine(*shards: m.ShardMetadata, shape: EngineShape = SHAPE) -> m.EngineMetadata:
    return m.EngineMetadata(1, "p/1", m.from_shape(shape), shards, 60.0)


def reasons(metadata: m.EngineMetadata) -> list[Reason]:
    findings = validate_metadata(metadata)
    assert all(finding.message and finding.remedy for finding in findings)
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
            engine(shard(0), shard(1), shape=EngineShape(tensor=2, layers=SHAPE.layers[:2])),
            [Reason.LAYER_MISMATCH],
        ),
        (engine(shape=EngineShape(tensor=4096, pipeline=4096)), [Reason.LAYOUT_UNSUPPORTED]),
    ],
)
def test_contradictions(metadata: m.EngineMetadata, expected: list[Reason]) -> None:
    assert reasons(metadata) == expected


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
    assert reasons(engine(msgspec.structs.replace(good, regions=regions), shard(1))) == [
        Reason.LAYOUT_UNSUPPORTED
    ]


def finding(verdict: Verdict) -> Finding:
    return Finding(Reason.BLOCK_SIZE_MISMATCH, verdict, "block_size", "16", "32", "differ.", "Fix.")


def test_a_refusal_becomes_a_failure_with_rule_and_both_values() -> None:
    refusal = refusal_of([finding(Verdict.UNKNOWN), finding(Verdict.REFUSED)])
    assert refusal is not None
    assert refusal.message == "differ. Fix."
    failure = failure_of(refusal)
    assert failure.reason is Reason.BLOCK_SIZE_MISMATCH
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
    refusal = m.Refusal("BlockSizeMismatch", message, "16", "32")
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


def test_a_reason_of_a_newer_peer_stays_in_the_text() -> None:
    failure = failure_of(m.Refusal("QuantumMismatch", "no"))
    assert failure.reason is Reason.PROTOCOL_VERSION_MISMATCH
    assert "QuantumMismatch" in failure.message
