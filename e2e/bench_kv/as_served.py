"""What a user notices: the time to the first token, prefill velocity, and idle workers.

Arms take turns: one pair of engines is started, measured and ended, then the other's. So an engine
that takes a core while it is idle does not take it from the other arm.
"""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from bench_kv import figures, phases, served
from bench_kv.served import OURS, STOCK, Arm, Pair
from forked_python import ForkedPython

LENGTHS = (64, 512, 900)
WARM_UP = 3
VELOCITY_TOKENS = 512
PROMPTS_AT_ONCE = 12
"""So many that prefill always has the next one: with four, it waited while decode had them."""
PROMPTS = 24
IDLE_SECONDS = 10.0
SPIN_SECONDS = 2.0
"""After a request, vLLM's processes look for the next one without a pause for a second."""


@dataclass(frozen=True)
class Size:
    """How often each thing is measured, in how many turns of each arm."""

    lengths: tuple[int, ...] = LENGTHS
    rounds: int = 20
    turns: int = 4


class Served(Protocol):
    """A prefill and a decode engine of an arm."""

    arm: Arm

    def first_token(self, prompt: list[int]) -> dict[str, float]:
        """Serve a prompt; return the moments of its way."""

    def notes(self) -> list[str]:
        """Return the moments that the engines have written down."""


@dataclass
class Taken:
    """What was measured of one arm."""

    ways: dict[int, list[dict[str, float]]] = field(default_factory=dict)
    parts: dict[int, list[dict[str, float]]] = field(default_factory=dict)
    through: list[float] = field(default_factory=list)
    alone: list[float] = field(default_factory=list)
    idle: float = 0.0

    def seconds(self, length: int) -> list[float]:
        """Return the times to the first token."""
        return [way["answered"] - way["began"] for way in self.ways[length]]


def measure(arms: Sequence[Arm], size: Size, say: Any) -> dict[str, Any]:
    """Return the numbers of all arms; ``say`` tells a person how far it is."""
    say("the host of the engines imports vLLM")
    taken = {arm.name: Taken() for arm in arms}
    with _hosts(arms) as hosts:
        shares = figures.shares(size.rounds, size.turns)
        for number, rounds in enumerate(shares):
            for arm in figures.turn(arms, number):
                say(f"as served, turn {number + 1} of {len(shares)}: {arm.name}")
                with _running(arm, hosts[arm.sources]) as pair:
                    first_tokens(pair, size.lengths, rounds, number, taken[arm.name])
                    if number + 1 == len(shares):
                        time.sleep(SPIN_SECONDS)
                        taken[arm.name].idle = pair.decode.idle_share(IDLE_SECONDS)
                    with _pinned(pair):
                        _velocity(pair, rounds, number, taken[arm.name])
    return {
        **times(taken, size.lengths, shares),
        "velocity": _rates(taken, size.rounds),
        "idle": {name: round(of.idle, 4) for name, of in taken.items()},
    }


@contextmanager
def _hosts(arms: Sequence[Arm]) -> Iterator[dict[Path, ForkedPython]]:
    """Start a host for each version of the connector."""
    hosts = {arm.sources: served.host(arm) for arm in arms}
    try:
        yield hosts
    finally:
        for host in hosts.values():
            host.close()


@contextmanager
def _running(arm: Arm, host: ForkedPython) -> Iterator[Pair]:
    """Start a pair of engines; end it afterwards."""
    with tempfile.TemporaryDirectory(prefix="bench-kv-") as folder:
        pair = Pair(arm, host, Path(folder))
        try:
            pair.wait()
            yield pair
        finally:
            pair.end()


@contextmanager
def _pinned(pair: Pair) -> Iterator[None]:
    """Give prefill one core, and the others to decode and to this process.

    Otherwise both engines compute on the same cores, and what decode does is missing to prefill.
    """
    cores = sorted(os.sched_getaffinity(0))
    others = cores[1:] or cores
    pair.prefill.bind(cores[:1])
    pair.decode.bind(others)
    os.sched_setaffinity(0, others)
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def first_tokens(
    pair: Served, lengths: Sequence[int], rounds: int, turn: int, taken: Taken
) -> None:
    """Serve prompts of each length: in the same turn, those of each arm are the same."""
    dice = random.Random(turn)
    ways: dict[int, list[dict[str, float]]] = {length: [] for length in lengths}
    for count in (WARM_UP, rounds):
        for length in lengths:
            prompts = [[dice.randrange(3, 250) for _ in range(length)] for _ in range(count)]
            ways[length] = [pair.first_token(prompt) for prompt in prompts]
    lines = pair.notes()
    for length, each in ways.items():
        taken.ways.setdefault(length, []).extend(each)
        if (kinds := pair.arm.phases) is not None:
            for way in each:
                moments = phases.read(lines, way["began"], way["answered"]) | way
                if "reported" not in moments:
                    raise SystemExit(f"{pair.arm.name}: no KV was moved: {moments}")
                split = phases.split(moments, way["began"], kinds)
                taken.parts.setdefault(length, []).append(split)


def _velocity(pair: Pair, rounds: int, turn: int, taken: Taken) -> None:
    """Prompt tokens a second through both engines, beside the same prefill engine alone."""
    dice = random.Random(-1 - turn)
    serve: dict[str, Any] = {
        "through": pair.first_token,
        "alone": lambda prompt: pair.prefill.complete(prompt, None),
    }
    with ThreadPoolExecutor(PROMPTS_AT_ONCE) as pool:
        for number in range(1 + rounds):
            for name in figures.turn(list(serve), number):
                prompts = [
                    [dice.randrange(3, 250) for _ in range(VELOCITY_TOKENS)] for _ in range(PROMPTS)
                ]
                began = time.monotonic()
                list(pool.map(serve[name], prompts))
                rate = PROMPTS * VELOCITY_TOKENS / (time.monotonic() - began)
                if number:
                    getattr(taken, name).append(rate)


def times(taken: dict[str, Taken], lengths: Sequence[int], shares: Sequence[int]) -> dict[str, Any]:
    """Return the times to the first token, and their phases."""
    return {
        "ttft": {
            str(length): figures.compared(
                {name: of.seconds(length) for name, of in taken.items()}, shares
            )
            for length in lengths
        },
        "phases": {
            str(length): {
                name: figures.medians(of.parts[length]) for name, of in taken.items() if of.parts
            }
            for length in lengths
        },
    }


def _rates(taken: dict[str, Taken], rounds: int) -> dict[str, Any]:
    return {
        "tokens_per_second": figures.middles({name: of.through for name, of in taken.items()}),
        "alone": figures.middles({name: of.alone for name, of in taken.items()}),
        "of_alone": {
            name: round(figures.ratio(of.through, of.alone), 3) for name, of in taken.items()
        },
        "rounds": rounds,
    }


ARMS = (OURS, STOCK)
