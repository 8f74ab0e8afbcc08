"""A field of a message may be as large as its bound, and no larger: both sides of each bound."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from pdcluster_connector.compat.shape import EngineShape
from pdcluster_connector.protocol import link_documents as links
from pdcluster_connector.protocol import messages as m

SHARD = m.ShardMetadata("e/1", (0, 0), "agent", b"blob", (), m.ProbeRegion(4096, 65536))
ENGINE = m.EngineMetadata(1, "e/1", EngineShape(), (SHARD,), 60.0)
LEASES = m.LeaseRequest("p/1", "d/1")
REPLY = m.LeaseReply(60.0)
HEALTH = m.HealthReply("p/1", "prefill", 2)
ENTRY = links.PeerEntry("e", "h:1")
PEERS = links.PeersDocument(1, (ENTRY,))
LINK = links.LinkReport("e", "e/1", links.LinkState.PENDING)
REPORT = links.RankReport((0, 0), (1, 1), (LINK,))
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
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_texts_and_lists_end_at_their_bound(message: Any, field: str, item: Any, most: int) -> None:
    assert takes(message, field, item * most)
    assert not takes(message, field, item * (most + 1))


@pytest.mark.parametrize(
    ("message", "field", "good", "bad"),
    [
        (ENGINE, "lease_seconds", (1e-9, DAY), (0, DAY + 1)),
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
        (LINK, "probe_bytes", (0, 2**62), (-1, 2**62 + 1)),
        (LINK, "data_rank", (0, 4095), (-1, 4096)),
        (REPORT, "data_rank", (0, 4095), (-1, 4096)),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_numbers_end_at_their_bounds(message: Any, field: str, good: Any, bad: Any) -> None:
    assert [value for value in good if not takes(message, field, value)] == []
    assert [value for value in bad if takes(message, field, value)] == []


def test_an_engine_tells_of_64_versions_and_no_more() -> None:
    versions = {f"package-{number}": "1" for number in range(64)}
    assert takes(ENGINE, "versions", versions)
    assert not takes(ENGINE, "versions", {**versions, "one-more": "1"})
