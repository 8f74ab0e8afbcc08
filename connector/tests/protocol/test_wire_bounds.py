"""A field of a message may be as large as its bound, and no larger: both sides of each bound."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from pdcluster_connector.compat.shape import (
    EngineShape,
    GroupShape,
    LayerKind,
    LayerShape,
    PartShape,
)
from pdcluster_connector.plan.geometry import MemoryRange, Region
from pdcluster_connector.protocol import launcher_documents as links, messages as m
from pdcluster_connector.protocol.load_report import ReceiveRate

SHARD = m.ShardMetadata("e/1", (0, 0), "agent", b"blob", (), MemoryRange(4096, 65536))
ENGINE = m.EngineMetadata(1, "e/1", EngineShape(), (SHARD,))
LEASES = m.LeaseRequest("p/1", "d/1")
REPLY = m.LeaseReply(60.0)
HEALTH = m.HealthReply("p/1", "prefill", 2)
ENTRY = links.PeerEntry("e", "h:1")
PEERS = links.PeersDocument(1, (ENTRY,))
LINK = links.RankLink("e", "e/1", links.LinkState.PENDING)
RATE = ReceiveRate(2e9, 1e9, 16, 2**30)
REPORT = links.RankReport((0, 0), (1, 1), (LINK,))
PART = PartShape("ssm", 1, 64, "float32")
LAYER = LayerShape("l", LayerKind.FULL_ATTENTION, 0, 1, 64)
GROUP = GroupShape(LayerKind.FULL_ATTENTION, 16)
SHAPE = EngineShape()
REGION = Region("l", 4096, 8, 1024, 16, 0, 2, 512, 32, 32)
DAY = 86400
KEY = ("r", 1)


def takes(message: Any, field: str, value: object) -> bool:
    """Whether the message is read with ``value`` in a field."""
    raw = msgspec.msgpack.encode(msgspec.structs.replace(message, **{field: value}))
    try:
        msgspec.msgpack.decode(raw, type=type(message))
    except msgspec.ValidationError:
        return False
    return True


@pytest.mark.parametrize(
    ("message", "field", "item", "most"),
    [
        (SHARD, "agent_metadata", b"x", 8 * 1024 * 1024),
        (SHARD, "engine_id", "x", 512),
        (SHARD, "seams", (1 << 40,), 65_536),
        (ENGINE, "shards", (SHARD,), 4096),
        (m.Refusal("r", ""), "message", "x", 4096),
        (LEASES, "releases", (KEY,), 1024),
        (LEASES, "renewals", (KEY,), 1024),
        (REPLY, "renewed", (KEY,), 1024),
        (REPLY, "claimed", (KEY,), 1024),
        (ENTRY, "side_channel", "x", 512),
        (ENTRY, "engine_id", "x", 512),
        (ENTRY, "api", "x", 512),
        (ENTRY, "follower_hosts", ("h",), 255),
        (PEERS, "peers", (ENTRY,), 4096),
        (PEERS, "model", "x", 512),
        (LINK, "engine_id", "x", 512),
        (LINK, "reason", "x", 128),
        (LINK, "message", "x", 4096),
        (REPORT, "links", (LINK,), 4096),
        (SHAPE, "model", "x", 512),
        (SHAPE, "layers", (LAYER,), 8192),
        (SHAPE, "groups", (GROUP,), 256),
        (LAYER, "name", "x", 512),
        (LAYER, "dtype", "x", 64),
        (LAYER, "scales", "x", 512),
        (LAYER, "parts", (PART,), 16),
        (PART, "name", "x", 512),
        (REGION, "layer", "x", 512),
        (REGION, "part", "x", 64),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_texts_and_lists_end_at_their_bound(message: Any, field: str, item: Any, most: int) -> None:
    assert takes(message, field, item * most)
    assert not takes(message, field, item * (most + 1))


@pytest.mark.parametrize(
    ("message", "field", "good", "bad"),
    [
        (REPLY, "seconds", (1e-9, DAY), (0, DAY + 1)),
        (HEALTH, "shards", (0, 4096), (-1, 4097)),
        (HEALTH, "role", ("p",), ("",)),
        (SHARD, "rank", ((0, 4095), (4095, 0)), ((-1, 0), (0, -1), (4096, 0), (0, 4096))),
        (LEASES, "releases", ([("r", 0)], [("r", 2**64 - 1)]), ([("r", -1)], [("", 1)])),
        (ENTRY, "data_parallel_size", (1, 4096), (0, 4097)),
        (ENTRY, "side_channel", ("x",), ("",)),
        (ENTRY, "follower_hosts", (["h"], ["h" * 255]), ([""], ["h" * 256])),
        (PEERS, "generation", (0, 2**62), (-1, 2**62 + 1)),
        (PEERS, "canary_interval_seconds", (0,), (-1,)),
        (LINK, "bytes_per_second", (0, 1e18), (-1e-9, 1.001e18)),
        (LINK, "data_rank", (0, 4095), (-1, 4096)),
        (RATE, "best", (0, 1e18), (-1e-9, 1.001e18)),
        (RATE, "count", (0, 2**62), (-1, 2**62 + 1)),
        (REPORT, "data_rank", (0, 4095), (-1, 4096)),
        (SHAPE, "tensor", (1, 4096), (0, 4097)),
        (LAYER, "group", (0, 255), (-1, 256)),
        (LAYER, "kv_heads", (1, 2**31 - 1), (0, 2**31)),
        (LAYER, "token_bytes", (0, 2**48), (-1, 2**48 + 1)),
        (PART, "heads", (1, 2**31 - 1), (0, 2**31)),
        (REGION, "base", (0, 2**63 - 1), (-1, 2**63)),
        (REGION, "block_stride", (0, 2**48), (-1, 2**48 + 1)),
        (REGION, "head_start", (0, 2**20), (-1, 2**20 + 1)),
        (REGION, "device", (0, 4096), (-1, 4097)),
        (REGION, "group", (0, 255), (-1, 256)),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_numbers_end_at_their_bounds(message: Any, field: str, good: Any, bad: Any) -> None:
    assert [value for value in good if not takes(message, field, value)] == []
    assert [value for value in bad if takes(message, field, value)] == []


@pytest.mark.parametrize(
    ("decode", "most"),
    [
        (m.decode_handshake_request, 256 * 1024),
        (m.decode_handshake_reply, 64 * 1024 * 1024),
        (m.decode_lease_request, 256 * 1024),
        (m.decode_lease_reply, 256 * 1024),
        (m.decode_health, 4096),
        (links.decode_peers, 1024 * 1024),
        (links.decode_report, 1024 * 1024),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_message_is_read_up_to_its_bound(decode: Callable[[bytes], Any], most: int) -> None:
    """What is longer is refused by its length; what is not, by what stands in it."""
    long, longer = decode(bytes(most)), decode(bytes(most + 1))
    assert isinstance(long, m.Malformed)
    assert "allowed" not in long.message
    assert longer == m.Malformed(f"{most + 1} bytes, more than the {most} allowed")
