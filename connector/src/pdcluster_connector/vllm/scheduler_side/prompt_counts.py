"""How the prompts of a decode engine are counted: each once, by what became of its KV."""

from __future__ import annotations

from typing import Final

from vllm.v1.request import Request

from pdcluster_connector.protocol.prompt_outcomes import LocalReason, Outcome
from pdcluster_connector.vllm.metrics import StatsCollector
from pdcluster_connector.vllm.scheduler_side.incoming import Incoming

NO_TICKET: Final = LocalReason.NO_TICKET.value
SHORT_PROMPT: Final = LocalReason.SHORT_PROMPT.value


class PromptCounts:
    """Counts prompts. ``Incoming.counted`` says whether a prompt was counted already.

    Args:
        block: tokens of the smallest block. A shorter rest of a prompt needs no prefill engine.
        recomputes: vLLM computes the prompt here if its transfer fails, and fails it otherwise.
    """

    def __init__(self, stats: StatsCollector, block: int, *, recomputes: bool) -> None:
        self._stats = stats
        self._block = block
        self._recomputes = recomputes

    def scheduled(self, request: Request, incoming: Incoming) -> None:
        """Count a prompt that this engine computes itself."""
        if incoming.counted or incoming.outcome != "local":
            return
        incoming.counted = True
        tokens = incoming.here(request)
        if incoming.reason == NO_TICKET and tokens < self._block:
            incoming.reason = SHORT_PROMPT
        self._stats.prompt(Outcome.LOCAL, incoming.reason, tokens)

    def received(self, incoming: Incoming, *, failed: bool) -> None:
        """Count a prompt whose receive ended."""
        if incoming.counted:
            return
        incoming.counted = True
        outcome = Outcome.TRANSFERRED
        if failed:
            outcome = Outcome.RECOMPUTED if self._recomputes else Outcome.FAILED
        self._stats.prompt(outcome, incoming.reason, incoming.stop - incoming.start)
