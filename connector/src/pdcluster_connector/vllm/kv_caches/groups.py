"""KV cache groups, and which of a request's blocks hold which tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm.v1 import kv_cache_interface as interface

from pdcluster_connector.plan.block_pairs import GroupBlocks, state_slot


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """One group that takes part in transfers, with the specs of its layers.

    ``spec`` is that of its first layer.
    """

    spec: Any
    layers: Mapping[str, Any] = field(default_factory=dict)

    @property
    def block_size(self) -> int:
        """Return the tokens in a logical block."""
        return int(self.spec.block_size)

    @property
    def window(self) -> int | None:
        """Return the sliding window in tokens; None without one."""
        return (
            self.spec.sliding_window if isinstance(self.spec, interface.SlidingWindowSpec) else None
        )

    @property
    def is_state(self) -> bool:
        """Return whether its blocks are Mamba states."""
        return isinstance(self.spec, interface.MambaSpec)

    def holding(self, blocks: Sequence[int], start: int, stop: int) -> GroupBlocks:
        """Return the blocks of a request that hold the tokens [start, stop); see :meth:`ids`."""
        first = 0 if self.is_state else start // self.block_size
        return GroupBlocks(tuple(self.ids(blocks, start, stop)), first * self.block_size)

    def ids(self, blocks: Sequence[int], start: int, stop: int) -> Sequence[int]:
        """Return the ids of the blocks that hold the tokens [start, stop).

        For a Mamba group, that is the running state after ``stop`` tokens.

        Raises:
            CoverageError: the request has no state.
        """
        if self.is_state:
            return (state_slot(blocks, self.spec.num_speculative_blocks),)
        return blocks[start // self.block_size : -(-stop // self.block_size)]


def cache_groups(config: interface.KVCacheConfig) -> tuple[CacheGroup, ...]:
    """Return the groups that take part in transfers, in the order of their block lists."""
    found = []
    for group in config.transfer_groups:
        spec: Any = group.kv_cache_spec
        uniform = isinstance(spec, interface.UniformTypeKVCacheSpecs)
        layers = spec.kv_cache_specs if uniform else dict.fromkeys(group.layer_names, spec)
        found.append(CacheGroup(next(iter(layers.values()), spec), layers))
    return tuple(found)


def leaves_last_token(groups: Sequence[CacheGroup]) -> bool:
    """Return whether prefill must stop one token short of the prompt's end.

    Decode always computes the last token itself. A Mamba state after that token would count it
    twice. With a sliding window, the last token's query may be the only one that still reads a
    block: the window then begins with the last token of that block. vLLM frees such a block, on
    both sides.
    """
    return any(group.is_state or group.window is not None for group in groups)


def smallest_block(groups: Sequence[CacheGroup]) -> int:
    """Return the tokens of the smallest block that holds tokens; 0 if there is none."""
    return min((group.block_size for group in groups if not group.is_state), default=0)
