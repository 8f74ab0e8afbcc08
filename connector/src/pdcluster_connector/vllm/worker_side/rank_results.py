"""What one rank tells vLLM of its requests: which it has sent, received, or failed to receive."""

from __future__ import annotations

import logging

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

from pdcluster_connector.compat.reasons import Reason
from pdcluster_connector.transfer.receiver import ReceiveResults
from pdcluster_connector.vllm.metrics import StatsCollector
from pdcluster_connector.vllm.step_messages import Receipt

logger = logging.getLogger(__name__)


class RankResults:
    """Gathers results from step to step.

    Attributes:
        sent: requests whose blocks prefill may free.
        unreceivable: requests whose receive could not start, and why.
    """

    def __init__(self, stats: StatsCollector) -> None:
        self.sent: set[str] = set()
        self.unreceivable: dict[str, str] = {}
        self._receipts: dict[str, Receipt] = {}
        self._stats = stats

    def take(self, ended: ReceiveResults) -> KVConnectorTransferResults:
        """Return the requests that this rank is through with, each exactly once."""
        sent, self.sent = self.sent, set()
        unreceivable, self.unreceivable = self.unreceivable, {}
        for request_id, why in unreceivable.items():
            self._failed(request_id, Reason.BACKEND_ERROR, why)
        for request_id in ended.failed.keys() - ended.abandoned:
            failure = ended.failed[request_id]
            self._failed(request_id, failure.reason, failure.message)
        for request_id, received in ended.received.items():
            self._receipts[request_id] = Receipt(received.nbytes, received.seconds)
        if unreceivable:
            self._stats.receives(0, {}, {Reason.BACKEND_ERROR.value: len(unreceivable)})
        self._stats.receives(ended.nbytes, ended.phase_seconds, ended.failures)
        return KVConnectorTransferResults(
            finished_sending=sent,
            finished_recving=ended.finished | unreceivable.keys(),
            failed_recving=set(ended.failed) | unreceivable.keys(),
        )

    def take_receipts(self) -> dict[str, Receipt]:
        """Return what became of the receives in :meth:`take`."""
        receipts, self._receipts = self._receipts, {}
        return receipts

    def _failed(self, request_id: str, reason: Reason, message: str) -> None:
        self._receipts[request_id] = Receipt(0, 0.0, reason.value, message)
        logger.warning("KV of %s was not received: %s: %s", request_id, reason.value, message)
