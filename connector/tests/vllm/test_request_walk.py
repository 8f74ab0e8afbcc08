"""One request goes the way that docs/design.md tells, row by row.

The schedulers are vLLM's own, and the workers are the connector's. Only the model and NIXL are not
there: the KV moves over the in-memory NIXL.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from contract import BLOCK, FULL, LAYER, ContractEngine, closing_engines, prompt
from registered_caches import Attention
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_cache_interface import create_kv_cache_views
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.outputs import KVConnectorOutput

from design_walk import Calls, happened
from pdcluster_connector.testing.nixl import Fabric
from pdcluster_connector.vllm.connector import PDClusterConnector

pytestmark = pytest.mark.vllm


class Worker:
    """A rank without a model: the connector's worker side does what vLLM's runner has it do."""

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
        self.connector.register_kv_caches({LAYER: self.cache})
        rank = {(0, 0): self.connector.get_handshake_metadata()}
        engine.connector.set_xfer_handshake_metadata_pp_aware(rank)
        engine.workers = [self]

    def step(self, raw: bytes) -> KVConnectorOutput:
        self.connector.bind_connector_metadata(pickle.loads(raw))
        self.connector.start_load_kv(None)
        results = self.connector.get_transfer_results(set())
        output = KVConnectorOutput(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            kv_connector_worker_meta=self.connector.build_connector_worker_meta(),
        )
        self.connector.clear_connector_metadata()
        return output


@pytest.fixture
def engines() -> Iterator[Any]:
    yield from closing_engines(ranks=1, publish=False)


def test_a_request_goes_the_way_of_the_walk(
    engines: Any, one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    fabric, parked = Fabric(), threading.Event()
    monkeypatch.setattr(
        "pdcluster_connector.vllm.worker_side.worker.NixlAgent",
        lambda name, **_: fabric.agent(name),
    )
    with Calls("request") as calls:
        prefill, decode = engines("producer"), engines("consumer")
        workers = [Worker(prefill, 1.0), Worker(decode, 0.0)]
        params = prefill.prefill("p0", prompt(40))
        desk = prefill.connector._scheduler._leases
        answer = desk.answer
        # Otherwise the claim may be acknowledged before there is a receive to be told of it.
        desk.answer = lambda request: parked.wait(60) and answer(request)
        decode.add("d0", prompt(40), params, max_tokens=2)
        decode.step()
        parked.set()
        decode.run(lambda: "d0" in decode.finished)
        prefill.run(lambda: not prefill.scheduler.requests)
    for worker in workers:
        worker.connector.shutdown()
    assert decode.params["d0"]["kv_path"]["outcome"] == "transferred"
    assert torch.count_nonzero(workers[1].cache[:, :, :, 0]) == 3 * BLOCK

    seen = calls.seen
    happened(seen, "request", "1")
    happened(
        seen, "request", "2", "3", "4", "5", "6", "7", "8", "9", "10", "11", "12", "14", "15",
        but=("NixlAgent.read",),
    )  # fmt: skip
    happened(seen, "request", "13")
    happened(seen, "request", "CONNECT", "POST", "FENCE", "REPORT")
