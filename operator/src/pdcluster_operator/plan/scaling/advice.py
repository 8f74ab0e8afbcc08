"""``advise``: how many prefill and decode engines a PDCluster needs. Pure, and below a millisecond.

A request passes three stages: prefill computes the prompt, the KV is transferred, and decode
generates. Requests queue in front of the stage that limits all others, and in front of those before
it, because prefill keeps KV until decode has read it. So the last stage that is at its limit is the
one to look at: more prefill engines would only queue more requests in front of it.

Each need is a number of engines that follows from the measured work alone, and never from the
number before. So advice that is not carried out, or too late, does not add up. More engines are
advised at once, and fewer only if the others have been enough for ``CALM_SECONDS``, at most one at
a time.

Nothing is remembered but the moments of the window. What somebody else scaled, and engines that
never came, are seen in it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from math import ceil

from pdcluster_operator.api.spec.autoscaling_types import Limit
from pdcluster_operator.plan.moments import Goal, Moment, RoleLoad

CALM_SECONDS = 300.0
"""For so long fewer engines must have been enough. An engine takes minutes to start."""
MANUAL_SECONDS = 900.0
"""For so long a number that somebody else set stays as it is."""
PATIENCE_SECONDS = 900.0
"""For so long engines are waited for that do not run. Nodes take minutes to start. An engine that
loads its weights has come, however long that takes."""
MEMORY_SECONDS = PATIENCE_SECONDS + 1800.0
"""How far a window reaches. So for half an hour after the patience has ended, no more engines are
asked for than came."""
MOST_BUSY = 0.8
"""The largest share of its time that an engine or a link works. At 0.8, a request waits four times
as long as it takes (an M/M/1 queue); above, waits grow without bound."""
MOST_KV = 0.85
"""The largest share of a decode engine's KV cache. vLLM preempts requests when it is full."""
SPARE = 0.8
"""Fewer engines must hold the target with so much of the limit: else the next peak brings the
engine back."""
BACKLOG_SECONDS = 300.0
"""In this time the requests that wait in front of prefill are to be gone. An engine that is added
for them takes minutes to start."""
BLOCKED = 0.5
"""A prefill engine that is less busy than this, and has requests waiting, waits itself: its KV
cache is full of what decode has not read yet."""
MOST_GROWTH = 2
"""The largest factor by which a role grows at once."""


class Outlook(StrEnum):
    """Whether the targets can be met by this advice."""

    MET = "Met"
    SCALING = "Scaling"  # they will be, once the engines that are advised serve
    BOUNDED = "Bounded"  # more engines than spec.autoscaling allows would be needed
    NO_ENGINES = "NoEngines"  # engines that were asked for did not come
    UNREACHABLE = "Unreachable"  # no number of engines meets them
    UNKNOWN = "Unknown"  # too little was measured


@dataclass(frozen=True, slots=True)
class Advice:
    """How many engines are needed.

    Attributes:
        why: a sentence, without numbers that change while the advice stays the same.
    """

    prefill: int
    decode: int
    limit: Limit
    outlook: Outlook
    why: str


@dataclass(frozen=True, slots=True)
class _Found:
    number: int
    outlook: Outlook
    why: str


def advise(window: Sequence[Moment], goal: Goal) -> Advice:
    """Return how many engines a PDCluster needs.

    Args:
        window: moments of the last ``MEMORY_SECONDS``, the oldest first, and at least one.
    """
    now = window[-1]
    wanted = now.wanted
    if 0 in wanted:  # as with a HorizontalPodAutoscaler
        return Advice(*wanted, Limit.UNKNOWN, Outlook.UNKNOWN, "a role was scaled to zero")
    measured = bool(now.prefill.engines and now.decode.engines)
    limit = _limit(now, goal) if measured else Limit.UNKNOWN
    found = [_of_role(window, goal, role, limit) for role in (0, 1)]
    prefill, decode = (one.number for one in found)
    if prefill < wanted[0] and decode < wanted[1]:
        prefill = wanted[0]  # what one engine less of a role does is seen before the next one goes
    prefill = goal.prefill.clamp(_in_ratio(prefill, decode, goal.ratio))
    reasons = [one.why for one in found if one.why]
    outlook = next((one.outlook for one in found if one.outlook is not Outlook.MET), Outlook.MET)
    if outlook is Outlook.MET:
        outlook, never = _outlook(now, goal, limit, (prefill, decode))
        reasons += filter(None, [never])
    return Advice(prefill, decode, limit, outlook, "; ".join((_WORDS[limit], *reasons)))


def _of_role(window: Sequence[Moment], goal: Goal, role: int, limit: Limit) -> _Found:
    """Return how many engines of one role are advised."""
    now, name = window[-1], _ROLES[role]
    allowed = (goal.prefill, goal.decode)[role]
    present = number = now.wanted[role]
    more = _more(now, goal, role, limit)
    if more > present:
        number = min(more, MOST_GROWTH * present)
    elif not now.rolling and _is_calm(window, goal, role):
        number = present - 1
    outlook, why = Outlook.MET, ""
    if _was_set_by_others(window, role):
        number, why = present, f"somebody else has set the number of {name} engines"
    ceiling = _ceiling(window, role)
    if ceiling is not None and number > ceiling:
        # Only growth is stopped, or given up: an engine less would be one that serves.
        number, outlook = min(number, _kept(window, role)), Outlook.NO_ENGINES
        why = f"{name} engines that were asked for did not come"
    elif more > allowed.most:
        outlook, why = Outlook.BOUNDED, f"spec.autoscaling.{name}.max allows {allowed.most}"
    return _Found(allowed.clamp(number), outlook, why)


def _outlook(
    now: Moment, goal: Goal, limit: Limit, advised: tuple[int, int]
) -> tuple[Outlook, str]:
    """Return whether the targets can be met, and why not if no number of engines meets them."""
    if limit is Limit.UNKNOWN:
        return Outlook.UNKNOWN, ""
    missed, never = _is_missed(now, goal), _unreachable(now, goal)
    if never or (missed and limit is Limit.TRANSFER):
        return Outlook.UNREACHABLE, never
    grows = advised[0] > now.wanted[0] or advised[1] > now.wanted[1]
    return (Outlook.SCALING if missed or grows else Outlook.MET), ""


_ROLES = ("prefill", "decode")
_WORDS = {
    Limit.NONE: "no stage is at its limit",
    Limit.PREFILL: "prefill engines compute nearly all the time, or prompts wait too long for them",
    Limit.TRANSFER: (
        "KV takes too long from prefill to decode, so more engines do not help; see the bandwidth "
        "of the links"
    ),
    Limit.DECODE: "decode engines generate too slowly, or have no room for more requests",
    Limit.UNKNOWN: "no engine of a role has served for long enough to be measured",
}


def _limit(now: Moment, goal: Goal) -> Limit:
    """Return the last stage of a request that is at its limit."""
    prefill, decode, transfer = now.prefill, now.decode, now.transfer
    if _decode_share(now, goal) > 1.0:
        return Limit.DECODE
    if transfer.busy(decode.engines) > MOST_BUSY or transfer.busy(prefill.engines) > MOST_BUSY:
        return Limit.TRANSFER
    # Prompts wait, but not because prefill computes: it has no room for their KV.
    if prefill.waiting >= prefill.engines and prefill.busy < BLOCKED * prefill.engines:
        return Limit.TRANSFER
    if goal.ttft is not None and now.first_token > goal.ttft:
        waits = {
            Limit.PREFILL: prefill.first_token - _prompt_seconds(prefill),
            Limit.TRANSFER: transfer.seconds,
            Limit.DECODE: decode.first_token - transfer.seconds,
        }
        return max(waits, key=lambda stage: waits[stage])
    if _prefill_share(now, goal) > 1.0:
        return Limit.PREFILL
    return Limit.NONE


def _prompt_seconds(load: RoleLoad) -> float:
    """Return the seconds that a prefill engine works for one prompt."""
    return load.busy / load.requests if load.requests > 0 else 0.0


def _prefill_share(now: Moment, goal: Goal) -> float:
    """Return the work of prefill engines, as a share of what they can do within the target."""
    load = now.prefill
    each = _prompt_seconds(load)
    most = MOST_BUSY
    if goal.ttft is not None and each > 0:
        # In an M/M/1 queue a prompt waits each * busy / (1 - busy).
        left = goal.ttft - each - now.decode.first_token
        most = max(0.05, min(MOST_BUSY, left / (each + left))) if left > 0 else MOST_BUSY
    work = load.busy + load.waiting * each / BACKLOG_SECONDS
    return work / (most * load.engines)


def _decode_share(now: Moment, goal: Goal) -> float:
    """Return the load of decode engines, as a share of what they can do within the target."""
    load = now.decode
    shares = [load.kv / (MOST_KV * load.engines)]
    if goal.itl is not None:
        shares.append(load.gap / goal.itl)
    if load.waiting >= load.engines and load.running > 0:
        shares.append((load.running + load.waiting) / load.running)
    return max(shares)


def _more(now: Moment, goal: Goal, role: int, limit: Limit) -> int:
    """Return how many engines of a role are needed at least, by those that were measured.

    Engines that were not measured take a part of the load, so this never asks for too many.
    """
    if limit is not (Limit.PREFILL, Limit.DECODE)[role]:
        return 0
    load = (now.prefill, now.decode)[role]
    # Bursts wait longer than the rule of the queue says, so what was measured counts, too.
    least = load.engines + 1 if _is_missed(now, goal) else 0
    return max(least, _engines(load.engines * _share(now, goal, role)))


def _fewer(now: Moment, goal: Goal, role: int) -> int:
    """Return how many engines of a role are enough, with something to spare.

    The time between tokens grows at most in proportion to the requests of an engine. So N engines
    with the load of N + 1 are at most (N + 1) / N times as slow.
    """
    load = (now.prefill, now.decode)[role]
    share = max(_share(now, goal, role), now.transfer.busy(load.engines) / MOST_BUSY)
    return _engines(max(load.engines, now.ready[role]) * share / SPARE)


def _share(now: Moment, goal: Goal, role: int) -> float:
    return _decode_share(now, goal) if role else _prefill_share(now, goal)


def _engines(load: float) -> int:
    return ceil(min(load, 1e6) - 1e-9)


def _is_missed(now: Moment, goal: Goal) -> bool:
    """Whether a target is missed at this moment."""
    slow = goal.ttft is not None and now.first_token > goal.ttft
    return slow or (goal.itl is not None and now.decode.gap > goal.itl)


def _unreachable(now: Moment, goal: Goal) -> str:
    """Return why no number of engines meets a target; empty if one may."""
    if goal.ttft is not None and _prompt_seconds(now.prefill) > goal.ttft:
        return "one prompt alone takes longer than ttftMs; use larger prefill engines"
    alone = now.decode.running <= now.decode.engines
    if goal.itl is not None and now.decode.gap > goal.itl and alone:
        return "one request alone takes longer than itlMs for a token; use larger decode engines"
    return ""


def _is_calm(window: Sequence[Moment], goal: Goal, role: int) -> bool:
    """Whether one engine less of a role was enough all the time, for long enough."""
    now = window[-1]
    present = now.wanted[role]
    for one in reversed(window):
        measured = one.prefill.engines and one.decode.engines
        if not measured or one.wanted[role] != present or _is_missed(one, goal):
            return False
        if _fewer(one, goal, role) >= min(present, one.came[role]):
            return False  # the one that goes may serve, and one that did not come may stay
        if _limit(one, goal) in (Limit.TRANSFER, (Limit.PREFILL, Limit.DECODE)[role]):
            return False
        if now.at - one.at >= CALM_SECONDS:
            return True
    return False


def _was_set_by_others(window: Sequence[Moment], role: int) -> bool:
    """Whether somebody else has set the number of engines lately, although the operator does."""
    now = window[-1].at
    for before, one in pairwise(window):
        changed = one.wanted[role] != before.wanted[role]
        if one.asked is None or not changed or now - one.at >= MANUAL_SECONDS:
            continue
        if not _is_ours(before, one, role):
            return True
    return False


def _is_ours(before: Moment, one: Moment, role: int) -> bool:
    """Whether the operator has asked for the number of engines of a moment."""
    return one.wanted[role] in [at.asked[role] for at in (before, one) if at.asked is not None]


def _kept(window: Sequence[Moment], role: int) -> int:
    """Return how many engines stay when others did not come: all, if no growth is known.

    Growth is given up as far as it did not come. Engines that were missing before it, and those
    that came and have died, are no part of it. Numbers of others stay unless they follow advice.
    """
    kept, most = window[-1].wanted[role], window[-1].came[role]
    for before, one in reversed(list(pairwise(window))):
        most = max(most, one.came[role])
        ours = one.asked is None or _is_ours(before, one, role)
        if ours and one.wanted[role] > before.wanted[role]:
            kept = min(kept, before.wanted[role] + max(0, most - before.came[role]))
    return kept


def _ceiling(window: Sequence[Moment], role: int) -> int | None:
    """Return how many engines may be asked for, because others did not come; None for no bound.

    They may be asked for again when the window has forgotten it, or when more run than then.
    """
    now = window[-1]
    for end in range(len(window) - 1, -1, -1):
        last = window[end]
        for one in reversed(window[: end + 1]):
            same = one.wanted[role] == last.wanted[role]
            if not same or one.came[role] != last.came[role] or one.rolling:
                break
            if one.came[role] >= one.wanted[role]:
                break
            if last.at - one.at >= PATIENCE_SECONDS:
                return None if now.came[role] > last.came[role] else last.came[role]
    return None


def _in_ratio(prefill: int, decode: int, ratio: tuple[int | None, int | None]) -> int:
    least, most = (None if share is None else -(-share * decode // 100) for share in ratio)
    if least is not None and prefill < least:
        return least
    return prefill if most is None else min(prefill, most)
