"""Clears the part of a received prompt's last blocks that no token fills.

With Mamba layers, or layers of different precision, an attention block may have held other data
before. Its bytes may read as NaN, and attention's mask does not remove NaN (vLLM #35219). vLLM
therefore clears blocks before their first use. It does not clear blocks that a connector fills,
because it could clear data that has arrived (v1/core/kv_cache_manager.py, allocate_slots).
Prefill's blocks may end before decode's do, so decode clears the rest itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from vllm.v1.kv_cache_interface import KVCacheConfig

from pdcluster_connector.plan.geometry import Region
from pdcluster_connector.plan.held_blocks import EngineBlocks, unfilled


class UnfilledBlocks:
    """The caches of one rank whose blocks must be cleared; none if vLLM clears none.

    Args:
        kv_caches: by layer; attention's are views ``[kernel block, head, token, content]``.
        regions: this rank's.
    """

    def __init__(
        self,
        config: KVCacheConfig,
        kv_caches: Mapping[str, torch.Tensor],
        regions: Sequence[Region],
    ) -> None:
        self._needed = config.needs_kv_cache_zeroing
        self._caches: dict[int, list[tuple[torch.Tensor, bool]]] = {}
        for region in regions:
            cut = region.token_stride is not None
            self._caches.setdefault(region.group, []).append((kv_caches[region.layer], cut))

    def clear(self, held: EngineBlocks, stop: int) -> None:
        """Clear the bytes that no token before ``stop`` fills, in blocks of this request alone.

        Call this before anything is posted. On a GPU it may still run while NIXL writes. The bytes
        that both write are the rest of a descriptor, and prefill has cleared them as well. A packed
        block is received whole, so it is cleared only if it holds no token.
        """
        for part in unfilled(held, stop) if self._needed else ():
            whole = part.block + (part.first > 0)
            for cache, cut in self._caches.get(part.group, ()):
                if cut:
                    cache[part.block, :, part.first :].zero_()
                cache[whole : part.end].zero_()
