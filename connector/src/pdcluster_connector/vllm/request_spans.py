"""OpenTelemetry spans of what becomes of a request's KV, in the trace of its HTTP request.

vLLM keeps the ``traceparent`` of a request only with ``--otlp-traces-endpoint``, and sets up the
exporter of each of its processes (vllm/tracing/otel.py). Without it, a span costs a comparison.
"""

import logging
import time
from collections.abc import Mapping

from vllm import tracing

logger = logging.getLogger(__name__)

WAIT = "pdcluster.kv_wait"
"""On decode: from a request with a ticket to the order to receive its KV. Queue and claim."""
RECEIVE = "pdcluster.kv_receive"
"""On decode: from that order until all ranks are through with it."""
LOCAL = "pdcluster.local_prompt"
"""On decode: from a request until this engine begins to compute its prompt itself."""
LEASE = "pdcluster.kv_lease"
"""On prefill: from the ticket until its KV is released, or its lease ends."""

Headers = Mapping[str, str] | None


def span(name: str, headers: Headers, begun: int, **attributes: str | float) -> int:
    """Record a span that ends now; return the time, in ns since the epoch. Never raises.

    Args:
        headers: those of the request that say to which trace it belongs.
        begun: in ns since the epoch.
        attributes: names get the prefix ``pdcluster.``.
    """
    now = time.time_ns()
    if headers:
        try:
            named = {f"pdcluster.{key}": value for key, value in attributes.items()}
            context = tracing.extract_trace_context(headers)
            tracing.instrument_manual(name, begun, max(begun, now), named, context)
        except Exception:  # engine-step code: a trace is worth no request
            logger.exception("the span %s is lost", name)
    return now
