"""How many descriptors a request takes.

The host posts each descriptor. That takes about 10 microseconds, whatever the descriptor's size.
[measured, NIXL 1.5]
"""

from __future__ import annotations

from pdcluster_connector.plan.transfer import PeerPlan

NOTICE_TOKENS = 1000


def descriptors(plan: PeerPlan, tokens: int) -> tuple[int, int]:
    """Return how many descriptors a request of ``tokens`` tokens takes, and how many it would take
    if both engines kept a head's tokens of a block side by side.

    NIXL may join neighbours later; that is not counted. It cannot join parts of blocks.
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
    """Return why a pair's transfers are smaller than needed, and the remedy; empty if they are not.

    ``layout`` is vLLM's name of the order in which prefill keeps KV.
    """
    taken, least = descriptors(plan, NOTICE_TOKENS)
    if taken == least:
        return ""
    return (
        f"{NOTICE_TOKENS:,} tokens take {taken:,} descriptors on this rank; {least:,} would be "
        f"enough. KV is laid out token by token{f' on prefill ({layout})' if layout else ''}, and "
        "the two engines' tensor-parallel sizes or layouts differ. Set "
        "VLLM_KV_CACHE_LAYOUT=LBHNC on both, with an attention backend that supports it"
    )
