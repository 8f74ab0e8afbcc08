"""One engine's connector, called as vLLM's scheduler and runner call it, on the engine's thread.

Nothing here knows which connector it is, so what is measured of one is measured of the other.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

PAUSE = 0.0005
"""Seconds between two steps: an engine with other requests computes meanwhile."""
SECONDS = 120.0
PREFILL_TOKENS = 8192
"""Tokens that prefill computes in a step."""


class Watch:
    """Times what a connector does once for each peer: preparing its lists of descriptors."""

    def __init__(self, kind: str) -> None:
        self.seconds = 0.0
        self.on_engine_thread = 0.0
        if kind == "ours":
            from pdcluster_connector.nixl_io.reading_agent import ReadingAgent

            self._time(ReadingAgent, "open")
        else:
            from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker import (
                NixlBaseConnectorWorker,
            )

            self._time(NixlBaseConnectorWorker, "register_local_xfer_handler")
            self._time(NixlBaseConnectorWorker, "add_remote_agent")

    def _time(self, owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return real(*args, **kwargs)
            finally:
                taken = time.perf_counter() - began
                self.seconds += taken
                if threading.current_thread() is threading.main_thread():
                    self.on_engine_thread += taken

        setattr(owner, name, timed)


class Driven:
    """Both sides of one engine's connector."""

    def __init__(self, engine: Any, watch: Watch | None = None) -> None:
        from vllm.distributed.kv_transfer import get_kv_transfer_group
        from vllm.v1.core.sched.output import SchedulerOutput

        core = engine.engine_core.engine_core
        self._engine = engine
        self._scheduler = core.scheduler.connector
        self._worker = get_kv_transfer_group()
        self._nothing = SchedulerOutput.make_empty()
        self._caches = core.model_executor.driver_worker.worker.model_runner.kv_caches
        self._watch = watch

    def rest(self) -> None:
        """Make a step in which nothing is computed."""
        self._step()

    def fill(self, seed: int) -> None:
        """Fill the KV cache with bytes that only ``seed`` decides."""
        dice = np.random.default_rng(seed)
        for cache in self._caches:
            cache.copy_(_torch().from_numpy(dice.random(tuple(cache.shape), dtype=np.float32)))

    def sums(self, blocks: Sequence[int]) -> list[int]:
        """Return a checksum of each block over all layers."""
        held = [cache[list(blocks)].numpy() for cache in self._caches]
        return [
            zlib.crc32(b"".join(layer[index].tobytes() for layer in held))
            for index in range(len(blocks))
        ]

    def offer(self, requests: Sequence[tuple[str, int, list[int]]]) -> dict[str, Any]:
        """Be prefill, which has computed prompts: (request id, tokens, blocks).

        Returns the parameters for decode, and the seconds of the longest call and of the step.
        """
        from vllm.v1.request import RequestStatus

        clock, params = Calls(), []
        made = [self._request(name, tokens, {"do_remote_decode": True, "do_remote_prefill": False})
                for name, tokens, _ in requests]  # fmt: skip
        for request, (_, _, blocks) in zip(made, requests, strict=True):
            clock.call(self._scheduler.on_new_request, request)
            clock.call(self._scheduler.update_state_after_alloc, request, _held(blocks), 0)
        for _ in range(0, max(tokens for _, tokens, _ in requests), PREFILL_TOKENS):
            clock.call(self._step)
        for request, (_, _, blocks) in zip(made, requests, strict=True):
            request.num_computed_tokens = request.num_prompt_tokens
            request.status = RequestStatus.FINISHED_LENGTH_CAPPED
            finished = self._scheduler.request_finished_all_groups
            params.append(clock.call(finished, request, (blocks,))[1])
        clock.call(self._step)
        return {"params": params, "total": clock.total, "longest": clock.longest}

    def receive(
        self, requests: Sequence[tuple[str, int, dict[str, Any], list[int]]]
    ) -> dict[str, Any]:
        """Be decode: receive prompts (request id, tokens, prefill's answer, blocks).

        Returns seconds: ``done`` of each request, ``admitted`` on the scheduler's side, ``first``
        of the first step and ``longest`` of any step on the engine's thread.
        """
        made = [self._request(name, tokens, params) for name, tokens, params, _ in requests]
        held = [_held(blocks) for *_, blocks in requests]
        began, clock, steps = time.perf_counter(), Calls(), Calls()
        self._admit(made, held, clock)
        done: dict[str, float] = {}
        while len(done) < len(made):
            results = steps.call(self._step)
            now = time.perf_counter() - began
            if results.failed_recving:
                raise RuntimeError(f"not received: {results.failed_recving}")
            done.update(dict.fromkeys(results.finished_recving, now))
            if now > SECONDS:
                raise TimeoutError(f"only {len(done)} of {len(made)} were received")
            if len(done) < len(made):
                time.sleep(PAUSE)
        for request in made:
            self._finish(request)
        self._step()
        return {
            "done": list(done.values()),
            "admitted": clock.total,
            "first": steps.first,
            "longest": steps.longest,
        }

    def receive_nothing(
        self, name: str, tokens: int, params: dict[str, Any], blocks: list[int]
    ) -> dict[str, float]:
        """Be decode's scheduler side only, for a prompt for which the cache has no room."""
        clock, request = Calls(), self._request(name, tokens, params)
        self._admit([request], [_held(blocks)], clock)
        clock.call(self._scheduler.build_connector_meta, self._nothing)
        self._finish(request)
        return {"longest": clock.longest}

    def _admit(self, made: list[Any], held: list[Any], clock: Calls) -> None:
        for request in made:
            clock.call(self._scheduler.on_new_request, request)
        for request, blocks in zip(made, held, strict=True):
            asked = self._scheduler.get_num_new_matched_tokens, request, 0
            while (count := clock.call(*asked)[0]) is None:  # the scheduler asks again
                clock.call(self._step)
            if not count:
                raise RuntimeError(f"{request.request_id} is not received: {count}")
            clock.call(self._scheduler.update_state_after_alloc, request, blocks, count)

    def handshake(self) -> dict[str, float]:
        """Return the seconds that the lists of descriptors took, and how many of them here."""
        assert self._watch is not None
        return {"seconds": self._watch.seconds, "on_engine_thread": self._watch.on_engine_thread}

    def _finish(self, request: Any) -> None:
        from vllm.v1.request import RequestStatus

        request.status = RequestStatus.FINISHED_LENGTH_CAPPED
        self._scheduler.request_finished_all_groups(request, ([],))

    def _step(self) -> Any:
        from vllm.v1.outputs import KVConnectorOutput

        worker, scheduler = self._worker, self._scheduler
        metadata = scheduler.build_connector_meta(self._nothing)
        worker.bind_connector_metadata(metadata)
        worker.start_load_kv(None)
        results = worker.get_transfer_results(set())
        report = worker.build_connector_worker_meta()
        worker.clear_connector_metadata()
        scheduler.update_connector_output(
            KVConnectorOutput(
                finished_sending=results.finished_sending,
                finished_recving=results.finished_recving,
                failed_recving=results.failed_recving,
                kv_connector_worker_meta=report,
            )
        )
        return results

    def _request(self, name: str, tokens: int, params: dict[str, Any]) -> Any:
        from vllm import SamplingParams
        from vllm.v1.request import Request

        sampling = SamplingParams(
            max_tokens=1, ignore_eos=True, extra_args={"kv_transfer_params": dict(params)}
        )
        # The same prompt on both engines.
        prompt = np.random.default_rng(tokens).integers(3, 250, tokens).tolist()
        return Request(
            request_id=name,
            prompt_token_ids=prompt,
            sampling_params=sampling,
            pooling_params=None,
        )


class Calls:
    """Adds up the seconds of calls."""

    def __init__(self) -> None:
        self.total = self.longest = 0.0
        self.first: float | None = None

    def call(self, function: Any, *args: Any) -> Any:
        """Call and time a function."""
        began = time.perf_counter()
        found = function(*args)
        taken = time.perf_counter() - began
        self.total += taken
        self.longest = max(self.longest, taken)
        if self.first is None:
            self.first = taken
        return found


def _held(blocks: Sequence[int]) -> Any:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

    return KVCacheBlocks(([KVCacheBlock(block_id) for block_id in blocks],))


def _torch() -> Any:
    import torch

    return torch
