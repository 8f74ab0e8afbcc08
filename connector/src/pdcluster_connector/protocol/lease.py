"""What prefill and decode engines agree on about leases, beside the messages.

A lease is prefill's promise to hold a request's blocks until decode has read them.
``sidechannel/lease_desk.py`` has prefill's leases.
"""

from enum import StrEnum
from typing import Final

LEASE_SECONDS: Final = 60.0  # the default of the option `lease_seconds` and of spec.transfer
SLOTS: Final = 16_384  # lease words of a rank: 128 KiB
CLEARED: Final = 0  # the word of a slot without a lease; never a token


class Standing(StrEnum):
    """How a lease stands for the decode engine that asks."""

    HELD = "held"
    GONE = "gone"
    EXPIRED = "expired"
    CLAIMED = "claimed"  # by another decode engine
