"""What each engine holds of a request, and which blocks of the two engines pair.

An engine holds logical blocks in each of its KV cache groups. Prefill's block ids come from the
ticket and decode's from its scheduler. Each has one list for each group, in the order of the
shape's ``groups``.

Two lists of a group are paired by token position. A block list covers a token interval. Whatever
the two lists' block sizes and first tokens, the required interval is cut at every block boundary of
either side. Each interval between two cuts then lies in one prefill block and in one decode block.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pdcluster_connector.compat.shape import EngineShape, GroupShape, LayerKind
from pdcluster_connector.plan import CoverageError

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]

LIMIT = 2**31 - 1
NULL_BLOCK = 0  # vLLM's block pool keeps block 0 back as the null block


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


@dataclass(frozen=True, slots=True, eq=False)
class BlockList:
    """Kernel blocks of one request in one KV cache group, by position.

    Attributes:
        blocks: block i holds the tokens from ``first_token + i * block_tokens`` on;
            negative where nothing is held.
        block_tokens: tokens in a block.
        first_token: the first token that ``blocks[0]`` stands for.
    """

    blocks: Sequence[int] | Int32
    block_tokens: int
    first_token: int = 0


class PairedSide(NamedTuple):
    """Where the pieces of a token interval begin on one side: block, and offset in tokens."""

    blocks: Int32
    offsets: Int32
    block_tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class Pairs:
    """Pieces of a token interval, in token order; arrays of one length, int32.

    Piece i is ``tokens[i]`` tokens that start at token ``offsets[i]`` of block ``blocks[i]`` on
    each side.
    """

    prefill: PairedSide
    decode: PairedSide
    tokens: Int32


def pair_blocks(prefill: BlockList, decode: BlockList, start: int, stop: int) -> Pairs:
    """Pair both lists' blocks over the tokens [start, stop).

    Raises:
        CoverageError: a token of the interval has no block on one side, or a list that is
            needed for it is not a list of different block ids.
    """
    if not 0 <= start <= stop <= LIMIT:
        raise CoverageError(f"tokens [{start}, {stop}) are not an interval")
    if start == stop:
        none = np.empty(0, np.int32)
        placed = [PairedSide(none, none, side.block_tokens) for side in (prefill, decode)]
        return Pairs(placed[0], placed[1], none)
    sides = {"prefill": prefill, "decode": decode}
    held = [_held(side, blocks, start, stop) for side, blocks in sides.items()]
    (first, ours), (other, theirs) = held
    size = prefill.block_tokens
    if (decode.block_tokens, other) == (size, first):  # whole blocks pair
        tokens, offsets = np.full(len(ours), size, np.int32), np.zeros(len(ours), np.int32)
        offsets[0] = start - first
        tokens[0] -= offsets[0]
        tokens[-1] -= first + len(ours) * size - stop
        return Pairs(PairedSide(ours, offsets, size), PairedSide(theirs, offsets, size), tokens)
    cuts = np.unique(np.concatenate([_cuts(blocks, start, stop) for blocks in sides.values()]))
    placed = []
    for side, (first, blocks) in zip(sides.values(), held, strict=True):
        index, offsets = np.divmod(cuts[:-1] - first, side.block_tokens)
        placed.append(PairedSide(blocks[index], offsets.astype(np.int32), side.block_tokens))
    return Pairs(placed[0], placed[1], np.diff(cuts).astype(np.int32))


def expand_blocks(logical: Sequence[int] | Int32, ratio: int, most: int | None = None) -> Int32:
    """Expand an engine's logical block ids to its kernel block ids, with its own ratio.

    Args:
        logical: ids as the scheduler counts them.
        ratio: kernel blocks in a logical block; a peer's may be anything.
        most: how many kernel block ids are needed; the others are left out.

    Returns:
        int32 of ``ratio`` for each id that counts; -1 where nothing is held.

    Raises:
        CoverageError: the ids are not block ids.
    """
    if not 1 <= ratio <= LIMIT:
        raise CoverageError(f"{ratio} kernel blocks in a logical block")
    ids, width = _integers("logical", logical), ratio
    if most is not None:
        ids, width = ids[: -(-most // ratio)], min(ratio, most)
    if ratio == 1:
        return np.where(ids > NULL_BLOCK, ids, np.int32(-1)).astype(np.int32, copy=False)
    if ids.size and int(ids.max()) > LIMIT // ratio - 1:
        raise CoverageError(f"logical block {int(ids.max())} is out of range")
    kernel = ids[:, None] * ratio + np.arange(width)
    kernel[ids <= NULL_BLOCK] = -1
    return kernel.ravel().astype(np.int32)


def _integers(side: str, blocks: Sequence[int] | Int32) -> Int64 | Int32:
    """Return ids as int64. A ticket may hold anything, so all but whole numbers are refused."""
    if isinstance(blocks, np.ndarray) and blocks.dtype == np.int32 and blocks.ndim == 1:
        return blocks
    try:
        ids = np.asarray(blocks)
    except (ValueError, OverflowError) as error:
        raise CoverageError(f"{side} blocks are not a list of ids: {error}") from None
    if ids.size == 0:
        return np.empty(0, np.int64)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise CoverageError(f"{side} blocks are not a list of ids")
    if int(ids.max()) > LIMIT:
        raise CoverageError(f"{side} block {int(ids.max())} is out of range")
    return ids.astype(np.int64)


def _held(side: str, blocks: BlockList, start: int, stop: int) -> tuple[int, Int32]:
    """Return a side's blocks that hold [start, stop), after the first token of the first one."""
    size, first = blocks.block_tokens, blocks.first_token
    if not (1 <= size <= LIMIT and 0 <= first <= LIMIT):
        raise CoverageError(f"{side} blocks of {size} tokens from token {first} on")
    ids = _integers(side, blocks.blocks)
    end = first + size * len(ids)
    if start < first or stop > end:
        raise CoverageError(f"{side} blocks hold tokens [{first}, {end}), not [{start}, {stop})")
    low = (start - first) // size
    needed = ids[low : (stop - 1 - first) // size + 1]
    ordered = needed.copy()
    ordered.sort()
    if ordered[0] < 0:
        token = first + (low + int(np.flatnonzero(needed < 0)[0])) * size
        raise CoverageError(f"{side} holds no block for token {max(token, start)}")
    twice = ordered[1:] == ordered[:-1]
    if twice.any():
        raise CoverageError(f"{side} block {int(ordered[1:][twice][0])} is listed twice")
    return first + low * size, needed.astype(np.int32, copy=False)


def _cuts(blocks: BlockList, start: int, stop: int) -> Int64:
    """Return start, stop and this list's block boundaries between them."""
    size, first = blocks.block_tokens, blocks.first_token
    boundary = first + ((start - first) // size + 1) * size
    inner = np.arange(boundary, stop, size, dtype=np.int64)
    return np.concatenate([np.array([start], np.int64), inner, np.array([stop], np.int64)])
