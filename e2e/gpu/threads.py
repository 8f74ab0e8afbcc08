"""Do NIXL's threads work side by side: threads × split × limit, with the CPU that each took.

All settings read the same blocks in turn, round after round, in another order each time. So what
else the machine does meets all of them, and their ratios are those of one run.
"""

from __future__ import annotations

import statistics
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msgspec.structs import replace
from transfer_rig import Decode

from gpu.device_cache import LAYER_OUTERMOST
from gpu.rig import Agents, PrefillProcess, decode_of

SETTINGS = (
    (0, 0, 1024),
    (4, 1024, 1024),
    (4, 1024, 4096),
    (2, 256, 1024),
    (4, 256, 1024),
    (4, 256, 4096),
    (8, 256, 2048),
)
"""NIXL's threads, its ``split_batch_size``, our ``descriptors_per_transfer``; the fifth is ours."""
OURS = SETTINGS[4]
COUNTS = (512, 2048, 16_384)
LAYERS, BLOCK_TOKENS = 32, 16
WORKED = 0.05
"""A thread has worked if it took this share of the CPU of all threads that read."""


@dataclass
class Reader:
    """A decode rank, the threads that its agent has, and what its reads took."""

    decode: Decode
    own: set[str]
    seconds: list[float] = field(default_factory=list)
    posting: list[float] = field(default_factory=list)
    cpu: dict[str, int] = field(default_factory=dict)

    def read(self, prefill: PrefillProcess, number: int, blocks: list[int]) -> None:
        """Read ``blocks`` once into blocks of the same numbers."""
        ticket = replace(
            prefill.ask("ticket", 1, [], 0), blocks=(tuple(blocks),),
            tokens=len(blocks) * BLOCK_TOKENS, token=number, fence_slot=1,
        )  # fmt: skip
        prefill.ask("write_word", 1, number)
        before = thread_nanoseconds(self.own)
        self.decode.receive(self.decode.request(f"r{number}", ticket, blocks))
        results = self.decode.wait(f"r{number}")
        after = thread_nanoseconds(self.own)
        if results.failed:
            raise SystemExit(f"FAILED: {results.failed}")
        self.seconds.append(results.phase_seconds["transfer"][0])
        self.posting.append(results.phase_seconds["post"][0])
        for thread, spent in after.items():
            self.cpu[thread] = self.cpu.get(thread, 0) + spent - before.get(thread, 0)


def threads(device: str, small: bool) -> None:
    """Print a table for each number of descriptors."""
    counts, rounds = (COUNTS[1:2], 3) if small else (COUNTS, 21)
    largest = max(counts) // LAYERS
    cache: dict[str, Any] = {
        "device": device, "layout": LAYER_OUTERMOST, "block_tokens": BLOCK_TOKENS,
        "num_blocks": 2 * largest + 2, "kv_heads": 8, "layers": LAYERS, "token_bytes": 32,
    }  # fmt: skip
    prefill = PrefillProcess(1, cache)
    prefill.ask("fill_random", 7)
    print(
        "| descriptors of 4 KiB | threads, split, limit | time ÷ ours | posting ÷ ours |"
        " threads that worked | CPU of the busiest ÷ of all |"
    )
    print("|---|---|---|---|---|---|")
    number = 0
    for count in counts:
        blocks = [2 * one + 1 for one in range(count // LAYERS)]  # no neighbours: NIXL joins none
        with ExitStack() as stack:
            readers = [_reader(stack, prefill, cache, settings) for settings in SETTINGS]
            for turn in range(rounds + 1):
                for reader in readers[turn % len(readers) :] + readers[: turn % len(readers)]:
                    number += 1
                    reader.read(prefill, number, blocks)
            ours = readers[SETTINGS.index(OURS)]
            for settings, reader in zip(SETTINGS, readers, strict=True):
                _row(count, settings, reader, ours)
    prefill.end()


def _reader(
    stack: ExitStack, prefill: PrefillProcess, cache: dict[str, Any], settings: tuple[int, int, int]
) -> Reader:
    threads, split, limit = settings
    before = set(thread_nanoseconds())
    decode = stack.enter_context(
        decode_of(
            prefill,
            cache,
            agents=Agents(threads, split),
            options={"descriptors_per_transfer": limit},
        )
    )
    decode.receiver.probe(prefill.metadata).result(120)
    time.sleep(0.2)  # NIXL's threads have started
    return Reader(decode, set(thread_nanoseconds()) - before)


def _row(count: int, settings: tuple[int, int, int], reader: Reader, ours: Reader) -> None:
    seconds = _median(reader.seconds) / _median(ours.seconds)
    posting = _median(reader.posting) / _median(ours.posting)
    total = sum(reader.cpu.values()) or 1
    worked = [spent for spent in reader.cpu.values() if spent > WORKED * total]
    print(
        f"| {count:,} | {', '.join(map(str, settings))} | {seconds:.2f} | {posting:.2f} |"
        f" {len(worked)} | {max(worked, default=0) / total:.0%} |",
        flush=True,
    )


def _median(found: list[float]) -> float:
    return statistics.median(found[1:])  # the first one connects


def thread_nanoseconds(of: set[str] | None = None, *, process: str = "self") -> dict[str, int]:
    """Return the CPU time of a process's threads, by thread id."""
    found = {}
    for task in Path(f"/proc/{process}/task").iterdir():
        if of is None or task.name in of:
            try:
                found[task.name] = int((task / "schedstat").read_text().split()[0])
            except (FileNotFoundError, ProcessLookupError):
                continue  # it has just ended
    return found
