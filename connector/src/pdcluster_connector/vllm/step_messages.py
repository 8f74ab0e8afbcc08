"""Messages between the two sides of one engine's connector; vLLM carries them in each step.

Scheduler to workers: :class:`StepOrders`. Every rank gets the same orders and answers each id
exactly once, since vLLM counts the answers of all ranks. Workers to scheduler:
:class:`StepReport`, summed over ranks. All of it is pickled inside one engine.
"""

from dataclasses import dataclass, field
from typing import Self

from vllm.distributed.kv_transfer.kv_connector.v1 import base

from pdcluster_connector.compat.shape import EngineShape
from pdcluster_connector.protocol import failure, messages, receive_order


@dataclass
class StepOrders(base.KVConnectorMetadata):
    """One step's orders to every worker.

    Attributes:
        receive: receives to start.
        abandon: parked requests that were aborted; still to be answered once.
        sent: prefill requests whose lease was released or ended; their blocks may go.
        unreceivable: parked requests that cannot be received, with the cause as text.
        lease_words: what to write into this rank's table of lease words, by slot. Before ``sent``
            is reported: see :mod:`pdcluster_connector.nixl_io.serving_agent`.
        renewed: seconds that prefill has promised to hold the KV of a parked request.
        lost: parked requests whose lease is not this engine's any more, and why.
        gone: peers that the first rank found gone or silent, by engine id, and why.
        idle: no token is computed in this step or beside it, so it may wait for ``IDLE_SECONDS``.
    """

    receive: list[receive_order.ReceiveOrder] = field(default_factory=list)
    abandon: list[str] = field(default_factory=list)
    sent: list[str] = field(default_factory=list)
    unreceivable: dict[str, str] = field(default_factory=dict)
    lease_words: dict[int, int] = field(default_factory=dict)
    renewed: dict[str, float] = field(default_factory=dict)
    lost: dict[str, failure.Failure] = field(default_factory=dict)
    gone: dict[str, failure.Failure] = field(default_factory=dict)
    idle: bool = field(default=False, compare=False)


@dataclass
class StepReport(base.KVConnectorWorkerMetadata):
    """Receipts of the receives that ended in this step, by request id.

    ``gone``: peers that the first rank has just found gone or silent, by engine id, and why.
    """

    receipts: dict[str, receive_order.Receipt]
    gone: dict[str, failure.Failure] = field(default_factory=dict)

    def aggregate(self, other: base.KVConnectorWorkerMetadata) -> Self:
        """Sum with another rank's report."""
        if isinstance(other, StepReport):
            for request_id, receipt in other.receipts.items():
                mine = self.receipts.get(request_id)
                self.receipts[request_id] = receipt if mine is None else mine + receipt
            self.gone |= other.gone
        return self


@dataclass
class WorkerHandshake(base.KVConnectorHandshakeMetadata):
    """What a worker publishes when its caches stand.

    ``shard`` is None in an engine that only decodes: nobody reads from it.
    """

    engine_id: str
    shape: EngineShape
    shard: messages.ShardMetadata | None
