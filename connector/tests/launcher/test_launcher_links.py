"""Reports of many workers become one row a link."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from hypothesis import given, strategies as st

from pdcluster_connector.launcher.links.link_table import REPORT_LIFETIME, LinkTable
from pdcluster_connector.protocol.launcher_documents import (
    CanaryReport,
    CanaryState,
    LinkState,
    PeerEntry,
    PeersDocument,
    RankLink,
    RankReport,
)
from pdcluster_connector.protocol.load_report import ReceiveRate

P0 = PeerEntry("ns.c.prefill.r.0", "10.0.0.1:5600", "ns.c.prefill.r.0/aaaa", "http://10.0.0.1:8000")
P1 = PeerEntry("ns.c.prefill.r.1", "10.0.0.2:5600", "ns.c.prefill.r.1/bbbb", "http://10.0.0.2:8000")
UP, DOWN, WAIT = LinkState.ESTABLISHED, LinkState.FAILED, LinkState.PENDING


def table(*peers: PeerEntry, shards: tuple[int, int] = (1, 2)) -> LinkTable:
    links = LinkTable(shards)
    links.set_peers(PeersDocument(1, peers, "llama", 60))
    return links


def link(state: LinkState, peer: PeerEntry = P0, engine_id: str = "", **more) -> RankLink:
    if state is UP:
        more.setdefault("establishment", 1)
    return RankLink(peer.engine, engine_id or peer.engine_id, state, **more)


def test_before_any_report():
    (row,) = table(P0).rows(now=0.0)
    assert msgspec.to_builtins(row.report) == {
        "prefill": P0.engine,
        "prefill_engine_id": P0.engine_id,
        "state": "Pending",
        "reason": "",
        "message": "first report pending from worker (data,pipeline,tensor) 0,0,0, 0,0,1",
        "shards": "0/2",
        "bytes_per_second": 0.0,
        "canary": {"state": "Pending", "bytes": 0, "message": ""},
    }


def test_established_only_when_every_worker_is():
    links = table(P0)
    links.add(RankReport((0, 0), (1, 2), (link(UP, bytes_per_second=5e9),)), 0.0)
    (row,) = links.rows(1.0)
    assert (row.report.state, row.report.shards) == (WAIT, "1/2")
    assert "0,0,1" in row.report.message
    assert "0,0,0" not in row.report.message
    links.add(RankReport((0, 1), (1, 2), (link(UP, bytes_per_second=3e9),)), 1.0)
    (row,) = links.rows(1.0)
    assert (row.report.state, row.report.shards, row.report.message) == (UP, "2/2", "")
    assert row.report.bytes_per_second == 3e9


def test_the_receives_of_the_slowest_worker_are_told_with_both_its_numbers():
    links = table(P0)
    assert "receives" not in msgspec.to_builtins(links.rows(0.0)[0].report)
    rates = [ReceiveRate(2e9, 1e8, 16, 2**30), ReceiveRate(1e9, 9e8, 8, 2**29)]
    for tensor, rate in enumerate(rates):
        links.add(RankReport((0, tensor), (1, 2), (link(UP, receives=rate),)), 0.0)
    assert links.rows(0.0)[0].report.receives == rates[1]
    links.add(RankReport((0, 1), (1, 2), (link(UP),)), 0.0)
    assert links.rows(0.0)[0].report.receives == rates[0]


@given(st.lists(st.sampled_from([UP, DOWN, WAIT, None]), min_size=4, max_size=4))
def test_state_of_all_mixtures(states):
    links = table(P0, shards=(2, 2))
    places = list(itertools.product(range(2), range(2)))
    for place, state in zip(places, states, strict=True):
        if state is not None:
            links.add(RankReport(place, (2, 2), (link(state, reason=str(place)),)), 0.0)
    (row,) = links.rows(0.0)
    assert row.report.shards == f"{states.count(UP)}/4"
    if DOWN in states:
        assert row.report.state is DOWN
        assert row.report.reason == str(places[states.index(DOWN)])
    else:
        assert row.report.state is (UP if states == [UP] * 4 else WAIT)


@given(st.lists(st.sampled_from([UP, DOWN, WAIT, None]), max_size=3))
def test_no_link_works_only_if_each_is_known_to_have_failed(states):
    """An engine without peers, or whose links are still made, stays with the routers."""
    peers = [msgspec.structs.replace(P0, engine=f"ns.c.prefill.r.{n}") for n in range(len(states))]
    links = table(*peers, shards=(1, 1))
    found = [
        link(state, peer, reason="PeerRestarted")
        for peer, state in zip(peers, states, strict=True)
        if state is not None
    ]
    links.add(RankReport((0, 0), (1, 1), tuple(found)), 0.0)
    none_works = bool(states) and set(states) == {DOWN}
    assert links.why_none_works(0.0) == ("PeerRestarted" if none_works else "")
    assert links.why_none_works(REPORT_LIFETIME + 1) == "", "what is not known is no failure"


def test_one_failed_rank_of_tensor_parallelism_fails_every_request():
    links = table(P0)
    links.add(RankReport((0, 0), (1, 2), (link(UP),)), 0.0)
    links.add(RankReport((0, 1), (1, 2), (link(DOWN, reason="BackendError"),)), 0.0)
    assert links.why_none_works(0.0) == "BackendError"


# Data-parallel engines: P2 is one of two ranks, each with a side channel.

P2 = PeerEntry(P0.engine, "10.0.0.1:5600", P0.engine_id, data_parallel_size=2)


def told(links: LinkTable, own: int, states: dict[int, LinkState], now: float = 0.0, **more) -> str:
    """Report, as data-parallel rank ``own``, a state for each of the peer's ranks."""
    found = tuple(link(state, P2, data_rank=rank, **more) for rank, state in states.items())
    return links.add(RankReport((0, 0), (1, 1), found, own), now) or ""


def ranks(own: int) -> LinkTable:
    links = LinkTable((1, 1), own)
    links.set_peers(PeersDocument(1, (P2,), "llama", 60))
    return links


@given(st.lists(st.sampled_from([UP, DOWN, WAIT, None]), min_size=4, max_size=4))
def test_every_pair_of_data_parallel_ranks_counts(states):
    links = ranks(2)
    pairs = dict(zip(itertools.product(range(2), range(2)), states, strict=True))
    for own in range(2):
        known = {n: pairs[own, n] for n in range(2) if pairs[own, n] is not None}
        assert not told(links, own, known, message="it broke")
    (row,) = links.rows(0.0)
    assert row.report.shards == f"{states.count(UP)}/4"
    if DOWN in states:
        own, theirs = next(pair for pair, state in pairs.items() if state is DOWN)
        assert row.report.state is DOWN
        where = f"prefill's data-parallel rank {theirs}, decode's data-parallel rank {own}"
        assert row.report.message == f"{where}: it broke"
    else:
        assert row.report.state is (UP if states == [UP] * 4 else WAIT)
        for own in range(2):
            silent = None in (pairs[own, 0], pairs[own, 1])
            assert (f"{own},0,0" in row.report.message) == silent


def test_the_failure_of_one_of_several_ranks_names_it_and_only_the_end_that_has_ranks():
    links = ranks(1)
    told(links, 0, {0: UP, 1: DOWN}, message="connection refused", reason="SideChannelUnreachable")
    (row,) = links.rows(0.0)
    assert row.report.message == "prefill's data-parallel rank 1: connection refused"
    assert (row.report.reason, row.report.shards) == ("SideChannelUnreachable", "1/2")


def test_a_link_between_data_parallel_engines_works_while_a_part_of_it_does():
    links = LinkTable((1, 1), 2)
    links.set_peers(PeersDocument(1, (P2,), "llama", 60))
    told(links, 0, {0: UP, 1: DOWN}, reason="PeerRestarted")
    told(links, 1, {0: DOWN, 1: DOWN}, reason="PeerRestarted")
    assert links.why_none_works(0.0) == ""
    told(links, 0, {0: DOWN, 1: DOWN}, reason="PeerRestarted")
    assert links.why_none_works(0.0) == "PeerRestarted"


def test_ranks_of_two_incarnations_are_not_established():
    links = ranks(1)
    old, new = link(UP, P2), link(UP, P2, f"{P2.engine}/cccc", data_rank=1)
    links.add(RankReport((0, 0), (1, 1), (old, new)), 0.0)
    (row,) = links.rows(0.0)
    assert row.report.state is WAIT
    assert "several incarnations" in row.report.message


def test_a_rank_that_stands_again_needs_another_canary():
    links = ranks(1)
    told(links, 0, {0: UP, 1: UP})
    before = links.rows(0.0)[0]
    assert before.establishment == (1, 1)
    links.set_canary(before, CanaryReport(CanaryState.PASSED, 8192), 0.0)
    assert links.rows(0.0)[0].report.canary.bytes == 8192
    again = link(UP, P2), link(UP, P2, data_rank=1, establishment=2)
    links.add(RankReport((0, 0), (1, 1), again), 1.0)
    assert links.rows(1.0)[0].report.canary == CanaryReport()


def test_a_data_parallel_rank_that_this_engine_has_not_is_refused():
    assert told(ranks(2), 2, {0: UP}) == "data_rank is 2, but data_parallel_size is 2"
    assert told(ranks(1), 1, {0: UP})


def test_ranks_that_the_peer_has_not_are_not_counted():
    links = table(P0, shards=(1, 1))
    told(links, 0, {0: UP, 1: DOWN, 5: UP})
    (row,) = links.rows(0.0)
    assert (row.report.state, row.report.shards) == (UP, "1/1")


def test_an_old_report_is_not_believed():
    links = table(P0, shards=(1, 1))
    links.add(RankReport((0, 0), (1, 1), (link(UP),)), 100.0)
    assert links.rows(100.0 + REPORT_LIFETIME)[0].report.state is UP
    stale = links.rows(100.1 + REPORT_LIFETIME)[0]
    assert stale.report.state is WAIT
    assert stale.report.shards == "0/1"
    silent = "no report in the last 15 s from worker (data,pipeline,tensor) 0,0,0"
    assert stale.report.message == silent
    # Nor is an old failure: nobody knows.
    links.add(RankReport((0, 0), (1, 1), (link(DOWN, reason="BackendError"),)), 200.0)
    assert links.rows(200.0)[0].report.state is DOWN
    assert links.rows(201.0 + REPORT_LIFETIME)[0].report.state is WAIT


def test_a_worker_that_has_not_heard_of_a_new_peer_is_not_called_silent():
    """A peer that is told between two reports: the worker is well, its report is on the way."""
    links = table(P0, shards=(1, 1))
    links.add(RankReport((0, 0), (1, 1), (link(UP),)), 100.0)
    links.set_peers(PeersDocument(2, (P0, P1), "llama"))
    fresh, gone = links.rows(101.0)[1], links.rows(101.0 + REPORT_LIFETIME)[1]
    assert fresh.report.message == "first report pending from worker (data,pipeline,tensor) 0,0,0"
    assert gone.report.message.startswith("no report in the last 15 s from worker")


def test_a_report_replaces_the_former_whole():
    links = table(P0, P1, shards=(1, 1))
    links.add(RankReport((0, 0), (1, 1), (link(UP), link(UP, P1))), 0.0)
    links.add(RankReport((0, 0), (1, 1), (link(UP, P1),)), 1.0)
    assert [row.report.state for row in links.rows(1.0)] == [WAIT, UP]


def test_a_newer_incarnation_that_all_workers_see_is_shown():
    links = table(P0)
    newer = f"{P0.engine}/cccc"
    links.add(RankReport((0, 0), (1, 2), (link(UP, engine_id=newer),)), 0.0)
    links.add(RankReport((0, 1), (1, 2), (link(UP),)), 0.0)
    (row,) = links.rows(0.0)
    assert row.report.state is WAIT
    assert "several incarnations" in row.report.message
    links.add(RankReport((0, 1), (1, 2), (link(UP, engine_id=newer),)), 0.0)
    (row,) = links.rows(0.0)
    assert (row.report.state, row.report.prefill_engine_id) == (UP, newer)


def test_a_canary_counts_for_one_incarnation():
    links = table(P0, shards=(1, 1))
    links.add(RankReport((0, 0), (1, 1), (link(UP),)), 0.0)
    links.set_canary(links.rows(0.0)[0], CanaryReport(CanaryState.PASSED, 4096), 0.0)
    assert links.rows(0.0)[0].report.canary == CanaryReport(CanaryState.PASSED, 4096)
    links.add(RankReport((0, 0), (1, 1), (link(UP, engine_id="restarted"),)), 1.0)
    assert links.rows(1.0)[0].report.canary.state == "Pending"


@pytest.mark.parametrize("seen", [True, False])
def test_a_canary_counts_for_one_establishment(seen):
    """A link that was lost needs another one, also when nobody heard that it was lost."""
    links = table(P0)
    for rank in ((0, 0), (0, 1)):
        links.add(RankReport(rank, (1, 2), (link(UP, establishment=1),)), 0.0)
    before = links.rows(0.0)[0]
    links.set_canary(before, CanaryReport(CanaryState.PASSED, 4096), 0.0)
    if seen:
        links.add(RankReport((0, 1), (1, 2), (link(DOWN),)), 1.0)
        assert links.rows(1.0)[0].report.canary == CanaryReport()
    links.add(RankReport((0, 1), (1, 2), (link(UP, establishment=2),)), 2.0)
    after = links.rows(2.0)[0]
    assert (after.report.state, after.report.canary) == (UP, CanaryReport())
    # It was under way when the link was lost.
    links.set_canary(before, CanaryReport(CanaryState.PASSED, 1), 0.0)
    assert links.rows(2.0)[0].report.canary == CanaryReport()
    links.set_canary(after, CanaryReport(CanaryState.PASSED, 2), 0.0)
    assert links.rows(2.0)[0].report.canary == CanaryReport(CanaryState.PASSED, 2)


def test_silent_workers_do_not_cost_the_canary():
    links = table(P0, shards=(1, 1))
    links.add(RankReport((0, 0), (1, 1), (link(UP),)), 0.0)
    links.set_canary(links.rows(0.0)[0], CanaryReport(CanaryState.PASSED, 1), 0.0)
    assert links.rows(100.0)[0].report.canary == CanaryReport()
    links.add(RankReport((0, 0), (1, 1), (link(UP),)), 100.0)
    assert links.rows(100.0)[0].report.canary == CanaryReport(CanaryState.PASSED, 1)


PASSED = CanaryReport(CanaryState.PASSED, 4096)
FAILED = CanaryReport(CanaryState.FAILED, message="0 bytes moved")
BUSY = CanaryReport(message="answered 503")


def test_a_canary_without_a_result_leaves_the_last_one_with_its_age():
    links = table(P0, shards=(1, 1))

    def after(result: CanaryReport, at: float) -> CanaryReport:
        links.add(RankReport((0, 0), (1, 1), (link(UP),)), at)
        links.set_canary(links.rows(at)[0], result, at)
        return links.rows(at + 5.5)[0].report.canary

    assert after(BUSY, 0.0) == BUSY, "there is none that could stand"
    for known, said in ((PASSED, "no newer result: answered 503"), (FAILED, FAILED.message)):
        assert after(known, 100.0) == known
        for at in (200.0, 300.0):
            stands = after(BUSY, at)
            assert stands == msgspec.structs.replace(
                known, message=said, age_seconds=int(at) - 100 + 5
            )
        assert after(PASSED, 400.0) == PASSED
    # Another establishment needs a result of its own.
    links.add(RankReport((0, 0), (1, 1), (link(UP, establishment=2),)), 500.0)
    links.set_canary(links.rows(500.0)[0], BUSY, 500.0)
    assert links.rows(500.0)[0].report.canary == BUSY


def test_the_clock_that_differs_most_is_shown():
    links = table(P0)
    links.add(RankReport((0, 0), (1, 2), (link(UP, clock_skew_seconds=2.0),)), 0.0)
    links.add(RankReport((0, 1), (1, 2), (link(UP),)), 0.0)
    assert links.rows(0.0)[0].report.clock_skew_seconds == 2.0
    links.add(RankReport((0, 1), (1, 2), (link(UP, clock_skew_seconds=-61.0),)), 1.0)
    assert links.rows(1.0)[0].report.clock_skew_seconds == -61.0
    assert msgspec.to_builtins(links.rows(1.0)[0].report)["clock_skew_seconds"] == -61.0


def test_the_worker_that_needs_most_descriptors_is_shown():
    links = table(P0)
    links.add(RankReport((0, 0), (1, 2), (link(UP, descriptors=64),)), 0.0)
    links.add(RankReport((0, 1), (1, 2), (link(UP, descriptors=2048),)), 0.0)
    assert links.rows(0.0)[0].report.descriptors == 2048
    links.add(RankReport((0, 1), (1, 2), (link(DOWN, descriptors=9999),)), 0.0)
    assert links.rows(0.0)[0].report.descriptors == 64


def test_a_canary_of_a_peer_that_is_gone_is_forgotten():
    links = table(P0, shards=(1, 1))
    links.add(RankReport((0, 0), (1, 1), (link(UP), link(UP, P1))), 0.0)
    links.set_canary(links.rows(0.0)[0], CanaryReport(CanaryState.PASSED, 1), 0.0)
    links.set_peers(PeersDocument(2, (P1,), "llama"))
    links.set_peers(PeersDocument(3, (P0,), "llama"))
    assert links.rows(0.0)[0].report.canary.state == "Pending"


def test_generation_grows_with_every_change_and_only_then():
    links = LinkTable((1, 1))
    assert links.set_peers(PeersDocument(7, (P0,), "llama"))
    assert links.peers.generation == 7
    assert not links.set_peers(PeersDocument(8, (P0,), "llama"))
    assert links.peers.generation == 7
    # A restarted operator may count from 1 again.
    assert links.set_peers(PeersDocument(1, (P0, P1), "llama"))
    assert links.peers.generation == 8
    assert [row.peer for row in links.rows(0.0)] == [P0, P1]


@pytest.mark.parametrize(
    ("rank", "of"), [((0, 0), (1, 1)), ((0, 2), (1, 2)), ((1, 0), (1, 2)), ((0, 0), (2, 2))]
)
def test_reports_of_another_shape_are_refused(rank, of):
    links = table(P0)
    assert links.add(RankReport(rank, of, (link(UP),)), 0.0)
    assert links.rows(0.0)[0].report.shards == "0/2"


def test_long_messages_are_cut():
    links = table(P0, shards=(1, 1))
    links.add(RankReport((0, 0), (1, 1), (link(DOWN, message="x" * 100_000),)), 0.0)
    assert len(links.rows(0.0)[0].report.message) == 1024


def test_an_established_link_says_what_makes_it_slow() -> None:
    links = table(P0)
    links.add(RankReport((0, 0), (1, 2), (link(UP),)), 0.0)
    links.add(RankReport((0, 1), (1, 2), (link(UP, message="many descriptors"),)), 0.0)
    row = links.rows(0.0)[0]
    assert (row.report.state, row.report.reason, row.report.message) == (UP, "", "many descriptors")
