"""vLLM's own Scheduler and KVOutputAggregator with our scheduler side and W invented workers.

There is no model: a step samples one token for each request whose tokens are all computed. A
worker carries out orders as the real ones do (each id answered once), but the test says which
receives land or fail, and on which rank first. Everything else is real: the prefill and the
decode scheduler of a pair talk over a real side channel.
"""

from __future__ import annotations

import collections
import itertools
import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from invented_worker import InventedWorker
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MambaSpec,
)
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from loopback import free_port
from models.tiny import model_path
from pdcluster_connector.compat.shape import EngineShape
from pdcluster_connector.plan.geometry import MemoryRange
from pdcluster_connector.protocol.messages import ShardMetadata
from pdcluster_connector.protocol.receive_order import Receipt
from pdcluster_connector.vllm.metrics import ConnectorStats
from pdcluster_connector.vllm.step_messages import WorkerHandshake
from ticket_key import KEY_FILE

BLOCK = 16
LAYER = "model.layers.0.self_attn.attn"
FULL = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=32, dtype=torch.float32)
STATE = MambaSpec(block_size=1024, shapes=((4, 4),), dtypes=(torch.float32,))


class ContractEngine:
    """A scheduler with ``ranks`` invented workers."""

    def __init__(
        self, role: str, *, ranks: int = 2, blocks: int = 64, policy: str = "fail",
        max_tokens_per_step: int = 1024, asynchronous: bool = False, publish: bool = True,
        others: list[dict[str, Any]] | None = None, specs: Sequence[Any] = (FULL,),
        prefixes: bool = True, block: int = BLOCK, port: int = 0, data_rank: int | None = None,
        together: int = 1, stages: int = 1, **extra: Any,
    ) -> None:  # fmt: skip
        init_none_hash(sha256)
        model = str(model_path("llama"))
        self.port = port or free_port()
        self.engine_id = f"ns.c.{role}.r.0/{self.port:016x}"
        if data_rank is not None:  # as vLLM's engine core of a data-parallel rank does
            self.engine_id += f"_dp{data_rank}"
        transfer: dict[str, Any] = {
            "kv_connector": "PDClusterConnector",
            "kv_connector_module_path": "pdcluster_connector.vllm.connector",
            "kv_role": f"kv_{role}",
            "kv_connector_extra_config": {
                "side_channel_port": self.port,
                "show_internal_names": True,
                "ticket_key_file": KEY_FILE,
                **extra,
            },
        }
        if extra.get("ticket_key_file", KEY_FILE) is None:
            del transfer["kv_connector_extra_config"]["ticket_key_file"]
        if others:
            transfer = {
                "kv_connector": "MultiConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"connectors": [transfer, *others]},
            }
        self.config = VllmConfig(
            model_config=ModelConfig(model=model, dtype="float32", max_model_len=1024),
            cache_config=CacheConfig(block_size=block, enable_prefix_caching=prefixes),
            scheduler_config=SchedulerConfig(
                max_model_len=1024, is_encoder_decoder=False, max_num_seqs=16,
                max_num_batched_tokens=max_tokens_per_step, async_scheduling=False,
                enable_chunked_prefill=True,
            ),
            parallel_config=ParallelConfig(),
            device_config=DeviceConfig("cpu"),
            kv_transfer_config=KVTransferConfig(
                engine_id=self.engine_id, kv_load_failure_policy=policy, **transfer
            ),
        )  # fmt: skip
        self.config.parallel_config.tensor_parallel_size = ranks
        self.config.parallel_config.data_parallel_index = data_rank or 0
        # Not 1 only where a model has experts: its ranks make their steps together.
        self.config.parallel_config.data_parallel_size = together
        self.config.parallel_config.pipeline_parallel_size = stages
        self.config.parallel_config.world_size = ranks
        self.config.cache_config.num_gpu_blocks = blocks
        # vLLM turns it off on CPU.
        self.config.scheduler_config.async_scheduling = asynchronous
        layers = [LAYER.replace("0", str(i)) for i in range(len(specs))]
        self.scheduler = (AsyncScheduler if asynchronous else Scheduler)(
            vllm_config=self.config,
            kv_cache_config=KVCacheConfig(
                num_blocks=blocks,
                kv_cache_tensors=[
                    KVCacheTensor(
                        size=blocks * spec.page_size_bytes,
                        layers=[layer],
                        layer_stride=blocks * spec.page_size_bytes,
                        block_stride=spec.page_size_bytes,
                    )
                    for layer, spec in zip(layers, specs, strict=True)
                ],
                kv_cache_groups=[
                    KVCacheGroupSpec([layer], spec)
                    for layer, spec in zip(layers, specs, strict=True)
                ],
            ),
            structured_output_manager=StructuredOutputManager(self.config),
            block_size=max(spec.block_size for spec in specs),
            hash_block_size=block,
            log_stats=True,
        )
        multi = self.scheduler.connector
        self.connector = multi.sub_connectors[0] if others else multi
        self.offloads = bool(others)
        self.workers = [InventedWorker(rank) for rank in range(ranks)]
        self.aggregator = KVOutputAggregator.from_connector(multi, ranks)
        if publish:
            multi.set_xfer_handshake_metadata_pp_aware(
                {(0, rank): self._handshake(rank) for rank in range(ranks)}
            )
        self.params: dict[str, Any] = {}
        self.finished: dict[str, str] = {}
        self.headers: dict[str, Any] = {}
        self.tokens: dict[str, int] = {}
        self.stats: list[dict[str, Any]] = []
        self._tokens = itertools.count(1000)
        self._depth = 1 if asynchronous else 0
        self._flying: collections.deque[tuple[Any, Any]] = collections.deque()
        self._hasher = get_request_block_hasher(block, sha256)

    def _handshake(self, rank: int) -> WorkerHandshake:
        shard = ShardMetadata(
            engine_id=self.engine_id, rank=(0, rank), agent_name=f"a{rank}", agent_metadata=b"m",
            regions=(), probe=MemoryRange(address=4096, length=4096),
        )  # fmt: skip
        shape = EngineShape(model="m", tensor=len(self.workers), layers=())
        return WorkerHandshake(self.engine_id, shape, shard)

    def add(
        self, request_id: str, prompt: list[int], params: dict[str, Any] | None = None,
        max_tokens: int = 1, **request: Any,
    ) -> Request:  # fmt: skip
        sampling = SamplingParams(
            max_tokens=max_tokens, ignore_eos=True,
            extra_args=None if params is None else {"kv_transfer_params": dict(params)},
        )  # fmt: skip
        made = Request(
            request_id=request_id, prompt_token_ids=prompt, sampling_params=sampling,
            pooling_params=None, block_hasher=self._hasher, **request,
        )  # fmt: skip
        self.scheduler.add_request(made)
        return made

    def step(self) -> list[str]:
        """One engine step; returns the requests that computed something in it.

        With async scheduling the outcome is processed when the next step was dispatched.
        """
        scheduled = self.scheduler.schedule()
        raw = pickle.dumps(scheduled.kv_connector_metadata)
        ids = list(scheduled.num_scheduled_tokens)
        sampled = [
            [] if self.scheduler.requests[r].is_prefill_chunk else [next(self._tokens)] for r in ids
        ]
        outputs = [
            ModelRunnerOutput(
                req_ids=ids,
                req_id_to_index={r: i for i, r in enumerate(ids)},
                sampled_token_ids=[list(tokens) for tokens in sampled],
                kv_connector_output=(worker.step_both if self.offloads else worker.step)(raw),
            )
            for worker in self.workers
        ]
        self._flying.append((scheduled, self.aggregator.aggregate(outputs)))
        if len(self._flying) > self._depth:
            self._process(*self._flying.popleft())
        return ids

    def _process(self, scheduled: Any, merged: Any) -> None:
        result = self.scheduler.update_from_output(scheduled, merged)
        for client in result.values():
            for output in client.outputs:
                self.tokens[output.request_id] = self.tokens.get(output.request_id, 0) + len(
                    output.new_token_ids
                )
                if output.finished:
                    self.finished[output.request_id] = str(output.finish_reason)
                    self.params[output.request_id] = output.kv_transfer_params
                    self.headers[output.request_id] = output.trace_headers
            stats = client.scheduler_stats and client.scheduler_stats.kv_connector_stats
            if stats and self.offloads:
                stats = stats.get("PDClusterConnector")
            if stats:
                self.stats.append(stats)

    def run(self, until: Callable[[], bool], seconds: float = 120) -> None:
        """Step until something holds."""
        deadline = time.monotonic() + seconds
        while not until():
            assert time.monotonic() < deadline, "nothing changes any more"
            self.step()
            time.sleep(0.001)

    def prefill(self, request_id: str, prompt: list[int]) -> dict[str, Any]:
        """Run a prefill to its end; returns the ticket's parameters."""
        self.add(request_id, prompt, {"do_remote_decode": True})
        self.run(lambda: request_id in self.finished)
        return self.params[request_id]

    def land(self, request_id: str, ranks: list[int] | None = None, reason: str = "") -> None:
        """Let a parked request's receive end, on some ranks."""
        for worker in self.workers:
            if ranks is None or worker.rank in ranks:
                assert request_id in worker.parked
                worker.ready[request_id] = Receipt(100, 0.25 + worker.rank, reason)

    def parked(self) -> set[str]:
        return set(self.workers[0].parked)

    def total(self, name: str) -> Any:
        """A connector stat over all steps."""
        if name == "decodes_without_transfer":
            local = [item for item in self.prompts().items() if item[0][0] == "local"]
            return {reason: count for (_, reason), count in local}
        total = ConnectorStats()
        for stats in self.stats:
            total.aggregate(ConnectorStats(data=stats))
        children = total.data[name]
        return children.get("", children)

    def prompts(self) -> dict[tuple[str, str], int]:
        """Prompts by outcome and reason, over all steps."""
        sums: dict[tuple[str, str], int] = {}
        for stats in self.stats:
            for key, count in stats["prompts"].items():
                outcome, reason = key.split("|")
                sums[outcome, reason] = sums.get((outcome, reason), 0) + count
        return sums

    def free_blocks(self) -> int:
        return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    def close(self) -> None:
        self.scheduler.shutdown()


def stood_still(seconds: float, *engines: ContractEngine) -> bool:
    """Step for so long; returns whether this machine stood still for a second of it."""
    pause, last = 0.0, time.monotonic()
    until = last + seconds
    while last < until:
        for engine in engines:
            engine.step()
        time.sleep(0.01)
        now = time.monotonic()
        pause, last = max(pause, now - last), now
    return pause > 1.0


def prompt(length: int, first: int = 5) -> list[int]:
    """Token ids that differ from block to block."""
    return [(first + 7 * i) % 300 for i in range(length)]


def closing_engines(**defaults: Any) -> Iterator[Callable[..., ContractEngine]]:
    """Yield what makes engines, then close all that it made."""
    made: list[ContractEngine] = []

    def make(role: str, **options: Any) -> ContractEngine:
        made.append(ContractEngine(role, **{**defaults, **options}))
        return made[-1]

    yield make
    for engine in made:
        engine.close()
