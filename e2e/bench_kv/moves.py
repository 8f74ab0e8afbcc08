"""What each connector does with its own time: blocks moved, requests side by side, step threads."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench_kv import figures, workers
from bench_kv.workers import BLOCK_BYTES, BLOCK_TOKENS, BLOCKS, LAYERS, Worker

Pairs = dict[str, tuple[Worker, Worker]]
MOVED = 2**24
SIDE_BY_SIDE = (1, 8, 32, 256)
BLOCKS_OF_ONE = 2
FRAGMENTED = 41_000
LONG = 1_000_000


@dataclass(frozen=True)
class Size:
    """How often each thing is measured, and how large the largest are."""

    rounds: int = 21
    side_by_side: tuple[int, ...] = SIDE_BY_SIDE
    fragmented: int = FRAGMENTED
    long: int = LONG
    blocks: int = BLOCKS
    raw: bool = True


SMALL = Size(rounds=2, side_by_side=(1, 8), fragmented=2_000, long=20_000, blocks=300, raw=False)
"""For a test of the benchmark itself."""


def measure(size: Size, say: Callable[[str], None]) -> dict[str, Any]:
    """Return the numbers of both connectors, and of raw NIXL where it has the same to do."""
    say("engines whose connectors are driven start")
    with (
        tempfile.TemporaryDirectory(prefix="bench-kv-") as folder,
        workers.forked(Path(folder), blocks=size.blocks) as pairs,
    ):
        for prefill, _ in pairs.values():
            prefill.ask("fill", 7)
        rows = Rows(pairs, size)
        rows.connect()
        say("16 MiB in random blocks")
        found = {"blocks": rows.random_blocks()}
        say("requests side by side")
        found["side_by_side"] = {str(n): rows.side_by_side(n) for n in size.side_by_side}
        say(f"{size.fragmented:,} descriptors")
        found["fragmented"] = rows.fragmented()
        say(f"a prompt of {size.long:,} tokens")
        found["long"] = rows.long_prompt()
        found["handshake"] = {
            "descriptors": LAYERS * size.blocks,
            **{name: decode.ask("handshake") for name, (_, decode) in pairs.items()},
            "prefill": {name: one.ask("handshake") for name, (one, _) in pairs.items()},
        }
    return found


class Rows:
    """The rows, measured on running engines."""

    def __init__(self, pairs: Pairs, size: Size) -> None:
        self._pairs = pairs
        self._size = size
        self._dice = random.Random(1)
        self._number = 0

    def connect(self) -> None:
        """Move one block: the engines of a pair meet."""
        for name in self._pairs:
            self._move(name, [1])

    def random_blocks(self) -> dict[str, Any]:
        """Move 16 MiB in blocks of which no two are neighbours; see that they are right."""
        count = MOVED // (LAYERS * BLOCK_BYTES)
        theirs, ours = self._scattered(count), self._scattered(count)
        tokens = count * BLOCK_TOKENS
        raw = RawReads(self._size.blocks, theirs, ours, tokens) if self._size.raw else None
        names = [*self._pairs, *(["raw"] if raw else [])]
        taken: dict[str, list[float]] = {name: [] for name in names}
        for number in range(1 + self._size.rounds):
            for name in figures.turn(names, number):
                if name == "raw" and raw:
                    seconds = raw.read()
                else:
                    [seconds] = self._move(name, [count], theirs, ours)["done"]
                if number:
                    taken[name].append(seconds)
        if raw:
            raw.end()
        for name, (prefill, decode) in self._pairs.items():
            if prefill.ask("sums", theirs) != decode.ask("sums", ours):
                raise SystemExit(f"{name} moved wrong bytes")
        return {**figures.compared(taken), "descriptors": count * LAYERS}

    def side_by_side(self, count: int) -> dict[str, Any]:
        """Give decode many requests in one step; seconds until each is there."""
        whole: dict[str, list[float]] = {name: [] for name in self._pairs}
        late: dict[str, list[float]] = {name: [] for name in self._pairs}
        for number in range(1 + self._size.rounds):
            for name in figures.turn(list(self._pairs), number):
                done = self._move(name, [BLOCKS_OF_ONE] * count)["done"]
                if number:
                    whole[name].append(max(done))
                    late[name].append(figures.percentile(done, 0.99))
        megabytes = count * BLOCKS_OF_ONE * LAYERS * BLOCK_BYTES / 1e6
        all_done = figures.compared(whole)
        return {
            "all": all_done,
            "p99": figures.compared(late),
            "megabytes_per_second": {
                name: round(megabytes / milliseconds * 1e3)
                for name, milliseconds in all_done["milliseconds"].items()
            },
        }

    def fragmented(self) -> dict[str, Any]:
        """Move one request of very many descriptors; what the engine's thread pays for it."""
        count = min(self._size.fragmented // LAYERS, self._size.blocks // 2 - 1)
        steps: dict[str, list[float]] = {name: [] for name in self._pairs}
        whole: dict[str, list[float]] = {name: [] for name in self._pairs}
        for number in range(1 + self._size.rounds):
            for name in figures.turn(list(self._pairs), number):
                found = self._move(name, [count])
                if number:
                    steps[name].append(found["first"])
                    whole[name].append(*found["done"])
        return {
            "descriptors": count * LAYERS,
            "step": figures.compared(steps),
            "whole": figures.compared(whole),
        }

    def long_prompt(self) -> dict[str, Any]:
        """Hand a very long prompt over; the longest call on each scheduler's thread."""
        blocks = list(range(1, self._size.long // BLOCK_TOKENS + 1))
        longest: dict[str, dict[str, list[float]]] = {
            side: {name: [] for name in self._pairs} for side in ("prefill", "decode")
        }
        for number in range(1 + self._size.rounds):
            for name in figures.turn(list(self._pairs), number):
                prefill, decode = self._pairs[name]
                request = f"long-{number}"
                offered = prefill.ask("offer", [(request, self._size.long, blocks)])
                [params] = offered["params"]
                found = decode.ask("receive_nothing", request, self._size.long, params, blocks)
                if number:
                    longest["prefill"][name].append(offered["longest"])
                    longest["decode"][name].append(found["longest"])
        return {side: figures.compared(taken) for side, taken in longest.items()}

    def _move(
        self,
        name: str,
        counts: list[int],
        theirs: list[int] | None = None,
        ours: list[int] | None = None,
    ) -> dict[str, Any]:
        """Hand requests of so many blocks each from prefill to decode."""
        prefill, decode = self._pairs[name]
        places = [
            each or self._scattered(sum(counts), apart=2 * sum(counts) < self._size.blocks)
            for each in (theirs, ours)
        ]
        cut = []
        for count in counts:
            cut.append([place[:count] for place in places])
            places = [place[count:] for place in places]
        self._number += 1
        names = [f"r{self._number}-{index}" for index in range(len(counts))]
        offered = prefill.ask(
            "offer",
            [(n, len(a) * BLOCK_TOKENS, a) for n, (a, _) in zip(names, cut, strict=True)],
        )
        found: dict[str, Any] = decode.ask(
            "receive",
            [
                (n, len(b) * BLOCK_TOKENS, params, b)
                for n, params, (_, b) in zip(names, offered["params"], cut, strict=True)
            ],
        )
        return found

    def _scattered(self, count: int, *, apart: bool = True) -> list[int]:
        """Return block ids in random order; ``apart``: no two of them are neighbours."""
        ids = list(range(1, self._size.blocks, 2 if apart else 1))
        self._dice.shuffle(ids)
        return ids[:count]


class RawReads:
    """The same blocks by NIXL's own API, between two processes without a connector."""

    def __init__(self, blocks: int, theirs: list[int], ours: list[int], tokens: int) -> None:
        from gpu.device_cache import LAYER_OUTERMOST
        from gpu.rig import Agents, PrefillProcess
        from gpu.speed import Raw, Work

        model = {"kv_heads": 1, "layers": LAYERS, "token_bytes": BLOCK_BYTES // BLOCK_TOKENS}
        cache: dict[str, Any] = model | {
            "device": "cpu", "layout": LAYER_OUTERMOST, "block_tokens": BLOCK_TOKENS,
            "num_blocks": blocks,
        }  # fmt: skip
        work = Work("", model, 1, 1, LAYER_OUTERMOST, BLOCK_TOKENS)
        self._prefill = PrefillProcess(1, cache)
        self._prefill.ask("fill_random", 7)
        self._raw = Raw(work, cache, self._prefill, Agents(4, 256), theirs, ours, tokens)

    def read(self) -> float:
        """Read everything once; return the seconds."""
        self._raw.read()
        return float(self._raw._found[-1][2])

    def end(self) -> None:
        """End the process; raises SystemExit if bytes are wrong."""
        self._raw.end()
        self._prefill.end()
