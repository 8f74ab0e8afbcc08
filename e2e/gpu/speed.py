"""How fast is it: descriptors × layouts × threads, beside raw NIXL on the same lists."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace

from gpu.device_cache import BLOCK_OUTERMOST, LAYER_OUTERMOST, DeviceCache
from gpu.rig import Agents, PrefillProcess, decode_of, select
from pdcluster_connector.compat.shape import GroupShape, LayerKind
from pdcluster_connector.nixl_io.reading_agent import ProbeResult, ReadingAgent
from pdcluster_connector.plan.block_pairs import EngineBlocks, GroupBlocks
from pdcluster_connector.plan.geometry import MemoryRange
from pdcluster_connector.plan.peer_plan import plan_peer
from pdcluster_connector.plan.request_descriptors import plan_request
from pdcluster_connector.plan.slices import seams
from pdcluster_connector.protocol.load_report import ReceiveRate

LLAMA_8B = {"kv_heads": 8, "layers": 32, "token_bytes": 512}
LLAMA_70B = {"kv_heads": 8, "layers": 80, "token_bytes": 512}
TOKENS = 8192


@dataclass(frozen=True)
class Work:
    """A prompt of 8,192 tokens between two layouts."""

    name: str
    model: dict[str, int]
    prefill_tensor: int
    decode_tensor: int
    layout: str
    block_tokens: int = 16


WORKS = (
    Work("Llama-8B 1→1", LLAMA_8B, 1, 1, LAYER_OUTERMOST),
    Work("Llama-8B 1→1", LLAMA_8B, 1, 1, BLOCK_OUTERMOST),
    Work("Llama-70B 4→2", LLAMA_70B, 4, 2, LAYER_OUTERMOST),
    Work("Llama-70B 4→2", LLAMA_70B, 4, 2, BLOCK_OUTERMOST),
)
THREADS = ((0, 0, 1024), (4, 1024, 1024), (4, 256, 1024), (8, 256, 2048))
"""NIXL's threads, its ``split_batch_size``, our ``descriptors_per_transfer``; the third is ours."""


def speed(device: str, small: bool) -> None:
    """Read the same blocks by raw NIXL in one transfer a source, and by the receiver."""
    repeats = 2 if small else 7
    print(
        "| work | layout, block | descriptors of | by | threads, split, limit | post ms (µs each) |"
        " posted → landed ms | all ms | GB/s | of raw |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for work in WORKS[:2] if small else WORKS:
        tokens = 256 if small else TOKENS
        blocks = tokens // work.block_tokens
        cache: dict[str, Any] = work.model | {
            "device": device, "layout": work.layout, "block_tokens": work.block_tokens,
            "num_blocks": blocks + blocks // 8 + 1,
        }  # fmt: skip
        if small:
            cache["layers"] = 4
        prefill = PrefillProcess(work.prefill_tensor, cache)
        prefill.ask("fill_random", 7)
        dice = np.random.default_rng(1)
        usable = np.arange(1, cache["num_blocks"])
        theirs, ours = (dice.permutation(usable)[:blocks].tolist() for _ in range(2))
        for settings in THREADS[:2] if small else THREADS:
            raw, own = _both(work, cache, prefill, settings, theirs, ours, tokens, repeats)
            rate = _row(work, "raw NIXL", settings, raw, 0.0)
            _row(work, "receiver", settings, own, rate)
        prefill.end()


@dataclass(frozen=True)
class Timed:
    """Medians of one way, in seconds."""

    descriptors: int
    nbytes: int
    post: float
    wire: float
    total: float
    note: str = ""


def _row(work: Work, by: str, settings: tuple[Any, ...], timed: Timed, raw: float) -> float:
    rate = timed.nbytes / timed.total / 1e9
    each = timed.post / timed.descriptors * 1e6
    words = ", ".join("-" if one is None else str(one) for one in settings)
    print(
        f"| {work.name} | {work.layout} {work.block_tokens} | {timed.descriptors:,} of"
        f" {timed.nbytes / timed.descriptors / 1024:.0f} KiB | {by} | {words} |"
        f" {timed.post * 1e3:.2f} ({each:.2f}) | {timed.wire * 1e3:.2f} | {timed.total * 1e3:.2f} |"
        f" {rate:.1f} | {f'{rate / raw:.2f}' if raw else ''}{timed.note} |",
        flush=True,
    )
    return rate


def _both(
    work: Work,
    cache: dict[str, Any],
    prefill: PrefillProcess,
    settings: tuple[int, int, int],
    theirs: list[int],
    ours: list[int],
    tokens: int,
    repeats: int,
) -> tuple[Timed, Timed]:
    """Read by turns: one transfer a source by NIXL's own API, and the receiver with its fence."""
    threads, split, limit = settings
    agents, options = Agents(threads, split), {"descriptors_per_transfer": limit}
    raw = Raw(work, cache, prefill, agents, theirs, ours, tokens)
    found: list[tuple[float, float, float]] = []
    with decode_of(prefill, cache, work.decode_tensor, agents=agents, options=options) as decode:
        for number in range(repeats + 1):
            raw.read()
            ticket = prefill.ask("ticket", 1, [], 0)
            ticket = replace(
                ticket, blocks=(tuple(theirs),), tokens=tokens, token=number + 1, fence_slot=1
            )
            prefill.ask("write_word", 1, number + 1)
            decode.receive(decode.request(f"r{number}", ticket, ours))
            results = decode.wait(f"r{number}")
            if results.failed:
                raise SystemExit(f"FAILED: {results.failed}")
            received = results.received[f"r{number}"]
            phases = {name: values[0] for name, values in results.phase_seconds.items()}
            post = phases["post"]
            found.append((post, phases["transfer"] - post, phases["total"]))
        probed = decode.receiver.probe(prefill.metadata).result(120)
        wrong = _wrong(work, cache, decode.cache, theirs, ours)
    timed = raw.end()
    if wrong:
        raise SystemExit(f"the receiver moved {wrong} wrong bytes")
    return timed, Timed(
        timed.descriptors, received.nbytes, *_medians(found[1:]), note=_judged(probed)
    )


def _judged(probed: ProbeResult) -> str:
    """Say at which rates ``minBandwidthMBps`` would judge this link."""
    receives = probed.receives
    rate = f"{receives.best / 1e9:.1f}" if isinstance(receives, ReceiveRate) else "none"
    return f"; judged: probe {probed.bytes_per_second / 1e9:.1f}, receives {rate}"


def _medians(found: list[tuple[float, float, float]]) -> list[float]:
    return [statistics.median(column) for column in zip(*found, strict=True)]


class Raw:
    """The same read by NIXL's own Python API: one transfer a source, posted and then polled."""

    def __init__(
        self,
        work: Work,
        cache: dict[str, Any],
        prefill: PrefillProcess,
        agents: Agents,
        theirs: list[int],
        ours: list[int],
        tokens: int,
    ) -> None:
        select(cache["device"])
        self._work, self._cache, self._blocks = work, cache, (theirs, ours)
        self._own = DeviceCache(tensor=work.decode_tensor, **cache)
        self._words = torch.zeros(8, dtype=torch.uint8)
        shard = replace(self._own.shard, seams=seams(item.span for item in self._own.memory))
        plan = plan_peer(shard, [shard.shard for shard in prefill.metadata.shards])
        groups = [GroupShape(LayerKind.FULL_ATTENTION, work.block_tokens)]
        self._parts = plan_request(
            plan,
            EngineBlocks(groups, [GroupBlocks(theirs)]),
            EngineBlocks(groups, [GroupBlocks(ours)]),
            start=0,
            stop=tokens,
            tokens=tokens,
        )
        address = self._words.data_ptr()
        self._agent = ReadingAgent(
            lambda: agents.agent("raw"),
            [*self._own.memory, MemoryRange(address, 8)],
            np.array([[address, 8, 0, 8, 1]], np.uint64),
            lambda: None,
        )
        self._connection = self._agent.open(prefill.metadata, plan)
        self._found: list[tuple[float, float, float]] = []
        self._polls, self._polled = 0, 0.0

    def read(self) -> None:
        """Read everything once."""
        native = self._connection.sources[0].agent._agent  # type: ignore[attr-defined]
        began = time.perf_counter()
        handles = []
        for part in self._parts:
            source = self._connection.sources[part.source]
            handle = native.make_prepped_xfer(
                "READ",
                source.local.native,
                part.decode_indices,
                source.remote.native,
                part.prefill_indices,
            )
            native.transfer(handle)
            handles.append(handle)
        posted = time.perf_counter()
        waiting = list(handles)
        while waiting:
            asked = time.perf_counter()
            count = len(waiting)
            waiting = [one for one in waiting if native.check_xfer_state(one) == "PROC"]
            self._polled += time.perf_counter() - asked
            self._polls += count
        ended = time.perf_counter()
        for handle in handles:
            handle.release()
        self._found.append((posted - began, ended - posted, ended - began))

    def end(self) -> Timed:
        """Destroy the agent; return the medians of all reads but the first, which connects."""
        wrong = _wrong(self._work, self._cache, self._own, *self._blocks)
        self._agent.close_connection(self._connection)
        self._agent.destroy()
        if wrong:
            raise SystemExit(f"raw NIXL moved {wrong} wrong bytes")
        count = sum(len(part.decode_indices) for part in self._parts)
        nbytes = sum(part.nbytes for part in self._parts)
        note = f"poll {self._polled / max(1, self._polls) * 1e6:.1f} µs"
        return Timed(count, nbytes, *_medians(self._found[1:]), note)


def idle(device: str, small: bool) -> None:
    """How much of a core a decode worker takes that has nothing to do."""
    seconds = 1.0 if small else 4.0
    print("| NIXL's threads | % of a core, connected and idle |")
    print("|---|---|")
    cache: dict[str, Any] = {"device": device}
    prefill = PrefillProcess(1, cache)
    for threads in (0, 4, 8):
        with decode_of(prefill, cache, agents=Agents(threads, 256)) as decode:
            decode.receiver.probe(prefill.metadata).result(120)
            time.sleep(0.5)
            began, used = time.perf_counter(), time.process_time()
            time.sleep(seconds)
            share = (time.process_time() - used) / (time.perf_counter() - began)
        print(f"| {threads} | {share * 100:.1f} |", flush=True)
    prefill.end()


def _wrong(
    work: Work, cache: dict[str, Any], own: DeviceCache, theirs: list[int], ours: list[int]
) -> int:
    """Count wrong bytes of all blocks, on the device: a rank's bytes follow from its seed."""
    wrong = 0
    for rank in range(work.prefill_tensor):
        first = rank * cache["kv_heads"] // work.prefill_tensor
        if first not in own.heads:
            continue
        source = DeviceCache(tensor=work.prefill_tensor, rank=rank, **cache)
        source.fill_random(7 + rank)
        heads = slice(first - own.heads.start, first - own.heads.start + len(source.heads))
        for layer in own.layers:
            found = own.bytes[layer, ours][:, heads]
            wrong += int((found != source.bytes[layer, theirs]).sum())
    return wrong
