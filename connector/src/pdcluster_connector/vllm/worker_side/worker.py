"""Worker side: registers this rank's caches, starts receives and reports what ended.

The engine step only swaps queues: NIXL belongs to the receiver's transfer thread
(transfer.receiver), handshakes to the peer book's (sidechannel.peers). Only a step that computes
nothing may wait for a moment, for a receive whose lease is claimed.
"""

import logging
import os
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import Any, Final

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.v1.kv_cache_interface import KVCacheConfig

from pdcluster_connector.certificate_files import Tls
from pdcluster_connector.compat.reasons import Reason
from pdcluster_connector.compat.shape import EngineShape, GroupShape
from pdcluster_connector.nixl_io import nixl_agent, serving_agent
from pdcluster_connector.plan.block_pairs import EngineBlocks, groups_of, unfilled
from pdcluster_connector.plan.geometry import Region
from pdcluster_connector.protocol.failure import Failure
from pdcluster_connector.protocol.receive_order import IDLE_SECONDS, Receipt
from pdcluster_connector.sidechannel.peers import CONCERNS_ALL_RANKS, FIRST_RANK, PeerBook
from pdcluster_connector.transfer import measures, receiver
from pdcluster_connector.transfer.options import ReceiverOptions
from pdcluster_connector.transfer.receive_machine import Acknowledged, Event, Failed, Signal
from pdcluster_connector.vllm import joined_shape, metrics, step_messages
from pdcluster_connector.vllm.config import ConnectorOptions
from pdcluster_connector.vllm.kv_caches.registration import Registration, register
from pdcluster_connector.vllm.worker_side import device_memory, fingerprint, link_keeper

logger = logging.getLogger(__name__)

# An engine without requests makes no steps. A peer that was gone longer ago may be back.
GONE_SECONDS: Final = 5.0


class UnfilledBlocks:
    """Clears the part of a received prompt's last blocks that no token fills.

    With Mamba layers, or layers of different precision, an attention block may have held other data
    before. Its bytes may read as NaN, and attention's mask does not remove NaN (vLLM #35219). vLLM
    therefore clears blocks before their first use. It does not clear blocks that a connector fills,
    because it could clear data that has arrived (v1/core/kv_cache_manager.py, allocate_slots).
    Prefill's blocks may end before decode's do, so decode clears the rest itself. If vLLM clears no
    blocks, nothing is cleared here either.

    Args:
        kv_caches: by layer; attention's are views ``[kernel block, head, token, content]``.
        regions: this rank's.
    """

    def __init__(
        self,
        config: KVCacheConfig,
        kv_caches: Mapping[str, torch.Tensor],
        regions: Sequence[Region],
    ) -> None:
        self._needed = config.needs_kv_cache_zeroing
        self._caches: dict[int, list[tuple[torch.Tensor, bool]]] = {}
        for region in regions:
            cut = region.token_stride is not None
            self._caches.setdefault(region.group, []).append((kv_caches[region.layer], cut))

    def clear(self, held: EngineBlocks, stop: int) -> None:
        """Clear the bytes that no token before ``stop`` fills, in blocks of this request alone.

        Call this before anything is posted. On a GPU it may still run while NIXL writes. The bytes
        that both write are the rest of a descriptor, and prefill has cleared them as well. A packed
        block is received whole, so it is cleared only if it holds no token.
        """
        for part in unfilled(held, stop) if self._needed else ():
            whole = part.block + (part.first > 0)
            for cache, cut in self._caches.get(part.group, ()):
                if cut:
                    cache[part.block, :, part.first :].zero_()
                cache[whole : part.end].zero_()


class WorkerRole:
    """One rank's worker side. Not thread-safe: lives on the worker's main thread."""

    def __init__(
        self,
        vllm_config: Any,
        kv_cache_config: KVCacheConfig,
        options: ConnectorOptions,
        engine_id: str,
    ) -> None:
        transfer = vllm_config.kv_transfer_config
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._options = options
        self._engine_id = engine_id
        self._produces: bool = transfer.is_kv_producer
        self._consumes: bool = transfer.is_kv_consumer
        self._rank = (get_pp_group().rank_in_group, get_tp_group().rank_in_group)
        self.stats = metrics.StatsCollector()
        self._registration: Registration | None = None
        self._groups: tuple[GroupShape, ...] = ()
        self._unfilled: UnfilledBlocks | None = None
        self._device: torch.device | None = None
        self._serving: serving_agent.ServingAgent | None = None
        self._peers: PeerBook | None = None
        self._receiver: receiver.Receiver | None = None
        self._launcher: link_keeper.LauncherClient | None = None
        self._bound_at = inf
        self._receiving: dict[str, bool] = {}  # whether the lease is claimed, by request
        self._may_wait = self._has_reported = False
        self._left: list[step_messages.StepOrders] = []  # what start() could not finish
        self._unreceivable: dict[str, str] = {}  # requests whose receive could not start, and why
        self._ended = measures.ReceiveResults()
        # The next ones. They stay here until the very line that returns them.
        self._results = [KVConnectorTransferResults()]
        self._reports = [step_messages.StepReport({})]
        # When the first rank found which peer gone or silent; thread-safe at both ends.
        self._gone: deque[tuple[float, str, Failure]] = deque()

    # At start.

    def register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Register this rank's caches with NIXL and start the transfer thread."""
        registration = register(
            kv_caches,
            self._kv_cache_config,
            self._vllm_config,
            self._rank,
            fingerprint.digest_of_engine(self._vllm_config.model_config),
            fingerprint.digest_of_draft(self._vllm_config.speculative_config),
            self._options.kv_layout or None,
        )
        registration = replace(registration, shape=_of_all_stages(registration.shape))
        self._registration = registration
        self._groups = groups_of(registration.shape)
        self._unfilled = UnfilledBlocks(
            self._kv_cache_config, kv_caches, registration.shard.regions
        )
        self._device = next((cache.device for cache in kv_caches.values()), None)
        probe_memory = device_memory.probe_memory_of(self._device)
        if self._produces:
            # It posts no transfers. Each thread would take doorbell pages of the network card,
            # of which DeepEP's kernels need some too.
            self._serving = serving_agent.ServingAgent(
                lambda: self._new_agent(threads=0, serves=True),
                registration.memory,
                probe_memory=probe_memory,
            )
        if not self._consumes:
            return
        files = self._options.tls
        tls = Tls(files, self._engine_id) if files else None
        self._peers = PeerBook(self._engine_id, registration.shape, self._rank, tls)
        if self._rank == FIRST_RANK:  # it asks peers often whether they live, the others rarely
            self._peers.listen(self.peer_gone, silence=True)
        self._receiver = receiver.Receiver(
            shard=registration.shard,
            groups=self._groups,
            memory=registration.memory,
            make_agent=lambda: self._new_agent(threads=self._options.num_threads),
            peers=self._peers,
            options=receiver_options(self._options),
            prepare_thread=self._select_device,
            probe_memory=probe_memory,
        )
        self._peers.start()
        self._receiver.start()
        parallel = self._vllm_config.parallel_config
        self._launcher = link_keeper.LauncherClient.from_environment(
            os.environ,
            rank=self._rank,
            of=(parallel.pipeline_parallel_size, parallel.tensor_parallel_size),
            data_rank=parallel.data_parallel_index,
            peers=self._peers,
            probe=self._receiver.probe,
            tls=tls,
        )
        if self._launcher is not None:
            self._launcher.start()

    def handshake(self) -> step_messages.WorkerHandshake | None:
        """What the scheduler side publishes on behalf of this rank."""
        if self._registration is None:
            return None
        shard = None
        if self._serving is not None:
            regions = self._registration.shard.regions
            shard = self._serving.metadata(self._engine_id, self._rank, regions)
        return step_messages.WorkerHandshake(self._engine_id, self._registration.shape, shard)

    def _new_agent(self, threads: int, *, serves: bool = False) -> nixl_agent.NixlAgent:
        options = self._options
        return nixl_agent.NixlAgent(
            f"{self._engine_id}/{self._rank[0]}/{self._rank[1]}",
            backends=options.backends,
            num_threads=threads,
            backend_options=options.backend_options,
            rocm=torch.version.hip is not None,
            serves_gpu=serves and self._device is not None and self._device.type != "cpu",
        )

    def _select_device(self) -> None:
        """On a GPU: without a current device on its thread, UCX turns cuda_ipc off."""
        if self._device is not None and self._device.type == "cuda":
            torch.cuda.set_device(self._device)

    # Every step.

    def bound(self, orders: step_messages.StepOrders) -> None:
        """Before the forward pass: report leases and peers to the transfer thread."""
        self._bound_at = time.monotonic()
        if self._peers is not None and self._rank != FIRST_RANK:
            for engine_id, failure in orders.gone.items():
                self._peers.hear(engine_id, failure)
        if self._receiver is not None:
            self._receiver.pass_on(self._of_leases(orders))

    def start(self, orders: step_messages.StepOrders) -> None:
        """Write lease words, and hand orders to the transfer thread."""
        # What the step before has reported may reach vLLM only when this one ends, too.
        self._may_wait, self._has_reported = orders.idle and not self._has_reported, False
        while self._left:
            self._carry_out(self._left[0])
            self._left.pop(0)
        self._carry_out(orders)

    def _carry_out(self, orders: step_messages.StepOrders) -> None:
        """Do what is left of a step's orders, in an order in which it can be repeated."""
        if self._serving is not None:
            self._serving.write_lease_words(orders.lease_words)
        while orders.sent:  # not before: vLLM gives these blocks to others
            self._results[0].finished_sending.add(orders.sent.pop())
        while orders.unreceivable:
            self._unreceivable.update([orders.unreceivable.popitem()])
        if self._receiver is None:
            return
        self._receiver.pass_on([(given_up, Signal.ABANDONED) for given_up in orders.abandon])
        for given_up in orders.abandon:  # its quarantine may be long
            self._receiving.pop(given_up, None)
        # Receives start last, and all of them or none: if a line above raises, none has started.
        if self._unfilled is not None:
            for order in orders.receive:
                self._unfilled.clear(EngineBlocks(self._groups, order.blocks), order.stop)
        self._receiver.receive(orders.receive, self._begun(), self._of_leases(orders))
        self._receiving |= {order.request_id: order.claimed for order in orders.receive}
        self._receiving |= dict.fromkeys(self._receiving.keys() & orders.renewed, True)

    def _of_leases(self, orders: step_messages.StepOrders) -> list[tuple[str, Event]]:
        """Return what these orders say of leases, as events of receives."""
        begun = self._begun()
        return [
            *((key, Acknowledged(begun + left)) for key, left in orders.renewed.items()),
            *((key, Failed(why)) for key, why in orders.lost.items()),
        ]

    def _begun(self) -> float:
        """Return when this step began: the seconds in its orders count from then on."""
        return min(self._bound_at, time.monotonic())

    def fail_orders(self, orders: step_messages.StepOrders, error: Exception) -> None:
        """Report the receives of these orders as failed; the next step does what else is left."""
        for order in orders.receive:
            self._unreceivable[order.request_id] = repr(error)
        orders.receive = []
        if orders != step_messages.StepOrders():
            self._left.append(orders)

    def wait(self) -> None:
        """In a step that may wait: wait for the end of a receive whose lease is claimed."""
        awaited = self._may_wait and not self._unreceivable and any(self._receiving.values())
        if awaited and self._receiver is not None:
            self._receiver.wait(IDLE_SECONDS)

    def results(self) -> KVConnectorTransferResults:
        """Requests that this rank is through with, each exactly once."""
        ended, results, receipts = self._ended, self._results[0], self._reports[0].receipts
        if self._receiver is not None:
            self._receiver.results(ended)
            for request_id in ended.finished:
                self._receiving.pop(request_id, None)
        for request_id, why in self._unreceivable.items():
            ended.finished.add(request_id)
            ended.failed[request_id] = Failure(Reason.BACKEND_ERROR, why)
        self._unreceivable = {}
        for request_id, failure in ended.failed.items():
            if request_id in ended.abandoned:
                continue
            self.stats.count("failures", failure.reason.value)
            receipts[request_id] = Receipt(0, 0.0, failure.reason.value, failure.message)
            logger.warning("KV of %s was not received: %s", request_id, failure)
        for request_id, received in ended.received.items():
            self.stats.count("received_bytes", amount=received.nbytes)
            receipts[request_id] = received
        for phase, seconds in ended.phase_seconds.items():
            self.stats.count("receive_seconds", phase, seconds)
        for engine_id, (nbytes, took) in ended.links.items():
            self.stats.link(engine_id, nbytes, took)
        results.failed_recving.update(ended.failed)
        results.finished_recving.update(ended.finished)
        self._has_reported = bool(results.finished_recving or results.finished_sending)
        self._ended = measures.ReceiveResults()
        self._results.append(KVConnectorTransferResults())
        return self._results.pop(0)

    def report(self) -> step_messages.StepReport | None:
        """What became of the receives in :meth:`results`, and which peers are gone or silent."""
        oldest, report = time.monotonic() - GONE_SECONDS, self._reports[0]
        while self._gone:
            at, engine_id, failure = self._gone.popleft()
            if at >= oldest:
                report.gone[engine_id] = failure
        if not report.receipts and not report.gone:
            return None
        self._reports.append(step_messages.StepReport({}))
        return self._reports.pop(0)

    def peer_gone(self, engine_id: str, failure: Failure) -> None:
        """Note on the first rank, for the others, who is gone or silent. Any thread calls it."""
        if failure.reason in CONCERNS_ALL_RANKS:
            self._gone.append((time.monotonic(), engine_id, failure))

    def close(self) -> None:
        """End the threads and NIXL's agents."""
        for part in (self._launcher, self._receiver, self._peers, self._serving):
            if part is not None:
                part.close()


def _of_all_stages(shape: EngineShape) -> EngineShape:
    """The engine's shape from this pipeline rank's; every rank calls it at the same time."""
    group = get_pp_group()
    if group.world_size == 1:
        return shape
    stages = [shape] * group.world_size
    torch.distributed.all_gather_object(stages, shape, group=group.cpu_group)
    tensor = get_tp_group().rank_in_group
    return joined_shape.join_shapes({(stage, tensor): held for stage, held in enumerate(stages)})


def receiver_options(options: ConnectorOptions) -> ReceiverOptions:
    """Return what a user may set of the receiver's limits."""
    return ReceiverOptions(
        drain_deadline_seconds=options.drain_deadline_seconds,
        transfer_stall_seconds=options.transfer_stall_seconds,
        # One transfer has enough descriptors for all of NIXL's threads.
        descriptors_per_transfer=max(1024, options.num_threads * nixl_agent.SPLIT_BATCH_SIZE),
    )
