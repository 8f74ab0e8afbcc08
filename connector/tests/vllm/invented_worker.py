"""A worker without a model or memory: remembers orders, answers what a test lets land."""

from __future__ import annotations

import pickle
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import (
    MultiKVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingWorkerMetadata,
)
from vllm.v1.outputs import KVConnectorOutput

from pdcluster_connector.protocol.failure import Failure
from pdcluster_connector.protocol.receive_order import Receipt
from pdcluster_connector.vllm.step_messages import StepOrders, StepReport


class InventedWorker:
    """One rank: remembers orders, answers what the test lets land."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.parked: dict[str, Any] = {}
        self.abandoned: list[str] = []
        self.sent: list[str] = []
        self.ready: dict[str, Receipt] = {}
        self.words: dict[int, int] = {}
        self.renewed: dict[str, float] = {}
        self.lost: dict[str, Failure] = {}
        self.found_gone: dict[str, Failure] = {}
        self.told_gone: dict[str, Failure] = {}
        self.loads = self.stores = 0  # of an offloading connector
        self.stores_slowly = False  # its stores do not end any more
        self.flushed: set[int] = set()

    def step(self, raw: bytes) -> KVConnectorOutput:
        orders = pickle.loads(raw)
        if not isinstance(orders, StepOrders):  # those of a step in which the connector failed
            orders = StepOrders()
        for order in orders.receive:
            assert order.request_id not in self.parked, "ordered twice"
            self.parked[order.request_id] = order
        self.words |= orders.lease_words
        self.renewed |= orders.renewed
        self.lost |= orders.lost
        self.abandoned += orders.abandon
        self.sent += orders.sent
        for request_id, why in orders.unreceivable.items():
            self.ready[request_id] = Receipt(0, 0.0, "BackendError", why)
        self.told_gone |= orders.gone
        ready, self.ready = self.ready, {}
        gone, self.found_gone = self.found_gone, {}
        for request_id in ready:
            self.parked.pop(request_id, None)
        return KVConnectorOutput(
            finished_sending=set(orders.sent),
            finished_recving=set(ready),
            failed_recving={r for r, receipt in ready.items() if receipt.reason},
            kv_connector_worker_meta=StepReport(ready, gone) if ready or gone else None,
        )

    def step_both(self, raw: bytes) -> KVConnectorOutput:
        """A step below MultiConnector with an offloading connector, which ends its jobs."""
        ours, offloading = pickle.loads(raw).metadata
        output = self.step(pickle.dumps(ours))
        self.loads += len(offloading.load_jobs)
        self.stores += len(offloading.store_jobs)
        self.flushed |= offloading.jobs_to_flush or set()
        ended = [*offloading.load_jobs, *([] if self.stores_slowly else offloading.store_jobs)]
        output.finished_recving |= {job.req_id for job in offloading.load_jobs.values()}
        output.kv_connector_worker_meta = MultiKVConnectorWorkerMetadata(
            (
                output.kv_connector_worker_meta,
                OffloadingWorkerMetadata(completed_jobs=dict.fromkeys(ended, 1)),
            )
        )
        return output
