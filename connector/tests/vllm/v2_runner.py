"""A rank whose worker side is ours, called in the order of vLLM's V2 model runner.

vLLM's own ``ActiveKVConnector`` makes the calls. NIXL is left out: lease words and receives are
noted, with the forward pass, in the order in which they come.
"""

from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace
from typing import Any

from contract import ContractEngine
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.forward_context import set_forward_context
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector

from pdcluster_connector.compat.reasons import Reason
from pdcluster_connector.protocol.failure import Failure
from pdcluster_connector.protocol.receive_order import Receipt
from pdcluster_connector.transfer.measures import ReceiveResults
from pdcluster_connector.transfer.receive_machine import Acknowledged, Failed, Signal
from pdcluster_connector.vllm.connector import PDClusterConnector
from pdcluster_connector.vllm.step_messages import StepOrders

Event = tuple[Any, ...]


class V2Rank:
    """Stands in for a ContractEngine's invented worker.

    Attributes:
        words: the lease words as they are now.
        steps: what happened in each step, in order. ``("forward",)`` is the forward pass, which a
            step without tokens does not have. ``("reported", finished_sending, finished_recving)``
            comes last.
    """

    def __init__(self, engine: ContractEngine, rank: int, monkeypatch: Any) -> None:
        self.rank = rank
        self.words: dict[int, int] = {}
        self.steps: list[list[Event]] = []
        self.results = ReceiveResults()  # what the next step finds
        connector = PDClusterConnector(
            engine.config, KVConnectorRole.WORKER, engine.scheduler.kv_cache_config
        )
        monkeypatch.setattr(connector, "register_kv_caches", lambda _: None)
        monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", connector)
        self._config = engine.config
        self._active = ActiveKVConnector(engine.config, {})
        role = connector._worker
        if role._produces:
            role._serving = SimpleNamespace(write_lease_words=self.write, close=lambda: None)
        if role._consumes:
            role._receiver = Receiver(self)
        self._scheduled: Any = None
        schedule = engine.scheduler.schedule

        def noted(*args: Any, **kwargs: Any) -> Any:
            self._scheduled = schedule(*args, **kwargs)
            return self._scheduled

        monkeypatch.setattr(engine.scheduler, "schedule", noted)

    def write(self, words: dict[int, int]) -> None:
        """The table of lease words."""
        self.words |= words
        if words:
            self.note("words", dict(words))

    def note(self, *event: Any) -> None:
        self.steps[-1].append(event)

    def step(self, raw: bytes) -> KVConnectorOutput | None:
        """What GPUModelRunner.execute_model does about a connector."""
        orders: StepOrders = pickle.loads(raw)
        scheduled = copy.copy(self._scheduled)
        scheduled.kv_connector_metadata = orders
        assert not scheduled.has_sync_kv_loads, "V2 would start loads before the forward pass"
        self.steps.append([])
        if scheduled.total_num_scheduled_tokens == 0:
            output = self._active.no_forward(scheduled).kv_connector_output
        else:
            ids = list(scheduled.num_scheduled_tokens)
            batch = SimpleNamespace(idx_mapping=None, req_ids=ids, num_tokens=len(ids))
            with set_forward_context(None, self._config):
                self._active.pre_forward(scheduled, batch)
                self.note("forward")
            self._active.finish_forward()
            output = self._active.post_forward(scheduled.finished_req_ids)
        found = output or KVConnectorOutput()
        sent, received = found.finished_sending or set(), found.finished_recving or set()
        self._check(pickle.loads(raw), sent)
        self.note("reported", sent, received)
        return output

    def _check(self, orders: StepOrders, sent: set[str]) -> None:
        """Whatever a step orders, it has done before it reports; nothing else, nothing twice."""
        done = self.steps[-1]
        assert sent == set(orders.sent), "reported in the step of the order, once"
        wanted: list[Event] = []
        if orders.renewed or orders.lost:
            wanted.append(("leases", set(orders.renewed), set(orders.lost)))
        if ("forward",) in done:
            wanted.append(("forward",))
        if orders.lease_words:
            wanted.append(("words", orders.lease_words))
        if orders.abandon:
            wanted.append(("abandon", orders.abandon))
        if orders.receive:
            wanted.append(("receive", [order.request_id for order in orders.receive]))
        assert [event for event in done if event[0] != "leases again"] == wanted

    def land(self, request_id: str) -> None:
        """Let a receive end well."""
        self.results.finished.add(request_id)
        self.results.received[request_id] = Receipt(100, 0.25)

    def give_up(self, request_id: str) -> None:
        """Let an abandoned receive end."""
        self.results.finished.add(request_id)
        self.results.failed[request_id] = Failure(Reason.BACKEND_ERROR, "given up")
        self.results.abandoned.add(request_id)


class Receiver:
    """Notes what the engine step hands to the transfer thread."""

    def __init__(self, rank: V2Rank) -> None:
        self._rank = rank

    def pass_on(self, events: list[tuple[str, Any]]) -> None:
        abandoned = [key for key, event in events if event is Signal.ABANDONED]
        renewed = {key for key, event in events if isinstance(event, Acknowledged)}
        lost = {key for key, event in events if isinstance(event, Failed)}
        if abandoned:
            self._rank.note("abandon", abandoned)
        if renewed or lost:
            done = any(name in ("forward", "receive") for name, *_ in self._rank.steps[-1])
            self._rank.note("leases again" if done else "leases", renewed, lost)

    def receive(self, orders: list[Any], since: float, events: list[tuple[str, Any]]) -> None:
        if orders:
            self._rank.note("receive", [order.request_id for order in orders])
            self.pass_on(events)

    def wait(self, seconds: float) -> None:
        """A test says when a receive ends."""

    def results(self, results: ReceiveResults) -> None:
        found, self._rank.results = self._rank.results, ReceiveResults()
        for name in ("finished", "failed", "abandoned", "received"):
            getattr(results, name).update(getattr(found, name))

    def close(self) -> None:
        """Nothing is open."""


def drive(engine: ContractEngine, monkeypatch: Any) -> list[V2Rank]:
    """Let our own worker side take the place of an engine's invented workers."""
    ranks = [V2Rank(engine, worker.rank, monkeypatch) for worker in engine.workers]
    engine.workers = ranks  # type: ignore[assignment]
    return ranks
