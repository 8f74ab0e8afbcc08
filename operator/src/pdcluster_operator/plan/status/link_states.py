"""``status.linkStates`` and ``status.failedLinks``: what is known of each link.

At rest nothing here changes, so nothing is written. A speed is measured when a link is established.
A moment is written when something becomes true, and stays. Canaries that pass again change nothing.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class ToldLink:
    """A link's entry without its moments, and what those depend on.

    Attributes:
        proof_seconds: age of the last canary that passed; None if KV was not seen to move.
    """

    entry: Mapping[str, Any]
    proof_seconds: float | None


def told_link(pair: PairView) -> ToldLink:
    """Return what is told of a link: the same until something about the link changes."""
    prefill, decode = _key(pair)
    entry: dict[str, Any] = {"prefill": prefill, "decode": decode, "state": pair.state.value}
    if pair.state is not LinkState.ESTABLISHED:
        entry["reason"] = readable_reason(pair.reason or "Unknown")
        return ToldLink(entry, None)
    entry["canary"] = pair.canary.state.value
    if pair.bytes_per_second:
        entry["megabytesPerSecond"] = max(1, round(pair.bytes_per_second / MEGABYTE))
    if pair.descriptors:
        entry["descriptors"] = pair.descriptors
    if pair.message:
        entry["message"] = pair.message[:LONGEST_DETAIL]
    return ToldLink(entry, (pair.canary.age_seconds or 0) if pair.verified else None)


def link_states(
    before: Mapping[str, Any], links: Iterable[ToldLink], interval: float, now: float
) -> list[dict[str, Any]]:
    """Return the entries of ``linkStates``. At rest it calls nothing for a link.

    Args:
        before: the status as it is.
        interval: seconds between two canaries of a link.
    """
    listed = before.get("linkStates")
    old = {
        (one.get("prefill"), one.get("decode")): one
        for one in (listed if isinstance(listed, list) else ())
        if isinstance(one, dict)
    }
    written, moment, nothing = [], timestamp(now), dict[str, Any]()
    for link in links:
        state, age = {**link.entry}, link.proof_seconds
        written.append(state)
        if age is None:
            continue
        known = old.get((state["prefill"], state["decode"]), nothing)
        state["verifiedTime"] = known.get("verifiedTime") or moment
        if age > interval + PROOF_STANDS_SECONDS:
            told = seconds(known.get("lastProofTime"))
            same = told is not None and abs(told - (now - age)) < SAME_MOMENT_SECONDS
            state["lastProofTime"] = known["lastProofTime"] if same else timestamp(now - age)
    return written


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
