"""What a field means that a peer leaves out, because its connector is older than the field."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from msgspec import UNSET

from pdcluster_connector.compat.shape import (
    EngineShape,
    GroupShape,
    LayerKind,
    LayerShape,
    Memory,
)
from pdcluster_connector.plan.geometry import MemoryRange, Region
from pdcluster_connector.protocol import launcher_documents as links, messages as m


def read(kind: Any, value: object) -> Any:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(value), type=kind)


@pytest.mark.parametrize(
    ("kind", "sent", "meant"),
    [
        (MemoryRange, {"address": 4096, "length": 64}, {"device": 0, "memory": Memory.DRAM}),
        (
            m.ShardMetadata,
            {
                "engine_id": "e/1",
                "rank": [0, 0],
                "agent_name": "a",
                "agent_metadata": b"",
                "regions": [],
                "probe": {"address": 0, "length": 0},
            },
            {"lease_words": None, "seams": ()},
        ),
        (
            m.EngineMetadata,
            {
                "type": "engine",
                "protocol": 3,
                "engine_id": "e/1",
                "shape": {},
                "shards": [],
            },
            {"shape": EngineShape()},
        ),
        (
            m.Refusal,
            {"type": "refusal", "reason": "r", "message": ""},
            {"prefill_value": "", "decode_value": ""},
        ),
        (m.LeaseRequest, {"engine_id": "e", "holder": "d"}, {"releases": (), "renewals": ()}),
        (m.LeaseReply, {"seconds": 60}, {"renewed": (), "claimed": ()}),
        (
            LayerShape,
            ["l", "full_attention", 0, 1, 64],
            {"window": None, "dtype": "", "scales": "", "parts": ()},
        ),
        (GroupShape, ["full_attention", 16], {"kernel_blocks_per_block": 1, "window": None}),
        (
            Region,
            ["l", 0, 1, 64, 1, 0, 1, 64, None, 64],
            {"device": 0, "memory": Memory.DRAM, "group": 0, "part": ""},
        ),
        (
            EngineShape,
            {},
            {
                **dict.fromkeys(
                    ("model", "kv_dtype", "block_size", "kernel_blocks_per_block", "memory",
                     "prefix_caching", "token_sliceable", "packing", "layers", "groups", "layout",
                     "hybrid", "draft", "asked_layout", "backend"),
                ),
                **dict.fromkeys(("tensor", "pipeline", "data", "context", "nodes"), 1),
            },
        ),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)  # fmt: skip
def test_a_field_that_an_engine_leaves_out_has_its_plain_meaning(
    kind: Any, sent: object, meant: dict[str, object]
) -> None:
    found = read(kind, sent)
    assert {name: getattr(found, name) for name in meant} == meant


def test_what_a_peers_document_leaves_out() -> None:
    sent = {"generation": 1, "peers": [{"engine": "e", "side_channel": "h:1"}]}
    document = links.decode_peers(json.dumps(sent).encode())
    assert isinstance(document, links.PeersDocument)
    [entry] = document.peers
    assert (document.model, document.canary_interval_seconds) == ("", 0)
    assert (entry.engine_id, entry.api, entry.follower_hosts) == ("", "", ())
    assert list(entry.data_ranks) == [0]


def test_what_a_report_leaves_out() -> None:
    link = {"engine": "e", "engine_id": "e/1", "state": "Pending"}
    report = links.decode_report(
        json.dumps({"rank": [0, 0], "of": [1, 1], "links": [link]}).encode()
    )
    assert isinstance(report, links.RankReport)
    assert report.data_rank == 0
    [found] = report.links
    assert found.state is links.LinkState.PENDING
    assert (found.reason, found.message, found.data_rank) == ("", "", 0)
    assert (found.bytes_per_second, found.establishment, found.receives) == (0.0, 0, UNSET)


def test_what_a_group_without_a_ratio_and_a_state_count_as() -> None:
    """Blocks that a kernel does not cut, and a state that counts as one token."""
    assert read(GroupShape, ["full_attention", 48]).kernel_tokens == 48
    assert read(GroupShape, ["full_attention", 48, 3]).kernel_tokens == 16
    assert read(GroupShape, ["mamba", 544]).kernel_tokens == 1
    assert read(GroupShape, ["of a newer peer", 16]).kind is LayerKind.OTHER


@pytest.mark.parametrize(
    ("message", "required"),
    [
        (m.HandshakeRequest((3, 3), "d/1", EngineShape()), {"rank": [0, 0]}),
        (m.EngineMetadata(3, "p/1", EngineShape(), ()), {"lease_seconds": 60.0}),
    ],
)
def test_a_handshake_holds_what_engines_of_0_1_0_require(
    message: Any, required: dict[str, Any]
) -> None:
    """They speak the same protocol: in a rollout, engines of both versions pair."""
    sent = msgspec.msgpack.decode(m.encode(message))
    assert sent.items() >= required.items()


@pytest.mark.parametrize(
    ("kind", "fields", "new"),
    [
        (m.LeaseReply, ("seconds", "renewed", "claimed"), m.LeaseReply(60.0, expired=(("r", 1),))),
        (m.HealthReply, ("engine_id", "role", "shards"), m.HealthReply("p/1", "prefill", 1, 1.8e9)),
    ],
)
def test_answers_of_a_side_channel_are_read_by_engines_of_0_1_0_and_theirs_here(
    kind: type[msgspec.Struct], fields: tuple[str, ...], new: msgspec.Struct
) -> None:
    types = {field.name: field.type for field in msgspec.structs.fields(kind)}
    former = msgspec.defstruct(kind.__name__, [(name, types[name]) for name in fields])
    sent = msgspec.msgpack.decode(m.encode(new), type=former)
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=kind)
    left_out = {field.name: field.default for field in msgspec.structs.fields(kind)[len(fields) :]}
    assert again == msgspec.structs.replace(new, **left_out)
    assert list(left_out.values()) in ([()], [None])
