"""A rank with the connector's own worker side. Only the model and NIXL are not there."""

from __future__ import annotations

import collections
import pickle

import torch
from contract import BLOCK, FULL, LAYER, ContractEngine
from registered_caches import Attention
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_cache_interface import create_kv_cache_views
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.outputs import KVConnectorOutput

from pdcluster_connector.vllm.connector import PDClusterConnector


class RealWorker:
    """A rank without a model: the connector's worker side does what vLLM's runner has it do.

    Attributes:
        cache: its KV cache, ``[block, head, token, content]``.
        reported: how often it has reported each request, as sent or as received.
    """

    def __init__(self, engine: ContractEngine, fill: float) -> None:
        config, caches = engine.config, engine.scheduler.kv_cache_config
        config.compilation_config.static_forward_context[LAYER] = Attention("FLASH_ATTN")
        self.connector = PDClusterConnector(config, KVConnectorRole.WORKER, caches)
        [placed] = caches.kv_cache_tensors
        raw = torch.zeros(placed.size, dtype=torch.int8)
        [self.cache] = create_kv_cache_views(
            raw, FULL, caches.num_blocks, KVCacheLayout.LBHNC, placed, BLOCK
        )
        self.cache.fill_(fill)
        self.reported: collections.Counter[str] = collections.Counter()
        self.connector.register_kv_caches({LAYER: self.cache})
        rank = {(0, 0): self.connector.get_handshake_metadata()}
        engine.connector.set_xfer_handshake_metadata_pp_aware(rank)
        engine.workers = [self]

    def step(self, raw: bytes) -> KVConnectorOutput:
        self.connector.bind_connector_metadata(pickle.loads(raw))
        self.connector.start_load_kv(None)
        results = self.connector.get_transfer_results(set())
        self.reported.update([*results.finished_sending, *results.finished_recving])
        output = KVConnectorOutput(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            kv_connector_stats=self.connector.get_kv_connector_stats(),
            kv_connector_worker_meta=self.connector.build_connector_worker_meta(),
        )
        self.connector.clear_connector_metadata()
        return output
