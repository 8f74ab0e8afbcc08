"""How much was read for each receive and how long its phases took, as the engine step takes it.

The bytes come from ``planned_reads.py``, which sums them up when the reads are planned. The seconds
are those between the states that ``receive_machine.py`` enters. ``vllm/worker_side/worker.py``
counts both in the metrics.
"""

from dataclasses import dataclass, field

from pdcluster_connector.compat.reasons import Reason
from pdcluster_connector.protocol.failure import Failure
from pdcluster_connector.protocol.receive_order import Receipt
from pdcluster_connector.transfer.receive_machine import Receive, State


@dataclass(slots=True)
class ReceiveResults:
    """What has ended since the last take.

    Attributes:
        finished: every request that ended, well or not; each id once.
        failed: requests whose blocks hold no valid KV, with the cause. No transfer can write into
            the blocks any more. Abandoned requests are among them.
        abandoned: the requests of ``failed`` that the engine gave up. They are not failures of the
            KV path.
        received: those that arrived whole: bytes of this rank, and seconds from the connect on.
        phase_seconds: one value for each of them under ``handshake``, ``post``, ``transfer``,
            ``fence``, ``total``.
        links: bytes, and seconds of the phase ``transfer``, of those from each prefill engine.
    """

    finished: set[str] = field(default_factory=set)
    failed: dict[str, Failure] = field(default_factory=dict)
    abandoned: set[str] = field(default_factory=set)
    received: dict[str, Receipt] = field(default_factory=dict)
    phase_seconds: dict[str, list[float]] = field(default_factory=dict)
    links: dict[str, tuple[int, float]] = field(default_factory=dict)

    def add(self, receive: Receive, nbytes: int, prefill: str) -> None:
        """Count a receive that is DONE or FAILED, and the bytes that were read for it.

        ``prefill`` is the id of the engine that they were read from.
        """
        self.finished.add(receive.request_id)
        if receive.state is not State.DONE:
            failure = receive.failure or Failure(Reason.BACKEND_ERROR, "no cause is known")
            self.failed[receive.request_id] = failure
            if receive.abandoned:
                self.abandoned.add(receive.request_id)
            return
        entered, posted = receive.entered, receive.entered[State.POSTED]
        phases = {
            "handshake": posted - entered[State.HANDSHAKE],
            "post": (receive.posted_at or posted) - posted,
            "transfer": entered[State.FENCE] - posted,
            "fence": entered[State.DONE] - entered[State.FENCE],
            "total": entered[State.DONE] - entered[State.HANDSHAKE],
        }
        for phase, seconds in phases.items():
            self.phase_seconds.setdefault(phase, []).append(seconds)
        before, seconds = self.links.get(prefill, (0, 0.0))
        self.links[prefill] = before + nbytes, seconds + phases["transfer"]
        self.received[receive.request_id] = Receipt(nbytes, phases["total"])
