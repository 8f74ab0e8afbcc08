"""The receiving side of one worker, as the engine step uses it.

``receive``, ``abandon`` and ``results`` only put into a queue or take from one: they never block
and never raise. Everything else happens on the transfer thread.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

from pdcluster_connector.compat.reasons import Reason
from pdcluster_connector.nixl_io.interface import AgentInterface
from pdcluster_connector.nixl_io.probe_memory import HostMemory, ProbeMemory
from pdcluster_connector.nixl_io.reading_agent import ProbeResult
from pdcluster_connector.plan.geometry import MemoryRange, Shard
from pdcluster_connector.protocol.failure import Failure
from pdcluster_connector.protocol.messages import EngineMetadata
from pdcluster_connector.sidechannel.peers import PeerBook
from pdcluster_connector.transfer.connections import Connections
from pdcluster_connector.transfer.job import Job, ReceiveRequest, ReceiverOptions
from pdcluster_connector.transfer.receive import Receive, State
from pdcluster_connector.transfer.receives import Receives
from pdcluster_connector.transfer.transfer_thread import TransferThread

START_SECONDS = 120.0
STOP_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Received:
    """What this rank read for one request that arrived whole, and how long it took."""

    nbytes: int
    seconds: float


@dataclass(slots=True)
class ReceiveResults:
    """What has ended since the last take.

    Attributes:
        finished: every request that ended, well or not; each id once.
        failed: requests whose blocks hold no valid KV, with the cause. No transfer can write into
            the blocks any more. Abandoned requests are among them.
        abandoned: the requests of ``failed`` that the engine gave up. They are not failures of the
            KV path.
        received: those that arrived whole.
        phase_seconds: one value for each of them under ``handshake``, ``post``, ``transfer``,
            ``fence``, ``total``.
    """

    finished: set[str] = field(default_factory=set)
    failed: dict[str, Failure] = field(default_factory=dict)
    abandoned: set[str] = field(default_factory=set)
    received: dict[str, Received] = field(default_factory=dict)
    phase_seconds: dict[str, list[float]] = field(default_factory=dict)

    def add(self, receive: Receive, nbytes: int) -> None:
        """Count a receive that is DONE or FAILED, and the bytes that were read for it."""
        self.finished.add(receive.request_id)
        if receive.state is not State.DONE:
            failure = receive.failure or Failure(Reason.BACKEND_ERROR, "no cause is known")
            self.failed[receive.request_id] = failure
            if receive.abandoned:
                self.abandoned.add(receive.request_id)
            return
        phases = _phases(receive)
        for phase, seconds in phases.items():
            self.phase_seconds.setdefault(phase, []).append(seconds)
        self.received[receive.request_id] = Received(nbytes, phases["total"])


def _phases(receive: Receive) -> dict[str, float]:
    entered = receive.entered
    posted = entered[State.POSTED]
    return {
        "handshake": posted - entered[State.HANDSHAKE],
        "post": (receive.posted_at or posted) - posted,
        "transfer": entered[State.FENCE] - posted,
        "fence": entered[State.DONE] - entered[State.FENCE],
        "total": entered[State.DONE] - entered[State.HANDSHAKE],
    }


class Receiver:
    """Reads KV for one decode worker.

    Args:
        shard: this rank's KV cache.
        memory: what NIXL has to register so that all of ``shard`` can be written.
        make_agent: makes a NIXL agent; called on the transfer thread, and again whenever
            the agent had to be destroyed.
        peers: where handshakes come from; its ``on_gone`` becomes ours.
        options: limits.
        clock: of the requests' deadlines.
        prepare_thread: called first on the transfer thread (CUDA: select the device).
        probe_memory: what probes are read into: where this engine's KV lives.
    """

    def __init__(
        self,
        *,
        shard: Shard,
        memory: Sequence[MemoryRange],
        make_agent: Callable[[], AgentInterface],
        peers: PeerBook,
        options: ReceiverOptions | None = None,
        clock: Callable[[], float] = time.monotonic,
        prepare_thread: Callable[[], None] = lambda: None,
        probe_memory: ProbeMemory | None = None,
    ) -> None:
        def make_connections(receives: Receives) -> Connections:
            buffers = probe_memory or HostMemory()
            return Connections(receives, shard, memory, make_agent, peers, self._answered, buffers)

        self._receives = Receives(options or ReceiverOptions(), clock, make_connections)
        self._connections = self._receives.connections
        self._prepare_thread = prepare_thread
        name = f"pdcluster-transfer-{shard.rank[0]}-{shard.rank[1]}"
        self._thread = TransferThread(name, self._receives, self._prepare)
        peers.on_gone = self._gone

    def start(self) -> None:
        """Start the transfer thread and register the memory.

        Raises:
            NixlError: NIXL is not installed, or refuses the memory.
        """
        self._thread.start(START_SECONDS)

    def receive(
        self,
        requests: Iterable[ReceiveRequest],
        renewed: Mapping[str, float] | None = None,
        lost: Mapping[str, Failure] | None = None,
    ) -> None:
        """Start receives; :meth:`results` reports each request once. If this raises, none starts.

        ``renewed`` and ``lost``: see :meth:`acknowledge` and :meth:`refuse`.
        """
        if batch := tuple(requests):
            self._thread.put(partial(self._receives.receive, batch, renewed, lost))

    def abandon(self, request_ids: Iterable[str]) -> None:
        """Abandon requests. Each is still reported once, when no transfer of it can write."""
        if batch := tuple(request_ids):
            self._thread.put(partial(self._receives.abandon, batch))

    def acknowledge(self, until: Mapping[str, float]) -> None:
        """Take in until when prefill has renewed leases for this engine, by request id."""
        if until:
            self._thread.put(partial(self._receives.acknowledge, until))

    def refuse(self, failures: Mapping[str, Failure]) -> None:
        """Fail requests whose leases this engine no longer holds; the reasons, by request id."""
        if failures:
            self._thread.put(partial(self._receives.refuse, failures))

    def results(self, results: ReceiveResults | None = None) -> ReceiveResults:
        """Return what has ended since the last call, added to ``results``."""
        if self._thread.dead is not None:
            self._thread.drain()
        results = ReceiveResults() if results is None else results
        while self._receives.ended:
            job = self._receives.ended[0]
            try:
                results.add(job.machine, job.nbytes)
            except Exception as error:  # noqa: BLE001 - it would come back in every step
                results.finished.add(job.request.request_id)
                failure = Failure(Reason.BACKEND_ERROR, f"no result can be made: {error!r}")
                results.failed[job.request.request_id] = failure
            self._receives.ended.popleft()
        return results

    def probe(self, peer: EngineMetadata, *, check: bool = False) -> Future[ProbeResult]:
        """Read the peer's probe regions; the future never raises, failures are in the result.

        ``check``: read only as much as shows that data still comes through, and nothing from
        shards whose KV has just landed.
        """
        future: Future[ProbeResult] = Future()
        probing = self._connections.probing
        self._thread.put(partial(probing.check if check else probing.probe, peer, future))
        if self._thread.dead is not None:
            self._thread.drain()
        return future

    def close(self) -> bool:
        """Destroy the agent and fail what is under way; returns whether the thread ended."""
        return self._thread.stop(STOP_SECONDS)

    def _prepare(self) -> None:
        self._prepare_thread()
        _ = self._connections.agent

    def _answered(self, job: Job, answer: EngineMetadata | Failure) -> None:
        self._thread.put(partial(self._connections.answered, job, answer))

    def _gone(self, engine_id: str, failure: Failure) -> None:
        self._thread.put(partial(self._connections.gone, engine_id, failure))
