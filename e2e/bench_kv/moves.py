"""What each connector does with its own time: blocks moved, requests side by side, step threads.

Arms take turns: one pair of engines is started, measured and ended, then the next. So an engine
that takes a core while it is idle does not take it from another arm.
"""

from __future__ import annotations

import functools
import random
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench_kv import figures, workers
from bench_kv.workers import BLOCK_BYTES, BLOCK_TOKENS, BLOCKS, LAYERS, Worker

MOVED = 2**24
SIDE_BY_SIDE = (1, 8, 32, 256)
BLOCKS_OF_ONE = 2
FRAGMENTED = 41_000
LONG = 1_000_000
BLOCK_OUTERMOST = "BLHNC"


@dataclass(frozen=True)
class Size:
    """How often each thing is measured, in how many turns, and how large the largest are."""

    rounds: int = 20
    turns: int = 4
    side_by_side: tuple[int, ...] = SIDE_BY_SIDE
    fragmented: int = FRAGMENTED
    long: int = LONG
    blocks: int = BLOCKS


SMALL = Size(rounds=2, side_by_side=(1, 8), fragmented=2_000, long=20_000, blocks=300)
"""For a test of the benchmark itself."""
ARMS = ("ours", "stock", "raw")
CALM = "calm"
"""NixlConnector with a progress thread that waits."""
Taken = dict[str, list[float]]
"""Seconds of each row, named by where they stand in what was found."""


def measure(size: Size, say: Callable[[str], None], arms: Sequence[str] = ARMS) -> dict[str, Any]:
    """Return the numbers of both connectors, and of raw NIXL where it has the same to do."""
    workers.import_vllm()
    taken: dict[str, Taken] = {arm: {} for arm in arms}
    shares = figures.shares(size.rounds, size.turns)
    for number, rounds in enumerate(shares):
        for arm in figures.turn(arms, number):
            say(f"moves, turn {number + 1} of {len(shares)}: {arm}")
            measured = _raw(size, rounds, number) if arm == "raw" else _turn(
                arm, size, rounds, number)  # fmt: skip
            for row, seconds in measured.items():
                taken[arm].setdefault(row, []).extend(seconds)
    return found(taken, size, shares)


def found(taken: Mapping[str, Taken], size: Size, shares: Sequence[int]) -> dict[str, Any]:
    """Return all rows, compared."""
    made: dict[str, Any] = {}
    for row in taken["ours"]:
        of_arms = {arm: of[row] for arm, of in taken.items() if row in of}
        *way, last = row.split("/")
        place = made
        for name in way:
            place = place.setdefault(name, {})
        # Lists are made once in a turn.
        place[last] = figures.compared(of_arms, () if way == ["handshake"] else shares)
    for name in ("blocks", "neighbours"):
        made[name]["descriptors"] = moved(size) * LAYERS
    made["outermost"]["descriptors"] = moved(size)
    made["fragmented"]["descriptors"] = fragments(size) * LAYERS
    made["handshake"]["descriptors"] = size.blocks * LAYERS
    for count, of in made["side_by_side"].items():
        megabytes = int(count) * BLOCKS_OF_ONE * LAYERS * BLOCK_BYTES / 1e6
        of["megabytes_per_second"] = {
            arm: round(megabytes / milliseconds * 1e3)
            for arm, milliseconds in of["all"]["milliseconds"].items()
        }
    return made


def moved(size: Size) -> int:
    """Return how many blocks are 16 MiB, or as many as there is room for."""
    return min(MOVED // (LAYERS * BLOCK_BYTES), size.blocks // 2 - 1)


def fragments(size: Size) -> int:
    """Return the blocks of the request of very many descriptors."""
    return min(size.fragmented // LAYERS, size.blocks // 2 - 1)


def _turn(arm: str, size: Size, rounds: int, number: int) -> Taken:
    """Start a pair of engines for each layout, measure it, and end it."""
    with _pair(arm, size, BLOCK_OUTERMOST) as (prefill, decode):
        taken = Rows(prefill, decode, size, rounds, number).outermost()
    with _pair(arm, size) as (prefill, decode):
        rows = Rows(prefill, decode, size, rounds, number)
        taken |= rows.measure()
        met = [worker.ask("handshake") for worker in (prefill, decode)]
        taken["handshake/all"] = [sum(one["seconds"] for one in met)]
        taken["handshake/on_engine_thread"] = [met[1]["on_engine_thread"]]
    return taken


@contextmanager
def _pair(arm: str, size: Size, layout: str = "") -> Iterator[tuple[Worker, Worker]]:
    """Start a pair of engines; end it afterwards."""
    with (
        tempfile.TemporaryDirectory(prefix="bench-kv-") as folder,
        workers.forked(Path(folder), [arm], blocks=size.blocks, layout=layout) as pairs,
    ):
        yield pairs[arm]


def _raw(size: Size, rounds: int, number: int) -> Taken:
    """Start what reads by NIXL's own API, measure it, and end it."""
    taken: Taken = {}
    for layout in (BLOCK_OUTERMOST, ""):
        with tempfile.TemporaryDirectory(prefix="bench-kv-") as folder:
            # In a process of its own: engines are forked from this one, which has no agents.
            made = functools.partial(RawReads, size, number, layout)
            worker = Worker("raw", Path(folder), made)
            with workers.ended(worker):
                taken |= worker.ask("measure", rounds)
    return taken


class Places:
    """Which blocks hold the prompts on prefill and on decode: in a turn, the same for all arms."""

    def __init__(self, size: Size, number: int) -> None:
        self._size = size
        self._dice = random.Random(number)
        count = moved(size)
        first = self._dice.randrange(1, size.blocks - count)
        self.all = {
            "blocks": (self.scattered(count), self.scattered(count)),
            # One range of memory for each layer, on both sides.
            "neighbours": ([*range(1, count + 1)], [*range(first, first + count)]),
        }

    def scattered(self, count: int, *, apart: bool = True) -> list[int]:
        """Return block ids in random order; ``apart``: no two of them are neighbours."""
        ids = list(range(1, self._size.blocks, 2 if apart else 1))
        self._dice.shuffle(ids)
        return ids[:count]


class Rows:
    """The rows of one turn, measured on a running pair of engines."""

    def __init__(
        self, prefill: Worker, decode: Worker, size: Size, rounds: int, number: int
    ) -> None:
        self._prefill = prefill
        self._decode = decode
        self._size = size
        self._rounds = rounds
        self._places = Places(size, number)
        self._number = 0

    def outermost(self) -> Taken:
        """Return the seconds of the row of engines whose caches have blocks outermost."""
        self._meet()
        return {"outermost": self._blocks(*self._places.all["blocks"])}

    def measure(self) -> Taken:
        """Return the seconds of all other rows."""
        self._meet()
        taken: Taken = {row: self._blocks(*places) for row, places in self._places.all.items()}
        for count in self._size.side_by_side:
            moves = self._repeated([BLOCKS_OF_ONE] * count)
            taken[f"side_by_side/{count}/all"] = [max(one["done"]) for one in moves]
            taken[f"side_by_side/{count}/p99"] = [
                figures.percentile(one["done"], 0.99) for one in moves
            ]
        moves = self._repeated([fragments(self._size)])
        taken["fragmented/step"] = [one["first"] for one in moves]
        taken["fragmented/whole"] = [one["done"][0] for one in moves]
        return taken | self._long_prompt()

    def _meet(self) -> None:
        self._prefill.ask("fill", 7)
        self._move([1])

    def _repeated(self, counts: list[int]) -> list[dict[str, Any]]:
        """Move requests of so many blocks each, again and again; the first time does not count."""
        return [self._move(counts) for _ in range(1 + self._rounds)][1:]

    def _blocks(self, theirs: list[int], ours: list[int]) -> list[float]:
        """Move one prompt that lies in these blocks; see that the bytes are right."""
        count = len(theirs)
        moves = [self._move([count], theirs, ours) for _ in range(1 + self._rounds)][1:]
        if self._prefill.ask("sums", theirs) != self._decode.ask("sums", ours):
            raise SystemExit(f"{self._decode.name} has wrong bytes")
        return [one["done"][0] for one in moves]

    def _long_prompt(self) -> Taken:
        """Hand a very long prompt over; the longest call on each scheduler's thread."""
        blocks = list(range(1, self._size.long // BLOCK_TOKENS + 1))
        taken: Taken = {"long/prefill": [], "long/decode": []}
        for number in range(1 + self._rounds):
            request = f"long-{number}"
            offered = self._prefill.ask("offer", [(request, self._size.long, blocks)])
            [params] = offered["params"]
            received = self._decode.ask("receive_nothing", request, self._size.long, params, blocks)
            if number:
                taken["long/prefill"].append(offered["longest"])
                taken["long/decode"].append(received["longest"])
        return taken

    def _move(
        self,
        counts: list[int],
        theirs: list[int] | None = None,
        ours: list[int] | None = None,
    ) -> dict[str, Any]:
        """Hand requests of so many blocks each from prefill to decode."""
        apart = 2 * sum(counts) < self._size.blocks
        places = [
            each or self._places.scattered(sum(counts), apart=apart) for each in (theirs, ours)
        ]
        cut = []
        for count in counts:
            cut.append([place[:count] for place in places])
            places = [place[count:] for place in places]
        self._number += 1
        names = [f"r{self._number}-{index}" for index in range(len(counts))]
        offered = self._prefill.ask(
            "offer",
            [(n, len(a) * BLOCK_TOKENS, a) for n, (a, _) in zip(names, cut, strict=True)],
        )
        found: dict[str, Any] = self._decode.ask(
            "receive",
            [
                (n, len(b) * BLOCK_TOKENS, params, b)
                for n, params, (_, b) in zip(names, offered["params"], cut, strict=True)
            ],
        )
        return found


class RawReads:
    """The same blocks by NIXL's own API, between two processes without a connector."""

    def __init__(self, size: Size, number: int, layout: str) -> None:
        from gpu import device_cache
        from gpu.rig import PrefillProcess
        from gpu.speed import Work

        # With one head, BLHNC is BHLNC.
        order = device_cache.BLOCK_OUTERMOST if layout else device_cache.LAYER_OUTERMOST
        model = {"kv_heads": 1, "layers": LAYERS, "token_bytes": BLOCK_BYTES // BLOCK_TOKENS}
        self._cache: dict[str, Any] = model | {
            "device": "cpu", "layout": order, "block_tokens": BLOCK_TOKENS,
            "num_blocks": size.blocks,
        }  # fmt: skip
        self._work = Work("", model, 1, 1, order, BLOCK_TOKENS)
        places = Places(size, number).all
        self._rows = {"outermost": places["blocks"]} if layout else places
        self._prefill = PrefillProcess(1, self._cache)
        self._prefill.ask("fill_random", 7)

    def rest(self) -> None:
        """Do nothing: here are no steps."""

    def measure(self, rounds: int) -> Taken:
        """Return the seconds of each row; raises SystemExit if bytes are wrong."""
        return {row: self._reads(*places, rounds) for row, places in self._rows.items()}

    def _reads(self, theirs: list[int], ours: list[int], rounds: int) -> list[float]:
        from gpu.rig import Agents
        from gpu.speed import Raw

        tokens = len(theirs) * BLOCK_TOKENS
        raw = Raw(self._work, self._cache, self._prefill, Agents(4, 256), theirs, ours, tokens)
        for _ in range(1 + rounds):  # the first one connects
            raw.read()
        raw.end()
        return [float(seconds) for *_, seconds in raw._found[1:]]
