"""The documents of launchers: as the operator reads them, and as launchers really write them."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given, strategies as st
from simulated_cluster import SimulatedCluster, manifest

from launcher_answers import decode_engine, decode_links
from pdcluster_connector.launcher.links.link_table import LinkTable
from pdcluster_connector.protocol.launcher_documents import (
    CanaryReport,
    CanaryState,
    ChangesReport,
    EngineReport,
    EngineState,
    LinkReport,
    LinksReport,
    LinkState,
    PeersDocument,
    RankLink,
    RankReport,
    decode_changes,
    decode_peers,
    encode_json,
)
from pdcluster_connector.protocol.load_report import ReceiveRate
from pdcluster_connector.protocol.messages import Malformed

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


NEXT = {"prefill": "q"}


def engine(**fields: object) -> EngineReport | Malformed:
    return decode_engine(json.dumps({"engine": "e", **fields}).encode())


def links(*entries: object, **fields: object) -> LinksReport | Malformed:
    document = {"engine": "e", "engine_id": "e/1", "links": entries, **fields}
    return decode_links(json.dumps(document).encode())


def link(**fields: object) -> LinkReport | None:
    """Read one link; None if the document is refused."""
    report = links({"prefill": "p", **fields})
    return report.links[0] if isinstance(report, LinksReport) else None


@given(st.binary(max_size=200) | JSON.map(lambda document: json.dumps(document).encode()))
def test_any_bytes_are_read_or_refused(raw: bytes) -> None:
    decode_engine(raw)
    decode_changes(raw)
    report = decode_links(raw)
    assert isinstance(report, Malformed) or all(one.bytes_per_second >= 0 for one in report.links)


@pytest.mark.parametrize(
    "document",
    [
        None,
        [],
        {},
        {"links": {}},
        {"engine": 3},
        {"engine": ""},
        {"engine": 3, "engine_id": "e/1", "links": {"prefill": "p"}, "revision": 7},
    ],
)
def test_what_is_no_report(document: object) -> None:
    raw = json.dumps(document).encode()
    assert isinstance(decode_engine(raw), Malformed)
    assert isinstance(decode_links(raw), Malformed)
    assert isinstance(decode_changes(raw), Malformed)


@pytest.mark.parametrize("wrong", [None, 7, {}, {"prefill": "p"}, "many"])
def test_what_is_no_list_of_links_is_no_report(wrong: object) -> None:
    document = {"engine": "e", "engine_id": "e/1", "links": wrong}
    assert isinstance(decode_links(json.dumps(document).encode()), Malformed)


def test_what_an_older_launcher_leaves_out_has_a_default() -> None:
    assert engine() == EngineReport(engine="e")
    report = EngineReport(engine="e")
    assert (report.ready, report.state, report.routed) == (False, EngineState.STARTING, None)
    assert (report.data_parallel_size, report.certificate_expires) == (None, None)
    assert link() == LinkReport("p")
    assert (LinkReport("p").state, CanaryReport().state) == ("Pending", "Pending")
    assert decode_changes(b'{"revision": "ab"}') == ChangesReport("ab", None, None)


def test_what_a_newer_launcher_adds_is_passed_over() -> None:
    later = {"later": {"field": [1]}}
    assert engine(**later) == engine()
    assert link(**later) == link()
    assert links(**later) == links()


def test_a_state_of_a_newer_launcher_is_unknown() -> None:
    read = engine(state="Hibernating")
    assert isinstance(read, EngineReport)
    assert read.state is EngineState.UNKNOWN
    found = link(state="Degraded", canary={"state": "Skipped"})
    assert found is not None
    assert (found.state, found.canary.state) == (LinkState.UNKNOWN, CanaryState.UNKNOWN)


def test_how_many_links_there_may_be() -> None:
    entry = {"prefill": "p"}
    for count in (4096, 4097):
        report = links(*[entry] * count)
        assert isinstance(report, LinksReport)
        assert len(report.links) == 4096


@pytest.mark.parametrize(
    ("value", "valid"),
    [(4, True), (1, True), (1024, True), (None, True), (0, False), (1025, False), (-1, False),
     ("2", False), (True, False), (10**30, False)],
)  # fmt: skip
def test_a_data_parallel_size(value: object, valid: bool) -> None:
    report = engine(ready=True, data_parallel_size=value)
    size = value if valid else None
    assert report == EngineReport(engine="e", ready=True, data_parallel_size=size)


@pytest.mark.parametrize(
    ("value", "valid"),
    [(1_800_000_000, True), (None, True), (253402300799, True), (0, False), (-1, False),
     ("1800000000", False), (253402300800, False), (10**18, False), (True, False)],
)  # fmt: skip
def test_when_a_certificate_expires(value: object, valid: bool) -> None:
    report = engine(ready=True, certificate_expires=value)
    moment = value if valid else None
    assert report == EngineReport(engine="e", ready=True, certificate_expires=moment)


@pytest.mark.parametrize(
    ("value", "read"),
    [(0, 0.0), (1, 1.0), (0.5, 0.5), (10**18, 1e18), (2 * 10**18, 0.0), (-1, 0.0), ("1", 0.0),
     (True, 0.0), (None, 0.0)],
)  # fmt: skip
def test_a_bandwidth_that_cannot_be_is_not_known(value: object, read: float) -> None:
    report = links({"prefill": "p", "state": "Established", "bytes_per_second": value}, NEXT)
    first = LinkReport("p", state=LinkState.ESTABLISHED, bytes_per_second=read)
    assert report == LinksReport("e", "e/1", (first, LinkReport("q")))


RATE = {"best": 2e9, "median": 1e9, "count": 16, "bytes": 2**30}


@pytest.mark.parametrize(
    "value",
    [
        None,
        7,
        {},
        {"best": 2e9},
        {**RATE, "best": -1},
        {**RATE, "median": "1"},
        {**RATE, "count": None},
    ],
)
def test_a_rate_of_receives_that_cannot_be_is_not_known(value: object) -> None:
    assert link(state="Established", receives=value) == link(state="Established")
    found = link(state="Established", receives={**RATE, "of a newer version": 1})
    assert found is not None
    assert found.receives == ReceiveRate(2e9, 1e9, 16, 2**30)


@pytest.mark.parametrize("value", [-1, 2**63, 10**30, "1", True, None])
def test_an_amount_of_kv_that_cannot_be_is_not_known(value: object) -> None:
    found = link(state="Established", canary={"state": "Passed", "bytes": value})
    assert found is not None
    assert (found.state, found.canary) == ("Established", CanaryReport(CanaryState.PASSED))


@pytest.mark.parametrize("field", ["role", "engine_id", "side_channel", "api"])
def test_each_name_of_an_engine_is_bounded(field: str) -> None:
    assert engine(**{field: "x" * 512}) == EngineReport(engine="e", **{field: "x" * 512})
    for wrong in ("x" * 513, 7, ["x"], None):
        assert engine(ready=True, **{field: wrong}) == EngineReport(engine="e", ready=True)


@pytest.mark.parametrize("field", ["prefill_engine_id", "reason", "shards"])
def test_each_name_of_a_link_is_bounded(field: str) -> None:
    assert link(**{field: "x" * 512}) == LinkReport("p", **{field: "x" * 512})
    for wrong in ("x" * 513, 7, ["x"], None):
        assert link(state="Failed", **{field: wrong}) == LinkReport("p", state=LinkState.FAILED)


@pytest.mark.parametrize("wrong", [7, None, [], {}, {"prefill": ""}, {"prefill": "x" * 513}])
def test_a_link_to_nobody_hides_no_other_link(wrong: object) -> None:
    assert links(wrong, NEXT) == LinksReport("e", "e/1", (LinkReport("q"),))


@pytest.mark.parametrize("wrong", [7, None, "Passed", [{"state": "Passed"}]])
def test_a_canary_that_cannot_be_read_has_not_passed(wrong: object) -> None:
    assert link(state="Established", canary=wrong) == LinkReport("p", state=LinkState.ESTABLISHED)


@pytest.mark.parametrize("wrong", [7, None, ["Ready"]])
def test_a_state_that_cannot_be_read_is_that_of_the_beginning(wrong: object) -> None:
    assert engine(ready=True, state=wrong) == EngineReport(engine="e", ready=True)
    assert link(state=wrong) == LinkReport("p")


def test_a_long_message_is_cut() -> None:
    """The last words of an engine may be long. An engine that failed must be read all the same."""
    for length in (1024, 1025, 9999):
        words = "x" * length
        read, found = engine(message=words), link(message=words, canary={"message": words})
        assert isinstance(read, EngineReport)
        assert found is not None
        assert read.message == found.message == found.canary.message == "x" * 1024


@pytest.mark.parametrize("value", [True, False])
def test_what_is_true_or_false_is_so_only_in_json(value: bool) -> None:
    report = engine(ready=value, routed=value)
    assert isinstance(report, EngineReport)
    assert (report.ready, report.routed) == (value, value)
    for other in (int(value), str(value), [value], None):
        assert engine(ready=other, routed=other) == EngineReport(engine="e")


def test_versions_are_bounded() -> None:
    most = {f"{n}": "v" * 512 for n in range(64)}
    assert engine(versions=most) == EngineReport(engine="e", versions=most)
    for wrong in ({**most, "more": "v"}, {"vllm": "v" * 513}, {"vllm": 1}, [1]):
        assert engine(versions=wrong) == EngineReport(engine="e")


def test_prompts_that_are_not_counted_yet_are_not_those_that_are_never_counted() -> None:
    known, unknown, never = links(prompts={"prompts": 0, "local": 0}), links(prompts=None), links()
    assert isinstance(known, LinksReport)
    assert isinstance(unknown, LinksReport)
    assert isinstance(never, LinksReport)
    assert known.prompts
    assert known.prompts.percent == 0
    assert unknown.prompts is None
    assert never.prompts is msgspec.UNSET
    for report in (known, unknown, never):
        assert decode_links(encode_json(report)) == report
    for wrong in (7, "many", [1, 2]):
        assert links(prompts=wrong) == unknown
    counts = links(prompts={"prompts": 40, "local": "few", "cause": 7, "window_seconds": -1})
    assert isinstance(counts, LinksReport)
    assert counts.prompts
    assert (counts.prompts.prompts, counts.prompts.local, counts.prompts.cause) == (40, 0, "")


def test_both_ends_of_the_peers_document_and_of_the_link_table():
    """Operator -> launcher -> operator, through the real types of both halves."""
    world = SimulatedCluster(manifest())
    world.step()
    world.run_pods()
    world.speak()
    [(decode, assignment)] = world.step().peers.items()
    document = decode_peers(encode_json(assignment))
    assert document == assignment
    table = LinkTable(shards=(1, 1))
    assert isinstance(document, PeersDocument)
    assert table.set_peers(document)
    (peer,) = document.peers
    report = RankLink(
        peer.engine, peer.engine_id, LinkState.ESTABLISHED, bytes_per_second=2e9, establishment=1
    )
    assert table.add(RankReport((0, 0), (1, 1), (report,)), 0.0) is None
    [row] = table.rows(0.0)
    table.set_canary(row, CanaryReport(CanaryState.PASSED, 4096), 0.0)
    rows = tuple(row.report for row in table.rows(1.0))
    read = decode_links(encode_json(LinksReport(decode, "d", rows)))
    world.links[decode] = read
    world.route()
    world.step()
    assert world.condition("Ready")["status"] == "True"
    # The same assignment again is no news, another incarnation is.
    assert not table.set_peers(decode_peers(encode_json(world.plan().peers[decode])))
