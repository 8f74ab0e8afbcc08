"""Conditions of several links: which link is named, and how many are counted."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest
from simulated_cluster import brought_up

from pdcluster_connector.protocol.launcher_documents import (
    CanaryReport,
    CanaryState,
    EngineReport,
    EngineState,
    LinkState,
)
from pdcluster_connector.protocol.load_report import ReceiveRate
from pdcluster_operator.api.conditions import Status, StatusReason, Verdict
from pdcluster_operator.api.object_names import EngineName
from pdcluster_operator.api.spec.types import Rdma, Role, Transfer
from pdcluster_operator.plan.observed.engines import EngineView
from pdcluster_operator.plan.observed.links import PairView
from pdcluster_operator.plan.status.conditions import (
    links_established,
    path_verified,
    transport_healthy,
)
from pdcluster_operator.plan.types import Apply, Step

PASSED = CanaryReport(CanaryState.PASSED)
FAILED = CanaryReport(CanaryState.FAILED, message="no KV moved")


def engine(role: Role, index: int) -> EngineView:
    name = EngineName("ns", "c", role, "aaaaa", index)
    return EngineView(name, True, StatusReason.ENGINES_READY, "", "x/1", "10.0.0.1", 1)


def link(index: int, state: LinkState = LinkState.ESTABLISHED, **known: Any) -> PairView:
    """Return the link of prefill engine ``index`` to the one decode engine."""
    return PairView(engine(Role.PREFILL, index), engine(Role.DECODE, 0), state, **known)


def label(index: int) -> str:
    return f"c-prefill-aaaaa-{index} -> c-decode-aaaaa-0"


def good(index: int) -> PairView:
    return link(index, canary=PASSED, bytes_per_second=2e9)


def test_failed_links_are_counted_and_the_first_of_them_is_named() -> None:
    broken = [
        link(1, LinkState.FAILED, reason="PeerRestarted", message="it is gone"),
        link(2, LinkState.FAILED, reason="BackendError", message="no route"),
    ]
    found = links_established([good(0), *broken, good(3)], {})
    assert (found.status, found.reason) == (Status.FALSE, "PeerRestarted")
    assert found.message == f"2 of 4 links failed; {label(1)}: it is gone"
    assert links_established([good(0), broken[0]], {}).message.startswith("1 of 2 links failed; ")
    alone = links_established(broken[1:], {})
    assert alone.message == f"{label(2)}: no route", "of one link, nothing is counted"


@pytest.mark.parametrize(
    ("links", "reason", "named"),
    [
        ([good(0), link(1, canary=FAILED), link(2, canary=FAILED)], "CanaryFailed", 1),
        ([good(0), link(1, LinkState.FAILED), link(2, canary=FAILED)], "CanaryFailed", 2),
        ([good(0), link(1), link(2, LinkState.FAILED)], "CanaryPending", 2),
        ([good(0), link(1), link(2, LinkState.PENDING, reason="Waiting")], "Waiting", 2),
        ([good(0), link(1), link(2)], "CanaryPending", 1),
    ],
)
def test_the_worst_link_says_why_no_kv_was_seen_to_move(
    links: list[PairView], reason: str, named: int
) -> None:
    found = path_verified(links, {})
    assert found.status != Status.TRUE
    assert found.reason == reason
    assert found.message.startswith(label(named))


def test_the_first_canary_that_failed_is_told_with_its_own_words() -> None:
    other = CanaryReport(CanaryState.FAILED, message="the request timed out")
    wordless = CanaryReport(CanaryState.FAILED)
    links = [good(0), *(link(n, canary=one) for n, one in ((1, FAILED), (2, other), (3, wordless)))]
    found = path_verified(links, {})
    assert found.message == f"{label(1)}: no KV moved"


def healthy(*links: PairView, least: int | None = 1000, before: Verdict | None = None) -> Verdict:
    was = {} if before is None else asdict(before)
    return transport_healthy(links, Transfer(min_bandwidth_mbps=least), was)


def test_slow_links_are_counted_and_the_first_of_them_is_named() -> None:
    slow = [link(1, bytes_per_second=999e6), link(2, bytes_per_second=1e6)]
    found = healthy(good(0), *slow, link(3, bytes_per_second=1000e6))
    assert (found.status, found.reason) == (Status.FALSE, StatusReason.PROBABLE_TCP_FALLBACK)
    assert found.message == f"2 of 4 links slower than 1000 MB/s; {label(1)}"
    assert healthy(good(0), link(3, bytes_per_second=1000e6)).status == Status.TRUE


def received(index: int, best: float, median: float | None = None, **known: Any) -> PairView:
    """Return a link whose probe was fast; of its receives, in MB/s."""
    rate = ReceiveRate(best * 1e6, (median or best) * 1e6, 16, 3_200_000_000)
    return replace(good(index), receives=rate, **known)


def test_a_link_is_slow_if_none_of_its_latest_receives_was_fast_enough() -> None:
    assert healthy(received(1, 1000, 300)).status == Status.TRUE, "one of them was"
    found = healthy(good(0), received(1, 999, 250))
    assert (found.status, found.reason) == (Status.FALSE, StatusReason.PROBABLE_TCP_FALLBACK)
    assert found.message == (
        f"1 of 2 links slower than 1000 MB/s; {label(1)}: its receives reached 250 MB/s, and at "
        "most 999 MB/s, in 16 measurements with 3,200 MB of KV"
    )
    many = replace(received(1, 999), message="1,000 tokens take 5,040 descriptors")
    assert healthy(many).message.endswith(" MB of KV: 1,000 tokens take 5,040 descriptors")
    assert healthy(received(1, 1), least=None).reason == StatusReason.NO_THRESHOLD
    unmeasured = replace(received(1, 999), bytes_per_second=0.0)
    assert healthy(unmeasured).reason == StatusReason.PROBABLE_TCP_FALLBACK
    lost = replace(received(1, 999), state=LinkState.FAILED)
    assert healthy(lost).reason == StatusReason.BANDWIDTH_UNMEASURED


def test_receives_are_judged_only_by_what_somebody_asked_for() -> None:
    """Eight ranks that share a NIC get an eighth of it each, and nothing is wrong with that."""
    shared = [received(0, 400)]
    rdma = Transfer(rdma=Rdma(resource="rdma/ib"))
    assert transport_healthy(shared, rdma, {}).status is Status.TRUE
    asked = replace(rdma, min_bandwidth_mbps=1000)
    assert transport_healthy(shared, asked, {}).status is Status.FALSE


def test_a_link_that_was_found_slow_recovers_once_half_of_its_receives_are_fast() -> None:
    slow = healthy(received(1, 300, 250))
    same = [(1200, 260), (900, 800), (5000, 999), (310, 250)]
    for best, median in same:
        assert healthy(received(1, best, median), before=slow) == slow, "also the message"
    assert healthy(received(1, 5000, 1000), before=slow).status == Status.TRUE
    assert healthy(good(1), before=slow).status == Status.TRUE, "a new link has a new probe"
    assert healthy(received(1, 300, 250), least=250, before=slow).status == Status.TRUE
    other = healthy(received(2, 5000, 300), before=slow)
    assert other.status == Status.TRUE, "this one was not found slow"
    again = healthy(received(1, 300, 250), received(2, 300), before=slow)
    assert again.message.startswith("2 of 2 links")


def test_a_slow_probe_comes_before_slow_receives_and_a_link_counts_once() -> None:
    both = replace(received(1, 300), bytes_per_second=5e6)
    found = healthy(received(0, 300), both)
    assert found.message == (
        f"2 of 2 links slower than 1000 MB/s; {label(1)}; slow receives also over {label(0)}"
    )


def test_each_of_several_slow_links_recovers_once_half_of_its_receives_are_fast() -> None:
    """All links of a node fall back at once, and one of them is fast by chance."""
    links = [received(index, 300, 250) for index in (1, 2, 10)]
    slow = healthy(*links)
    assert slow.message.endswith(f" of KV; slow receives also over {label(2)}, {label(10)}")
    for lucky in range(3):
        links = [received(n, 1200 if i == lucky else 300, 250) for i, n in enumerate((1, 2, 10))]
        assert healthy(*links, before=slow) == slow
    later = healthy(received(1, 5000), received(2, 5000), received(10, 1200, 250), before=slow)
    assert later.message.startswith(f"1 of 3 links slower than 1000 MB/s; {label(10)}: its rec")
    alone = healthy(received(2, 1200, 250), before=healthy(received(10, 300), received(20, 300)))
    assert alone.status == Status.TRUE, "it was not found slow"
    crowd = healthy(*(received(index, 300) for index in range(64)))
    assert crowd.message.startswith("64 of 64 links")
    assert len(crowd.message) < 4096
    assert healthy(*(received(index, 300) for index in range(64)), before=crowd) == crowd


def test_a_link_that_is_not_measured_keeps_the_speed_unknown() -> None:
    for unmeasured in (link(1), link(1, LinkState.FAILED, bytes_per_second=2e9)):
        assert healthy(good(0), unmeasured).reason == StatusReason.BANDWIDTH_UNMEASURED
    assert healthy().reason == StatusReason.BANDWIDTH_UNMEASURED
    assert healthy(link(1, bytes_per_second=1)).reason == StatusReason.PROBABLE_TCP_FALLBACK
    assert healthy(good(0), link(1, LinkState.PENDING), least=None).status == Status.UNKNOWN
    assert healthy(good(0), link(1), least=None).reason == StatusReason.NO_THRESHOLD


def test_a_link_that_failed_without_a_word_is_a_fault_of_its_backend() -> None:
    """A launcher of another version may name no reason. A condition without one is refused."""
    found = links_established([link(1, LinkState.FAILED)], {})
    assert (found.status, found.reason, found.message) == (
        Status.FALSE,
        "BackendError",
        label(1),
    )


def test_a_launcher_that_does_not_answer_is_told_before_engines_that_start() -> None:
    waits = link(0, LinkState.PENDING, reason="WaitingForEngines", message="it starts")
    silent = link(1, LinkState.UNKNOWN, reason="LauncherUnreachable", message="it is silent")
    for judge in (links_established, path_verified):
        for links in ([waits, silent], [silent, waits]):
            found = judge(links, {"status": "True"})
            assert (found.status, found.reason) == (Status.UNKNOWN, "LauncherUnreachable")
            assert found.message == "it is silent"


@pytest.mark.parametrize(
    ("before", "now"),
    [({}, "Unknown"), ({"status": "Unknown"}, "Unknown"), ({"status": "True"}, "False"),
     ({"status": "False"}, "False")],
)  # fmt: skip
def test_what_was_known_once_is_not_unknown_while_a_link_is_made_again(
    before: dict[str, str], now: str
) -> None:
    again = link(1, LinkState.PENDING, reason="LinksPending", message="1 of 2 ranks")
    for judge in (links_established, path_verified):
        found = judge([good(0), again], before)
        assert (found.status, found.reason) == (now, "LinksPending")
        assert found.message == f"{label(1)}: 1 of 2 ranks"
    waits = link(1, canary=CanaryReport())
    assert path_verified([good(0), waits], before).status == now
    assert path_verified([good(0), link(1, LinkState.FAILED)], before).status == now


def test_a_verified_pair_that_no_router_knows_does_not_serve(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The API server refuses the change of the routers, and the decode engine they know fails."""
    world = brought_up(decode={"replicas": 1})
    perform = world.perform

    def refused(step: Step) -> None:
        if not (isinstance(step, Apply) and step.manifest["kind"] == "Deployment"):
            perform(step)

    monkeypatch.setattr(world, "perform", refused)
    world.edit(decode={"replicas": 2})
    for _ in range(4):
        world.step()
        world.others_act()
    known, _ = world.leaders("decode")
    world.step()
    assert world.condition("Available")["status"] == "True"
    world.engines[known.logical] = EngineReport(
        ready=False, engine=known.logical, state=EngineState.FAILED
    )
    del world.links[known.logical]
    world.step()
    said = world.condition("Available")
    assert (said["status"], said["reason"]) == ("False", StatusReason.NO_VERIFIED_PAIR)
