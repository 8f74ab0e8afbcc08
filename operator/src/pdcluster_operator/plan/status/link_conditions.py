"""KVLinksEstablished, KVPathVerified and TransportHealthy.

A link that was never tried is Unknown. A link that was established and is lost is False.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pdcluster_connector.compat.counted import counted
from pdcluster_connector.compat.reasons import Reason
from pdcluster_connector.protocol.launcher_documents import LinkState
from pdcluster_operator.api.conditions import Status, StatusReason, Verdict, no, unknown, yes
from pdcluster_operator.api.spec.types import Transfer
from pdcluster_operator.plan.observed.links import PairView

MEGABYTE = 1_000_000
# Slower than this over RDMA hardware means that another transport was taken.
RDMA_LEAST_MBPS = 1000


def links_established(pairs: Sequence[PairView], before: Mapping[str, Any]) -> Verdict:
    """Whether each decode engine shook hands with each prefill engine and read its memory."""
    if not pairs:
        return unknown(StatusReason.NO_PAIRS, "there is no pair of engines")
    failed = [pair for pair in pairs if pair.state is LinkState.FAILED]
    if failed:
        first = failed[0]
        count = f"{len(failed)} of {counted(len(pairs), 'link')} failed; " if len(pairs) > 1 else ""
        detail = f": {first.message}" if first.message else ""
        return no(first.reason or Reason.BACKEND_ERROR, f"{count}{first.label}{detail}")
    return _undecided(pairs, before) or yes(
        StatusReason.LINKS_ESTABLISHED,
        f"{len(pairs)} of {counted(len(pairs), 'link')} established",
    )


def path_verified(pairs: Sequence[PairView], before: Mapping[str, Any]) -> Verdict:
    """Whether a canary's KV was counted on every link."""
    if not pairs:
        return unknown(StatusReason.NO_PAIRS, "there is no pair of engines")
    failed = [pair for pair in pairs if pair.canary_failed]
    if failed:
        detail = f": {failed[0].canary.message}" if failed[0].canary.message else ""
        return no(Reason.CANARY_FAILED, f"{failed[0].label}{detail}")
    broken = next((pair for pair in pairs if pair.state is LinkState.FAILED), None)
    if broken is not None:
        return _open(StatusReason.CANARY_PENDING, f"{broken.label}: the link failed", before)
    undecided = _undecided(pairs, before)
    if undecided is not None:
        return undecided
    waiting = next((pair for pair in pairs if not pair.verified), None)
    if waiting is not None:
        detail = f": {waiting.canary.message}" if waiting.canary.message else ""
        message = f"{waiting.label}: no canary since the link was established{detail}"
        return _open(StatusReason.CANARY_PENDING, message, before)
    return yes(
        StatusReason.CANARY_PASSED, f"KV was seen to move over {counted(len(pairs), 'link')}"
    )


def transport_healthy(pairs: Sequence[PairView], transfer: Transfer) -> Verdict:
    """Whether every link is as fast as was asked for. Speeds themselves are metrics."""
    least = transfer.min_bandwidth_mbps
    if least is None and transfer.rdma is not None:
        least = RDMA_LEAST_MBPS
    if least is None:
        # That a link is established is the evidence: its probe was read and checked.
        if not pairs or any(pair.state is not LinkState.ESTABLISHED for pair in pairs):
            return unknown(StatusReason.BANDWIDTH_UNMEASURED, "not every link is established")
        return yes(StatusReason.NO_THRESHOLD, "no bandwidth is asked for")
    measured = [
        pair for pair in pairs if pair.state is LinkState.ESTABLISHED and pair.bytes_per_second > 0
    ]
    slow = [pair for pair in measured if pair.bytes_per_second < least * MEGABYTE]
    if slow:
        return no(
            StatusReason.PROBABLE_TCP_FALLBACK,
            f"{len(slow)} of {counted(len(pairs), 'link')} slower than {least} MB/s; "
            f"{slow[0].label}",
        )
    if not pairs or len(measured) < len(pairs):
        return unknown(StatusReason.BANDWIDTH_UNMEASURED, "not every link is measured")
    return yes(StatusReason.BANDWIDTH_SUFFICIENT, f"all links reach {least} MB/s")


def _undecided(pairs: Sequence[PairView], before: Mapping[str, Any]) -> Verdict | None:
    """Return the verdict of a pair of which nothing is decided; None if there is no such pair.

    A pair whose decode launcher does not answer comes before one that waits.
    """
    silent = next((pair for pair in pairs if pair.state is LinkState.UNKNOWN), None)
    if silent is not None:
        return unknown(silent.reason, silent.message)
    waiting = next((pair for pair in pairs if pair.state is LinkState.PENDING), None)
    if waiting is None:
        return None
    detail = f": {waiting.message}" if waiting.message else ""
    return _open(waiting.reason, f"{waiting.label}{detail}", before)


def _open(reason: str, message: str, before: Mapping[str, Any]) -> Verdict:
    once_known = before.get("status") in (Status.TRUE, Status.FALSE)
    return no(reason, message) if once_known else unknown(reason, message)
