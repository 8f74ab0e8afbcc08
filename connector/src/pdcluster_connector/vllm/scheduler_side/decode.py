"""Scheduler side of a decode engine: which prompt tokens come from a prefill engine.

Each live request has an :class:`Incoming`. Its ticket is judged when it arrives. A ticket is used
once, and only for the prompt that it was made for. If none of our engines signed it, decode
contacts no engine because of it: its sender would choose the address.

The lease of a ticket is renewed by :mod:`.decode_leases`. It is released when the KV is no longer
needed: after the receive (also a failed one), or without one if the request never got that far.
"""

import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from enum import Enum
from typing import Any, Final

from vllm.v1.request import Request, RequestStatus

from pdcluster_connector.compat.reasons import Reason
from pdcluster_connector.protocol import kv_path, prompt_outcomes, receive_order
from pdcluster_connector.protocol.engine_id import parse_engine_id
from pdcluster_connector.protocol.failure import Failure
from pdcluster_connector.protocol.prompt_outcomes import LocalReason, Outcome
from pdcluster_connector.protocol.ticket import Ticket, TicketKeys, passed_on, ticket_of
from pdcluster_connector.sidechannel.lease_client import LeaseClient
from pdcluster_connector.vllm import config, metrics, request_spans, step_messages
from pdcluster_connector.vllm.kv_caches.groups import CacheGroup, leaves_last_token, smallest_block
from pdcluster_connector.vllm.scheduler_side import decode_leases, local_prompts, prompt_digests

_CHOICE: Final = re.compile(r"[0-9]+_")  # how vLLM begins the id of a choice of ``n``


class Stage(Enum):
    """How far a request's KV has come."""

    WAITING = "waiting"  # not scheduled yet; its ticket is good
    PARKED = "parked"  # waits for its KV
    SETTLED = "settled"  # received, failed or local: nothing will be loaded again


@dataclass(slots=True)
class Incoming:
    """One live request. ``reason`` says why its KV does not come from a prefill engine.

    ``named``: the answer names the engines that its KV moved between.
    ``digest``: of its prompt, until it was compared with the ticket's.
    ``computed``: tokens of it in this engine's prefix cache when vLLM last asked.
    ``held``: the ticket's lease is renewed, and released when the request no longer needs it.
    ``repeated``: what the answer repeats of the request.
    ``headers``: of the output of a request that has failed: its client reads the cause in them.
    ``trace``: the headers that name its trace. ``since``: when its next span begins, in ns.
    """

    ticket: Ticket | None
    stage: Stage
    reason: str = ""
    message: str = ""
    held: bool = False
    repeated: Mapping[str, Any] = field(default_factory=dict)
    counted: bool = False
    digest: prompt_digests.PromptDigest | None = None
    computed: int = 0
    start: int = 0
    stop: int = 0
    blocks: int = 0
    receipt: receive_order.Receipt | None = None
    outcome: str = "local"
    named: bool = False
    headers: dict[str, str] | None = None
    trace: request_spans.Headers = None
    since: int = field(default_factory=time.time_ns)

    def path(self, decode: str) -> dict[str, Any]:
        """Return what the answer says of the KV's way; ``decode`` is this engine's id."""
        receipt = self.receipt or receive_order.Receipt(0, 0.0)
        moved = self.outcome == "transferred"
        return {
            "prefill": self.ticket.engine_id if self.ticket else "",
            "decode": decode,
            "tokens": self.stop - self.start if moved else 0,
            "blocks": self.blocks if moved else 0,
            "bytes": receipt.nbytes,
            "seconds": round(receipt.seconds, 6),
            "outcome": self.outcome,
            "reason": str(self.reason),
            "message": self.message[:500],
        }


@dataclass(eq=False, repr=False)  # of no log: it holds a key
class DecodeRole:
    """Not thread-safe: lives on the scheduler's thread.

    Args:
        keys: gives the keys of which one must have signed a ticket.
        digests: makes the digests of long prompts.
        key: a request with this key learns in any case between which engines its KV moved; empty
            for no such request.
        recomputes: whether vLLM computes a prompt here if its transfer fails. It is counted so.
    """

    engine_id: str
    options: config.ConnectorOptions
    groups: Sequence[CacheGroup]
    leases: LeaseClient
    stats: metrics.StatsCollector
    clock: Callable[[], float] = time.monotonic
    _: KW_ONLY
    keys: Callable[[], TicketKeys | None]
    digests: prompt_digests.PromptDigests
    key: str = ""
    recomputes: bool = False

    def __post_init__(self) -> None:
        options, clock = self.options, self.clock
        self._tickets = decode_leases.DecodeLeases(self.leases, options.lease_seconds, clock)
        # A shorter rest of a prompt needs no prefill engine.
        self._block = smallest_block(self.groups)
        pace = local_prompts.PromptPace(options.local_tokens_per_step)
        self.local = local_prompts.LocalPrompts(pace, self._block, self.stats, clock)
        self._leaves_last_token = leaves_last_token(self.groups)
        self._is_data_rank = parse_engine_id(self.engine_id).data_rank is not None
        self._requests: dict[str, Incoming] = {}
        self._aborted: dict[str, Incoming] = {}  # finished while parked; blocks still held
        self._orders: list[receive_order.ReceiveOrder] = []
        self._abandoned: list[str] = []
        self._stepped_at = 0.0  # when the latest step began, which may have failed

    # Before scheduling.

    def arrived(self, request: Request) -> None:
        """Judge a new request's ticket."""
        params = request.kv_transfer_params
        incoming = self._judge(request)
        incoming.named = self.options.show_internal_names or kv_path.has_key(params, self.key)
        incoming.repeated = passed_on(params)
        incoming.trace = request.trace_headers
        self._requests[request.request_id] = incoming
        self.local.arrived(request)
        if incoming.held and incoming.ticket is not None:
            self._tickets.use(incoming.ticket, request.request_id)
        self._compare(request, incoming)

    def _judge(self, request: Request) -> Incoming:
        keys = self.keys()
        ticket = ticket_of(request.kv_transfer_params, keys, self.options.ticket_audience)
        if ticket is None:
            may_skip = self.options.router_may_skip_prefill
            why = prompt_outcomes.why_no_ticket(request.kv_transfer_params, may_skip=may_skip)
            return Incoming(None, Stage.SETTLED, why)
        if isinstance(ticket, Failure):
            return Incoming(None, Stage.SETTLED, ticket.reason, ticket.message)
        incoming = Incoming(ticket, Stage.WAITING, held=keys is not None)
        if self._tickets.is_spent(ticket):
            # Released by an earlier request of this engine: the blocks may be reused already.
            incoming.reason = LocalReason.TICKET_SPENT
        elif self._leaves_last_token and ticket.tokens >= request.num_tokens:
            incoming.reason = LocalReason.TICKET_TOO_LONG
        elif (digest := self.digests.begin(request, ticket.tokens)) is None:
            incoming.reason = LocalReason.PROMPT_MISMATCH
        else:
            incoming.digest = digest
        return incoming

    def _compare(self, request: Request, incoming: Incoming) -> bool:
        """Compare the prompt with the ticket's; False while its digest is being made."""
        if incoming.digest is None or incoming.ticket is None:
            return True
        if incoming.digest.left:
            return False
        if incoming.digest.value() != incoming.ticket.prompt_digest:
            incoming.reason = incoming.reason or LocalReason.PROMPT_MISMATCH
        elif not incoming.held and self._tickets.is_spent(incoming.ticket):  # meanwhile
            incoming.reason = incoming.reason or LocalReason.TICKET_SPENT
        elif not incoming.held:  # not signed, but at least its client knows the whole prompt
            self._tickets.use(incoming.ticket, request.request_id)
            incoming.held = True
        incoming.digest = None
        return True

    def matched(self, request: Request, computed: int) -> tuple[int | None, bool]:
        """(tokens that a transfer brings beyond ``computed``, loaded asynchronously).

        None, and vLLM asks in the next step: the prompt's digest is being made, a claim is not
        answered, the prompt waits its turn to be computed here, or those that wait have theirs now.
        """
        incoming = self._requests.get(request.request_id)
        if incoming is None:
            return 0, False
        incoming.computed = computed
        if not self._compare(request, incoming):
            return None, False
        count, loads = self._from_prefill(request, incoming)
        if count == 0 and self.local.must_wait(request, computed):
            if incoming.reason and incoming.stage is Stage.WAITING:
                self._settle(request.request_id, incoming)  # prefill need not hold its KV meanwhile
            return None, False
        if loads and self.local.lets_others_begin(request.request_id):
            return None, False
        return count, loads

    def _from_prefill(self, request: Request, incoming: Incoming) -> tuple[int | None, bool]:
        ticket = incoming.ticket
        if ticket is None or incoming.stage is not Stage.WAITING or incoming.reason:
            return 0, False
        if self._tickets.objection(ticket) is not None:
            return 0, False
        # The lease may have ended before this engine has claimed it: then it computes the prompt,
        # and a receive would only fail. vLLM spreads the choices of a request with ``n`` > 1 over
        # data-parallel ranks, and the others may have read and released.
        is_shared = self._is_data_rank and _CHOICE.match(request.request_id) is not None
        if self._tickets.waits_for_claim(ticket, shared=is_shared):
            return None, False
        count = min(ticket.tokens, request.num_tokens) - incoming.computed
        return (count, True) if count > 0 else (0, False)

    def reset(self) -> None:
        """Use none of the waiting tickets: their KV is of before the caches were cleared."""
        for incoming in self._requests.values():
            if incoming.stage is Stage.WAITING and not incoming.reason:
                incoming.reason = LocalReason.CACHE_RESET

    # Scheduling.

    def scheduled(
        self, request: Request, blocks: tuple[list[int], ...], external_tokens: int
    ) -> None:
        """Order the receive of a request that vLLM has just parked, or settle it without one."""
        incoming = self._requests.get(request.request_id)
        if incoming is None or incoming.stage is Stage.PARKED:
            return
        ticket = incoming.ticket
        if incoming.stage is not Stage.WAITING or external_tokens <= 0 or ticket is None:
            self._begin_here(request, incoming)
            return
        self.local.kv_comes(request.request_id)
        # The ticket covers [0, stop). What vLLM has not asked for is a local prefix hit.
        stop = incoming.stop = min(ticket.tokens, request.num_tokens)
        start = incoming.start = stop - external_tokens
        held = tuple(
            group.holding(ids, start, stop) for group, ids in zip(self.groups, blocks, strict=True)
        )
        incoming.blocks = sum(block > 0 for group in held for block in group.blocks)
        incoming.stage = Stage.PARKED
        incoming.since = request_spans.span(
            request_spans.WAIT, incoming.trace, incoming.since, prefill=ticket.engine_id
        )
        seconds, claimed = self._tickets.park(ticket, request.request_id)
        # Nothing follows the order: it is given, or the exception fails the request.
        self._orders.append(
            receive_order.ReceiveOrder(
                request_id=request.request_id, ticket=ticket, blocks=held,
                start=start, stop=stop, seconds=seconds, claimed=claimed,
            )
        )  # fmt: skip

    def _begin_here(self, request: Request, incoming: Incoming) -> None:
        if incoming.stage is Stage.WAITING:
            self._explain(request, incoming)
            self._settle(request.request_id, incoming)
        preempted = request.num_computed_tokens == 0  # what had come is lost
        if incoming.outcome != "transferred" or preempted:
            self.local.begins(request, incoming.computed)
        self._count_local(request, incoming)

    def _explain(self, request: Request, incoming: Incoming) -> None:
        """Say why a request is computed here although its ticket was good."""
        if incoming.reason or incoming.ticket is None:
            return
        objection = self._tickets.objection(incoming.ticket) if incoming.held else None
        if objection is not None:
            incoming.reason, incoming.message = objection.reason, objection.message
        elif request.skip_reading_prefix_cache:
            incoming.reason = LocalReason.PREFIX_READING_OFF
        else:
            incoming.reason = LocalReason.PREFIX_HIT

    def _count_local(self, request: Request, incoming: Incoming) -> None:
        """Count a prompt that this engine computes itself, once."""
        if incoming.counted or incoming.outcome != "local":
            return
        incoming.counted = True
        tokens = max(0, int(request.num_prompt_tokens) - incoming.computed)
        ticketless = incoming.reason in (LocalReason.NO_TICKET, LocalReason.LOCAL_BY_ROUTER)
        if ticketless and tokens < self._block:
            incoming.reason = LocalReason.SHORT_PROMPT
        request_spans.span(
            request_spans.LOCAL, incoming.trace, incoming.since,
            reason=str(incoming.reason), tokens=tokens,
        )  # fmt: skip
        self.stats.prompt(Outcome.LOCAL, incoming.reason, tokens)

    def step(self, orders: step_messages.StepOrders) -> None:
        """Add what the workers have to do in this step."""
        now = self.clock()
        late = now - self._stepped_at  # by so much shorter is what a step that failed has left
        orders.receive, orders.renewed, self._orders, self._stepped_at = (
            [replace(one, seconds=one.seconds - late) for one in orders.receive] + self._orders,
            {request_id: left - late for request_id, left in orders.renewed.items()},
            [],
            now,
        )
        wait = orders.idle and not (orders.receive or orders.renewed)
        self._tickets.renew_all()  # all claims of a step travel together
        renewed, lost = self._tickets.take_news(wait=wait)
        orders.renewed, orders.lost = orders.renewed | renewed, orders.lost | lost
        orders.abandon, self._abandoned = orders.abandon + self._abandoned, []
        self.local.step(idle=orders.idle)

    # Results.

    def received(
        self, receipts: dict[str, receive_order.Receipt], finished: Iterable[str], failed: set[str]
    ) -> None:
        """Take in what workers reported about receives. If this raises, it can be called again.

        Args:
            receipts: of one rank or several; those that were added up are taken out.
            finished: requests that all ranks are through with; ``failed`` is a subset.
        """
        finished = set(finished)
        for request_id, receipt in list(receipts.items()):
            incoming = self._requests.get(request_id) or self._aborted.get(request_id)
            if incoming is not None:
                is_live = request_id in self._requests and request_id not in finished
                if receipt.reason and is_live:
                    self._abandoned.append(request_id)  # the other ranks would wait for nothing
                total = receipt if incoming.receipt is None else incoming.receipt + receipt
                incoming.receipt, _ = total, receipts.pop(request_id)
        for request_id in finished:
            incoming = self._requests.get(request_id) or self._aborted.get(request_id)
            if incoming is not None and incoming.stage is not Stage.SETTLED:
                self._end_receive(request_id, incoming, failed=request_id in failed)
            self._aborted.pop(request_id, None)
        if finished and not self._is_data_rank:  # another one may not have claimed the ticket yet
            self._tickets.end_receives()

    def _end_receive(self, request_id: str, incoming: Incoming, *, failed: bool) -> None:
        if request_id in self._abandoned:  # aborted in the very step that ended it
            self._abandoned.remove(request_id)
        incoming.outcome = "failed" if failed else "transferred"
        if incoming.receipt is not None and incoming.receipt.reason:
            incoming.reason = incoming.receipt.reason
            incoming.message = incoming.receipt.message
        elif failed:  # the report that says why was lost, or comes later
            incoming.reason = Reason.BACKEND_ERROR
        path = incoming.path(self.engine_id)
        request_spans.span(request_spans.RECEIVE, incoming.trace, incoming.since, **path)
        self._settle(request_id, incoming)
        if failed and incoming.headers is not None:
            failure = kv_path.failure(self._shown(incoming), request_id)
            incoming.headers[kv_path.FAILURE_HEADER] = failure
        if incoming.counted:
            return
        incoming.counted = True
        lost = Outcome.RECOMPUTED if self.recomputes else Outcome.FAILED
        outcome = lost if failed else Outcome.TRANSFERRED
        self.stats.prompt(outcome, incoming.reason, incoming.stop - incoming.start)

    def finished(self, request: Request) -> dict[str, Any] | None:
        """Forget a request; return what the client learns about its KV."""
        incoming = self._requests.get(request.request_id)
        if incoming is not None and incoming.stage is Stage.PARKED:
            # vLLM also ends a request here whose transfer failed; one that its client left is not
            # counted.
            incoming.counted = request.status is RequestStatus.FINISHED_ABORTED
            if request.status is RequestStatus.FINISHED_ERROR:
                # vLLM drops what this returns, but the output gets these headers, by reference.
                # `_end_receive` comes in the same step and writes the cause into them.
                incoming.headers = dict(request.trace_headers or {})
                request.trace_headers = incoming.headers
        self.forget(request.request_id)
        if incoming is None or incoming.stage is Stage.PARKED:
            return None
        return {"kv_path": self._shown(incoming), **incoming.repeated}

    def _shown(self, incoming: Incoming) -> dict[str, Any]:
        path = incoming.path(self.engine_id)
        return path if incoming.named else kv_path.without_names(path)

    def forget(self, request_id: str) -> None:
        """Drop a request; if it is parked, only when all ranks are through with it."""
        self.local.left(request_id)
        incoming = self._requests.get(request_id)
        if incoming is None:
            return
        if incoming.stage is Stage.PARKED:
            # Its blocks stay until every rank has said that nothing can land in them.
            self._aborted[request_id] = incoming
            self._abandoned.append(request_id)
        elif incoming.stage is Stage.WAITING:
            self._settle(request_id, incoming)
        self._requests.pop(request_id)

    def _settle(self, request_id: str, incoming: Incoming) -> None:
        """Nothing will be loaded any more. If the ticket cannot be released, this is repeated."""
        if incoming.ticket is not None and incoming.held:
            self._tickets.done(incoming.ticket, request_id)
        incoming.stage, incoming.digest = Stage.SETTLED, None
