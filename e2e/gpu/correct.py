"""Is every byte right: the byte oracle, probes, the fence, and a copy that outlives its agent."""

from __future__ import annotations

import os
import random
import time
from typing import Any

import numpy as np
import torch

from gpu.device_cache import BLOCK_OUTERMOST, LAYER_OUTERMOST, DeviceCache, probe_memory
from gpu.rig import Agents, PrefillProcess, decode_of, pair, select
from pdcluster_connector.nixl_io.reading_agent import ReadingAgent
from pdcluster_connector.plan.geometry import MemoryRange
from pdcluster_connector.plan.peer_plan import plan_peer

ORACLE = {"kv_heads": 4, "layers": 4, "num_blocks": 96, "block_tokens": 16, "token_bytes": 32}
LEAST_GB_PER_S = 5.0  # between processes of one GPU 99 were measured, and 0.5 over TCP
AT_ONCE = 64  # reads of the whole cache: a GPU copies a GiB in less than a millisecond
SIZES = ((1, 1), (2, 1), (4, 2), (1, 2), (2, 4))


def oracle(device: str, small: bool) -> None:
    """Compare every byte, for tensor sizes and layouts, and every block that is not written."""
    print("| layout | prefill TP → decode TP | requests | wrong bytes | foreign blocks |")
    print("|---|---|---|---|---|")
    for layout in (LAYER_OUTERMOST, BLOCK_OUTERMOST):
        cache: dict[str, Any] = ORACLE | {"device": device, "layout": layout}
        for prefill_tensor, decode_tensor in SIZES[:2] if small else SIZES:
            prefill = PrefillProcess(prefill_tensor, cache)
            wrong = foreign = requests = 0
            for rank in range(decode_tensor):
                with decode_of(prefill, cache, decode_tensor, rank=rank) as decode:
                    found = _requests(prefill, decode, 100 * prefill_tensor + rank)
                wrong, foreign = wrong + found[0], foreign + found[1]
                requests += found[2]
            prefill.end()
            print(
                f"| {layout} | {prefill_tensor} → {decode_tensor} | {requests} | {wrong} |"
                f" {foreign} |",
                flush=True,
            )
            if wrong or foreign:
                raise SystemExit("WRONG BYTES")


def _requests(prefill: PrefillProcess, decode: Any, seed: int) -> tuple[int, int, int]:
    """Ragged ends, prefix hits, one block, many; returns wrong tokens, foreign blocks, requests."""
    dice = random.Random(seed)
    shapes = [(1, 0), (15, 0), (16, 0), (17, 16), (200, 0), (333, 64), (400, 384)]
    free = {side: dice.sample(range(1, 96), 95) for side in ("prefill", "decode")}
    decode.cache.bytes[:] = 0xEE
    sent = []
    for number, (tokens, start) in enumerate(shapes):
        blocks = {side: [free[side].pop() for _ in range(-(-tokens // 16))] for side in free}
        ticket = prefill.ask("ticket", seed + number, blocks["prefill"], tokens)
        request = decode.request(f"r{number}", ticket, blocks["decode"], start=start)
        sent.append((f"r{number}", seed + number, blocks["decode"], start, tokens))
        decode.receive(request)
    results = decode.wait(*(request[0] for request in sent))
    if results.failed:
        raise SystemExit(f"FAILED: {results.failed}")
    wrong, touched = 0, np.zeros(96, bool)
    for _, of, blocks, start, tokens in sent:
        wrong += len(decode.cache.wrong_tokens(of, blocks, start, tokens))
        touched[blocks[start // 16 :]] = True
    rest = decode.cache.bytes[:, np.flatnonzero(~touched).tolist()]
    return wrong, int((rest != 0xEE).any(dim=(0, 2, 3, 4)).sum()), len(sent)


def probe(device: str, small: bool) -> None:
    """Probe the link, and say in which memory the probe lay."""
    cache: dict[str, Any] = ORACLE | {"device": device}
    with pair(cache) as (prefill, decode):
        decode.receiver.probe(prefill.metadata).result(120)
        rates = []
        for _ in range(2 if small else 10):
            result = decode.receiver.probe(prefill.metadata).result(120)
            if result.failure is not None:
                raise SystemExit(f"FAILED: {result.failure}")
            rates.append(result.bytes_per_second / 1e9)
        if device != "cpu" and "UCX_TLS" not in os.environ and np.median(rates) < LEAST_GB_PER_S:
            raise SystemExit(f"{np.median(rates):.2f} GB/s: KV DOES NOT GO FROM GPU TO GPU")
        region = prefill.metadata.shards[0].probe
        ranges = [slots.memory for slots in _connections(decode).probing.scratch.values()]
        print(
            f"probe of {result.nbytes / 2**20:g} MiB: {np.median(rates):.2f} GB/s (median of"
            f" {len(rates)}); its memory: prefill {region.memory.value}, decode"
            f" {'/'.join(sorted({item.memory.value for item in ranges}))}; lease words"
            f" {_connections(decode).fence_words.memory.memory.value}"
        )


def fence(device: str, small: bool) -> None:
    """A lease that ends before the read must fail the request: its blocks are another's."""
    cache: dict[str, Any] = ORACLE | {"device": device}
    rounds = 3 if small else 20
    with pair(cache) as (prefill, decode):
        refused = 0
        for seed in range(1, rounds + 1):
            blocks = list(range(1, 65))
            ticket = prefill.ask("ticket", seed, blocks, 1024)
            prefill.ask("give_up", seed, blocks, 1024)
            decode.receive(decode.request(f"f{seed}", ticket, blocks))
            refused += f"f{seed}" in decode.wait(f"f{seed}").failed
        print(f"fence: {refused} of {rounds} tickets of leases that had ended were refused")
        if refused != rounds:
            raise SystemExit("THE FENCE FAILED")


def _connections(decode: Any) -> Any:
    return decode.receiver._connections


def quarantine(device: str, small: bool) -> None:
    """Destroy an agent whose copies run: what lands afterwards, and what after synchronize()."""
    blocks = 64 if small else 2048
    cache: dict[str, Any] = {
        "device": device, "kv_heads": 8, "layers": 8, "num_blocks": blocks, "block_tokens": 16,
        "token_bytes": 512,
    }  # fmt: skip
    prefill = PrefillProcess(1, cache)
    prefill.ask("fill_random", 7)
    select(device)
    own = DeviceCache(**cache)
    words = torch.zeros(8, dtype=torch.uint8)
    memory = probe_memory(device)
    plan = plan_peer(own.shard, [shard.shard for shard in prefill.metadata.shards])
    late = rounds = 0
    waits: list[float] = []
    for _ in range(2 if small else 5):
        own.whole.fill_(0xEE)
        _synchronize(device)
        registered = [*own.memory, MemoryRange(words.data_ptr(), 8)]
        rows = np.array([[words.data_ptr(), 8, 0, 8, 1]], np.uint64)
        agent = ReadingAgent(lambda: Agents().agent("quarantine"), registered, rows, lambda: None)
        connection = agent.open(prefill.metadata, plan)
        source = connection.sources[0]
        everything = np.arange(int(plan.sources[0].decode_rows[:, 4].sum()), dtype=np.int32)
        for _ in range(1 if small else AT_ONCE):
            source.agent.read(source.local, everything, source.remote, everything)
        began = time.perf_counter()
        agent.destroy()  # without synchronize: what UCX does
        destroyed = time.perf_counter() - began
        _give_to_another(own.whole)
        began = time.perf_counter()
        memory.synchronize()
        waits.append(time.perf_counter() - began)
        late += int((own.whole != 0xDD).sum())
        _give_to_another(own.whole)
        time.sleep(0.5)
        rounds += 1
        changed = int((own.whole != 0xDD).sum())
        if changed:
            raise SystemExit(f"{changed} BYTES LANDED AFTER synchronize()")
    prefill.end()
    print(
        f"quarantine: {rounds} agents were destroyed while up to"
        f" {(1 if small else AT_ONCE) * own.whole.numel() / 2**30:.2f} GiB were under way."
        f" destroy() took {destroyed * 1e3:.1f} ms, synchronize() then up to"
        f" {max(waits) * 1e3:.1f} ms. Bytes of another request, written between the two, that were"
        f" overwritten: {late:,}; of one written after both: 0"
    )


def _give_to_another(whole: torch.Tensor) -> None:
    """Write another request's bytes over a stream of its own, which waits for no copy of UCX."""
    if not whole.is_cuda:
        whole.fill_(0xDD)
        return
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        whole.fill_(0xDD)
    stream.synchronize()


def _synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()
