"""Scheduler side: the prefill and the decode half, the side channel, and their inboxes.

Runs in vLLM's EngineCore, on the step's critical path: everything that waits for the network
has a thread of its own (sidechannel.server, sidechannel.lease_client).
"""

import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from pdcluster_connector.certificate_files import Tls
from pdcluster_connector.compat.findings import counted
from pdcluster_connector.protocol import kv_path, launcher_documents, ticket
from pdcluster_connector.sidechannel import lease_client, lease_desk, server, ticket_key_file
from pdcluster_connector.vllm import config, joined_shape, metrics
from pdcluster_connector.vllm.kv_caches.groups import cache_groups
from pdcluster_connector.vllm.scheduler_side import busy_time, decode, prefill, prompt_digests
from pdcluster_connector.vllm.step_messages import StepOrders, StepReport, WorkerHandshake

logger = logging.getLogger(__name__)


class SchedulerRole:
    """One engine's scheduler side. Not thread-safe: lives on the scheduler's thread."""

    def __init__(
        self,
        vllm_config: Any,
        kv_cache_config: KVCacheConfig,
        options: config.ConnectorOptions,
        engine_id: str,
    ) -> None:
        transfer = vllm_config.kv_transfer_config
        parallel = vllm_config.parallel_config
        block_size = vllm_config.cache_config.block_size
        self._engine_id = engine_id
        self._options = options
        self._config = kv_cache_config
        groups = cache_groups(kv_cache_config)
        self._ranks = parallel.pipeline_parallel_size * parallel.tensor_parallel_size
        self.stats = metrics.StatsCollector()
        self.busy = busy_time.BusyTime(self.stats)
        # Data-parallel ranks make their steps together: none may wait for its own receives.
        self._alone = parallel.data_parallel_size == 1
        # So many steps may be planned while tokens are computed in one before.
        self._planned_ahead = parallel.pipeline_parallel_size
        self._quiet_steps = 0
        self._digests = prompt_digests.PromptDigests()
        self._orders = [StepOrders()]  # the next ones; here until the very line that returns them
        self._tls = Tls(options.tls, engine_id) if options.tls else None
        self._side_channel: server.SideChannelServer | None = None
        self._leases: lease_desk.LeaseDesk | None = None
        self._lease_client: lease_client.LeaseClient | None = None
        self.prefill: prefill.PrefillRole | None = None
        self.decode: decode.DecodeRole | None = None
        file = options.ticket_key_file
        keys: Callable[[], ticket.TicketKeys | None] = (
            ticket_key_file.TicketKeyFile(file) if file else lambda: None
        )
        if not file:
            logger.warning(
                "tickets are not signed: there is no ticket_key_file, and allow_insecure is set. "
                "Whoever can send a request can make this engine read or serve wrong KV"
            )
        if transfer.is_kv_producer:
            self._leases = lease_desk.LeaseDesk(options.lease_seconds)
            self.prefill = prefill.PrefillRole(
                engine_id,
                options,
                block_size,
                groups,
                (parallel.tensor_parallel_size, parallel.pipeline_parallel_size),
                self.stats,
                self._leases,
                keys,
                self._digests,
            )
        if transfer.is_kv_consumer:
            self._lease_client = lease_client.LeaseClient(engine_id, self._tls)
            self._lease_client.start()
            self.decode = decode.DecodeRole(
                engine_id,
                options,
                groups,
                self._lease_client,
                self.stats,
                keys=keys,
                digests=self._digests,
                key=kv_path.key_of(os.environ.get(launcher_documents.TOKEN_VARIABLE, "")),
                recomputes=transfer.kv_load_failure_policy == "recompute",
            )

    # At start.

    def publish(self, workers: Mapping[tuple[int, int], WorkerHandshake]) -> None:
        """Check what the workers say of themselves and open the side channel, once.

        vLLM publishes again after waking up (0.33); nothing that is registered has moved then.

        Raises:
            HandshakeError: a worker has another engine id or other settings, or is missing.
            SideChannelError: the address cannot be listened on.
        """
        if self._side_channel is not None:
            return
        shape, shards = joined_shape.join_workers(workers, self._engine_id, self._ranks)
        self._side_channel = server.SideChannelServer(
            self._options.side_channel_host,
            self._options.side_channel_port,
            self._engine_id,
            shape,
            shards=shards,
            leases=self._leases,
            tls=self._tls,
            allow_insecure=self._options.allow_insecure,
            role="prefill" if self.prefill is not None else "decode",
        )
        self._side_channel.start()
        logger.info(
            "KV of %s: %s, %s, side channel %s:%d",
            self._engine_id,
            counted(len(workers), "rank"),
            counted(len(shape.layers or ()), "layer"),
            self._options.side_channel_host,
            self._side_channel.port,
        )

    # Every step.

    def arrived(self, request: Request) -> None:
        """Take in a new request. An engine that only decodes hands no KV over, whoever asks."""
        if self.prefill is not None and prefill.is_prefill(request):
            self.prefill.arrived(request)
        elif self.decode is not None:
            self.decode.arrived(request)

    def matched(self, request: Request, computed: int) -> tuple[int | None, bool]:
        """See ``DecodeRole.matched``."""
        return (0, False) if self.decode is None else self.decode.matched(request, computed)

    def scheduled(self, request: Request, blocks: KVCacheBlocks, external_tokens: int) -> None:
        """Take note that vLLM gave a request its blocks."""
        if self.prefill is not None:
            self.prefill.scheduled(request)
        if self.decode is not None:
            ids = self._config.select_transfer_block_ids(blocks.get_block_ids())
            self.decode.scheduled(request, ids, external_tokens)

    def unreceivable(self, request_id: str, why: str) -> None:
        """Have every rank report a parked request as failed."""
        self._orders[0].unreceivable[request_id] = why

    def orders(self, scheduled_tokens: int) -> StepOrders:
        """What the workers have to do in this step; each order is given out once."""
        self.busy.step(scheduled_tokens)
        self._digests.step()
        self._quiet_steps = 0 if scheduled_tokens else self._quiet_steps + 1
        self._orders[0].idle = self._alone and self._quiet_steps > self._planned_ahead
        if self.decode is not None:
            self.decode.step(self._orders[0])
        if self.prefill is not None:
            self.prefill.take(self._orders[0])
        self._orders.append(StepOrders())
        return self._orders.pop(0)

    def recover(self) -> None:
        """Complete the orders after :meth:`orders` has failed. The next step gives them out."""
        if self.prefill is not None:
            self.prefill.recover(self._orders[0])

    def results(self, output: KVConnectorOutput) -> None:
        """Take in what all ranks reported in a step."""
        if self.decode is None:
            return
        report = output.kv_connector_worker_meta
        if not isinstance(report, StepReport):
            report = StepReport({})
        self._orders[0].gone |= report.gone
        self.decode.leases.doubt(report.gone)
        self.decode.received(report.receipts, output.finished_recving or (), output.failed_recving)

    def finished(
        self, request: Request, blocks: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Return (keep its blocks, what the client gets) for a request that ended."""
        keep, params = False, None
        if self.prefill is not None:
            ids = self._config.select_transfer_block_ids(blocks) if blocks else ()
            keep, params = self.prefill.finished(request, ids)
        if self.decode is not None and params is None:
            params = self.decode.finished(request)
        return keep, params

    def forget(self, request_id: str) -> None:
        """Drop what is known of a request whose end could not be handled."""
        if self.prefill is not None:
            self.prefill.forget(request_id)
        if self.decode is not None:
            self.decode.forget(request_id)

    def reset(self) -> bool:
        """Void what was computed before; False while leases let others fetch it."""
        if self.decode is not None:
            self.decode.reset()
        return self.prefill is None or not self.prefill.leases.held

    def close(self) -> None:
        """Close the side channel; send prefill engines the releases that still wait."""
        if self._side_channel is not None:
            self._side_channel.stop()
        if self._lease_client is not None:
            self._lease_client.close()
