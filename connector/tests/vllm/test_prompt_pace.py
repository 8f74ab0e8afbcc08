"""Prompts that decode computes itself keep to a pace while other requests generate.

The queue is a small model of vLLM's: it computes what has begun before anything else, fills a step
with what is allowed to begin, and never stops what has begun.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from types import SimpleNamespace

from hypothesis import example, given, strategies as st

from pdcluster_connector.protocol.prompt_outcomes import TOKENS_PER_STEP
from pdcluster_connector.vllm.scheduler_side.local_prompts import (
    MOST_LOOKUPS,
    LocalPrompts,
    PromptPace,
    lookups_of,
)


@dataclass
class Queue:
    """Prompts before an engine that has ``budget`` tokens in a step."""

    pace: PromptPace
    budget: int
    waiting: deque[tuple[int, int]] = field(default_factory=deque)  # (number, tokens)
    computing: list[tuple[int, int]] = field(default_factory=list)  # (number, tokens left)
    begun: list[int] = field(default_factory=list)
    arrived: int = 0

    def arrive(self, tokens: int) -> None:
        self.waiting.append((self.arrived, tokens))
        self.arrived += 1

    def step(self, *, others_generate: bool) -> tuple[int, list[int]]:
        """Return (prompt tokens that were computed, lengths of the prompts that began)."""
        room, began, still = self.budget, [], []
        for number, left in self.computing:
            done = min(left, room)
            room -= done
            still.append((number, left - done))
        while room and self.waiting and self.pace.may_begin():
            number, tokens = self.waiting.popleft()
            self.pace = self.pace.begin(tokens)
            self.begun.append(number)
            began.append(tokens)
            done = min(tokens, room)
            room -= done
            still.append((number, tokens - done))
        self.computing = [(number, left) for number, left in still if left]
        computed = self.budget - room
        self.pace = self.pace.step(others_generate=others_generate)
        return computed, began

    def leave(self, place: int) -> None:
        """A client hangs up."""
        if place < len(self.waiting):
            del self.waiting[place]
        elif place - len(self.waiting) < len(self.computing):
            del self.computing[place - len(self.waiting)]

    def preempt(self) -> None:
        """The latest prompt loses its blocks and begins again, before all that wait."""
        if self.computing:
            number, _ = self.computing.pop()
            self.waiting.appendleft((number, 100))


LENGTHS = st.integers(1, 3000)
EVENTS = st.one_of(
    st.tuples(st.just("arrive"), LENGTHS),
    st.tuples(st.just("leave"), st.integers(0, 20)),
    st.tuples(st.just("preempt"), st.just(0)),
    st.tuples(st.just("step"), st.integers(1, 20)),
    st.tuples(st.just("alone"), st.integers(1, 3)),
)


@given(
    st.lists(EVENTS, max_size=60),
    st.integers(1, 2000),
    st.integers(1, 4096),
)
@example([("arrive", 3000)] * 12 + [("step", 20)], TOKENS_PER_STEP, 4096)
def test_prompts_keep_to_the_pace_and_all_begin(
    events: list[tuple[str, int]], tokens_per_step: int, budget: int
) -> None:
    queue = Queue(PromptPace(tokens_per_step), budget)
    gone = 0
    # Computed since the engine last had nothing to protect, and in how many steps.
    computed, steps, longest = 0, 0, 0
    for event, number in events:
        if event == "arrive":
            queue.arrive(number)
        elif event == "leave":
            before = len(queue.waiting) + len(queue.computing)
            queue.leave(number)
            gone += before - len(queue.waiting) - len(queue.computing)
        elif event == "preempt":
            queue.preempt()
        for _ in range(number if event in ("step", "alone") else 0):
            is_kept = queue.pace.is_kept
            done, began = queue.step(others_generate=event == "step")
            assert sum(began[:-1]) < tokens_per_step or not is_kept
            if event == "alone" or not is_kept:
                computed, steps = 0, 0
                longest = sum(left for _, left in queue.computing)  # begun without a limit
                continue
            computed, steps = computed + done, steps + 1
            longest = max(longest, *began, *(left for _, left in queue.computing), 0)
            assert computed <= (steps + 2) * tokens_per_step + 2 * max(longest, budget)
            assert queue.pace.debt <= 2 * tokens_per_step + 2 * max(longest, budget)

    owed = queue.pace.debt + sum(tokens for _, tokens in [*queue.waiting, *queue.computing])
    for _ in range(owed // min(tokens_per_step, budget) + 2 * len(queue.waiting) + 3):
        queue.step(others_generate=True)
    assert not queue.waiting, "each prompt begins, although others generate all the time"
    assert not queue.computing
    assert queue.pace.debt == 0, "nothing is owed for ever"


@given(st.lists(LENGTHS, min_size=1, max_size=40), st.integers(1, 2000))
def test_prompts_begin_in_the_order_in_which_they_came(lengths: list[int], rate: int) -> None:
    queue = Queue(PromptPace(rate), 2048)
    for tokens in lengths:
        queue.arrive(tokens)
    while queue.waiting:
        queue.step(others_generate=True)
    assert queue.begun == list(range(len(lengths)))


def test_a_long_prompt_is_followed_by_steps_in_which_nothing_else_begins() -> None:
    queue = Queue(PromptPace(512, is_kept=True), 8192)
    for _ in range(3):
        queue.arrive(8192)
    began = [len(queue.step(others_generate=True)[1]) for _ in range(48)]
    assert began == [1, *[0] * 15] * 3


def test_short_prompts_share_a_step() -> None:
    queue = Queue(PromptPace(512, is_kept=True), 8192)
    for _ in range(60):
        queue.arrive(100)
    began = [len(queue.step(others_generate=True)[1]) for _ in range(12)]
    assert began[0] == 6, "the sixth is the first that reaches the limit"
    assert all(number in (5, 6) for number in began[:11])
    assert sum(began) == 60


def test_nothing_waits_while_nothing_generates() -> None:
    queue = Queue(PromptPace(512), 8192)
    for _ in range(164):
        queue.arrive(100)
    began = [len(queue.step(others_generate=False)[1]) for _ in range(2)]
    assert began == [82, 82], "as many as a step has room for"
    assert queue.pace == PromptPace(512)


def test_a_step_in_which_nothing_is_computed_looks_at_no_request() -> None:
    """Hundreds may wait for their KV, and the engine makes a step each millisecond."""
    looked: list[str] = []

    class Generates:
        request_id = "a"
        status = SimpleNamespace(name="RUNNING")

        @property
        def num_output_tokens(self) -> int:
            looked.append(self.request_id)
            return 1

    prompts = LocalPrompts(PromptPace(512), 16, SimpleNamespace(gauge=lambda *_: None))
    prompts.arrived(Generates())
    prompts.step(idle=False)
    assert prompts.pace.is_kept
    looked.clear()
    prompts.step(idle=True)
    assert looked == []
    assert prompts.pace.is_kept, "in a pause, what generates goes on afterwards"
    prompts.pace = PromptPace(512, debt=10_000, is_kept=True)
    waits = SimpleNamespace(request_id="b", num_tokens=100, num_output_tokens=0,
        skip_reading_prefix_cache=False, kv_transfer_params=None)  # fmt: skip
    assert prompts.must_wait(waits, 0)
    prompts.step(idle=True)
    assert prompts.pace == PromptPace(512, debt=10_000 - 512, is_kept=True)
    prompts.left("a")
    prompts.step(idle=True)
    assert not prompts.must_wait(waits, 0), "or it would wait for ever"


def test_zero_is_no_limit() -> None:
    queue = Queue(PromptPace(0), 10_000)
    for _ in range(100):
        queue.arrive(100)
    assert queue.step(others_generate=True) == (10_000, [100] * 100)
    assert queue.pace.may_begin()


def test_so_many_prompts_that_looking_at_them_takes_too_long_are_left_to_vllm() -> None:
    pace = PromptPace(512, debt=5000, is_kept=True)
    some, many = MOST_LOOKUPS // lookups_of(0), MOST_LOOKUPS // lookups_of(0) + 1
    assert not pace.step(others_generate=True, lookups=some * lookups_of(0)).may_begin()
    assert pace.step(others_generate=True, lookups=many * lookups_of(0)).may_begin()
    assert some > 1000
    long = MOST_LOOKUPS // lookups_of(512)
    assert 10 < long < 100, "prompts of which 8,192 tokens are in the prefix cache"


def test_what_looking_at_the_prompts_may_cost() -> None:
    """A prompt costs 8 µs and a block of it 0.8 µs: about 13 ms, as docs/operations.md says."""
    pace = PromptPace(512, debt=5000, is_kept=True)
    assert lookups_of(0) == 10
    assert lookups_of(512) == 522
    assert not pace.step(others_generate=True, lookups=16_384).may_begin()
    assert pace.step(others_generate=True, lookups=16_385).may_begin()


def test_a_pace_of_which_nothing_is_said_is_the_default() -> None:
    assert PromptPace().tokens_per_step == 512
    assert PromptPace().may_begin(), "nothing generates yet"
