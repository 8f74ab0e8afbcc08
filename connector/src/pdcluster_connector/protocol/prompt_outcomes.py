"""Who computed a request's prompt, and whether that is a fault.

A decode engine counts each request once, by outcome and reason. Its launcher judges the counts and
the operator shows them. All three use the rule that is written here:

* A prompt that decode computes by itself is a fault, whatever the reason. The answer is right and
  its status is 200, so nobody would notice otherwise.
* It is no fault if no transfer was due: decode's own prefix cache held the KV, less than one block
  was left to compute, vLLM had to compute all of it for the request, or somebody cleared the
  caches.
* It is no fault either if the sender asked for it: ``kv_transfer_params: {"local_prefill": true}``
  and no ticket. So `pdcluster check` and `pdcluster bench` compare with decode alone. It is then
  also computed at once, as if there was no prefill. Routers put those of
  prefill's answer, which may lack a ticket, in the place of these parameters.

* It is no fault by itself if the engine was told that its router decides (the option
  ``router_may_skip_prefill``) and the request has no ``kv_transfer_params`` at all. In this way,
  llm-d's endpoint picker sends short and cached prompts straight to decode. If nearly no prompt
  comes with KV, that is a fault all the same: see :data:`LEAST_TRANSFERRED_PERCENT`.

Without that option, a request without a ticket is a fault even if a router sent it to decode on
purpose: the engine cannot know the purpose. Whoever runs such a router allows the share that they
expect.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Final

LOCAL_PARAMETER: Final = "local_prefill"
PROMPTS_METRIC: Final = "pdcluster_kv_prompts_total"

# The option `local_tokens_per_step`, and the spec's field: its default and its largest value.
TOKENS_PER_STEP: Final = 512
MOST_TOKENS_PER_STEP: Final = 1_048_576


class Outcome(StrEnum):
    """What became of one prompt on a decode engine."""

    TRANSFERRED = "transferred"  # its KV came from prefill
    LOCAL = "local"  # decode computed it and tried no transfer
    RECOMPUTED = "recomputed"  # decode computed it after its transfer failed
    FAILED = "failed"  # its transfer failed, and so did the request


class LocalReason(StrEnum):
    """Why no transfer was tried, beside ``compat.reasons.Reason``."""

    NO_TICKET = "NoTicket"
    PROMPT_MISMATCH = "PromptMismatch"
    TICKET_SPENT = "TicketSpent"
    TICKET_TOO_LONG = "TicketTooLong"  # holds the last token, which this model's decode computes
    LOCAL_BY_ROUTER = "LocalByRouter"  # no kv_transfer_params, and the router may skip prefill
    CACHE_RESET = "CacheReset"  # the caches were cleared, e.g. for new weights
    PREFIX_HIT = "PrefixHit"
    PREFIX_READING_OFF = "PrefixReadingOff"  # e.g. prompt logprobs: vLLM computes all itself
    REQUESTED = "Requested"  # no ticket, and LOCAL_PARAMETER
    SHORT_PROMPT = "ShortPrompt"  # no ticket, and less than one block left to compute


NOT_DUE: Final = frozenset(
    {
        LocalReason.CACHE_RESET,
        LocalReason.LOCAL_BY_ROUTER,
        LocalReason.PREFIX_HIT,
        LocalReason.PREFIX_READING_OFF,
        LocalReason.REQUESTED,
        LocalReason.SHORT_PROMPT,
    }
)


LEAST_TRANSFERRED_PERCENT: Final = 5
"""If a smaller share of prompts was due for a transfer, a router that may skip prefill never uses
it, or requests come past the router."""

LEAST_JUDGED: Final = 100
"""Of fewer prompts, that share says nothing: a router may rightly skip prefill for a short one."""


def was_due(outcome: str, reason: str) -> bool:
    """Return whether prefill should have brought the KV of such a prompt."""
    return outcome != Outcome.LOCAL or reason not in NOT_DUE


def is_fault(outcome: str, reason: str) -> bool:
    """Return whether decode computed a prompt that prefill should have brought."""
    return outcome in (Outcome.LOCAL, Outcome.RECOMPUTED) and was_due(outcome, reason)


def no_ticket(why: str) -> dict[str, Any]:
    """Return the ``kv_transfer_params`` of a prefill answer that hands no KV over.

    They are not empty. Some routers pass them on as they are, and decode takes a request without
    any for one that its router sent past prefill.
    """
    return {"do_remote_prefill": False, "no_ticket": why}


def asks_for_local(params: Mapping[str, Any] | None) -> bool:
    """Return whether a request's ``kv_transfer_params`` ask decode to compute the prompt itself."""
    return isinstance(params, Mapping) and params.get(LOCAL_PARAMETER) is True


def why_no_ticket(params: Mapping[str, Any] | None, *, may_skip: bool) -> LocalReason:
    """Return why a request has no ticket; ``may_skip``: its router may skip prefill."""
    if asks_for_local(params):
        return LocalReason.REQUESTED
    # A router that used prefill, or a client that means to, sends parameters.
    return LocalReason.NO_TICKET if params or not may_skip else LocalReason.LOCAL_BY_ROUTER
