"""What one engine holds of a request: logical blocks, in each of its KV cache groups.

Prefill's block ids come from the ticket and decode's from its scheduler. Each has one list for each
group, in the order of the shape's ``groups``.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pdcluster_connector.compat.shape import EngineShape, GroupShape, LayerKind
from pdcluster_connector.plan.errors import CoverageError
from pdcluster_connector.plan.pairing import NULL_BLOCK, Int32


@dataclass(frozen=True, slots=True, eq=False)
class GroupBlocks:
    """One request's logical blocks in one KV cache group of one engine.

    Attributes:
        blocks: block i holds the tokens from ``first_token + i * block_size`` on; 0 (vLLM's
            null block) or negative where nothing is held, as before a window. Of a Mamba group
            exactly one id: the slot of the running state (:func:`state_slot`).
        first_token: the first token of ``blocks[0]``; not used in a Mamba group.
    """

    blocks: Sequence[int] | Int32
    first_token: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class EngineBlocks:
    """What one engine holds of a request: its KV cache groups, and the blocks in each."""

    groups: Sequence[GroupShape]
    blocks: Sequence[GroupBlocks]


@dataclass(frozen=True, slots=True)
class Unfilled:
    """Tokens of KV cache group ``group`` that get no KV: those of kernel block ``block`` from
    offset ``first`` on, and all tokens of the kernel blocks after it, up to ``end`` (exclusive).
    """

    group: int
    block: int
    first: int
    end: int


def groups_of(shape: EngineShape) -> tuple[GroupShape, ...]:
    """Return an engine's groups. An engine that states none has one group of its own sizes."""
    if shape.groups is not None:
        return shape.groups
    ratio = shape.kernel_blocks_per_block or 1
    return (GroupShape(LayerKind.FULL_ATTENTION, shape.block_size or 1, ratio),)


def unfilled(held: EngineBlocks, stop: int) -> Iterator[Unfilled]:
    """Find the parts of a request's attention blocks that tokens before ``stop`` do not fill."""
    for number, (group, blocks) in enumerate(zip(held.groups, held.blocks, strict=True)):
        ratio, size = group.kernel_blocks_per_block, group.block_size
        for index, block in enumerate(blocks.blocks if group.kind is not LayerKind.MAMBA else ()):
            filled = max(0, stop - blocks.first_token - index * size)
            if block > NULL_BLOCK and filled < size:
                whole, first = divmod(filled, group.kernel_tokens)
                yield Unfilled(number, block * ratio + whole, first, (block + 1) * ratio)


def state_slot(blocks: Sequence[int], scratch: int = 0) -> int:
    """Return the slot of a Mamba group's running state.

    Args:
        blocks: the group's block list as vLLM's scheduler holds it, in any cache mode: earlier
            states (or null blocks in their places), the running one, then scratch slots.
        scratch: ``num_speculative_blocks`` of the group's spec.

    Raises:
        CoverageError: the list holds no state.
    """
    kept = blocks[: max(1, len(blocks) - scratch)]
    if not kept or kept[-1] <= NULL_BLOCK:
        raise CoverageError("a Mamba group's blocks hold no state")
    return kept[-1]
