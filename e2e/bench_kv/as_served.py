"""What a user notices: the time to the first token, prefill velocity, and idle workers."""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench_kv import figures, phases
from bench_kv.served import OURS, STOCK, Arm, Pair

LENGTHS = (64, 512, 900)
WARM_UP = 5
VELOCITY_TOKENS = 512
PROMPTS_AT_ONCE = 4
PROMPTS = 12
IDLE_SECONDS = 10.0
SPIN_SECONDS = 2.0
"""After a request, vLLM's processes look for the next one without a pause for a second."""


@dataclass(frozen=True)
class Size:
    """How often each thing is measured."""

    lengths: tuple[int, ...] = LENGTHS
    rounds: int = 40
    velocity_rounds: int = 20


@contextmanager
def running(arms: Sequence[Arm]) -> Iterator[dict[str, Pair]]:
    """Start a pair of engines for each arm, all at once; end them afterwards."""
    pairs: dict[str, Pair] = {}
    with tempfile.TemporaryDirectory(prefix="bench-kv-") as folder:
        try:
            for arm in arms:
                pairs[arm.name] = Pair(arm, Path(folder))
            for pair in pairs.values():
                pair.wait()
            yield pairs
        finally:
            for pair in pairs.values():
                pair.end()


def measure(arms: Sequence[Arm], size: Size, say: Any) -> dict[str, Any]:
    """Return the numbers of all arms; ``say`` tells a person how far it is."""
    say(f"engines of {', '.join(arm.name for arm in arms)} start")
    with running(arms) as pairs:
        say("time to the first token")
        found: dict[str, Any] = {"ttft": first_tokens(pairs, size)}
        found["phases"] = found["ttft"].pop("phases")
        say("prefill velocity")
        found["velocity"] = velocity(pairs, size)
        say("idle")
        time.sleep(SPIN_SECONDS)
        found["idle"] = {
            name: round(pair.decode.idle_share(IDLE_SECONDS), 4) for name, pair in pairs.items()
        }
    return found


def first_tokens(pairs: dict[str, Pair], size: Size) -> dict[str, Any]:
    """Serve prompts of each length through all arms in turn, in another order each time."""
    dice = random.Random(1)
    seconds: dict[int, dict[str, list[float]]] = {}
    parts: dict[int, dict[str, list[dict[str, float]]]] = {}
    for length in size.lengths:
        seconds[length] = {name: [] for name in pairs}
        parts[length] = {name: [] for name in pairs if name in phases.PHASES}
        ways: dict[str, list[dict[str, float]]] = {name: [] for name in pairs}
        for number in range(WARM_UP + size.rounds):
            prompt = [dice.randrange(3, 250) for _ in range(length)]
            for name in figures.turn(list(pairs), number):
                ways[name].append(pairs[name].first_token(prompt))
        for name, pair in pairs.items():
            lines = pair.notes()
            for way in ways[name][WARM_UP:]:
                seconds[length][name].append(way["answered"] - way["began"])
                if name in phases.PHASES:
                    moments = phases.read(lines, way["began"], way["answered"]) | way
                    kinds = phases.PHASES[name]
                    if "reported" not in moments:
                        raise SystemExit(f"{name}: no KV was moved: {moments}")
                    parts[length][name].append(phases.split(moments, way["began"], kinds))
    return {str(length): figures.compared(taken) for length, taken in seconds.items()} | {
        "phases": {
            str(length): {name: figures.medians(rows) for name, rows in of_arms.items()}
            for length, of_arms in parts.items()
        }
    }


def velocity(pairs: dict[str, Pair], size: Size) -> dict[str, Any]:
    """Prompt tokens a second through both engines, beside ours' prefill engine alone."""
    dice = random.Random(2)
    rates: dict[str, list[float]] = {"alone": [], **{name: [] for name in pairs}}
    alone = pairs[OURS.name].prefill

    def serve(name: str, prompt: list[int]) -> None:
        if name == "alone":
            alone.complete(prompt, None)
        else:
            pairs[name].first_token(prompt)

    with ThreadPoolExecutor(PROMPTS_AT_ONCE) as pool:
        for number in range(1 + size.velocity_rounds):
            for name in figures.turn(list(rates), number):
                prompts = [
                    [dice.randrange(3, 250) for _ in range(VELOCITY_TOKENS)] for _ in range(PROMPTS)
                ]
                began = time.monotonic()
                list(pool.map(serve, [name] * PROMPTS, prompts))
                taken = time.monotonic() - began
                if number:
                    rates[name].append(PROMPTS * VELOCITY_TOKENS / taken)
    return {
        "tokens_per_second": {name: round(statistics.median(of), 1) for name, of in rates.items()},
        "of_alone": {name: round(figures.ratio(rates[name], rates["alone"]), 3) for name in pairs},
        "rounds": size.velocity_rounds,
    }


ARMS = (OURS, STOCK)
