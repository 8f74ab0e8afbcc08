"""How many prompt tokens a decode engine computes itself while it generates for other requests.

An engine step lasts as long as the tokens that it computes. Without a limit, vLLM fills each step
with prompts, and each request that generates gets one token from such a long step. The limit is a
mean: a step cannot be cut short by a connector, but the next prompt can begin later. So a prompt of
8,192 tokens at 512 tokens a step is followed by 15 steps in which no other begins.

512 tokens take an accelerator about as long as two steps that only generate: such a step reads all
weights once, and by the data sheets 150 (A100) to 300 tokens (H100) can be computed in that time,
whatever the model. A step that also reads long KV caches takes longer. So prompts and requests that
generate share the engine about equally.

In every step, vLLM looks at every prompt that waits, and looks up each block of it that the prefix
cache holds. We measured 8 µs for a prompt and 0.8 µs for a block. If that is too long, vLLM is left
to itself until fewer prompts wait.

Nothing here is kept for a request. The debt falls in every step, whatever becomes of the prompts
that made it, so no prompt waits for ever.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from pdcluster_connector.protocol.prompt_outcomes import TOKENS_PER_STEP

LOOKUPS_OF_A_PROMPT: Final = 10  # what else vLLM does for it takes as long as so many
MOST_LOOKUPS: Final = 16_384  # about 13 ms


@dataclass(frozen=True, slots=True)
class PromptPace:
    """What may begin in the next engine step.

    Attributes:
        tokens_per_step: prompt tokens in a mean step; 0 for no limit.
        debt: tokens of prompts that have begun, which are not yet paid for by steps.
        begun: prompt tokens of the prompts that begin in the next step.
        is_kept: there is something to protect. Without it, vLLM is left to itself.
    """

    tokens_per_step: int = TOKENS_PER_STEP
    debt: int = 0
    begun: int = 0
    is_kept: bool = False

    def may_begin(self) -> bool:
        """Whether another prompt may begin in the next step, however long it is."""
        return not self.is_kept or self.debt + self.begun < self.tokens_per_step

    def begin(self, tokens: int) -> PromptPace:
        """Return the pace after vLLM let a prompt of so many tokens begin."""
        return replace(self, begun=self.begun + tokens)

    def step(self, *, others_generate: bool, lookups: int = 0) -> PromptPace:
        """Return the pace after a step.

        Args:
            others_generate: requests that have their prompt generate tokens.
            lookups: what the prompts that wait cost vLLM in a step; see :func:`lookups_of`.
        """
        if not self.tokens_per_step or not others_generate or lookups > MOST_LOOKUPS:
            return PromptPace(self.tokens_per_step)
        owed = self.debt + self.begun - self.tokens_per_step
        return PromptPace(self.tokens_per_step, debt=max(0, owed), is_kept=True)


def lookups_of(cached_blocks: int) -> int:
    """Return what a prompt that waits costs vLLM in each step, in lookups of a block."""
    return LOOKUPS_OF_A_PROMPT + cached_blocks
