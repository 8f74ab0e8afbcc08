"""The links' documents, read on both ends: here by the worker, there by the launcher."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given, settings, strategies as st

from pdcluster_connector.protocol import launcher_documents as links
from pdcluster_connector.protocol.messages import Malformed

ENTRY = links.PeerEntry("ns.c.prefill.r.0", "127.0.0.2:5600", "ns.c.prefill.r.0/1", "http://a:8000")
DOCUMENT = links.PeersDocument(3, (ENTRY,), "tiny", 30)
REPORT = links.RankReport(
    (0, 1),
    (1, 2),
    (links.RankLink("e", "e/1", links.LinkState.ESTABLISHED, "", "", 1.5e9, 65536),),
)


def test_documents_as_operator_and_worker_write_them() -> None:
    peers = {
        "generation": 3,
        "model": "tiny",
        "canary_interval_seconds": 30,
        "later": {"field": 1},
        "peers": [
            {
                "engine": "ns.c.prefill.r.0",
                "engine_id": "ns.c.prefill.r.0/1",
                "side_channel": "127.0.0.2:5600",
                "api": "http://a:8000",
            }
        ],
    }
    assert links.decode_peers(json.dumps(peers).encode()) == DOCUMENT
    assert links.decode_peers(links.encode_json(DOCUMENT)) == DOCUMENT
    assert links.decode_report(links.encode_json(REPORT)) == REPORT
    peers["peers"][0]["data_parallel_size"] = 4
    ranks = links.decode_peers(json.dumps(peers).encode())
    assert isinstance(ranks, links.PeersDocument)
    assert list(ranks.peers[0].data_ranks) == [0, 1, 2, 3]
    assert list(ENTRY.data_ranks) == [0]
    assert json.loads(links.encode_json(REPORT))["links"][0]["state"] == "Established"


@settings(max_examples=3 * settings().max_examples)
@given(st.binary(max_size=200))
def test_any_bytes(raw: bytes) -> None:
    assert isinstance(links.decode_peers(raw), Malformed)
    assert isinstance(links.decode_report(raw), Malformed)


def test_a_document_may_have_a_mebibyte() -> None:
    for document, decode in ((DOCUMENT, links.decode_peers), (REPORT, links.decode_report)):
        raw = links.encode_json(document)
        padding = b" " * (1024 * 1024 - len(raw))
        assert decode(raw + padding) == document
        assert isinstance(decode(raw + padding + b" "), Malformed)


def test_mutations_never_raise() -> None:
    rng = random.Random(3)
    for raw in (links.encode_json(DOCUMENT), links.encode_json(REPORT)):
        for _ in range(3000):
            mutant = bytearray(raw)
            for _ in range(rng.randint(1, 4)):
                mutant[rng.randrange(len(mutant))] = rng.randrange(256)
            links.decode_peers(bytes(mutant))
            links.decode_report(bytes(mutant))


def test_an_engine_named_twice_and_a_wrong_address() -> None:
    twice = links.decode_peers(links.encode_json(links.PeersDocument(1, (ENTRY, ENTRY))))
    assert twice == Malformed("an engine is named twice")
    wrong = links.PeersDocument(1, (links.PeerEntry("e", "nowhere"),))
    outcome = links.decode_peers(links.encode_json(wrong))
    assert isinstance(outcome, Malformed)
    assert "nowhere" in outcome.message


@pytest.mark.parametrize("size", [0, -1, 4097, "2", None, 1.5])
def test_data_parallel_sizes_are_bounded(size: object) -> None:
    entry = {"engine": "e", "side_channel": "h:1", "data_parallel_size": size}
    raw = json.dumps({"generation": 1, "peers": [entry]}).encode()
    assert isinstance(links.decode_peers(raw), Malformed)


def test_each_rank_has_a_port_and_their_number_is_bounded() -> None:
    def of(port: int, size: int, count: int = 1) -> links.PeersDocument | Malformed:
        entries = tuple(
            links.PeerEntry(f"e{n}", f"h:{port}", data_parallel_size=size) for n in range(count)
        )
        return links.decode_peers(links.encode_json(links.PeersDocument(1, entries)))

    assert isinstance(of(65534, 2), links.PeersDocument)
    assert of(65535, 2) == Malformed(
        "side_channel 'h:65535': data-parallel rank 1 would be on port 65536"
    )
    assert isinstance(of(1, 2048, 2), links.PeersDocument)
    assert of(1, 2048, 3) == Malformed(
        "6144 data-parallel ranks of 3 peers, more than the 4096 allowed"
    )


def test_ranks_on_several_nodes_are_where_their_node_is() -> None:
    entry = links.PeerEntry("e", "[::1]:5600", data_parallel_size=4, follower_hosts=("h1",))
    document = links.decode_peers(links.encode_json(links.PeersDocument(1, (entry,))))
    assert isinstance(document, links.PeersDocument)
    (read,) = document.peers
    assert [read.address(rank) for rank in read.data_ranks] == [
        ("::1", 5600), ("::1", 5601), ("h1", 5602), ("h1", 5603),
    ]  # fmt: skip


@pytest.mark.parametrize(("size", "hosts"), [(1, 1), (3, 1), (4, 2), (255, 255), (512, 256)])
def test_every_node_has_as_many_whole_ranks(size: int, hosts: int) -> None:
    names = tuple(f"h{n}" for n in range(hosts))
    entry = links.PeerEntry("e", "h:1", data_parallel_size=size, follower_hosts=names)
    raw = links.encode_json(links.PeersDocument(1, (entry,)))
    outcome = links.decode_peers(raw)
    assert isinstance(outcome, Malformed)
    said = f"{size} data-parallel ranks are not spread evenly over {1 + hosts} nodes"
    assert hosts > 255 or outcome.message == said


@pytest.mark.parametrize("number", ["1e400", "-1e400", "NaN", "Infinity", "-Infinity", "null"])
def test_a_bandwidth_is_a_finite_number(number: str) -> None:
    raw = links.encode_json(REPORT)
    assert raw.count(b"1500000000.0") == 1
    told = links.decode_report(raw.replace(b"1500000000.0", number.encode()))
    assert isinstance(told, Malformed)
