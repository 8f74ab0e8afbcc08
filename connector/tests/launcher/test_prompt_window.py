"""What a decode engine's launcher makes of the prompts that the engine counts."""

from __future__ import annotations

from hypothesis import given, strategies as st
from launched import http, wait_for

from pdcluster_connector.launcher.engine.prompt_window import (
    SILENCE_SECONDS,
    PromptWindow,
    count_prompts,
)
from pdcluster_connector.protocol.prompt_outcomes import (
    NOT_DUE,
    PROMPTS_METRIC,
    LocalReason,
    Outcome,
    is_fault,
    was_due,
)

MOVED = (Outcome.TRANSFERRED.value, "")
NO_TICKET = (Outcome.LOCAL.value, LocalReason.NO_TICKET.value)
SKIPPED = (Outcome.LOCAL.value, LocalReason.LOCAL_BY_ROUTER.value)
HIT = (Outcome.LOCAL.value, LocalReason.PREFIX_HIT.value)


def told(window: PromptWindow, now: float) -> tuple[int, int, str]:
    report = window.report(now)
    assert report is not None
    return report.prompts, report.local, report.cause


def test_ranks_are_summed_and_other_metrics_are_passed_over() -> None:
    text = f"""# HELP {PROMPTS_METRIC} x
{PROMPTS_METRIC}{{engine="0",model_name="a}} 9",outcome="local",reason="NoTicket"}} 3.0
{PROMPTS_METRIC}{{engine="1",model_name="m",outcome="local",reason="NoTicket"}} 4.0
{PROMPTS_METRIC}{{engine="1",model_name="m",outcome="transferred",reason=""}} 1e+06
{PROMPTS_METRIC}{{engine="1",outcome="local",reason="PrefixHit"}} NaN
{PROMPTS_METRIC}{{engine="1",outcome="local",reason="PrefixHit"}} +Inf
{PROMPTS_METRIC}{{engine="1",outcome="local",reason="PrefixHit"}}
{PROMPTS_METRIC.removesuffix("_total")}_created{{outcome="local",reason="NoTicket"}} 1.7e9
vllm:num_requests_running{{engine="0"}} 7
"""
    assert count_prompts(text) == {NO_TICKET: 7, MOVED: 1_000_000}


@given(st.text(max_size=80))
def test_any_text_is_read(text: str) -> None:
    assert count_prompts(text) == {}
    count_prompts(f'{PROMPTS_METRIC}{{outcome="local",{text}')


def test_the_window_forgets_what_is_old() -> None:
    window = PromptWindow(300)
    assert window.report(0) is None
    window.add({}, 0)
    window.add({NO_TICKET: 10, MOVED: 30}, 10)
    assert told(window, 10) == (40, 10, "NoTicket")
    for now in range(20, 310, 10):
        window.add({NO_TICKET: 10, MOVED: 30 + now}, now)
    assert told(window, 300) == (340, 10, "NoTicket")
    window.add({NO_TICKET: 10, MOVED: 330}, 310)
    assert told(window, 310) == (300, 0, "")
    assert window.report(310 + SILENCE_SECONDS + 1) is None, "old counts are not known counts"


def test_the_first_look_counts_what_was_before_it() -> None:
    window = PromptWindow()
    window.add({NO_TICKET: 3}, 50)
    assert told(window, 50) == (3, 3, "NoTicket")


def test_an_engine_that_counts_from_anew_is_not_believed_to_count_backwards() -> None:
    window = PromptWindow(100)
    window.add({NO_TICKET: 30, MOVED: 30}, 0)
    window.add({NO_TICKET: 30, MOVED: 30}, 150)
    assert told(window, 150) == (0, 0, "")
    window.add({MOVED: 20}, 160)
    assert told(window, 160) == (20, 0, "")


def test_what_decode_is_meant_to_compute_is_no_prompt_of_the_share() -> None:
    window = PromptWindow()
    window.add({HIT: 100, MOVED: 4, NO_TICKET: 1}, 0)
    assert told(window, 0) == (5, 1, "NoTicket")
    failed = (Outcome.FAILED.value, "TransferStalled")
    window.add({HIT: 100, MOVED: 4, NO_TICKET: 1, failed: 5}, 1)
    assert told(window, 1) == (10, 1, "NoTicket"), "an error is not silent, so it is no local one"


def test_prompts_that_a_router_sent_past_prefill_are_a_fault_if_nearly_none_went_through_it() -> (
    None
):
    window = PromptWindow()
    window.add({SKIPPED: 95, MOVED: 5}, 0)
    assert told(window, 0) == (5, 0, "")
    window.add({SKIPPED: 95, MOVED: 4, NO_TICKET: 1}, 1)
    assert told(window, 1) == (5, 1, "NoTicket"), "it went to prefill, or was meant to"
    window.add({SKIPPED: 96, MOVED: 4, NO_TICKET: 1}, 2)
    assert told(window, 2) == (101, 97, "LocalByRouter")
    alone = PromptWindow()
    alone.add({SKIPPED: 99}, 0)
    assert told(alone, 0) == (0, 0, ""), "a few short prompts, and no word of the router's choice"
    alone.add({SKIPPED: 100}, 1)
    assert told(alone, 1) == (100, 100, "LocalByRouter")


def test_two_causes_do_not_alternate() -> None:
    window = PromptWindow()
    stalled = (Outcome.RECOMPUTED.value, "TransferStalled")
    window.add({NO_TICKET: 10, stalled: 9}, 0)
    assert told(window, 0)[2] == "NoTicket"
    window.add({NO_TICKET: 10, stalled: 19}, 1)
    assert told(window, 1)[2] == "NoTicket"
    window.add({NO_TICKET: 10, stalled: 20}, 2)
    assert told(window, 2)[2] == "TransferStalled"
    window.add({NO_TICKET: 21, stalled: 20}, 3)
    assert told(window, 3)[2] == "TransferStalled"


KINDS = st.sampled_from([MOVED, NO_TICKET, HIT, ("recomputed", "Other"), ("failed", "Other")])
STEPS = st.lists(st.tuples(st.integers(1, 40), st.dictionaries(KINDS, st.integers(0, 9))))


@given(STEPS)
def test_the_account_is_the_sum_of_what_was_added_in_the_window(
    steps: list[tuple[int, dict[tuple[str, str], int]]],
) -> None:
    """Against a plain list of all that happened; one step of slack at the window's beginning."""
    window, now, sums = PromptWindow(100), 0, {}
    window.add({}, now)
    seen: list[tuple[int, int, dict[tuple[str, str], int]]] = []
    for seconds, more in steps:
        begun, now = now, now + seconds
        for kind, number in more.items():
            sums[kind] = sums.get(kind, 0) + number
        seen.append((begun, now, more))
        window.add(sums, now)
        prompts, local, cause = told(window, now)
        inside = [kinds for _, end, kinds in seen if end > now - 100]
        assert prompts == sum(n for kinds in inside for k, n in kinds.items() if was_due(*k))
        assert local == sum(n for kinds in inside for k, n in kinds.items() if is_fault(*k))
        assert bool(cause) is bool(local)


def test_every_reason_is_decided() -> None:
    """A reason that is added later is a fault until somebody says otherwise."""
    for reason in LocalReason:
        assert is_fault("local", reason) is (reason not in NOT_DUE)
        assert is_fault("recomputed", reason)
        assert not is_fault("failed", reason)
    assert not is_fault("transferred", "")


def test_a_decode_engine_tells_its_account(launch) -> None:
    engine = launch("prompts:NoTicket=30;serve", role="decode")
    engine.ready()
    account = wait_for(lambda: http(f"{engine.url}/v1/links")[1].get("prompts"))
    assert account == {"window_seconds": 300, "prompts": 40, "local": 30, "cause": "NoTicket"}


def test_a_prefill_engine_has_none(launch) -> None:
    engine = launch("prompts:NoTicket=30;serve")
    engine.ready()
    assert "prompts" not in http(f"{engine.url}/v1/links")[1]
