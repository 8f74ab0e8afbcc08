"""Does vLLM compute slower with blocks outermost: engines alone, one for each layout, in turns.

With CUDA graphs, so that a step of decode takes as long as the GPU needs, and not as long as Python
needs to start its kernels.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from pathlib import Path

from bench_kv import figures
from gpu.engines import Engine
from gpu.hand_over import SIZES, Bench, Group

# vLLM's attention on a CPU has one layout.
GROUPS = {
    "cuda": {
        layout: Group(layout=layout, graphs=True, connectors=())
        for layout in ("LBHNC", "BLHNC", "BHLNC")
    },
    "cpu": {"LBHNC": Group(backend=None, runner=1, layout=None, connectors=())},
}
BATCH, TOKENS = 8, 64


def attention(device: str, folder: Path, *, small: bool) -> bool:
    """Print a line for each layout; return whether all engines started and answered."""
    kind = device.partition(":")[0]
    size = replace(SIZES[kind, small], cache_gib=2 * SIZES[kind, small].cache_gib)
    longest, side_by_side = size.lengths[-1], size.lengths[-2]
    benches = {name: Bench(group, kind, size, folder) for name, group in GROUPS[kind].items()}
    engines = {name: bench.engine(f"alone {name}", None, {}) for name, bench in benches.items()}
    prompt: dict[str, list[float]] = {name: [] for name in engines}
    token: dict[str, list[float]] = {name: [] for name in engines}
    try:
        for name, engine in engines.items():
            print(f"* {name}: {engine.ready()}", flush=True)
        for number in range(size.repeats + 1):
            for name in figures.turn(list(engines), number):
                make = benches[name].prompt
                alone = _batch(engines[name], [make(longest, number)])[0]
                many = [make(side_by_side, BATCH * number + one) for one in range(BATCH)]
                each = _batch(engines[name], many)[1]
                if number:
                    prompt[name].append(alone)
                    token[name].append(each)
    except RuntimeError as error:
        print(f"\n```\n{str(error)[-4000:]}\n```", flush=True)
        return False
    finally:
        for engine in engines.values():
            engine.stop()
    first = next(iter(engines))
    print(f"\n| layout | prompt of {longest} | a token of {BATCH} requests of {side_by_side} |")
    print("|---|---|---|")
    for name in engines:
        cells = [_cell(taken[name], taken[first]) for taken in (prompt, token)]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
    return True


def _batch(engine: Engine, prompts: list[list[int]]) -> tuple[float, float]:
    """Serve prompts side by side; return the seconds to the last first token, and of a token.

    A token is timed after all prompts are computed.
    """
    began = time.monotonic()
    sent = [engine.submit(prompt, TOKENS) for prompt in prompts]
    answers = [engine.answer(request) for request in sent]
    last = max(answer.first for answer in answers)
    return last - began, (max(answer.end for answer in answers) - last) / (TOKENS - 1)


def _cell(taken: list[float], first: list[float]) -> str:
    low, high = figures.interval(taken, first)
    ratio = figures.ratio(taken, first)
    return f"{statistics.median(taken) * 1e3:.2f} ms: {ratio:.2f} [{low:.2f}, {high:.2f}]"
