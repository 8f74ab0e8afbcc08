"""How long may NIXL's progress threads pause: what the readers pay, and what an idle process saves.

A pause is set on the prefill side, on the decode side or on both. All settings take turns in random
order, round after round. Their processes are made several times, since one process may be faster
than its twin.
"""

from __future__ import annotations

import random
import statistics
import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace
from transfer_rig import Decode

from bench_kv import figures
from gpu.device_cache import LAYER_OUTERMOST, DeviceCache
from gpu.rig import Agents, PrefillProcess, decode_of, select
from gpu.threads import thread_nanoseconds
from pdcluster_connector.compat.shape import Memory
from pdcluster_connector.nixl_io.nixl_agent import NixlAgent
from pdcluster_connector.nixl_io.serving_agent import one_row
from pdcluster_connector.plan.geometry import MemoryRange
from pdcluster_connector.protocol.ticket import Ticket
from pdcluster_connector.transfer.receiver import SHORTEST_SLEEP

Setting = tuple[int, int]
Taken = dict[Setting, dict[str, list[float]]]
SETTINGS: tuple[Setting, ...] = (
    (100, 100),
    (1_000, 1_000),
    (10_000, 10_000),
    (100_000, 100_000),
    (10_000, 100),
    (100, 10_000),
)
"""Microseconds on the prefill side and on the decode side. The others are compared to the first."""
LAYERS, BLOCK_TOKENS, TOKEN_BYTES = 32, 16, 512
LARGE, ONE, SIDE_BY_SIDE = 64, 2, 32  # blocks, blocks, requests
ROWS = {
    "large": f"{LARGE * LAYERS:,} descriptors of 8 KiB",
    "one": f"one request of {ONE * LAYERS}",
    "many": f"{SIDE_BY_SIDE} such requests side by side",
    "word": "a lease word",
    "connect": "a new agent's first word",
}
RECEIVES = {"large": [LARGE], "one": [ONE], "many": [ONE] * SIDE_BY_SIDE}
IDLE = {"prefill": "prefill, idle: of a core", "decode": "decode, idle: of a core"}
GENERATIONS = 3
WORD_BYTES = 8


@dataclass
class Pair:
    """A prefill process and a decode rank, with one pause each."""

    prefill: PrefillProcess
    agents: Agents
    decode: Decode
    raw: Words
    own: set[str]

    def measure(self, number: int) -> dict[str, float]:
        """Measure each row once; return the seconds."""
        ticket = replace(self.prefill.ask("ticket", 1, [], 0), token=number, fence_slot=1)
        self.prefill.ask("write_word", 1, number)
        found = {
            name: max(self._receive(ticket, name, counts)) for name, counts in RECEIVES.items()
        }
        found["word"] = self.raw.read()
        fresh = Words(self.agents, self.prefill)
        found["connect"] = fresh.connect()
        fresh.agent.close()
        return found

    def _receive(self, ticket: Ticket, name: str, counts: list[int]) -> list[float]:
        orders, first = [], 1
        for index, count in enumerate(counts):
            blocks = range(first, first + 2 * count, 2)  # no neighbours: NIXL joins none
            first = blocks.stop
            asked = replace(ticket, blocks=(tuple(blocks),), tokens=count * BLOCK_TOKENS)
            request = f"{name}-{ticket.token}-{index}"
            orders.append(self.decode.request(request, asked, list(blocks)))
        self.decode.receive(*orders)
        results = self.decode.wait(*(order.request_id for order in orders))
        if results.failed:
            raise SystemExit(f"FAILED: {results.failed}")
        return list(results.phase_seconds["total"])


class Words:
    """Reads the prefill process's first lease word by an agent of its own."""

    def __init__(self, agents: Agents, prefill: PrefillProcess) -> None:
        self.agent: NixlAgent = agents.agent("words")
        self._into = np.zeros(1, np.uint64)
        self._prefill = prefill.metadata.shards[0]
        self.agent.register([MemoryRange(self._into.ctypes.data, WORD_BYTES)])

    def connect(self) -> float:
        """Load the peer's metadata and read; return the seconds."""
        began = time.perf_counter()
        peer = self.agent.add_peer(self._prefill.agent_metadata)
        words = self._prefill.lease_words
        if words is None:
            raise SystemExit("FAILED: no lease words")
        self._local = self.agent.prepare(
            None, one_row(self._into.ctypes.data, WORD_BYTES), Memory.DRAM
        )
        row = one_row(words.address + WORD_BYTES, WORD_BYTES)
        self._remote = self.agent.prepare(peer, row, Memory.DRAM)
        self.read()
        return time.perf_counter() - began

    def read(self) -> float:
        """Read once, and poll as the receiver does; return the seconds."""
        first = np.zeros(1, np.int32)
        began = time.perf_counter()
        handle = self.agent.read(self._local, first, self._remote, first)
        while self.agent.state(handle) == "PROC":
            time.sleep(SHORTEST_SLEEP)
        taken = time.perf_counter() - began
        self.agent.release(handle)
        return taken


def pauses(device: str, small: bool) -> None:
    """Print one line for each setting."""
    settings, generations, rounds, seconds = SETTINGS, GENERATIONS, 20, 5.0
    if small:
        settings, generations, rounds, seconds = (SETTINGS[0], SETTINGS[-1]), 1, 2, 1.0
    select(device)
    dice = random.Random(1)
    taken: Taken = {one: {name: [] for name in [*ROWS, *IDLE]} for one in settings}
    for _ in range(generations):
        order = list(settings)
        dice.shuffle(order)
        _generation(device, order, dice, rounds, seconds, taken)
    print(f"| pause on prefill, decode | {' | '.join([*ROWS.values(), *IDLE.values()])} |")
    print("|---" * (1 + len(ROWS) + len(IDLE)) + "|")
    first = taken[settings[0]]
    for one in settings:
        cells = [", ".join(f"{pause / 1000:g} ms" for pause in one)]
        cells += [_cell(taken[one][name], first[name], [rounds] * generations) for name in ROWS]
        cells += [f"{statistics.median(taken[one][name]):.2%}" for name in IDLE]
        print(f"| {' | '.join(cells)} |", flush=True)


def _generation(
    device: str,
    settings: list[Setting],
    dice: random.Random,
    rounds: int,
    seconds: float,
    taken: Taken,
) -> None:
    """Measure all settings with processes of their own."""
    cache: dict[str, Any] = {
        "device": device, "layout": LAYER_OUTERMOST, "block_tokens": BLOCK_TOKENS,
        "num_blocks": 2 * LARGE + 2, "kv_heads": 1, "layers": LAYERS, "token_bytes": TOKEN_BYTES,
    }  # fmt: skip
    expected = DeviceCache(**cache)
    expected.fill_random(7)
    with ExitStack() as stack:
        prefills = {}
        for pause in dict.fromkeys(theirs for theirs, _ in settings):
            prefills[pause] = PrefillProcess(1, cache, Agents(pause=pause))
            stack.callback(prefills[pause].end)
            prefills[pause].ask("fill_random", 7)
        pairs = {one: _pair(stack, prefills[one[0]], cache, one[1]) for one in settings}
        for number in range(1, rounds + 2):
            for one in dice.sample(settings, len(settings)):
                for name, found in pairs[one].measure(number).items():
                    if number > 1:
                        taken[one][name].append(found)
        for one, shares in _idle(pairs, seconds).items():
            for name, share in zip(IDLE, shares, strict=True):
                taken[one][name].append(share)
        blocks = list(range(1, 2 * LARGE, 2))
        for one, pair in pairs.items():
            if not torch.equal(pair.decode.cache.bytes[:, blocks], expected.bytes[:, blocks]):
                raise SystemExit(f"FAILED: wrong bytes with pauses of {one}")


def _pair(stack: ExitStack, prefill: PrefillProcess, cache: dict[str, Any], pause: int) -> Pair:
    agents = Agents(4, 256, pause=pause)
    before = set(thread_nanoseconds())
    decode = stack.enter_context(decode_of(prefill, cache, agents=agents))
    decode.receiver.probe(prefill.metadata).result(120)
    own = set(thread_nanoseconds()) - before
    raw = Words(agents, prefill)
    stack.callback(raw.agent.close)
    raw.connect()
    return Pair(prefill, agents, decode, raw, own)


def _idle(pairs: dict[Setting, Pair], seconds: float) -> dict[Setting, list[float]]:
    """Return the shares of a core of each prefill process and of each decode rank's threads."""

    def used(pair: Pair) -> list[int]:
        theirs = thread_nanoseconds(process=str(pair.prefill.pid))
        return [sum(theirs.values()), sum(thread_nanoseconds(pair.own).values())]

    time.sleep(0.5)
    before = {one: used(pair) for one, pair in pairs.items()}
    began = time.perf_counter()
    time.sleep(seconds)
    spent = time.perf_counter() - began
    return {
        one: [(now - then) / spent / 1e9 for now, then in zip(used(pair), before[one], strict=True)]
        for one, pair in pairs.items()
    }


def _cell(taken: list[float], first: list[float], turns: list[int]) -> str:
    milliseconds = f"{statistics.median(taken) * 1e3:.2f} ms"
    if taken is first:
        return milliseconds
    low, high = figures.interval(taken, first, turns)
    return f"{milliseconds}: {figures.ratio(taken, first):.2f} [{low:.2f}, {high:.2f}]"
