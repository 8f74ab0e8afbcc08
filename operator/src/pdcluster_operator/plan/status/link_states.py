"""``status.linkStates`` and ``status.failedLinks``: what is known of each link.

At rest nothing here changes, so nothing is written. A speed is measured when a link is established.
A moment is written when something becomes true, and stays. Canaries that pass again change nothing.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from pdcluster_connector.compat.reasons import Reason
from pdcluster_connector.protocol.launcher_documents import LinkState
from pdcluster_operator.api.conditions import readable_reason, seconds, timestamp
from pdcluster_operator.plan.observed.links import PairView
from pdcluster_operator.plan.status.conditions import MEGABYTE

LONGEST_DETAIL = 512
PROOF_STANDS_SECONDS = 600.0
"""How long after a canary was due its link counts as proved, if an engine was too busy for it."""
SAME_MOMENT_SECONDS = 120.0
"""An age is told in whole seconds, and read up to a minute later."""


def link_states(
    before: Mapping[str, Any], pairs: Iterable[PairView], interval: float, now: float
) -> list[dict[str, Any]]:
    """Return the entries of ``linkStates``.

    Args:
        before: the status as it is.
        interval: seconds between two canaries of a link.
    """
    old = _by_pair(before.get("linkStates"))
    return [dict(_state(old.get(_key(pair), {}), pair, interval, now)) for pair in pairs]


def _state(
    known: Mapping[str, Any], pair: PairView, interval: float, now: float
) -> Iterator[tuple[str, Any]]:
    yield "prefill", pair.prefill.name.stateful_set
    yield "decode", pair.decode.name.stateful_set
    yield "state", pair.state.value
    if pair.state is not LinkState.ESTABLISHED:
        yield "reason", readable_reason(pair.reason or "Unknown")
        return
    yield "canary", pair.canary.state.value
    if pair.bytes_per_second:
        yield "megabytesPerSecond", max(1, round(pair.bytes_per_second / MEGABYTE))
    if pair.descriptors:
        yield "descriptors", pair.descriptors
    if pair.verified:
        yield "verifiedTime", known.get("verifiedTime") or timestamp(now)
        age = pair.canary.age_seconds or 0
        if age > interval + PROOF_STANDS_SECONDS:
            moment, told = now - age, seconds(known.get("lastProofTime"))
            same = told is not None and abs(told - moment) < SAME_MOMENT_SECONDS
            yield "lastProofTime", known["lastProofTime"] if same else timestamp(moment)


def failed_links(
    before: Mapping[str, Any], pairs: Sequence[PairView], now: float
) -> list[dict[str, Any]]:
    """Return the entries of ``failedLinks``."""
    old = {
        (entry.get("prefill"), entry.get("decode"), entry.get("reason")): entry
        for entry in before.get("failedLinks") or ()
    }
    written = []
    for pair in pairs:
        if pair.state is LinkState.FAILED:
            reason, message = readable_reason(pair.reason or "Unknown"), pair.message
        else:
            reason, message = Reason.CANARY_FAILED.value, pair.canary.message
        prefill, decode = _key(pair)
        known = old.get((prefill, decode, reason), {})
        written.append(
            {
                "prefill": prefill,
                "decode": decode,
                "reason": reason,
                "message": message[:LONGEST_DETAIL],
                "lastTransitionTime": known.get("lastTransitionTime") or timestamp(now),
            }
        )
    return written


def _key(pair: PairView) -> tuple[str, str]:
    return pair.prefill.name.stateful_set, pair.decode.name.stateful_set


def _by_pair(entries: object) -> dict[tuple[object, object], Mapping[str, Any]]:
    listed = entries if isinstance(entries, list) else ()
    return {
        (one.get("prefill"), one.get("decode")): one for one in listed if isinstance(one, Mapping)
    }
