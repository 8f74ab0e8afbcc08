"""Whole engines without a GPU and without vLLM: all that moves KV is real, the model is not.

A :class:`PrefillEngine` has KV caches, lease words, the lease desk and the side channel; a
:class:`DecodeEngine` has the peer book, its leases, the lease client and a receiver for each
rank. They speak the real handshake, the real tickets and the real lease messages over 127.0.0.1.
The bytes move over the in-memory NIXL (:mod:`pdcluster_connector.testing.nixl`), which fails as a
test asks. A request is a number, its *seed*: every byte of its KV follows from it.

Nothing happens by itself but what the transfer threads and side channels do: call ``step`` of both
engines again and again, as vLLM does. Engines are used by one thread.
"""

from __future__ import annotations

from pdcluster_connector.testing.decode_engine import DecodeEngine, Fetch
from pdcluster_connector.testing.engine_size import FREED, KEYS, PROBE_BYTES, Size, digest_of
from pdcluster_connector.testing.prefill_engine import PrefillEngine

__all__ = [
    "FREED",
    "KEYS",
    "PROBE_BYTES",
    "DecodeEngine",
    "Fetch",
    "PrefillEngine",
    "Size",
    "digest_of",
]
