"""Launchers' documents: read totally, and as the launcher really writes them."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulated_cluster import SimulatedCluster, manifest

from pdcluster_connector.launcher.links.link_table import CanaryResult, LinkTable
from pdcluster_connector.protocol.link_documents import (
    LinkReport,
    LinkState,
    PeersDocument,
    RankReport,
    decode_peers,
)
from pdcluster_operator.plan.reports import (
    ReportedState,
    parse_engine_report,
    parse_links_report,
)

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["engine", "links", "prefill", "state", "canary", "bytes", "versions"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=15,
)


@given(JSON)
def test_any_json_is_read_or_refused(document):
    parse_engine_report(document)
    report = parse_links_report(document)
    assert report is None or all(link.bytes_per_second >= 0 for link in report.links)


def test_numbers_and_texts_are_bounded():
    link = {"prefill": "p" * 9999, "bytes_per_second": float("nan"), "state": "Broken", "canary": 3}
    (read,) = parse_links_report({"links": [link, {"no": "prefill"}, 7]}).links
    assert len(read.prefill) == 1024
    assert read.bytes_per_second == 0.0
    assert read.state is ReportedState.PENDING
    assert parse_links_report({"links": [{"prefill": "p"}] * 9999}).links.__len__() == 4096


@pytest.mark.parametrize("document", [None, [], {}, {"links": {}}, {"engine": 3}])
def test_what_is_no_report(document):
    assert parse_engine_report(document) is None
    assert parse_links_report(document) is None


@pytest.mark.parametrize(
    ("value", "size"),
    [(4, 4), (1, 1), (1024, 1024), (0, None), (1025, None), (-1, None), ("2", None),
     (True, None), (2.0, None), (None, None), (10**30, None)],
)  # fmt: skip
def test_a_data_parallel_size(value, size):
    report = parse_engine_report({"engine": "e", "data_parallel_size": value})
    assert report is not None
    assert report.data_parallel_size == size


@pytest.mark.parametrize(
    ("value", "moment"),
    [(1_800_000_000, 1.8e9), (0, None), (-1, None), ("1800000000", None), (None, None),
     (253402300799, 253402300799), (253402300800, None), (10**18, None), (float("nan"), None),
     (True, None)],
)  # fmt: skip
def test_when_a_certificate_expires(value, moment):
    report = parse_engine_report({"engine": "e", "certificate_expires": value})
    assert report is not None
    assert report.certificate_expires == moment


def test_both_ends_of_the_peers_document_and_of_the_link_table():
    """Operator -> launcher -> operator, through the real types of both halves."""
    world = SimulatedCluster(manifest())
    world.step()
    world.run_pods()
    world.speak()
    (assignment,) = world.step().peers
    document = decode_peers(json.dumps(assignment.body).encode())
    assert isinstance(document, PeersDocument)
    table = LinkTable(shards=(1, 1))
    assert table.set_peers(document)
    (peer,) = document.peers
    report = LinkReport(
        peer.engine, peer.engine_id, LinkState.ESTABLISHED, bytes_per_second=2e9, establishment=1
    )
    assert table.add(RankReport((0, 0), (1, 1), (report,)), 0.0) is None
    [row] = table.rows(0.0)
    table.set_canary(row, CanaryResult("Passed", 4096))
    rows = [row.document() for row in table.rows(1.0)]
    read = parse_links_report({"engine": assignment.decode, "engine_id": "d", "links": rows})
    world.links[assignment.decode] = read
    world.route()
    world.step()
    assert world.condition("Ready")["status"] == "True"
    # The same assignment again is no news, another incarnation is.
    assert not table.set_peers(decode_peers(json.dumps(world.plan().peers[0].body).encode()))


def test_an_engine_without_prompts_has_computed_none_itself() -> None:
    report = parse_links_report({"links": [], "prompts": {"prompts": 0, "local": 0}})
    assert report is not None
    assert report.prompts is not None
    assert report.prompts.percent == 0


TEXTS = ["engine", "role", "state", "message", "side_channel", "api"]
LINK_TEXTS = ["prefill", "reason", "message", "shards"]


@pytest.mark.parametrize("field", TEXTS)
def test_each_text_of_an_engine_is_cut_at_its_length(field):
    for text in ("x" * 1024, "x" * 1025):
        report = parse_engine_report({"engine": "e", field: text})
        assert getattr(report, field) == "x" * 1024
    for wrong in (7, ["x"], None):
        report = parse_engine_report(
            {"engine": "e"} | ({field: wrong} if field != "engine" else {})
        )
        expected = {"engine": "e", "state": "Starting"}.get(field, "")
        assert getattr(report, field) == expected


@pytest.mark.parametrize("field", LINK_TEXTS)
def test_each_text_of_a_link_is_cut_at_its_length(field):
    (link,) = parse_links_report({"links": [{"prefill": "p", field: "x" * 1025}]}).links
    assert getattr(link, field) == "x" * 1024


@pytest.mark.parametrize(("length", "kept"), [(1, True), (511, True), (512, True), (513, False)])
def test_an_id_that_is_too_long_is_none_and_is_never_cut(length, kept):
    text = "i" * length
    expected = text if kept else ""
    assert parse_engine_report({"engine": "e", "engine_id": text}).engine_id == expected
    read = parse_links_report({"engine_id": text, "links": [{"prefill": "p"}]})
    assert read.engine_id == expected
    (link,) = parse_links_report({"links": [{"prefill": "p", "prefill_engine_id": text}]}).links
    assert link.prefill_engine_id == expected


@pytest.mark.parametrize(
    ("value", "read"),
    [(0, 0.0), (1, 1.0), (0.5, 0.5), (10**18, 1e18), (2 * 10**18, 0.0), (-1, 0.0), ("1", 0.0),
     (True, 0.0), (None, 0.0), (float("inf"), 0.0)],
)  # fmt: skip
def test_a_number_that_cannot_be_is_zero(value, read):
    entry = {"prefill": "p", "bytes_per_second": value, "canary": {"bytes": value}}
    (link,) = parse_links_report({"links": [entry]}).links
    assert (link.bytes_per_second, link.canary.bytes) == (read, int(read))


@pytest.mark.parametrize("value", [True, False])
def test_what_is_true_or_false_is_so_only_in_json(value):
    report = parse_engine_report({"engine": "e", "ready": value, "routed": value})
    assert (report.ready, report.routed) == (value, value)
    for other in (int(value), str(value), None, [value]):
        report = parse_engine_report({"engine": "e", "ready": other, "routed": other})
        assert (report.ready, report.routed) == (False, None)


def test_versions_are_few_and_short():
    many = {f"{n:02}" + "k" * 100: "v" * 100 for n in range(20)}
    versions = parse_engine_report({"engine": "e", "versions": many}).versions
    assert dict(versions) == {f"{n:02}" + "k" * 62: "v" * 64 for n in range(16)}
    assert parse_engine_report({"engine": "e", "versions": [1]}).versions == {}


@pytest.mark.parametrize("entry", [None, 7, "many", [1, 2]])
def test_prompts_that_are_not_counted_yet_say_nothing(entry):
    assert parse_links_report({"links": [], "prompts": entry}).prompts.percent is None
    assert parse_links_report({"links": []}).prompts is None
