"""From (layer, head interval) to strided descriptor rows.

A *part* is a run of bytes that is contiguous on both sides, at the same place in every block
(or in every ``grain`` tokens of a block). All parts of a *family* repeat with the same
strides, so one arithmetic gives the indices of all of them (:mod:`indexing`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from pdcluster_connector.compat.reasons import Reason
from pdcluster_connector.plan.errors import PlanError
from pdcluster_connector.plan.geometry import Region
from pdcluster_connector.plan.pairing import Int64
from pdcluster_connector.plan.topology import Assignment

Rows = NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Side:
    """How one side's copies of a part repeat.

    Attributes:
        num_blocks, block_tokens: as in the region.
        block_stride: bytes from block to block.
        grain_stride: bytes from one grain to the next in a block; 0 if a block is one grain.
        grains: grains in a block.
        device: device index.
    """

    num_blocks: int
    block_tokens: int
    block_stride: int
    grain_stride: int
    grains: int
    device: int

    @property
    def dense(self) -> bool:
        """Tell whether blocks continue the grains' stride, so that one row holds all of them."""
        return self.grains > 1 and self.block_stride == self.grains * self.grain_stride

    @property
    def steps(self) -> tuple[int, int]:
        """Return how far a part's flattened index moves per block and per grain."""
        return (self.grains, 1) if self.dense else (1, self.num_blocks)

    @property
    def elements(self) -> int:
        """Return the number of descriptors of one part."""
        return self.num_blocks * self.grains

    def rows(self, address: Int64, length: Int64) -> Rows:
        """Return the rows ``(addr, len, device, stride, count)`` of parts, part by part."""
        if self.dense:
            stride, count = self.grain_stride, self.elements
            starts = address[:, None]
        else:
            stride, count = self.block_stride, self.num_blocks
            starts = address[:, None] + np.arange(self.grains) * self.grain_stride
        rows = np.empty((starts.size, 5), np.uint64)
        rows[:, 0] = starts.ravel()
        rows[:, 1] = np.repeat(length, starts.shape[1])
        rows[:, 2:] = (self.device, stride, count)
        return rows


@dataclass(frozen=True, slots=True)
class FamilyKey:
    """What parts must share to be indexed together."""

    groups: tuple[int, int]  # (prefill's, decode's) KV cache group
    grain: int
    prefill: Side
    decode: Side
    by_token: bool = False  # a head's tokens of a grain are in descriptors of their own


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """Runs of bytes: addresses of block 0 on both sides, and lengths; int64, one length."""

    prefill: Int64
    decode: Int64
    length: Int64

    def merged(self) -> Parts:
        """Join runs that follow one another on both sides.

        Parts of a family shift alike from block to block, so what is adjacent in block 0 is
        adjacent in all: this joins the layers of a layout with blocks outermost.
        """
        order = np.argsort(self.prefill, kind="stable")
        prefill, decode, length = self.prefill[order], self.decode[order], self.length[order]
        joined = (prefill[1:] == prefill[:-1] + length[:-1]) & (
            decode[1:] == decode[:-1] + length[:-1]
        )
        first = np.flatnonzero(np.concatenate([[True], ~joined]))
        return Parts(prefill[first], decode[first], np.add.reduceat(length, first))


def families(assignments: Sequence[Assignment], grain: int | None) -> dict[FamilyKey, Parts]:
    """Cut assignments into parts, by family; layers of one geometry together.

    Args:
        assignments: all from one prefill shard; the regions passed :func:`check_region`.
        grain: tokens in a descriptor; None for the most that both block sizes allow.

    Raises:
        PlanError: the two sides' bytes do not correspond.
    """
    alike: dict[tuple[Region, Region, int, int], list[Assignment]] = {}
    for item in assignments:
        geometry = (_geometry(item.prefill), _geometry(item.decode))
        alike.setdefault((*geometry, item.head_start, item.head_stop), []).append(item)
    found: dict[FamilyKey, list[Parts]] = {}
    for items in alike.values():
        first = items[0]
        tokens = _grain(first.prefill, first.decode, grain)
        unit, prefill_offsets, decode_offsets = _runs(first, tokens)
        prefill_bases = np.array([item.prefill.base for item in items], np.int64)
        decode_bases = np.array([item.decode.base for item in items], np.int64)
        prefill = np.add.outer(prefill_bases, prefill_offsets).ravel()
        decode = np.add.outer(decode_bases, decode_offsets).ravel()
        parts = Parts(prefill, decode, np.full(prefill.size, unit, np.int64))
        sides = (_side(first.prefill, tokens), _side(first.decode, tokens))
        by_token = tokens > 1 and unit < tokens * first.prefill.token_bytes
        family = FamilyKey((first.prefill.group, first.decode.group), tokens, *sides, by_token)
        found.setdefault(family, []).append(parts)
    return {family: _concatenated(parts).merged() for family, parts in found.items()}


def rows_nx3(rows: Rows) -> Rows:
    """Flatten strided rows to (m, 3) rows ``(addr, len, device)``, for NIXL before 1.5."""
    counts = rows[:, 4].astype(np.int64)
    flat = np.repeat(rows[:, :3], counts, axis=0)
    before = np.repeat(np.cumsum(counts) - counts, counts)
    element = (np.arange(before.size) - before).astype(np.uint64)
    flat[:, 0] += element * np.repeat(rows[:, 3], counts)
    return flat


def _geometry(region: Region) -> Region:
    return replace(region, layer="", part="", base=0)


def _grain(prefill: Region, decode: Region, wanted: int | None) -> int:
    """Return the tokens of one descriptor after checking that both sides' bytes correspond."""
    sizes = f"(prefill {prefill.block_tokens}, decode {decode.block_tokens} tokens)"
    if prefill.token_bytes != decode.token_bytes:
        message = f"layer {prefill.layer} has {prefill.token_bytes} bytes a token and head on "
        message += f"prefill and {decode.token_bytes} on decode"
        raise PlanError(Reason.LAYER_MISMATCH, message)
    if (prefill.token_stride is None) != (decode.token_stride is None):
        message = f"layer {prefill.layer}: a block's inside is packed on one side only"
        raise PlanError(Reason.BLOCK_INTERIOR_OPAQUE, message)
    largest = math.gcd(prefill.block_tokens, decode.block_tokens)
    grain = largest if wanted is None else wanted
    if grain < 1 or largest % grain:
        message = f"descriptors of {grain} tokens do not fit the blocks {sizes}"
        raise PlanError(Reason.BLOCK_SIZE_MISMATCH, message)
    whole = grain == prefill.block_tokens == decode.block_tokens
    if prefill.token_stride is None and not whole:
        message = f"layer {prefill.layer}: a block cannot be cut by token, and blocks differ "
        raise PlanError(Reason.BLOCK_INTERIOR_OPAQUE, message + sizes)
    return grain


def _side(region: Region, grain: int) -> Side:
    grains = region.block_tokens // grain
    stride = 0 if grains == 1 or region.token_stride is None else grain * region.token_stride
    return Side(
        num_blocks=region.num_blocks,
        block_tokens=region.block_tokens,
        block_stride=region.block_stride,
        grain_stride=stride,
        grains=grains,
        device=region.device,
    )


def _runs(item: Assignment, grain: int) -> tuple[int, Int64, Int64]:
    """Return the length of the runs of one grain, and their offsets in the first one.

    An axis whose stride equals the run's length on both sides lengthens the run; the others
    give one run for each of their indices.
    """
    prefill, decode = item.prefill, item.decode
    axes = [(item.head_stop - item.head_start, prefill.head_stride, decode.head_stride)]
    if prefill.token_stride is None or decode.token_stride is None:
        unit = prefill.block_tokens * prefill.token_bytes
    else:
        unit = prefill.token_bytes
        axes.append((grain, prefill.token_stride, decode.token_stride))
    axes = [axis for axis in axes if axis[0] > 1]
    while inner := [axis for axis in axes if axis[1] == axis[2] == unit]:
        axes.remove(inner[0])
        unit *= inner[0][0]
    offsets = []
    for region, column in ((prefill, 1), (decode, 2)):
        start = (item.head_start - region.head_start) * region.head_stride
        offset = np.array([start], np.int64)
        for axis in axes:
            offset = np.add.outer(offset, np.arange(axis[0]) * axis[column]).ravel()
        offsets.append(offset)
    return unit, offsets[0], offsets[1]


def _concatenated(parts: Sequence[Parts]) -> Parts:
    return Parts(
        np.concatenate([part.prefill for part in parts]),
        np.concatenate([part.decode for part in parts]),
        np.concatenate([part.length for part in parts]),
    )
