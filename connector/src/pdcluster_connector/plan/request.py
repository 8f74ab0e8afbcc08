"""One request's part of a plan, over all KV cache groups.

Each side's logical block ids become kernel block ids, with the side's own ratio. Then the two lists
of a group are paired by token position. What decode needs depends on the kind of the group:

* full attention and MLA: every token that decode lacks;
* sliding window: of those, the window before ``stop``;
* Mamba: the state after ``stop`` tokens, which is one slot.

Prefill's block ids come from the ticket and decode's from its scheduler. Each has one list for each
group, in the order of the shape's ``groups``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from pdcluster_connector.compat.reasons import Reason
from pdcluster_connector.compat.shape import EngineShape, GroupShape, LayerKind
from pdcluster_connector.plan.errors import CoverageError, PlanError
from pdcluster_connector.plan.pairing import (
    NULL_BLOCK,
    BlockList,
    Int32,
    Pairs,
    expand_blocks,
    pair_blocks,
)
from pdcluster_connector.plan.transfer import PeerPlan, SourceIndices


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


def plan_request(
    plan: PeerPlan,
    prefill: EngineBlocks,
    decode: EngineBlocks,
    *,
    start: int,
    stop: int,
    tokens: int,
) -> list[SourceIndices]:
    """Return the descriptors that bring the tokens [start, stop) to decode, by source and group.

    Args:
        plan: of this decode shard with the prefill engine.
        prefill, decode: the request's blocks.
        start: tokens that decode has already (its prefix hit).
        stop: tokens that decode will have.
        tokens: tokens that prefill's blocks cover; a Mamba state is the one after ``tokens``.

    Raises:
        PlanError: TicketInvalid or CoverageIncomplete; nothing may be posted then.
    """
    if not 0 <= start <= stop <= tokens:
        raise CoverageError(f"tokens [{start}, {stop}) are wanted, the ticket covers {tokens}")
    if start == stop:
        return []
    _check_count("prefill", prefill, Reason.TICKET_INVALID)
    _check_count("decode", decode, Reason.COVERAGE_INCOMPLETE)
    found: list[SourceIndices] = []
    for groups, unit in plan.units.items():
        ours, theirs = _group(prefill, groups[0]), _group(decode, groups[1])
        if LayerKind.MAMBA in (ours[0].kind, theirs[0].kind):
            if stop != tokens:
                message = f"the state after {stop} tokens is needed, the ticket's is after {tokens}"
                raise CoverageError(message)
            pairs = _pair_slots(ours[1], theirs[1])
        else:
            lists = _kernel_blocks(*ours, stop), _kernel_blocks(*theirs, stop)
            first = _first_needed(theirs[0].window, lists, start, stop, unit)
            pairs = pair_blocks(*lists, first, stop)
        found += plan.indices(pairs, groups)
    return found


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


def _check_count(side: str, held: EngineBlocks, reason: Reason) -> None:
    if len(held.blocks) != len(held.groups):
        message = f"{side} lists the blocks of {len(held.blocks)} KV cache groups and has "
        raise PlanError(reason, f"{message}{len(held.groups)}")


def _group(held: EngineBlocks, number: int) -> tuple[GroupShape, GroupBlocks]:
    if number >= len(held.groups):
        message = f"a layer is in KV cache group {number} of {len(held.groups)}"
        raise PlanError(Reason.LAYER_MISMATCH, message)
    return held.groups[number], held.blocks[number]


def _kernel_blocks(group: GroupShape, held: GroupBlocks, stop: int) -> BlockList:
    """Return the kernel blocks that hold the tokens before ``stop``."""
    size, ratio = group.block_size, group.kernel_blocks_per_block
    needed = max(0, -(-(stop - held.first_token) // size))
    return BlockList(
        expand_blocks(held.blocks, ratio, most=needed), size // ratio, held.first_token
    )


def _first_needed(
    window: int | None, lists: Sequence[BlockList], start: int, stop: int, unit: int
) -> int:
    """Return the first token that decode needs of a group.

    vLLM computes next the token at ``stop``, or the one at ``stop - 1`` if it computes the prompt's
    last token again. So the window may begin one token earlier. An engine may have freed the block
    of that one token already. Then the window begins one token later.
    """
    if window is None:
        return start
    first = stop - window
    if any(_freed_up_to(blocks, first) for blocks in lists):
        first += 1
    return max(start, first - first % unit)


def _freed_up_to(held: BlockList, token: int) -> bool:
    """Tell whether ``token`` is the last one of a block that is not held any more."""
    index, offset = divmod(token - held.first_token, held.block_tokens)
    gone = index < 0 or (index < len(held.blocks) and held.blocks[index] < 0)
    return gone and offset == held.block_tokens - 1


def _pair_slots(prefill: GroupBlocks, decode: GroupBlocks) -> Pairs:
    """Pair two slots: each a list of one block of one token."""
    slots = []
    for side, held in (("prefill", prefill), ("decode", decode)):
        ids = expand_blocks(held.blocks, 1)
        if len(ids) != 1:
            raise CoverageError(f"{side} lists {len(ids)} states, not the running one alone")
        slots.append(BlockList(np.asarray(ids), 1))
    return pair_blocks(slots[0], slots[1], 0, 1)
