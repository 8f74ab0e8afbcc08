"""Scheduler role of a decode engine: which prompt tokens come from a prefill engine.

Each live request has an :class:`Incoming`. Its ticket is judged when it arrives
(:mod:`ticket_check`), and released as soon as its KV is no longer needed: after the receive (also a
failed one), or without one when the request never got that far.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from vllm.v1.request import Request, RequestStatus

from pdcluster_connector.protocol.engine_id import parse_engine_id
from pdcluster_connector.protocol.failure import Failure
from pdcluster_connector.protocol.kv_path import has_key, without_names
from pdcluster_connector.protocol.prompt_outcomes import LocalReason, Outcome
from pdcluster_connector.protocol.ticket import Ticket
from pdcluster_connector.protocol.ticket_keys import TicketKeys
from pdcluster_connector.protocol.transfer_params import passed_on
from pdcluster_connector.vllm.groups import CacheGroup, leaves_last_token, smallest_block
from pdcluster_connector.vllm.incoming import Incoming, Stage
from pdcluster_connector.vllm.metrics import StatsCollector
from pdcluster_connector.vllm.prefill import is_prefill
from pdcluster_connector.vllm.step_messages import Receipt, ReceiveOrder
from pdcluster_connector.vllm.ticket_book import LeaseSender, TicketBook
from pdcluster_connector.vllm.ticket_check import TicketCheck

# Why a request was decoded without a transfer.
NO_TICKET: Final = LocalReason.NO_TICKET.value
CACHE_RESET: Final = LocalReason.CACHE_RESET.value
PREFIX_HIT: Final = LocalReason.PREFIX_HIT.value
PREFIX_READING_OFF: Final = LocalReason.PREFIX_READING_OFF.value
SHORT_PROMPT: Final = LocalReason.SHORT_PROMPT.value
_CHOICE: Final = re.compile(r"[0-9]+_")  # how vLLM begins the id of a choice of ``n``


class DecodeRole:
    """Not thread-safe: lives on the scheduler's thread.

    Args:
        keys: gives the keys of which one must have signed a ticket.
        audience: a ticket must be meant for it.
        show_names: tell every client between which engines its KV moved.
        key: of requests that are told so in any case; empty for none.
        recomputes: vLLM computes the prompt here if its transfer fails, and fails it otherwise.
    """

    def __init__(
        self,
        engine_id: str,
        lease_seconds: float,
        groups: Sequence[CacheGroup],
        leases: LeaseSender,
        stats: StatsCollector,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        *,
        keys: Callable[[], TicketKeys | None],
        audience: str = "",
        show_names: bool = False,
        key: str = "",
        recomputes: bool = False,
    ) -> None:
        self._engine_id = engine_id
        self._is_data_rank = parse_engine_id(engine_id).data_rank is not None
        self._groups = groups
        self._block = smallest_block(groups)
        self._recomputes = recomputes
        self._tickets = TicketBook(leases, lease_seconds, clock)
        self._stats = stats
        self._check = TicketCheck(
            self._tickets,
            wall_clock,
            leaves_last_token=leaves_last_token(groups),
            keys=keys,
            audience=audience,
        )
        self._show_names, self._key = show_names, key
        self._requests: dict[str, Incoming] = {}
        self._aborted: dict[str, Incoming] = {}  # finished while parked; blocks still held
        self._orders: list[ReceiveOrder] = []
        self._abandoned: list[str] = []

    # Before scheduling.

    def arrived(self, request: Request) -> None:
        """Judge a new request's ticket."""
        if is_prefill(request):
            return
        params = request.kv_transfer_params
        incoming = self._check.arrived(request)
        incoming.named = self._show_names or has_key(params, self._key)
        incoming.repeated = passed_on(params)
        self._requests[request.request_id] = incoming

    def matched(self, request: Request, computed: int) -> tuple[int | None, bool]:
        """(tokens that a transfer brings beyond ``computed``, loaded asynchronously).

        None: a very long prompt is still compared with its ticket, or the claim of a ticket that
        another data-parallel rank may use up is not answered. vLLM asks again each step until the
        request is admitted; apart from that comparison, nothing changes here.
        """
        incoming = self._requests.get(request.request_id)
        if incoming is not None:
            incoming.computed = computed
        if incoming is None or incoming.ticket is None or incoming.stage is not Stage.WAITING:
            return 0, False
        if incoming.reason:
            return 0, False
        if incoming.reading is not None:
            self._check.compare(request, incoming, incoming.ticket)
            if incoming.reading is not None:
                return None, False
        if incoming.reason or self._tickets.objection(incoming.ticket) is not None:
            return 0, False
        if self._is_shared(request) and not self._tickets.is_claimed(incoming.ticket):
            return None, False
        count = min(incoming.ticket.tokens, request.num_tokens) - computed
        return (count, True) if count > 0 else (0, False)

    def _is_shared(self, request: Request) -> bool:
        """Whether other data-parallel ranks of this engine have requests with the same ticket.

        vLLM spreads the choices of a request with ``n`` > 1 over them. A rank may come when the
        others have read and released. It then computes the prompt; a receive would only fail.
        """
        return self._is_data_rank and _CHOICE.match(request.request_id) is not None

    def reset(self) -> None:
        """Use none of the waiting tickets: their KV is of before the caches were cleared."""
        for incoming in self._requests.values():
            if incoming.stage is Stage.WAITING and not incoming.reason:
                incoming.reason = CACHE_RESET

    # Scheduling.

    def scheduled(
        self, request: Request, blocks: tuple[list[int], ...], external_tokens: int
    ) -> None:
        """Order the receive of a request that vLLM has just parked, or settle it without one."""
        incoming = self._requests.get(request.request_id)
        if incoming is None or incoming.stage is Stage.PARKED:
            return
        if incoming.stage is Stage.WAITING and external_tokens > 0 and incoming.ticket is not None:
            self._park(request, incoming, incoming.ticket, blocks, external_tokens)
            return
        if incoming.stage is Stage.WAITING:
            self._explain(request, incoming)
            self._settle(request.request_id, incoming)
        if not incoming.counted and incoming.outcome == "local":
            incoming.counted = True
            tokens = incoming.here(request)
            if incoming.reason == NO_TICKET and tokens < self._block:
                incoming.reason = SHORT_PROMPT
            self._stats.prompt(Outcome.LOCAL, incoming.reason, tokens)

    def _park(
        self,
        request: Request,
        incoming: Incoming,
        ticket: Ticket,
        blocks: tuple[list[int], ...],
        external_tokens: int,
    ) -> None:
        # The ticket covers [0, tokens); what vLLM has not asked for is a local prefix hit.
        incoming.stop = min(ticket.tokens, request.num_tokens)
        incoming.start = incoming.stop - external_tokens
        held = tuple(
            group.holding(ids, incoming.start, incoming.stop)
            for group, ids in zip(self._groups, blocks, strict=True)
        )
        incoming.blocks = sum(block > 0 for group in held for block in group.blocks)
        incoming.stage = Stage.PARKED
        seconds, claimed = self._tickets.park(ticket, request.request_id)
        self._orders.append(
            ReceiveOrder(
                request_id=request.request_id,
                ticket=ticket,
                blocks=held,
                start=incoming.start,
                stop=incoming.stop,
                seconds=seconds,
                claimed=claimed,
            )
        )

    def _explain(self, request: Request, incoming: Incoming) -> None:
        """Say why a request whose ticket was good is computed here."""
        if incoming.reason or incoming.ticket is None:
            return
        objection = self._tickets.objection(incoming.ticket) if incoming.held else None
        if objection is not None:
            incoming.reason, incoming.message = objection.reason.value, objection.message
        elif request.skip_reading_prefix_cache:
            incoming.reason = PREFIX_READING_OFF
        else:
            incoming.reason = PREFIX_HIT

    def hear(self) -> tuple[dict[str, float], dict[str, Failure]]:
        """Return parked requests whose lease was renewed (seconds left), or lost (why)."""
        return self._tickets.take_news()

    def take_orders(self) -> tuple[list[ReceiveOrder], list[str]]:
        """(receives to start, parked requests that were aborted); each is given out once."""
        self._tickets.renew_all()
        self._check.begin_step()
        orders, self._orders = self._orders, []
        abandoned, self._abandoned = self._abandoned, []
        return orders, abandoned

    # Results.

    def reported(self, receipts: Mapping[str, Receipt]) -> None:
        """Add what workers said about receives, one rank or several."""
        for request_id, receipt in receipts.items():
            incoming = self._requests.get(request_id) or self._aborted.get(request_id)
            if incoming is not None:
                known = incoming.receipt
                incoming.receipt = receipt if known is None else known + receipt

    def received(self, finished: Iterable[str], failed: set[str]) -> None:
        """All ranks are through with these requests; ``failed`` is a subset."""
        for request_id in finished:
            incoming = self._requests.get(request_id) or self._aborted.pop(request_id, None)
            if incoming is None or incoming.stage is Stage.SETTLED:
                continue
            if request_id in self._abandoned:  # aborted in the very step that ended it
                self._abandoned.remove(request_id)
            incoming.outcome = "failed" if request_id in failed else "transferred"
            if incoming.receipt is not None and incoming.receipt.reason:
                incoming.reason = incoming.receipt.reason
                incoming.message = incoming.receipt.message
            self._count(incoming, failed=request_id in failed)
            self._settle(request_id, incoming)

    def _count(self, incoming: Incoming, *, failed: bool) -> None:
        """Count a prompt whose receive ended."""
        if incoming.counted:
            return
        incoming.counted = True
        outcome = Outcome.TRANSFERRED
        if failed:
            outcome = Outcome.RECOMPUTED if self._recomputes else Outcome.FAILED
        self._stats.prompt(outcome, incoming.reason, incoming.stop - incoming.start)

    def finished(self, request: Request) -> dict[str, Any] | None:
        """Forget a request; return what the client learns about its KV."""
        incoming = self._requests.pop(request.request_id, None)
        if incoming is None:
            return None
        if incoming.stage is Stage.PARKED:
            # Its blocks stay until every rank has said that nothing can land in them. vLLM also
            # ends a request here whose transfer failed; one that its client left is not counted.
            incoming.counted = request.status is RequestStatus.FINISHED_ABORTED
            self._aborted[request.request_id] = incoming
            self._abandoned.append(request.request_id)
            return None
        if incoming.stage is Stage.WAITING:
            self._settle(request.request_id, incoming)
        path = incoming.path(self._engine_id)
        return {"kv_path": path if incoming.named else without_names(path), **incoming.repeated}

    def forget(self, request_id: str) -> None:
        """Drop a request; if it is parked, only when all ranks are through with it."""
        incoming = self._requests.pop(request_id, None)
        if incoming is None:
            return
        if incoming.stage is Stage.PARKED:
            self._aborted[request_id] = incoming
        elif incoming.stage is Stage.WAITING:
            self._settle(request_id, incoming)

    def _settle(self, request_id: str, incoming: Incoming) -> None:
        """Nothing will be loaded any more."""
        incoming.stage = Stage.SETTLED
        if incoming.ticket is not None and incoming.held:
            self._tickets.done(incoming.ticket, request_id)
