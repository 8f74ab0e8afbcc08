"""What a request costs before its first byte moves: descriptors, each of which has to be posted.

Posting takes the host some 10 microseconds a descriptor, whatever its bytes. [measured, NIXL 1.5]
"""

from __future__ import annotations

from pdcluster_connector.plan.transfer import PeerPlan

NOTICE_TOKENS = 1000


def descriptors(plan: PeerPlan, tokens: int) -> tuple[int, int]:
    """Return the descriptors of a request of ``tokens`` tokens, and how few would do if both
    engines kept a head's tokens of a block side by side.

    Counted before NIXL joins neighbours, which it cannot do with parts of blocks.
    """
    taken = least = 0
    for source in plan.sources:
        for item in source.classes:
            states = item.prefill.block_tokens == 1  # a Mamba group: one slot a request
            count = item.prefill.first.size * (1 if states else -(-tokens // item.unit))
            taken += count
            least += -(-count // item.unit) if item.by_token else count
    return taken, least


def cost_notice(plan: PeerPlan, layout: str | None) -> str:
    """Return what makes a pair's transfers needlessly small, and the remedy; empty if nothing.

    ``layout`` is prefill's name of its order of KV in memory.
    """
    taken, least = descriptors(plan, NOTICE_TOKENS)
    if taken == least:
        return ""
    return (
        f"{NOTICE_TOKENS:,} tokens take {taken:,} descriptors on this rank where {least:,} would "
        f"do: KV is laid out token by token{f' on prefill ({layout})' if layout else ''}, and the "
        "two engines' tensor-parallel sizes or layouts differ. Give both "
        "VLLM_KV_CACHE_LAYOUT=LBHNC, and an attention backend that has it"
    )
