"""Why a request, a probe or a handshake failed.

A refusal has three forms: a rule's finding, a message on the wire, and a failure. At a handshake,
both engines state all of their fields. So a rule that cannot be decided is a refusal, too.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from pdcluster_connector.compat.check import refused
from pdcluster_connector.compat.findings import Finding, Verdict
from pdcluster_connector.compat.reasons import Reason
from pdcluster_connector.protocol.messages import Refusal


@dataclass(frozen=True, slots=True)
class Failure:
    """Why something did not happen.

    Attributes:
        reason: the name that users, metrics and conditions see.
        message: one sentence with the values at hand and, where there is one, the remedy.
        dead: whether the peer's process has ended: what is under way cannot end well.
    """

    reason: Reason
    message: str
    dead: bool = False

    def __str__(self) -> str:
        return f"{self.reason}: {self.message}"


_REASONS = {reason.value: reason for reason in Reason}


def refusal_of(findings: Sequence[Finding]) -> Refusal | None:
    """Return the refusal that ``findings`` amount to at a handshake; None when empty."""
    if not findings:
        return None
    finding = refused(findings) or findings[0]
    if finding.verdict is Verdict.UNKNOWN:
        message = f"an engine does not state its {finding.field}"
    else:
        message = finding.message
    return Refusal(
        reason=finding.reason.value,
        message=f"{message.rstrip('.')}. {finding.remedy}"[:4096],
        prefill_value=finding.prefill_value[:4096],
        decode_value=finding.decode_value[:4096],
    )


def failure_of(refusal: Refusal) -> Failure:
    """Return what a request fails with, or a link shows, for a refusal.

    Most rules name both values in their message; values that are not in it are added. A reason that
    only a newer peer has becomes ProtocolVersionMismatch, and the message begins with it.
    """
    reason = _REASONS.get(refusal.reason)
    message = refusal.message
    sides = (("prefill", refusal.prefill_value), ("decode", refusal.decode_value))
    unsaid = [
        f"{side}: {value}"
        for side, value in sides  # 16 is not in 160
        if value and not re.search(rf"(?<!\w){re.escape(value)}(?!\w)", message)
    ]
    if unsaid:
        message += f" ({'; '.join(unsaid)})"
    if reason is None:
        return Failure(Reason.PROTOCOL_VERSION_MISMATCH, f"{refusal.reason}: {message}")
    return Failure(reason, message)
