"""Scheduler side of a prefill engine: leases, tickets, and when blocks may go.

A lease is armed when a request is scheduled, so that its token exists before its blocks hold
anything, and granted when the request finishes. When it has ended (release, expiry), every rank
is ordered to clear its lease word and to report the request as sent, once: vLLM frees the
blocks when all ranks have. ``sidechannel/lease_desk.py`` judges which leases have expired.
"""

import logging
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.v1.request import Request, RequestStatus

from pdcluster_connector.protocol import ticket
from pdcluster_connector.protocol.prompt_outcomes import no_ticket
from pdcluster_connector.sidechannel.lease_desk import LeaseDesk
from pdcluster_connector.vllm import config, metrics, request_spans, step_messages
from pdcluster_connector.vllm.kv_caches.groups import CacheGroup, leaves_last_token
from pdcluster_connector.vllm.scheduler_side import prompt_digests

logger = logging.getLogger(__name__)

_HANDED_OFF = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)


def is_prefill(request: Request) -> bool:
    """Whether the client asked for this request's KV to be handed to another engine."""
    params = request.kv_transfer_params
    return isinstance(params, dict) and params.get("do_remote_decode") is True


def _ends_in_image(request: Request) -> bool:
    """Whether the last token stands for a part of an image or the like, which cannot be cut."""
    places = [feature.mm_position for feature in request.mm_features]
    return any(place.offset + place.length >= request.num_prompt_tokens for place in places)


@dataclass(eq=False)
class PrefillRole:
    """Not thread-safe: lives on the scheduler's thread.

    Args:
        parallel: (tensor, pipeline) sizes.
        leases: shared with the side channel, where releases and renewals come in.
        keys: gives the keys that sign tickets.
        digests: makes the digests of long prompts.
    """

    engine_id: str
    options: config.ConnectorOptions
    block_size: int
    groups: Sequence[CacheGroup]
    parallel: tuple[int, int]
    stats: metrics.StatsCollector
    leases: LeaseDesk
    keys: Callable[[], ticket.TicketKeys | None]
    digests: prompt_digests.PromptDigests

    def __post_init__(self) -> None:
        self._leaves_last_token = leaves_last_token(self.groups)
        self._owed: dict[str, str] = {}  # finished requests whose blocks vLLM keeps, by itself
        self._traces: dict[str, tuple[request_spans.Headers, int]] = {}  # of these; the end in ns
        self._shortened: set[str] = set()
        self._digests: dict[str, prompt_digests.PromptDigest] = {}

    def arrived(self, request: Request) -> None:
        """Shorten a prompt whose last token is decode's to compute (see ``groups``).

        Then begin with its digest.
        """
        if (
            self._leaves_last_token
            and request.prompt_token_ids is not None
            and request.prompt_embeds is None
            and request.num_prompt_tokens > 1
            and not request.skip_reading_prefix_cache
            and not _ends_in_image(request)
        ):
            del request.prompt_token_ids[-1:]
            del request._all_token_ids[-1:]  # noqa: SLF001  vLLM's own connectors do the same
            request.num_prompt_tokens -= 1
            request.max_tokens = 1
            self._shortened.add(request.request_id)
        digest = self.digests.begin(request, request.num_prompt_tokens)
        if digest is not None:
            self._digests[request.request_id] = digest

    def scheduled(self, request: Request) -> None:
        """Arm the lease of a request that starts to compute; again after a preemption."""
        if is_prefill(request):
            self.leases.arm(request.request_id, 1 + secrets.randbelow(2**64 - 1))

    def finished(
        self, request: Request, blocks: Sequence[Sequence[int]]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Return (keep the blocks, what the client gets): a ticket if there is KV to fetch.

        A client that asked for a ticket and gets none learns why.
        """
        kept, params, why = self._handed_over(request, blocks)
        if params is None and is_prefill(request):
            params = no_ticket(why)
        return kept, params and params | ticket.passed_on(request.kv_transfer_params)

    def _handed_over(
        self, request: Request, blocks: Sequence[Sequence[int]]
    ) -> tuple[bool, dict[str, Any] | None, str]:
        request_id = request.request_id
        whole = self._leaves_last_token and request_id not in self._shortened
        self._shortened.discard(request_id)
        place = self.leases.place(request_id)
        handed_off = (
            request.status in _HANDED_OFF
            and request.num_computed_tokens >= request.num_prompt_tokens
            and any(blocks)
        )
        digest = self._digests.pop(request_id, None)
        if digest is None or digest.tokens != request.num_prompt_tokens:
            digest = prompt_digests.digest_of_prompt(request, request.num_prompt_tokens)
        if place is None or digest is None or not handed_off or whole:
            self.leases.drop(request_id)
            why = "LeaseEnded" if place is None else "LastToken" if whole else "NoDigest"
            return False, None, why if handed_off else "NotFinished"
        token, slot = place
        try:
            if slot is None:  # decode could not see whether the lease stands
                raise ValueError("no lease word is free")
            made = self._ticket(request, token, slot, digest.value(), blocks)
            params = ticket.kv_transfer_params(made, self.keys())
        except ValueError as error:
            logger.warning("the KV of %s is not handed over: %s", request_id, error)
            fault = "NoLeaseWord" if slot is None else "TicketTooLong"
            self.stats.count("step_faults", f"finished:{fault}")
            self.leases.drop(request_id)
            return False, None, fault
        if not self.leases.grant(request_id):
            return False, None, "LeaseEnded"
        self._owed[request_id] = request_id
        self._traces[request_id] = request.trace_headers, time.time_ns()
        return True, params, ""

    def _ticket(
        self,
        request: Request,
        token: int,
        slot: int,
        digest: bytes,
        blocks: Sequence[Sequence[int]],
    ) -> ticket.Ticket:
        """Return the ticket of a finished request; raises ValueError for too many blocks."""
        return ticket.Ticket(
            engine_id=self.engine_id,
            host=self.options.side_channel_host,
            port=self.options.side_channel_port,
            request_id=request.request_id,
            token=token,
            blocks=tuple(
                ticket.BlockIds(group.ids(ids, 0, request.num_prompt_tokens))
                for group, ids in zip(self.groups, blocks, strict=True)
            ),
            block_size=self.block_size,
            tokens=request.num_prompt_tokens,
            prompt_digest=digest,
            expires_at=time.time() + self.options.lease_seconds,
            tensor=self.parallel[0],
            pipeline=self.parallel[1],
            fence_slot=slot,
            lease_seconds=self.options.lease_seconds,
            audience=self.options.ticket_audience,
        )

    def forget(self, request_id: str) -> None:
        """Drop a request's lease; vLLM frees its blocks by itself."""
        self.leases.drop(request_id)
        self._owed.pop(request_id, None)
        self._traces.pop(request_id, None)
        self._shortened.discard(request_id)
        self._digests.pop(request_id, None)

    def take(self, orders: step_messages.StepOrders) -> None:
        """Add the requests that every rank reports as sent now, and the words to write before."""
        changes = self.leases.take(orders.lease_words)
        self.stats.count("leases_expired", amount=len(changes.expired))
        self.stats.gauge("leases_held", self.leases.held)
        self.stats.count("handover_seconds", amount=changes.handovers)
        self._order_sent(orders, changes.released, "released")
        self._order_sent(orders, changes.expired, "expired")

    def recover(self, orders: step_messages.StepOrders) -> None:
        """Add the requests whose leases have ended while :meth:`take` failed."""
        ended = [key for key in self._owed if self.leases.place(key) is None]
        self._order_sent(orders, ended, "unknown")

    def _order_sent(
        self, orders: step_messages.StepOrders, ended: Iterable[str], outcome: str
    ) -> None:
        for request_id in ended:
            if request_id in self._owed:
                trace, since = self._traces.pop(request_id, (None, 0))
                orders.sent.append(self._owed.pop(request_id))
                request_spans.span(request_spans.LEASE, trace, since, outcome=outcome)
