"""``kv_transfer_params``: what requests and answers say about KV that waits elsewhere.

A request has the ticket, which is one string, next to the keys that routers read. An answer has
``kv_path`` (``kv_path.py``): what the KV path did for this request.
"""

from collections.abc import Mapping
from typing import Any

from pdcluster_connector.compat.reasons import Reason
from pdcluster_connector.protocol.failure import Failure
from pdcluster_connector.protocol.ticket import Ticket, decode, encode
from pdcluster_connector.protocol.ticket_keys import TicketKeys

MOST_IDS_FOR_ROUTERS = 4096
MAX_TRANSFER_ID = 512


def kv_transfer_params(ticket: Ticket, keys: TicketKeys | None) -> dict[str, Any]:
    """Return what prefill answers with and a router hands to decode unchanged.

    Raises:
        ValueError: as :func:`ticket.encode`.
    """
    # Some routers look whether remote_block_ids is there. Decode reads the ids from the ticket
    # alone. For a long prompt the list is left empty: it would be most of the answer.
    listed = sum(len(ids) for ids in ticket.blocks) <= MOST_IDS_FOR_ROUTERS
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": ticket.engine_id,
        "remote_host": ticket.host,
        "remote_port": ticket.port,
        "remote_request_id": ticket.request_id,
        "remote_block_ids": [list(ids) if listed else [] for ids in ticket.blocks],
        "tp_size": ticket.tensor,
        "ticket": encode(ticket, keys),
    }


def ticket_of(
    params: Mapping[str, Any] | None, keys: TicketKeys | None, audience: str = ""
) -> Ticket | Failure | None:
    """Return the ticket that a request came with; None when none was meant.

    ``params`` is the client's JSON: ``do_remote_prefill`` decides whether KV waits elsewhere, and
    then a missing or wrong ticket is a Failure. :func:`ticket.decode` says what ``keys`` and
    ``audience`` are.
    """
    if not isinstance(params, Mapping) or params.get("do_remote_prefill") is not True:
        return None
    text = params.get("ticket")
    if text is None:
        return Failure(Reason.TICKET_INVALID, "do_remote_prefill without a ticket")
    if not isinstance(text, str):
        why = f"a ticket of type {type(text).__name__}, not a string"
        return Failure(Reason.TICKET_INVALID, why)
    return decode(text, keys, audience)


def passed_on(params: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return what an answer repeats of a request: the id that some routers give a transfer.

    Nothing else is done with it.
    """
    given = params.get("transfer_id") if isinstance(params, Mapping) else None
    if isinstance(given, str) and 0 < len(given) <= MAX_TRANSFER_ID:
        return {"transfer_id": given}
    return {}
