"""Mints the keys that sign tickets, and puts them into the Secret that a plan describes."""

from __future__ import annotations

import base64
import binascii
import secrets
from collections.abc import Mapping
from typing import Any

from pdcluster_connector.protocol.ticket_keys import KEY_BYTES
from pdcluster_operator.api.labels import ROTATE_TICKET_KEY_ANNOTATION
from pdcluster_operator.plan.builders.ticket_key import TICKET_KEY_FILE
from pdcluster_operator.plan.model import TicketKey, WriteTicketKey

Manifest = Mapping[str, Any]


def what_is_held(secret: Manifest) -> TicketKey:
    """Return what the planner may know of the live Secret."""
    annotations = secret["metadata"].get("annotations") or {}
    return TicketKey(str(annotations.get(ROTATE_TICKET_KEY_ANNOTATION, "")))


def with_a_new_key(step: WriteTicketKey, live: Manifest | None) -> dict[str, Any]:
    """Return the Secret with a new key first and, of ``live``, the key that was first until now."""
    lines = [secrets.token_hex(KEY_BYTES), *_held(live)[:1]]
    text = "".join(f"{line}\n" for line in lines)
    return {**step.manifest, "data": {TICKET_KEY_FILE: base64.b64encode(text.encode()).decode()}}


def _held(live: Manifest | None) -> list[str]:
    encoded = ((live or {}).get("data") or {}).get(TICKET_KEY_FILE) or ""
    try:
        return base64.b64decode(encoded, validate=True).decode("ascii").split()
    except (binascii.Error, UnicodeDecodeError):  # somebody else wrote it
        return []
