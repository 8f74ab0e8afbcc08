"""``advise``: its properties, and what it does where the planners of others went wrong.

The courses come from a stated model (``scaling_model.py``). Nothing in them is a measurement.
"""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, strategies as st
from scaling_model import Fleet, follow, goal

from pdcluster_operator.plan.moments import Goal, Moment, RoleLoad, TransferLoad
from pdcluster_operator.plan.scaling.advice import (
    CALM_SECONDS,
    MANUAL_SECONDS,
    MEMORY_SECONDS,
    PATIENCE_SECONDS,
    Limit,
    Outlook,
    advise,
)

PER_MINUTE = 60.0


def changes(course: list[tuple[int, int]], role: int) -> list[tuple[int, int]]:
    return [(a[role], b[role]) for a, b in pairwise(course) if a[role] != b[role]]


def numbers(rows: object) -> list[tuple[int, int]]:
    return [moment.wanted for moment, _ in rows]  # type: ignore[attr-defined]


# What it does under load.


@pytest.mark.parametrize("rate", [1.0, 4.0, 9.0, 20.0])
def test_a_steady_load_gets_engines_that_hold_the_targets_and_then_nothing_changes(
    rate: float,
) -> None:
    wanted = goal()
    rows = list(follow(Fleet(), wanted, lambda _: rate, 120))
    last = [moment for moment, _ in rows[-40:]]
    assert all(one.first_token <= 2.0 and one.decode.gap <= 0.030 for one in last)
    assert len({one.wanted for one in last}) == 1, "at rest"
    assert rows[-1][1].outlook is Outlook.MET
    # And it was no waste: with one engine less of a role, a target could be missed, or nearly so.
    # From one number of engines it is not known which part of the time depends on the load.
    held = Fleet(wanted=list(last[-1].wanted))
    for role in (0, 1):
        if held.wanted[role] == 1:
            continue
        less = Fleet(wanted=[n - (i == role) for i, n in enumerate(held.wanted)])
        seen = [less.step(rate) for _ in range(20)][-1]
        busy = seen.prefill.busy / seen.prefill.engines
        tight = (
            seen.first_token > 0.7 * 2.0,
            last[-1].decode.gap * held.wanted[1] > 0.8 * 0.030 * less.wanted[1],
            busy > 0.64,
            seen.decode.kv / seen.decode.engines > 0.68,
        )
        assert any(tight), f"{held.wanted} engines, and role {role} has one too many"


def test_a_load_that_comes_and_goes_is_followed_both_ways() -> None:
    course = numbers(follow(Fleet(), goal(), lambda m: 12.0 if 20 <= m < 80 else 1.0, 240))
    assert course[10] == (1, 1)
    assert course[70][0] > 4
    assert course[70][1] > 2
    assert course[-1] == (1, 1)


def test_fewer_engines_are_advised_late_and_one_at_a_time() -> None:
    fleet = Fleet(wanted=[8, 8])
    course = numbers(follow(fleet, goal(), lambda _: 1.0, 100))
    for role in (0, 1):
        assert all(b == a - 1 for a, b in changes(course, role))
    down = [n for n, (a, b) in enumerate(pairwise(course)) if a != b]
    assert down[0] * PER_MINUTE >= CALM_SECONDS - PER_MINUTE
    assert all(sum(a) - sum(b) <= 1 for a, b in pairwise(course)), "one role at a time"
    for role in (0, 1):
        times = [n for n, (a, b) in enumerate(pairwise(course)) if a[role] != b[role]]
        assert all((b - a) * PER_MINUTE > CALM_SECONDS for a, b in pairwise(times))
    assert course[-1] == (1, 1)


def test_a_role_grows_at_most_twofold_at_once() -> None:
    course = numbers(follow(Fleet(), goal(), lambda _: 30.0, 20))
    steps = [pair for role in (0, 1) for pair in changes(course, role)]
    assert (1, 2) in steps
    assert (2, 4) in steps
    assert all(b <= 2 * a for a, b in steps)


def test_bursts_get_an_engine_that_the_rule_of_the_queue_does_not() -> None:
    moment = Fleet(wanted=[2, 2]).step(1.0)
    burst = replace(moment, prefill=replace(moment.prefill, first_token=5.0))
    assert (advise([burst], goal()).prefill, advise([moment], goal()).prefill) == (3, 2)
    # It is on its way: no other one is asked for meanwhile.
    assert advise([replace(burst, wanted=(3, 2))], goal()).prefill == 3


# What went wrong elsewhere.


@pytest.mark.parametrize("decodes", range(2, 9))
def test_no_engine_goes_whose_load_the_others_cannot_take(decodes: int) -> None:
    """Dynamo #9294: N engines were below the limit, and N - 1 above it; so one left and came."""
    fleet, wanted = Fleet(wanted=[64, decodes], room=10_000), goal(prefill=(64, 64))
    # A rate at which so many engines are well below the target, and one fewer is not.
    rate = next(
        r / 10
        for r in range(1, 4000)
        if Fleet(wanted=[64, decodes - 1], room=10_000).step(r / 10).decode.gap > 0.030
    )
    assert fleet.step(rate).decode.gap < 0.030
    course = numbers(follow(fleet, wanted, lambda _: rate, 90))
    assert changes(course, 1) == []


def test_gpus_that_never_come_hold_nothing_up() -> None:
    """Dynamo #14251: it waited for engines that never came, and never advised again."""
    fleet = Fleet(gpus=(64, 1))
    rows = list(follow(fleet, goal(), lambda m: 9.0 if m < 60 else 1.0, 260))
    course = numbers(rows)
    assert max(decode for _, decode in course) > 1, "it was tried"
    waited = sum(decode > 1 for _, decode in course[:60])
    assert waited * PER_MINUTE <= 2 * PATIENCE_SECONDS, "and given up"
    given_up = [found for moment, found in rows if found.outlook is Outlook.NO_ENGINES]
    assert given_up
    assert "decode engines that were asked for did not come" in given_up[0].why
    # The other role, and a load that falls, are followed all the same.
    assert course[-1] == (1, 1)


def test_engines_that_did_not_come_are_asked_for_again_later() -> None:
    fleet = Fleet(gpus=(64, 1))

    def gpus_come(minute: int, fleet: Fleet) -> None:
        if minute == 40:
            fleet.gpus = (64, 64)

    rows = list(follow(fleet, goal(), lambda _: 9.0, 120, gpus_come))
    given_up = next(n for n, (m, a) in enumerate(rows) if a.outlook is Outlook.NO_ENGINES)
    again = next(n for n, (m, _) in enumerate(rows) if n > given_up + 1 and m.wanted[1] > 1)
    assert (again - given_up) * PER_MINUTE >= MEMORY_SECONDS - PATIENCE_SECONDS - 3 * PER_MINUTE
    assert rows[-1][1].outlook is Outlook.MET


def test_only_growth_that_did_not_come_is_given_up() -> None:
    moment = Fleet(wanted=[1, 6]).step(1.0)
    moment = replace(moment, decode=replace(moment.decode, gap=0.029))
    for before, after, kept in (
        (6, 8, 8),  # all came, but an old one has died
        (5, 7, 8),  # one was missing, and the new ones came
        (5, 6, 7),  # one was missing, and one of two came
        (5, 5, 6),
        (6, 6, 6),
    ):
        at = replace(moment, asked=(1, 8))
        window = [replace(at, at=0.0, wanted=(1, 6), came=(1, before))]
        window += [replace(at, at=60.0, wanted=(1, 8), came=(1, after))]
        now = min(after, 7)
        window += [replace(at, at=60.0 * n, wanted=(1, 8), came=(1, now)) for n in range(2, 19)]
        found = advise(window, goal())
        assert (found.decode, found.outlook) == (kept, Outlook.NO_ENGINES)
    others = [replace(one, asked=(1, 6)) for one in window]
    assert advise(others, goal()).decode == 8, "what somebody else has set is theirs"


def test_engines_that_came_after_all_count() -> None:
    moment = Fleet(wanted=[1, 1]).step(1.0)
    missing = [replace(moment, at=n * 60.0, wanted=(1, 4), came=(1, 1)) for n in range(17)]
    assert advise(missing, goal()).outlook is Outlook.NO_ENGINES
    busy = replace(moment.decode, gap=0.028)
    came = replace(moment, at=17 * 60.0, wanted=(1, 4), came=(1, 4), ready=(1, 4), decode=busy)
    assert advise([*missing, came], goal()).decode == 4


def test_engines_that_load_their_weights_for_hours_are_waited_for() -> None:
    moment = replace(Fleet(wanted=[2, 4]).step(0.1), prefill=RoleLoad(), decode=RoleLoad())
    loading = [replace(moment, at=n * 60.0, came=(2, 4), ready=(0, 0)) for n in range(200)]
    found = [advise(loading[max(0, n - 44) : n + 1], goal()) for n in range(200)]
    assert {(one.prefill, one.decode, one.outlook) for one in found} == {(2, 4, Outlook.UNKNOWN)}


def test_engines_that_have_not_served_for_long_say_nothing() -> None:
    """Dynamo #12430: the first requests of a cold engine are slow, and were taken for load."""
    cold = Fleet().step(1.0)
    nothing = replace(cold, prefill=RoleLoad(), decode=RoleLoad())
    found = advise([nothing], goal())
    assert (found.prefill, found.decode) == (1, 1)
    assert (found.limit, found.outlook) == (Limit.UNKNOWN, Outlook.UNKNOWN)
    # Of eight engines, two are measured. Six new ones take their part, too: they are no reason
    # for more engines, and none for fewer.
    two = replace(
        cold,
        prefill=replace(cold.prefill, engines=2, busy=1.2, requests=3.6),
        wanted=(8, 1),
        came=(8, 1),
        ready=(8, 1),
    )
    window = [replace(two, at=minute * 60.0) for minute in range(20)]
    assert [advise(window[: n + 1], goal()).prefill for n in range(20)] == [8] * 20


@pytest.mark.parametrize("number", [1, 9])
def test_what_somebody_sets_by_hand_stays(number: int) -> None:
    """Dynamo #4420: a number that was set by hand was overwritten at once."""

    def hand(minute: int, fleet: Fleet) -> None:
        if minute == 40:
            fleet.scale(1, number)

    rows = list(follow(Fleet(), goal(), lambda _: 8.0, 180, hand))
    course = numbers(rows)
    before, kept = course[39][1], int(MANUAL_SECONDS / PER_MINUTE)
    assert before not in (number, 0)
    assert {decode for _, decode in course[40 : 40 + kept]} == {number}
    assert "somebody else has set the number of decode engines" in rows[45][1].why
    assert course[-1][1] == before, "and later the advice is followed again"


def test_prefill_is_not_added_where_decode_is_the_limit() -> None:
    """llm-d: prefill went from one to four engines, while requests failed behind it."""
    fleet = Fleet(gpus=(64, 1), room=20, each=0.003)
    rows = list(follow(fleet, goal(ttft=4.0), lambda _: 3.0, 60))
    assert max(moment.prefill.waiting for moment, _ in rows) > 10, "prompts wait for prefill"
    assert {moment.wanted[0] for moment, _ in rows} == {1}
    assert {found.limit for _, found in rows[3:]} == {Limit.DECODE}


def test_prefill_is_not_added_where_links_are_the_limit() -> None:
    fleet = Fleet(transfer_seconds=1.2, wanted=[2, 2])
    rows = list(follow(fleet, goal(itl=None), lambda _: 3.0, 60))
    assert {moment.wanted for moment, _ in rows} == {(2, 2)}
    assert rows[-1][1].limit is Limit.TRANSFER
    assert rows[-1][1].outlook is Outlook.UNREACHABLE
    assert "see the bandwidth" in rows[-1][1].why


def test_requests_that_wait_for_a_decode_engine_get_one() -> None:
    moment = Fleet().step(1.0)
    waiting = replace(moment.decode, running=10.0, waiting=15.0)
    found = advise([replace(moment, decode=waiting)], goal(itl=None))
    assert (found.decode, found.limit) == (2, Limit.DECODE)
    assert advise([replace(moment, decode=replace(waiting, waiting=0.5))], goal()).decode == 1


def test_prompts_that_wait_in_front_of_an_idle_prefill_engine_are_no_reason_for_another() -> None:
    moment = Fleet().step(1.0)
    load = replace(moment.prefill, waiting=50.0, busy=0.1, first_token=30.0)
    found = advise([replace(moment, prefill=load)], goal())
    assert (found.prefill, found.limit) == (1, Limit.TRANSFER)


def test_targets_that_no_number_of_engines_meets_are_said() -> None:
    rows = list(follow(Fleet(prompt_seconds=3.0), goal(prefill=(1, 4)), lambda _: 0.05, 30))
    assert rows[-1][1].outlook in (Outlook.UNREACHABLE, Outlook.BOUNDED)
    slow = list(follow(Fleet(floor=0.05), goal(decode=(1, 16)), lambda _: 0.01, 5))
    assert slow[0][1].outlook is Outlook.UNREACHABLE
    assert "one request alone" in slow[0][1].why


def test_the_largest_number_is_named_where_it_is_too_small() -> None:
    rows = list(follow(Fleet(), goal(prefill=(1, 2)), lambda _: 9.0, 30))
    assert rows[-1][0].wanted[0] == 2
    assert rows[-1][1].outlook is Outlook.BOUNDED
    assert "spec.autoscaling.prefill.max allows 2" in rows[-1][1].why


def test_during_a_rollout_no_engine_is_taken_away() -> None:
    fleet = Fleet(wanted=[4, 4])
    window = [replace(fleet.step(0.5), rolling=True) for _ in range(30)]
    assert advise(window, goal()).decode == 4
    calm = [replace(one, rolling=False) for one in window]
    assert advise(calm, goal()).decode == 3, "it was only held"
    loaded = replace(Fleet(wanted=[4, 4]).step(20.0), at=window[-1].at + 60, rolling=True)
    assert advise([*window, loaded], goal()).prefill > 4, "but more may come"


def test_a_role_that_was_scaled_to_zero_stays_there() -> None:
    moment = replace(Fleet().step(1.0), wanted=(0, 3))
    found = advise([moment], goal())
    assert (found.prefill, found.decode) == (0, 3)


def test_the_bounds_of_a_prefill_scaler_hold() -> None:
    moment = replace(Fleet(wanted=[1, 8]).step(0.1), ready=(1, 8))
    assert advise([moment], replace(goal(), ratio=(50, None))).prefill == 4
    loaded = Fleet(wanted=[4, 2]).step(9.0)
    assert advise([loaded], goal()).prefill > 4
    assert advise([loaded], replace(goal(), ratio=(None, 200))).prefill == 4


# For any measurements.

shares = st.floats(0, 1, allow_nan=False)
amounts = st.floats(0, 1e9, allow_nan=False)
seconds = st.floats(0, 1e4, allow_nan=False)


@st.composite
def loads(draw: st.DrawFn) -> RoleLoad:
    engines = draw(st.integers(0, 64))
    return RoleLoad(
        engines=engines,
        busy=draw(shares) * engines,
        tokens=draw(amounts),
        requests=draw(amounts),
        first_token=draw(seconds),
        gap=draw(seconds),
        running=draw(amounts),
        waiting=draw(amounts),
        kv=draw(shares) * engines,
    )


@st.composite
def windows(draw: st.DrawFn) -> list[Moment]:
    steps = draw(st.lists(st.sampled_from([1.0, 60.0, 300.0]), min_size=1, max_size=20))
    kinds = draw(st.lists(st.builds(lambda p, d: (p, d), loads(), loads()), min_size=1, max_size=3))
    pairs = st.tuples(st.integers(0, 40), st.integers(0, 40))
    counts = draw(st.lists(pairs, min_size=1, max_size=3))
    window, at = [], 0.0
    for step in steps:
        at += step
        prefill, decode = draw(st.sampled_from(kinds))
        wanted = draw(st.sampled_from(counts))
        window.append(
            Moment(
                at=at,
                prefill=prefill,
                decode=decode,
                transfer=draw(
                    st.builds(TransferLoad, rate=amounts, seconds=seconds, in_flight=amounts)
                ),
                wanted=wanted,
                came=draw(st.sampled_from([wanted, *counts])),
                ready=draw(st.sampled_from([wanted, *counts])),
                asked=draw(st.sampled_from([None, *counts])),
                rolling=draw(st.booleans()),
            )
        )
    return window


@st.composite
def goals(draw: st.DrawFn) -> Goal:
    least = draw(st.tuples(st.integers(1, 20), st.integers(1, 20)))
    more = draw(st.tuples(st.integers(0, 20), st.integers(0, 20)))
    targets = st.none() | st.floats(0.001, 100)
    return goal(
        draw(targets),
        draw(targets),
        (least[0], least[0] + more[0]),
        (least[1], least[1] + more[1]),
    )


@given(windows(), goals())
def test_for_any_measurements(window: list[Moment], wanted: Goal) -> None:
    now = window[-1]
    found = advise(window, wanted)
    assert found == advise(list(window), wanted), "it is a function"
    if 0 in now.wanted:
        assert (found.prefill, found.decode) == now.wanted
        return
    assert wanted.prefill.least <= found.prefill <= wanted.prefill.most
    assert wanted.decode.least <= found.decode <= wanted.decode.most
    if found.prefill > max(now.wanted[0], wanted.prefill.least):
        assert found.limit is Limit.PREFILL
    if found.decode > max(now.wanted[1], wanted.decode.least):
        assert found.limit is Limit.DECODE
    least = now.wanted[0] - 1, now.wanted[1] - 1
    took = [
        a < b and a < bounds.most and now.wanted[role] <= bounds.most
        for role, (a, b, bounds) in enumerate(
            zip(
                (found.prefill, found.decode),
                now.wanted,
                (wanted.prefill, wanted.decode),
                strict=True,
            )
        )
    ]
    if any(took) and found.outlook is not Outlook.NO_ENGINES:
        assert not all(took), "one role at a time"
        assert not now.rolling
        if took[1]:
            assert found.decode == least[1]
            assert wanted.itl is None or (
                now.decode.gap * now.wanted[1] <= wanted.itl * max(1, least[1])
            ), "the rest holds the target"
    if found.outlook is Outlook.MET:
        assert not found.why.startswith("no engine of a role")


def test_it_takes_less_than_a_millisecond() -> None:
    fleet = Fleet(wanted=[8, 8])
    window = [replace(fleet.step(1.0), asked=(8, 8)) for _ in range(45)]
    began = time.process_time()
    for _ in range(200):
        advise(window, goal())
    assert (time.process_time() - began) / 200 < 0.001
