"""A stated model of a PDCluster under load, one step a minute: what its engines would measure.

Nothing in it is a measurement. Prefill engines are M/M/1 queues with a backlog; a decode engine's
time between tokens is ``floor + each * requests``, as steps of vLLM are; a link is shared by its
receives. What waits at decode holds KV in prefill, which then has no room, as leases do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import count

from pdcluster_operator.plan.moments import Bounds, Goal, Moment, RoleLoad, TransferLoad
from pdcluster_operator.plan.scaling import advice

STEP = 60.0


@dataclass(kw_only=True)
class Fleet:
    """Engines that come after ``start`` steps, as far as there are GPUs for them."""

    prompt_seconds: float = 0.5  # of a prefill engine's work for one prompt
    prompt_tokens: int = 4096
    answer_tokens: int = 200
    floor: float = 0.010
    each: float = 0.0005  # of the time between tokens, for each request of a decode engine
    room: int = 100  # requests for which a decode engine has KV cache
    transfer_seconds: float = 0.02  # of one receive alone on a link
    start: int = 3
    gpus: tuple[int, int] = (64, 64)
    measured_by: int = 0  # steps for which new engines are not measured
    wanted: list[int] = field(default_factory=lambda: [1, 1])
    backlog: float = 0.0
    broken: bool = False  # clients get no answer, so that requests pile up in decode

    def __post_init__(self) -> None:
        self.ready = list(self.wanted)
        self.coming: list[list[int]] = [[], []]  # in how many steps
        self.now = 0.0

    def scale(self, role: int, number: int) -> None:
        self.wanted[role] = number
        self.ready[role] = min(self.ready[role], number)
        while self.ready[role] + len(self.coming[role]) < min(number, self.gpus[role]):
            self.coming[role].append(self.start)
        del self.coming[role][max(0, number - self.ready[role]) :]

    def step(self, rate: float) -> Moment:
        """Let a minute pass with so many requests a second; return what was measured."""
        self.now += STEP
        for role in (0, 1):
            self.coming[role] = [left - 1 for left in self.coming[role]]
            self.ready[role] += sum(left <= 0 for left in self.coming[role])
            self.coming[role] = [left for left in self.coming[role] if left > 0]
        prefills, decodes = self.ready
        # Decode first: what it does not take stays in prefill.
        most = min(self.room, 10_000.0)
        capacity = decodes * most / (self.answer_tokens * (self.floor + self.each * most))
        links = 0.95 * min(self.ready) / self.transfer_seconds
        offered = self.backlog / STEP + rate
        through = min(offered, capacity, links, 0.98 * prefills / self.prompt_seconds)
        self.backlog = max(0.0, self.backlog + (rate - through) * STEP)
        busy = min(0.98, through * self.prompt_seconds / prefills)
        queue = self.prompt_seconds * busy / (1 - busy) + self.backlog / max(through, 1e-9)
        requests = through / decodes  # each engine's, a second
        load = requests * self.answer_tokens
        gap = self.floor / max(1e-3, 1 - load * self.each) if load * self.each < 1 else 1.0
        running = min(most, load * gap)
        gap = self.floor + self.each * running
        on_link = min(0.95, through * self.transfer_seconds / min(self.ready))
        each_receive = self.transfer_seconds / (1 - on_link)
        blocked = through >= capacity - 1e-9
        return Moment(
            at=self.now,
            prefill=RoleLoad(
                engines=prefills,
                busy=busy * prefills,
                tokens=through * self.prompt_tokens,
                requests=through,
                first_token=self.prompt_seconds + queue,
                waiting=self.backlog + busy * busy / (1 - busy) * prefills,
            ),
            decode=RoleLoad(
                engines=decodes,
                busy=decodes * min(1.0, running),
                tokens=load * decodes,
                requests=through,
                first_token=each_receive + gap,
                gap=gap,
                running=running * decodes,
                kv=decodes * (0.97 if blocked else running / self.room),
            ),
            transfer=TransferLoad(
                rate=through * 1e9, seconds=each_receive, in_flight=through * each_receive
            ),
            wanted=(self.wanted[0], self.wanted[1]),
            came=(prefills + len(self.coming[0]), decodes + len(self.coming[1])),
            ready=(prefills, decodes),
        )


def goal(
    ttft: float | None = 2.0,
    itl: float | None = 0.030,
    prefill: tuple[int, int] = (1, 16),
    decode: tuple[int, int] = (1, 16),
) -> Goal:
    return Goal(prefill=Bounds(*prefill), decode=Bounds(*decode), ttft=ttft, itl=itl)


def follow(
    fleet: Fleet,
    wanted: Goal,
    rate: Callable[[int], float],
    minutes: int,
    hands: Callable[[int, Fleet], None] = lambda *_: None,
) -> Iterator[tuple[Moment, advice.Advice]]:
    """Carry the advice out, minute by minute, as the operator does; ``hands`` may interfere."""
    window: list[Moment] = []
    asked = (fleet.wanted[0], fleet.wanted[1])
    for minute in count():
        if minute == minutes:
            return
        hands(minute, fleet)
        window.append(replace(fleet.step(rate(minute)), asked=asked))
        del window[: -int(advice.MEMORY_SECONDS / STEP)]
        found = advice.advise(window, wanted)
        asked = found.prefill, found.decode
        for role in (0, 1):
            if asked[role] != fleet.wanted[role]:
                fleet.scale(role, asked[role])
        yield window[-1], found
