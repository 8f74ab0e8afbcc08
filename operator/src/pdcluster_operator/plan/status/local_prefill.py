"""Whether decode engines compute prompts that prefill should have computed.

Such a request is answered rightly and with HTTP 200, so nobody would notice. The launcher of each
decode engine reports the share of its last few minutes. The verdict turns False when one engine is
above the limit of the spec, and stays False until all engines are at half of the limit or
below: it does not turn back and forth when a share moves around the limit. What is judged are
percents; the condition's message holds none of them, because they change all the time.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from msgspec import UNSET

from pdcluster_connector.compat.reasons import Reason
from pdcluster_connector.protocol.launcher_documents import LinksReport
from pdcluster_connector.protocol.prompt_outcomes import LocalReason
from pdcluster_operator.api.conditions import Status, StatusReason, Verdict, no, unknown
from pdcluster_operator.plan.observed.engines import EngineView

OFF = 100
_NAME = re.compile(r"[A-Za-z]{1,64}")

REMEDIES: Mapping[str, str] = {
    LocalReason.NO_TICKET: (
        "the requests carry no ticket; send them to the router and not to decode engines, and see "
        "whether prefill hands over KV (kubectl logs of the prefill engines)"
    ),
    LocalReason.PROMPT_MISMATCH: (
        "the prompt is not the one that prefill computed; give both roles the same image and "
        "chat template, and send one prompt in each request"
    ),
    LocalReason.TICKET_SPENT: (
        "a request was repeated with its old ticket; send repeated requests through prefill again"
    ),
    LocalReason.TICKET_TOO_LONG: (
        "prefill and decode disagree about the last token; give both roles the same image"
    ),
    Reason.LEASE_EXPIRED: (
        "requests reach decode after their lease has ended; raise spec.transfer.leaseSeconds, "
        "or add decode engines"
    ),
    Reason.LEASE_LOST: (
        "the lease ended before decode asked for the KV; raise spec.transfer.leaseSeconds, or add "
        "decode engines"
    ),
    Reason.LEASE_CLAIMED: (
        "two decode engines got the same ticket; send repeated requests through prefill again"
    ),
    Reason.UNSIGNED: (
        "prefill does not sign its tickets, but decode has a ticket key; start both roles with the "
        "same key, and see whether the router passes kv_transfer_params on unchanged"
    ),
    Reason.FORGED: (
        "the ticket was changed, or signed with a key that decode does not have; see whether the "
        "router passes kv_transfer_params on unchanged, and whether both roles have the same key"
    ),
    Reason.AUDIENCE_MISMATCH: (
        "the ticket is for engines of another cluster; see which engines the router knows"
    ),
    Reason.TICKET_INVALID: (
        "the ticket cannot be read; see whether the router passes kv_transfer_params on unchanged"
    ),
}
TRANSFERS_FAIL = (
    "the transfer of KV fails or is refused; the logs of the decode engine say why, and the reason "
    "is described in docs/api.md"
)


def local_prefill(
    decode: Sequence[EngineView],
    links: Mapping[str, LinksReport],
    most: int,
    before: Mapping[str, Any],
) -> Verdict | None:
    """Return a verdict if prompts are computed in the wrong place, and None if not.

    Args:
        decode: the decode engines.
        links: what their launchers say, by logical id.
        most: ``spec.verification.maxLocalShare``, in percent.
        before: the condition as it is now.
    """
    if most >= OFF:
        return None
    was_above = before.get("status") == Status.FALSE and (
        before.get("reason") == StatusReason.LOCAL_PREFILL
    )
    was_unheard = before.get("status") == Status.UNKNOWN and (
        before.get("reason") == StatusReason.LAUNCHER_UNREACHABLE
    )
    limit = most // 2 if was_above else most
    asked = [engine for engine in decode if engine.ready is not False]
    unclear = False
    for engine in asked:
        report = links.get(engine.name.logical)
        if report is None or report.prompts is UNSET:
            continue
        percent = report.prompts.percent if report.prompts else None
        unclear |= percent is None
        if report.prompts and percent is not None and percent > limit:
            return no(StatusReason.LOCAL_PREFILL, _message(engine, report.prompts.cause, most))
    silent = next((engine for engine in asked if engine.name.logical not in links), None)
    if silent is not None and (was_above or was_unheard):
        return unknown(
            StatusReason.LAUNCHER_UNREACHABLE,
            f"the launcher of {silent.name.stateful_set} does not answer the operator",
        )
    if unclear and was_above:
        return no(StatusReason.LOCAL_PREFILL, str(before.get("message")))
    return None


def local_share(reports: Iterable[LinksReport]) -> float | None:
    """Return which share (0 to 1) of a cluster's prompts decode computed; None without prompts."""
    counts = [report.prompts for report in reports if report.prompts]
    prompts = sum(one.prompts for one in counts)
    return sum(one.local for one in counts) / prompts if prompts else None


def _message(engine: EngineView, cause: str, most: int) -> str:
    named = cause if _NAME.fullmatch(cause) else "Unknown"
    return (
        f"{engine.name.stateful_set} computes too many of its prompts by itself (maxLocalShare is "
        f"{most} %), mostly because of {named}: {REMEDIES.get(cause, TRANSFERS_FAIL)}"
    )
