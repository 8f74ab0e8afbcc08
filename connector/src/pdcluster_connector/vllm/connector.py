"""The class that vLLM loads. It delegates every method of vLLM's connector contract to a role.

``kv_connector_module_path`` names this module. Every process of the engine imports it, also the API
server. So it imports neither NIXL nor the roles; the constructor does that. Methods that vLLM calls
in a step go through :func:`engine_step` and never raise.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, cast

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.platforms import current_platform
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from pdcluster_connector.protocol.prompt_outcomes import no_ticket
from pdcluster_connector.vllm.config import ConfigError, parse_options, refuse_unsupported

if TYPE_CHECKING:
    import torch
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1 import metrics
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from pdcluster_connector.vllm.scheduler_side.scheduler import SchedulerRole
    from pdcluster_connector.vllm.step_messages import StepOrders, StepReport, WorkerHandshake
    from pdcluster_connector.vllm.worker_side.worker import WorkerRole

NAME = "PDClusterConnector"

logger = logging.getLogger(__name__)

Method = TypeVar("Method", bound=Callable[..., Any])


def share_handlers() -> None:
    """Log to vLLM's handlers, because they know its processes, ranks and formats."""
    theirs, ours = logging.getLogger("vllm"), logging.getLogger("pdcluster_connector")
    if not ours.handlers:
        for handler in theirs.handlers:
            ours.addHandler(handler)
        ours.setLevel(theirs.level)


def engine_step(
    fallback: Callable[[], Any], affected: Callable[..., Any] | None = None
) -> Callable[[Method], Method]:
    """Wrap a connector method that vLLM calls in its engine step, so that it never raises.

    An exception there would end the engine and every request in it. Here it is logged with its
    traceback and counted by the connector's ``count_fault(method, error)``, and it fails only the
    requests that the call was about.

    Args:
        fallback: makes the value to return after an exception.
        affected: called as ``affected(connector, error, *args)`` to fail the requests that the
            call was about.
    """

    def wrap(method: Method) -> Method:
        @functools.wraps(method)
        def safe(self: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return method(self, *args, **kwargs)
            except Exception as error:
                logger.exception("PDClusterConnector.%s failed", method.__name__)
                try:
                    self.count_fault(method.__name__, error)
                    if affected is not None:
                        affected(self, error, *args)
                except Exception:
                    name = method.__name__
                    logger.exception("PDClusterConnector.%s: failing its requests failed too", name)
                return fallback()

        return cast("Method", safe)

    return wrap


class PDClusterConnector(base.KVConnectorBase_V1, base.SupportsHMA):
    """KV connector for prefill and decode on separate engines. Decode reads KV over NIXL.

    vLLM makes one for the scheduler side and one for each worker, and calls on it only the methods
    of its side. Only the role of that side is there.
    """

    _cache_hit_source = CacheHitSource.P2P
    _scheduler: SchedulerRole
    _worker: WorkerRole

    def __init__(
        self, vllm_config: VllmConfig, role: base.KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        refuse_unsupported(vllm_config, current_platform.device_type)
        transfer = self._kv_transfer_config
        engine_id = transfer.engine_id
        if not engine_id or len(engine_id) > 512:
            raise ConfigError("engine_id of --kv-transfer-config must have 1 to 512 characters")
        options = parse_options(
            transfer.kv_connector_extra_config, vllm_config.parallel_config.data_parallel_index
        )
        made: SchedulerRole | WorkerRole
        if role is base.KVConnectorRole.SCHEDULER:
            from pdcluster_connector.vllm.scheduler_side.scheduler import SchedulerRole

            made = self._scheduler = SchedulerRole(vllm_config, kv_cache_config, options, engine_id)
        else:
            from pdcluster_connector.vllm.worker_side.worker import WorkerRole

            made = self._worker = WorkerRole(vllm_config, kv_cache_config, options, engine_id)
        self._made = made

    def count_fault(self, method: str, error: Exception) -> None:
        """Count an exception that the guard caught in ``method``."""
        self._made.stats.count("step_faults", f"{method}:{type(error).__name__}")

    # Scheduler side.

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], base.KVConnectorHandshakeMetadata]
    ) -> None:
        """Check the workers' metadata and open the side channel; raises at start only."""
        self._scheduler.publish(cast("Mapping[tuple[int, int], WorkerHandshake]", metadata))

    @engine_step(fallback=lambda: None)
    def on_new_request(self, request: Request) -> None:
        """Judge a new request's ticket."""
        self._scheduler.arrived(request)

    @engine_step(fallback=lambda: (0, False))
    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Tokens that a prefill engine holds beyond the local ones. Has no side effects."""
        return self._scheduler.matched(request, num_computed_tokens)

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        """A transfer fills the request's own blocks of every group."""
        return self._kv_cache_config.transfer_group_ids

    def _not_scheduled(
        self, error: Exception, request: Request, blocks: KVCacheBlocks, external: int
    ) -> None:
        if external > 0:
            self._scheduler.unreceivable(request.request_id, repr(error))
        else:  # once more: what is done already is not undone by it
            self._scheduler.scheduled(request, blocks, external)

    @engine_step(fallback=lambda: None, affected=_not_scheduled)
    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Arm the lease (prefill) or order the receive (decode)."""
        self._scheduler.scheduled(request, blocks, num_external_tokens)

    @engine_step(
        fallback=base.KVConnectorMetadata, affected=lambda self, *_: self._scheduler.recover()
    )
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> base.KVConnectorMetadata:
        """Return this step's orders to the workers; after an exception, the next step has them."""
        return self._scheduler.orders(scheduler_output.total_num_scheduled_tokens)

    @engine_step(
        fallback=lambda: None, affected=lambda self, _, output: self._scheduler.results(output)
    )
    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Take in what all ranks reported; what an exception interrupts is done once more."""
        self._scheduler.results(connector_output)

    @engine_step(
        fallback=lambda: (False, no_ticket("StepFault")),
        affected=lambda self, _, request, *__: self._scheduler.forget(request.request_id),
    )
    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Return the ticket (prefill) or what the KV path did (decode) of a request that ended."""
        return self._scheduler.finished(request, block_ids)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """The same for a model with one KV cache group."""
        return self.request_finished_all_groups(request, (block_ids,))

    @engine_step(fallback=lambda: False)
    def reset_cache(self) -> bool:
        """Make all KV computed so far invalid (new weights); False while others may fetch it."""
        return self._scheduler.reset()

    # Worker side.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Register the caches with NIXL; raises at start only."""
        self._worker.register(kv_caches)

    def get_handshake_metadata(self) -> base.KVConnectorHandshakeMetadata | None:
        """What the scheduler side publishes on behalf of this rank."""
        return self._worker.handshake()

    def bind_connector_metadata(self, connector_metadata: base.KVConnectorMetadata) -> None:
        """Take this step's orders; called before the forward pass."""
        super().bind_connector_metadata(connector_metadata)
        self._hear_of_leases()

    @engine_step(fallback=lambda: None)
    def _hear_of_leases(self) -> None:
        self._worker.bound(self._orders())

    @engine_step(
        fallback=lambda: None,
        affected=lambda self, error, *_: self._worker.fail_orders(self._orders(), error),
    )
    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Hand this step's orders to the transfer thread; returns at once."""
        self._worker.start(self._orders())

    @engine_step(fallback=base.KVConnectorTransferResults)
    def get_transfer_results(self, finished_req_ids: set[str]) -> base.KVConnectorTransferResults:
        """Return the requests that this rank has finished, each exactly once."""
        self._worker.wait()
        return self._worker.results()

    @engine_step(fallback=lambda: None)
    def build_connector_worker_meta(self) -> StepReport | None:
        """Return the results of the receives that ended in this step."""
        return self._worker.report()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: loads are asynchronous. vLLM runs a request when all of its KV is there."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Do nothing. Decode reads from prefill's cache itself, so nothing is saved."""

    def wait_for_save(self) -> None:
        """See save_kv_layer."""

    # Both roles.

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """Return the order of KV in memory that vLLM should choose: ``kv_layout``, or LBHNC.

        LBHNC is what the stock connector asks for. A head's tokens lie side by side. Engines of
        different tensor-parallel sizes then exchange a block in one piece, not token by token.
        MLA has one head, so the order of heads and tokens does not matter.
        vLLM ignores this order if ``VLLM_KV_CACHE_LAYOUT`` is set or the backend does not have it.
        Peers then refuse the engine if ``kv_layout`` asked for it.
        """
        transfer = vllm_config.kv_transfer_config
        if asked := transfer and transfer.kv_connector_extra_config.get("kv_layout"):
            return str(asked)
        model = vllm_config.model_config
        return None if model is None or model.use_mla else "LBHNC"

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: KVTransferConfig) -> bool:
        """Return False: sleep unmaps memory that NIXL has registered. vLLM asks from 0.33 on."""
        return False

    @engine_step(fallback=lambda: None)
    def get_kv_connector_stats(self) -> metrics.KVConnectorStats | None:
        """Return the counts since the last step."""
        return self._made.stats.take()

    def shutdown(self) -> None:
        """Stop the threads, the agents and the side channel."""
        self._made.close()

    @classmethod
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> metrics.KVConnectorStats | None:
        """Return stats from a dict that another process sent."""
        from pdcluster_connector.vllm.metrics import ConnectorStats

        return ConnectorStats() if data is None else ConnectorStats(data=data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> metrics.KVConnectorPromMetrics | None:
        """Return the API server's Prometheus metrics."""
        from pdcluster_connector.vllm.metrics import PrometheusMetrics

        return PrometheusMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def _orders(self) -> StepOrders:
        from pdcluster_connector.vllm.step_messages import StepOrders

        metadata = self._connector_metadata
        return metadata if isinstance(metadata, StepOrders) else StepOrders()


share_handlers()

# MultiConnector's metrics look classes up by name. A second import does no harm.
with contextlib.suppress(ValueError):
    KVConnectorFactory.register_connector(NAME, __name__, NAME)
