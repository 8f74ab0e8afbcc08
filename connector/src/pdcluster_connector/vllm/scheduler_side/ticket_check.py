"""Whether the ticket that a request came with may be used for its prompt.

A ticket is used once, and only for the prompt that it was made for. Nobody is told about a ticket
that an engine of ours did not sign: whoever sent it would say where decode connects to.
``protocol/ticket.py`` checks the signature.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

from vllm.v1.request import Request

from pdcluster_connector.compat.reasons import Reason
from pdcluster_connector.protocol.failure import Failure
from pdcluster_connector.protocol.prompt_outcomes import LocalReason
from pdcluster_connector.protocol.ticket import Ticket
from pdcluster_connector.protocol.ticket_keys import TicketKeys
from pdcluster_connector.protocol.transfer_params import ticket_of
from pdcluster_connector.vllm.scheduler_side.decode_leases import DecodeLeases
from pdcluster_connector.vllm.scheduler_side.incoming import Incoming, Stage
from pdcluster_connector.vllm.scheduler_side.prefill import DIGEST_TOKENS_A_STEP
from pdcluster_connector.vllm.scheduler_side.prompt import digest_of_prompt, prompt_reader

LEASE_EXPIRED: Final = Reason.LEASE_EXPIRED.value
PREFIX_HIT: Final = LocalReason.PREFIX_HIT.value
PREFIX_READING_OFF: Final = LocalReason.PREFIX_READING_OFF.value
PROMPT_MISMATCH: Final = LocalReason.PROMPT_MISMATCH.value
TICKET_SPENT: Final = LocalReason.TICKET_SPENT.value
TICKET_TOO_LONG: Final = LocalReason.TICKET_TOO_LONG.value
_CHOICE: Final = re.compile(r"[0-9]+_")  # how vLLM begins the id of a choice of ``n``


class TicketCheck:
    """Not thread-safe: lives on the scheduler's thread.

    Args:
        tickets: where a ticket is held from the moment that it is known to be true.
        leaves_last_token: decode computes a prompt's last token (see ``groups``).
        keys: gives the keys of which one must have signed a ticket.
        audience: a ticket must be meant for it.
        is_data_rank: this engine has other data-parallel ranks.
    """

    def __init__(
        self,
        tickets: DecodeLeases,
        wall_clock: Callable[[], float],
        *,
        leaves_last_token: bool,
        keys: Callable[[], TicketKeys | None],
        audience: str,
        is_data_rank: bool,
    ) -> None:
        self._tickets = tickets
        self._wall_clock = wall_clock
        self._leaves_last_token = leaves_last_token
        self._keys, self._audience = keys, audience
        self._is_data_rank = is_data_rank
        self._may_read = DIGEST_TOKENS_A_STEP

    def begin_step(self) -> None:
        """Allow the next step's share of long prompts to be read."""
        self._may_read = DIGEST_TOKENS_A_STEP

    def arrived(self, request: Request) -> Incoming:
        """Judge a new request's ticket. A long prompt needs further calls of :meth:`compare`."""
        keys = self._keys()
        ticket = ticket_of(request.kv_transfer_params, keys, self._audience)
        if ticket is None:
            return Incoming(None, Stage.SETTLED, LocalReason.NO_TICKET.value)
        if isinstance(ticket, Failure):
            return Incoming(None, Stage.SETTLED, ticket.reason.value, ticket.message)
        incoming = Incoming(ticket, Stage.WAITING, self._objection(request, ticket))
        if keys is not None:
            self._hold(incoming, ticket)
        if not incoming.reason:
            incoming.reading = prompt_reader(request, ticket.tokens)
            self.compare(request, incoming, ticket)
        return incoming

    def compare(self, request: Request, incoming: Incoming, ticket: Ticket) -> None:
        """Read on in the prompt, and say at its end whether it is the ticket's."""
        digest = None
        if incoming.reading is not None:
            self._may_read -= incoming.reading.read(self._may_read)
            if incoming.reading.left:
                return
            digest = digest_of_prompt(request, ticket.tokens, incoming.reading)
            incoming.reading = None
        if digest != ticket.prompt_digest:
            incoming.reason = PROMPT_MISMATCH
        elif not incoming.held:
            self._hold(incoming, ticket)

    def waits_for_claim(self, request: Request, ticket: Ticket) -> bool:
        """Whether other data-parallel ranks may use the ticket up before this one has claimed it.

        vLLM spreads the choices of a request with ``n`` > 1 over them. A rank may come when the
        others have read and released. It then computes the prompt; a receive would only fail.
        """
        is_shared = self._is_data_rank and _CHOICE.match(request.request_id) is not None
        return is_shared and not self._tickets.is_claimed(ticket)

    def explain(self, request: Request, incoming: Incoming) -> None:
        """Say why a request is computed here although its ticket was good."""
        if incoming.reason or incoming.ticket is None:
            return
        objection = self._tickets.objection(incoming.ticket) if incoming.held else None
        if objection is not None:
            incoming.reason, incoming.message = objection.reason.value, objection.message
        elif request.skip_reading_prefix_cache:
            incoming.reason = PREFIX_READING_OFF
        else:
            incoming.reason = PREFIX_HIT

    def _hold(self, incoming: Incoming, ticket: Ticket) -> None:
        incoming.held = True
        self._tickets.use(ticket)

    def _objection(self, request: Request, ticket: Ticket) -> str:
        """Why a true ticket must not be used, apart from its prompt; empty if it may."""
        if self._tickets.is_spent(ticket):
            # Released by an earlier request of this engine: the blocks may be reused already.
            return TICKET_SPENT
        if ticket.expires_at <= self._wall_clock():
            return LEASE_EXPIRED
        if self._leaves_last_token and ticket.tokens >= request.num_tokens:
            return TICKET_TOO_LONG
        return ""
