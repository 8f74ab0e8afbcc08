"""The prompts that a decode engine computes itself wait their turn.

If prefill is lost, all prompts come to decode. vLLM would fill each engine step with them, and
requests that generate would nearly stand still. :class:`PromptPace` says how many may begin. The
others stay in vLLM's queue: vLLM asks again in each step, and meanwhile goes on to requests behind
them whose KV comes from prefill.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, NamedTuple

from pdcluster_connector.protocol.prompt_outcomes import TOKENS_PER_STEP, asks_for_local

if TYPE_CHECKING:  # vLLM takes five seconds to import; the tests of the pace do not need it
    from vllm.v1.request import Request

    from pdcluster_connector.vllm.metrics import StatsCollector

LOOKUPS_OF_A_PROMPT: Final = 10  # what else vLLM does for it takes as long as so many
MOST_LOOKUPS: Final = 16_384  # about 13 ms


@dataclass(frozen=True, slots=True)
class PromptPace:
    """How many prompt tokens a decode engine computes itself while it generates for others.

    An engine step lasts as long as the tokens that it computes. Without a limit, vLLM fills each
    step with prompts, and each request that generates gets one token from such a long step. The
    limit is a mean: a step cannot be cut short by a connector, but the next prompt can begin later.
    So a prompt of 8,192 tokens at 512 tokens a step is followed by 15 steps in which no other
    begins.

    512 tokens take an accelerator about as long as two steps that only generate: such a step reads
    all weights once, and by the data sheets 150 (A100) to 300 tokens (H100) can be computed in that
    time, whatever the model. A step that also reads long KV caches takes longer. So prompts and
    requests that generate share the engine about equally.

    In every step, vLLM looks at every prompt that waits, and looks up each block of it that the
    prefix cache holds. We measured 8 µs for a prompt and 0.8 µs for a block. If that is too long,
    vLLM is left to itself until fewer prompts wait.

    Nothing here is kept for a request. The debt falls in every step, whatever becomes of the
    prompts that made it, so no prompt waits for ever.

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


class _Waiting(NamedTuple):
    since: float
    lookups: int


@dataclass(eq=False)
class LocalPrompts:
    """Not thread-safe: lives on the scheduler's thread.

    Args:
        block: tokens of the smallest block. A prompt of which no more is left to compute never
            waits: vLLM computes as much of a prompt that is in the prefix cache as a whole.
    """

    pace: PromptPace
    block: int
    stats: StatsCollector
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._requests: dict[str, Request] = {}
        self._waiting: dict[str, _Waiting] = {}
        self._asked: set[str] = set()
        self._gives_way = False

    def arrived(self, request: Request) -> None:
        """Keep a request until it has :meth:`left`."""
        self._requests[request.request_id] = request

    def must_wait(self, request: Request, computed: int) -> bool:
        """Whether a prompt, of which ``computed`` tokens are in the prefix cache, waits."""
        if self.pace.may_begin() or not self._is_paced(request, computed):
            return False
        known = self._waiting.get(request.request_id)
        since = self.clock() if known is None else known.since
        self._waiting[request.request_id] = _Waiting(since, lookups_of(computed // self.block))
        return True

    def _is_paced(self, request: Request, computed: int) -> bool:
        """Whether a prompt may have to wait, and others may have to wait for it.

        Not if the request was preempted while it generated: its client has begun to read. Nor if
        vLLM would not listen. Such prompts make no debt either: they would keep all others out.
        Nor if the sender asked this engine to compute it: a benchmark measures vLLM's own pace.
        """
        short = request.num_tokens - computed <= self.block
        unpaced = request.num_output_tokens or request.skip_reading_prefix_cache
        return not (short or unpaced or asks_for_local(request.kv_transfer_params))

    def begins(self, request: Request, computed: int) -> None:
        """Take note that a prompt waits no more and is computed here."""
        if self._is_paced(request, computed):
            self.pace = self.pace.begin(request.num_tokens - computed)
        waited = self._waiting.pop(request.request_id, None)
        if waited is not None:
            self.stats.count("local_prompt_wait_seconds", "", [self.clock() - waited.since])

    def lets_others_begin(self, request_id: str) -> bool:
        """Whether a request whose KV could come now is passed over in this step.

        vLLM keeps room for prompts whose transfers failed, also while they wait. It may find none
        for a request of higher priority because of that, and then looks at none behind it. They
        would wait for each other for ever. So after such a step, vLLM gets to those behind.
        """
        if self._gives_way:
            return True
        self._asked.add(request_id)
        return False

    def kv_comes(self, request_id: str) -> None:
        """Take note that a prompt that may have waited is not computed here."""
        self._asked.discard(request_id)
        self._waiting.pop(request_id, None)

    def left(self, request_id: str) -> None:
        """Forget a request that has ended, in whatever way."""
        self._requests.pop(request_id, None)
        self._waiting.pop(request_id, None)

    def step(self, *, idle: bool) -> None:
        """Take note that vLLM has just planned a step; ``idle``: nothing is computed beside it."""
        self._gives_way = bool(self._asked and self._waiting)
        self._asked.clear()
        if not idle or self._waiting:  # hundreds may wait for their KV, and a step looks at all
            self.pace = self.pace.step(
                others_generate=any(
                    one.num_output_tokens > 0 and one.status.name == "RUNNING"
                    for one in self._requests.values()
                ),
                lookups=sum(waiting.lookups for waiting in self._waiting.values()),
            )
        self.stats.gauge("local_prompts_waiting", len(self._waiting))
