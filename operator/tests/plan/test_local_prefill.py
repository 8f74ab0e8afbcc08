"""When decode computes prompts itself: above which share, until when, and what is said of it."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings, strategies as st
from msgspec import UNSET, structs
from simulated_cluster import SimulatedCluster, brought_up, manifest

from pdcluster_connector.compat.reasons import Reason
from pdcluster_connector.protocol.launcher_documents import (
    LEAST_PROMPTS,
    LinksReport,
    PromptsReport,
)
from pdcluster_connector.protocol.prompt_outcomes import NOT_DUE, LocalReason
from pdcluster_operator.plan.status.conditions import local_share


def running(most: int | None = None, **roles):
    spec = {} if most is None else {"verification": {"maxLocalShare": most}}
    return brought_up(**spec, **roles)


def judged(world: SimulatedCluster) -> str:
    """The condition after one look, and that nothing else is False because of it."""
    world.step()
    condition = world.condition("TransportHealthy")
    assert (condition["status"] == "False") is (condition["reason"] == "LocalPrefill")
    return condition["status"]


def seen(world: SimulatedCluster, prompts: int, local: int, cause: str = "NoTicket") -> str:
    world.count_prompts(prompts, local, cause)
    return judged(world)


def test_one_request_is_no_share():
    world = running()
    assert seen(world, LEAST_PROMPTS - 1, LEAST_PROMPTS - 1) == "True"
    assert seen(world, LEAST_PROMPTS, 1) == "True"
    assert seen(world, LEAST_PROMPTS, 2) == "False"


def test_it_turns_back_when_the_window_is_clean():
    world = running(10)
    assert seen(world, 100, 11) == "False"
    message = world.condition("TransportHealthy")["message"]
    assert "maxLocalShare is 10 %" in message, "true at 11 % and at 6 %"
    assert seen(world, 100, 6) == "False", "below the limit, but not by much"
    assert seen(world, 10, 1) == "False", "too few prompts to say that it is over"
    assert world.condition("TransportHealthy")["message"] == message
    assert seen(world, 100, 5) == "True"
    assert seen(world, 100, 6) == "True"
    assert seen(world, 100, 11) == "False"
    assert seen(world, 0, 0) == "True", "nothing is computed any more"


def limits_and_shares(most: int) -> st.SearchStrategy[tuple[int, list[int]]]:
    """Half of the shares lie beside the two limits, where the state may change."""
    beside = st.sampled_from([most // 2, most // 2 + 1, most, most + 1])
    return st.tuples(st.just(most), st.lists(beside | st.integers(0, 100), min_size=5, max_size=20))


@settings(max_examples=settings().max_examples // 5)  # each share costs a whole plan
@given(st.integers(0, 99).flatmap(limits_and_shares))
def test_each_flip_crosses_the_whole_distance(drawn: tuple[int, list[int]]):
    most, shares = drawn
    world = running(most)
    state = "True"
    for share in shares:
        now = seen(world, 100, share)
        if state == "True":
            assert now == ("False" if share > most else "True")
        else:
            assert now == ("True" if share <= most // 2 else "False")
        state = now


def test_a_hundred_percent_turns_it_off():
    world = running(100)
    assert seen(world, 100, 100) == "True"
    world = running(5)
    assert seen(world, 100, 100) == "False"
    world.edit(verification={"maxLocalShare": 100})
    assert judged(world) == "True"


def test_a_launcher_that_is_silent_from_the_beginning_says_nothing_of_prompts():
    world = SimulatedCluster(manifest(transfer={"device": "CPU", "minBandwidthMBps": 1000}))
    world.settle()
    world.run_pods()
    for _ in range(2):
        world.step()
        assert world.condition("TransportHealthy")["reason"] == "BandwidthUnmeasured"


def test_zero_allows_none():
    world = running(0)
    assert seen(world, 1000, 0) == "True"
    assert seen(world, 1000, 1) == "False"
    assert seen(world, 1000, 0) == "True"


def test_one_engine_of_many_is_named():
    world = running(decode={"replicas": 3})
    world.count_prompts(1000)
    assert judged(world) == "True"
    decode = world.leaders("decode")[1]
    prompts = PromptsReport(50, 30, "LeaseExpired")
    world.links[decode.logical] = structs.replace(world.links[decode.logical], prompts=prompts)
    assert judged(world) == "False"
    message = world.condition("TransportHealthy")["message"]
    assert decode.stateful_set in message
    assert "leaseSeconds" in message
    # One before it that counts no prompts, as an older connector, hides nothing.
    first = world.leaders("decode")[0].logical
    world.links[first] = structs.replace(world.links[first], prompts=UNSET)
    assert judged(world) == "False"
    assert world.condition("TransportHealthy")["message"] == message


def test_an_engine_that_cannot_be_asked_is_unknown_and_not_well():
    world = running()
    links = dict(world.links)
    world.links.clear()
    assert judged(world) == "Unknown"
    assert world.condition("TransportHealthy")["reason"] == "BandwidthUnmeasured"
    world.links.update(links)
    assert judged(world) == "True"
    assert seen(world, 100, 50) == "False"
    before = dict(world.links)
    world.links.clear()
    assert judged(world) == "Unknown"
    assert judged(world) == "Unknown"
    assert world.condition("TransportHealthy")["reason"] == "LauncherUnreachable"
    [engine] = world.leaders("decode")
    del world.engines[engine.logical]  # now it is not known either whether the engine is ready
    assert judged(world) == "Unknown"
    assert world.condition("TransportHealthy")["reason"] == "LauncherUnreachable"
    world.links.update(before)
    assert judged(world) == "False"


def test_an_engine_that_is_known_to_be_gone_is_not_judged():
    world = running()
    assert seen(world, 100, 50) == "False"
    (decode,) = world.links
    world.engines[decode] = structs.replace(world.engines[decode], ready=False, state="Draining")
    assert judged(world) == "Unknown", "nothing is measured, but the share is not held against it"
    assert world.condition("DecodeReady")["status"] == "False"


def test_an_engine_that_has_not_counted_yet_changes_nothing():
    world = running()
    nothing = None
    (decode,) = world.links
    world.links[decode] = structs.replace(world.links[decode], prompts=nothing)
    assert judged(world) == "True"
    assert seen(world, 100, 50) == "False"
    world.links[decode] = structs.replace(world.links[decode], prompts=nothing)
    assert judged(world) == "False"
    world.links[decode] = structs.replace(world.links[decode], prompts=UNSET)
    assert judged(world) == "True", "a launcher of the version before knows nothing of it"


CAUSES = [*LocalReason, *Reason, "NewReason"]


@pytest.mark.parametrize("cause", [str(cause) for cause in CAUSES if cause not in NOT_DUE])
def test_each_cause_has_a_remedy_and_no_number_that_changes(cause: str):
    world = running(7)
    assert seen(world, 1234, 567, cause) == "False"
    message = world.condition("TransportHealthy")["message"]
    assert f"because of {cause}: " in message
    stateless = message.replace(world.leaders("decode")[0].stateful_set, "")
    assert re.findall(r"\d+", stateless) == ["7"]


def test_a_condition_tells_a_missing_signature_from_a_wrong_one():
    """The first is a prefill engine without the key, the second may be somebody's attempt."""
    messages = {}
    for cause in (Reason.UNSIGNED, Reason.FORGED):
        world = running()
        assert seen(world, 100, 50, cause) == "False"
        messages[cause] = world.condition("TransportHealthy")["message"]
    assert "Prefill does not sign its tickets" in messages[Reason.UNSIGNED]
    assert (
        "changed on its way, or signed with a key that decode does not have"
        in messages[Reason.FORGED]
    )


def test_a_cause_that_is_no_name_is_not_shown():
    world = running()
    assert seen(world, 100, 100, "<b>1 2</b>") == "False"
    assert "<b>" not in world.condition("TransportHealthy")["message"]


@pytest.mark.parametrize(
    ("prompts", "local", "percent"),
    [(40, 1, 3), (40, 0, 0), (3, 0, 0), (0, 0, 0), (3, 1, None), (40, 80, 100),
     (19, 1, None), (20, 1, 5)],  # docs/operations.md says 20
)  # fmt: skip
def test_a_share_is_rounded_up_and_needs_twenty_prompts(prompts, local, percent):
    report = PromptsReport(prompts, local, "X")
    assert (report.percent, report.local) == (percent, min(local, prompts))


def test_the_limit_starts_no_engine_anew():
    world = running()
    world.edit(verification={"maxLocalShare": 50})
    assert [step.manifest["kind"] for step in world.step().steps] == ["ServiceAccount"]


def test_the_share_of_a_cluster_is_that_of_all_its_engines():
    reports = [
        LinksReport("d", "d/1", (), prompts)
        for prompts in (PromptsReport(30, 3), PromptsReport(10), None, UNSET)
    ]
    assert local_share(reports) == 3 / 40
    assert local_share(reports[2:]) is None
    assert local_share([]) is None


def test_other_counts_alone_are_no_other_report():
    """Each other report wakes the cluster's reconcile."""
    one, two, three = (
        LinksReport("d", "d/1", (), PromptsReport(n, m, "X"))
        for n, m in ((100, 50), (1000, 500), (1000, 600))
    )
    assert one == two
    assert two != three


def test_only_what_this_judge_said_before_halves_its_limit():
    """A link that is slow makes the condition False, too."""
    slow = {"device": "CPU", "minBandwidthMBps": 100}
    world = running(10, transfer=slow)
    world.link(bytes_per_second=5e6)
    world.count_prompts(100, 0)
    world.step()
    assert world.condition("TransportHealthy")["reason"] == "ProbableTCPFallback"
    world.count_prompts(100, 8)
    world.step()
    assert world.condition("TransportHealthy")["reason"] == "ProbableTCPFallback"
    world.count_prompts(100, 11)
    world.step()
    assert world.condition("TransportHealthy")["reason"] == "LocalPrefill"
    world.count_prompts(100, 8)
    world.step()
    assert world.condition("TransportHealthy")["reason"] == "LocalPrefill", "above the half"
