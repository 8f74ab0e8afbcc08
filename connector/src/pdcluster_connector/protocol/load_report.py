"""What an engine did of late, as its launcher tells the operator at ``/v1/changes``.

A launcher that is older does not tell it, which is no fault. Prompts of canaries count as others.
"""

from typing import Annotated, Final

from msgspec import Meta, Struct

WINDOW_SECONDS: Final = 60.0
WARM_SECONDS: Final = 60.0
"""So long after its start, an engine is not measured: its first requests are slow, because kernels
are compiled and caches are empty."""

Sum = Annotated[float, Meta(ge=0, le=1e18)]
Share = Annotated[float, Meta(ge=0, le=1)]


class LoadReport(Struct, frozen=True, omit_defaults=True):
    """Sums of the last ``seconds``, and means of what goes up and down. All ranks together.

    Attributes:
        busy_seconds: in which the engine computed; the mean of its data-parallel ranks.
        tokens: prompt tokens of a prefill engine, generated tokens of a decode engine.
        requests: that got their first token.
        first_token_seconds: from their arrival at this engine to their first token, summed up.
        gaps: between two tokens of one answer; ``gap_seconds`` is their sum.
        running: requests in work.
        waiting: requests that wait for room. Those whose KV is on its way are not among them.
        kv: share of the KV cache that is in use.
        receives: prompts whose KV came from prefill.
        receive_seconds: that these took, summed up; of each one the mean of the ranks.
        received_bytes: of KV.
    """

    seconds: Annotated[float, Meta(ge=1, le=86_400)]
    busy_seconds: Sum = 0.0
    tokens: Sum = 0.0
    requests: Sum = 0.0
    first_token_seconds: Sum = 0.0
    gaps: Sum = 0.0
    gap_seconds: Sum = 0.0
    running: Sum = 0.0
    waiting: Sum = 0.0
    kv: Share = 0.0
    receives: Sum = 0.0
    receive_seconds: Sum = 0.0
    received_bytes: Sum = 0.0


class ReceiveRate(Struct, frozen=True):
    """How fast one worker's latest large receives over a link were (``transfer/measures.py``).

    Attributes:
        best, median: of its measurements, in bytes a second.
        count: how many measurements there were.
        bytes: how much KV arrived in all of them.
    """

    best: Sum
    median: Sum
    count: Annotated[int, Meta(ge=0, le=2**62)]
    bytes: Annotated[int, Meta(ge=0, le=2**62)]
