"""vLLM's own Scheduler and KVOutputAggregator with our scheduler role and W invented workers.

There is no model: a step samples one token for each request whose tokens are all computed. A
worker carries out orders as the real ones do (each id answered once), but the test says which
receives land or fail, and on which rank first. Everything else is real: the prefill and the
decode scheduler of a pair talk over a real side channel.
"""

from __future__ import annotations

import itertools
import pickle
import socket
import time
from collections.abc import Callable
from typing import Any

import torch
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
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from models.tiny import model_path
from pdcluster_connector.compat.shape import EngineShape
from pdcluster_connector.protocol.messages import ProbeRegion, ShardMetadata, encode
from pdcluster_connector.vllm.shape import encode_shape
from pdcluster_connector.vllm.step import Receipt, StepOrders, StepReport, WorkerHandshake

BLOCK = 16
LAYER = "model.layers.0.self_attn.attn"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class InventedWorker:
    """One rank: remembers orders, answers what the test lets land."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.parked: dict[str, Any] = {}
        self.abandoned: list[str] = []
        self.sent: list[str] = []
        self.ready: dict[str, Receipt] = {}

    def step(self, raw: bytes) -> KVConnectorOutput:
        orders: StepOrders = pickle.loads(raw)
        for order in orders.receive:
            assert order.request_id not in self.parked, "ordered twice"
            self.parked[order.request_id] = order
        self.abandoned += orders.abandon
        self.sent += orders.sent
        for request_id, why in orders.unreceivable.items():
            self.ready[request_id] = Receipt(0, 0.0, "BackendError", why)
        ready, self.ready = self.ready, {}
        for request_id in ready:
            self.parked.pop(request_id, None)
        return KVConnectorOutput(
            finished_sending=set(orders.sent),
            finished_recving=set(ready),
            failed_recving={r for r, receipt in ready.items() if receipt.reason},
            kv_connector_worker_meta=StepReport(ready) if ready else None,
        )


class ContractEngine:
    """A scheduler with ``ranks`` invented workers."""

    def __init__(
        self, role: str, *, ranks: int = 2, blocks: int = 64, policy: str = "fail",
        max_tokens_per_step: int = 1024, **extra: Any,
    ) -> None:  # fmt: skip
        init_none_hash(sha256)
        model = str(model_path("llama"))
        self.port = free_port()
        self.engine_id = f"ns.c.{role}.r.0/{self.port:016x}"
        self.config = VllmConfig(
            model_config=ModelConfig(model=model, dtype="float32", max_model_len=1024),
            cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=True),
            scheduler_config=SchedulerConfig(
                max_model_len=1024, is_encoder_decoder=False, max_num_seqs=16,
                max_num_batched_tokens=max_tokens_per_step, async_scheduling=False,
                enable_chunked_prefill=True,
            ),
            parallel_config=ParallelConfig(),
            device_config=DeviceConfig("cpu"),
            kv_transfer_config=KVTransferConfig(
                kv_connector="PDClusterConnector",
                kv_connector_module_path="pdcluster_connector.vllm.connector",
                kv_role=f"kv_{role}",
                engine_id=self.engine_id,
                kv_load_failure_policy=policy,
                kv_connector_extra_config={"side_channel_port": self.port, **extra},
            ),
        )  # fmt: skip
        self.config.parallel_config.tensor_parallel_size = ranks
        self.config.cache_config.num_gpu_blocks = blocks
        spec = FullAttentionSpec(
            block_size=BLOCK, num_kv_heads=1, head_size=32, dtype=torch.float32
        )
        self.scheduler = Scheduler(
            vllm_config=self.config,
            kv_cache_config=KVCacheConfig(
                num_blocks=blocks,
                kv_cache_tensors=[],
                kv_cache_groups=[KVCacheGroupSpec([LAYER], spec)],
            ),
            structured_output_manager=StructuredOutputManager(self.config),
            block_size=BLOCK,
            log_stats=True,
        )
        self.connector = self.scheduler.connector
        self.workers = [InventedWorker(rank) for rank in range(ranks)]
        self.aggregator = KVOutputAggregator.from_connector(self.connector, ranks)
        self.connector.set_xfer_handshake_metadata_pp_aware(
            {(0, rank): self._handshake(rank) for rank in range(ranks)}
        )
        self.params: dict[str, Any] = {}
        self.finished: dict[str, str] = {}
        self.tokens: dict[str, int] = {}
        self.stats: list[dict[str, Any]] = []
        self._tokens = itertools.count(1000)
        self._hasher = get_request_block_hasher(BLOCK, sha256)

    def _handshake(self, rank: int) -> WorkerHandshake:
        shard = ShardMetadata(
            engine_id=self.engine_id, rank=(0, rank), agent_name=f"a{rank}", agent_metadata=b"m",
            regions=(), probe=ProbeRegion(address=4096, length=4096),
        )  # fmt: skip
        shape = EngineShape(model="m", tensor=len(self.workers), layers=())
        return WorkerHandshake(self.engine_id, encode_shape(shape), encode(shard))

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
        """One engine step; returns the requests that computed something in it."""
        scheduled = self.scheduler.schedule()
        raw = pickle.dumps(scheduled.kv_connector_metadata)
        ids = list(scheduled.num_scheduled_tokens)
        outputs = []
        for worker in self.workers:
            sampled = []
            for request_id in ids:
                request = self.scheduler.requests[request_id]
                complete = request.num_computed_tokens >= request.num_tokens
                sampled.append([next(self._tokens)] if complete else [])
            outputs.append(
                ModelRunnerOutput(
                    req_ids=ids,
                    req_id_to_index={r: i for i, r in enumerate(ids)},
                    sampled_token_ids=sampled,
                    kv_connector_output=worker.step(raw),
                )
            )
        merged = self.aggregator.aggregate(outputs)
        result = self.scheduler.update_from_output(scheduled, merged)
        for client in result.values():
            for output in client.outputs:
                self.tokens[output.request_id] = self.tokens.get(output.request_id, 0) + len(
                    output.new_token_ids
                )
                if output.finished:
                    self.finished[output.request_id] = str(output.finish_reason)
                    self.params[output.request_id] = output.kv_transfer_params
            if client.scheduler_stats is not None and client.scheduler_stats.kv_connector_stats:
                self.stats.append(client.scheduler_stats.kv_connector_stats)
        return ids

    def run(self, until: Callable[[], bool], seconds: float = 5) -> None:
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
        values = [stats[name] for stats in self.stats]
        if name == "leases_held":
            return [value for value in values if value is not None][-1]
        if name in ("failures", "decodes_without_transfer", "faults"):
            sums: dict[str, int] = {}
            for value in values:
                for label, count in value.items():
                    sums[label] = sums.get(label, 0) + count
            return sums
        return sum(values)

    def free_blocks(self) -> int:
        return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    def close(self) -> None:
        self.scheduler.shutdown()
