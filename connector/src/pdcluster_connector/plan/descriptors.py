"""From (layer, head interval) to strided descriptor rows.

A *run* is a range of bytes that is contiguous on both sides. It lies at the same place in every
block, or in every ``unit`` tokens of a block. All runs of a *stride class* repeat with the same
strides, so one formula gives the indices of all of them (``peer_plan.py``). ``rank_pairs.py``
decides which heads a rank reads from which peer.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from pdcluster_connector.compat.reasons import Reason
from pdcluster_connector.plan import PlanError, rank_pairs
from pdcluster_connector.plan.block_pairs import Int64
from pdcluster_connector.plan.geometry import Region

Rows = NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Side:
    """How runs repeat on one side.

    Attributes:
        num_blocks, block_tokens: as in the region.
        block_stride: bytes from block to block.
        unit_stride: bytes from one unit to the next in a block; 0 if a block is one unit.
        units: units in a block.
        device: device index.
        per_block, per_unit: how far a run's flattened index moves with a block and with a unit.
    """

    num_blocks: int
    block_tokens: int
    block_stride: int
    unit_stride: int
    units: int
    device: int
    per_block: int
    per_unit: int

    @property
    def dense(self) -> bool:
        """Return whether blocks continue the units' stride, so that one row holds all of them."""
        return self.block_stride == self.units * self.unit_stride

    @property
    def elements(self) -> int:
        """Return the number of descriptors of one run."""
        return self.num_blocks * self.units

    def rows(self, address: Int64, length: Int64) -> Rows:
        """Return the rows ``(addr, len, device, stride, count)`` of runs, run by run."""
        if self.dense:
            stride, count = self.unit_stride, self.elements
            starts = address[:, None]
        else:
            stride, count = self.block_stride, self.num_blocks
            starts = address[:, None] + np.arange(self.units) * self.unit_stride
        rows = np.empty((starts.size, 5), np.uint64)
        rows[:, 0] = starts.ravel()
        rows[:, 1] = np.repeat(length, starts.shape[1])
        rows[:, 2:] = (self.device, stride, count)
        return rows


@dataclass(frozen=True, slots=True)
class ClassKey:
    """What runs must share to be indexed together.

    Attributes:
        groups: (prefill's, decode's) KV cache group.
        unit: tokens that one descriptor covers.
        by_token: whether each token of a unit has a descriptor of its own.
    """

    groups: tuple[int, int]
    unit: int
    prefill: Side
    decode: Side
    by_token: bool = False


class Runs(NamedTuple):
    """Runs of bytes: addresses of block 0 on both sides, and lengths; int64, one length."""

    prefill: Int64
    decode: Int64
    length: Int64

    def merged(self) -> "Runs":
        """Join runs that follow one another on both sides.

        All runs of a stride class move by the same distance from block to block, so neighbours in
        block 0 are neighbours in every block. In a layout with blocks outermost, this joins layers.
        """
        order = np.argsort(self.prefill, kind="stable")
        prefill, decode, length = self.prefill[order], self.decode[order], self.length[order]
        joined = (prefill[1:] == prefill[:-1] + length[:-1]) & (
            decode[1:] == decode[:-1] + length[:-1]
        )
        first = np.flatnonzero(np.concatenate([[True], ~joined]))
        return Runs(prefill[first], decode[first], np.add.reduceat(length, first))


def stride_classes(assignments: Sequence[rank_pairs.Assignment]) -> dict[ClassKey, Runs]:
    """Cut assignments into runs, by stride class. Layers of equal geometry are cut together.

    Args:
        assignments: all from one prefill shard; the regions passed :func:`.geometry.region_fault`.

    Raises:
        PlanError: the two sides' bytes do not correspond.
    """
    alike: dict[tuple[Region, Region, int, int], list[rank_pairs.Assignment]] = {}
    for item in assignments:
        geometry = (_geometry(item.prefill), _geometry(item.decode))
        alike.setdefault((*geometry, item.head_start, item.head_stop), []).append(item)
    found: dict[ClassKey, list[Runs]] = {}
    for items in alike.values():
        first = items[0]
        tokens = _unit(first.prefill, first.decode)
        length, prefill_offsets, decode_offsets = _runs(first, tokens)
        prefill_bases = np.array([item.prefill.base for item in items], np.int64)
        decode_bases = np.array([item.decode.base for item in items], np.int64)
        prefill = np.add.outer(prefill_bases, prefill_offsets).ravel()
        decode = np.add.outer(decode_bases, decode_offsets).ravel()
        runs = Runs(prefill, decode, np.full(prefill.size, length, np.int64))
        sides = (_side(first.prefill, tokens), _side(first.decode, tokens))
        by_token = length < tokens * first.prefill.token_bytes
        key = ClassKey((first.prefill.group, first.decode.group), tokens, *sides, by_token)
        found.setdefault(key, []).append(runs)
    return {
        key: Runs(*map(np.concatenate, zip(*runs, strict=True))).merged()
        for key, runs in found.items()
    }


def _geometry(region: Region) -> Region:
    return replace(region, layer="", part="", base=0)


def _unit(prefill: Region, decode: Region) -> int:
    """Return the tokens of one descriptor, the most that both block sizes allow.

    Raises:
        PlanError: the two sides' bytes do not correspond.
    """
    if prefill.token_bytes != decode.token_bytes:
        message = f"layer {prefill.layer} has {prefill.token_bytes} bytes a token and head on "
        message += f"prefill and {decode.token_bytes} on decode"
        raise PlanError(Reason.LAYER_MISMATCH, message)
    if (prefill.token_stride is None) != (decode.token_stride is None):
        message = f"layer {prefill.layer}: a block's inside is packed on one side only"
        raise PlanError(Reason.BLOCK_INTERIOR_OPAQUE, message)
    unit = math.gcd(prefill.block_tokens, decode.block_tokens)
    whole = unit == prefill.block_tokens == decode.block_tokens
    if prefill.token_stride is None and not whole:
        message = f"layer {prefill.layer}: a block cannot be cut by token, and block sizes differ "
        message += f"(prefill {prefill.block_tokens}, decode {decode.block_tokens} tokens)"
        raise PlanError(Reason.BLOCK_INTERIOR_OPAQUE, message)
    return unit


def _side(region: Region, unit: int) -> Side:
    units = region.block_tokens // unit
    stride = 0 if units == 1 or region.token_stride is None else unit * region.token_stride
    dense = region.block_stride == units * stride
    return Side(
        num_blocks=region.num_blocks,
        block_tokens=region.block_tokens,
        block_stride=region.block_stride,
        unit_stride=stride,
        units=units,
        device=region.device,
        per_block=units if dense else 1,
        per_unit=1 if dense else region.num_blocks,
    )


class _Axis(NamedTuple):
    """The length of an axis of a unit, and its strides on both sides, in bytes."""

    length: int
    prefill: int
    decode: int


def _runs(item: rank_pairs.Assignment, unit: int) -> tuple[int, Int64, Int64]:
    """Return the length of the runs of one unit, and their offsets in the first one.

    An axis whose stride equals the run's length on both sides lengthens the run; the others
    give one run for each of their indices.
    """
    prefill, decode = item.prefill, item.decode
    heads = item.head_stop - item.head_start
    axes = [_Axis(heads, prefill.head_stride, decode.head_stride)]
    if prefill.token_stride is None or decode.token_stride is None:
        length = prefill.block_tokens * prefill.token_bytes
    else:
        length = prefill.token_bytes
        axes.append(_Axis(unit, prefill.token_stride, decode.token_stride))
    while inner := next((axis for axis in axes if axis.prefill == axis.decode == length), None):
        axes.remove(inner)
        length *= inner.length

    def offsets(region: Region, strides: Sequence[int]) -> Int64:
        start = (item.head_start - region.head_start) * region.head_stride
        offset = np.array([start], np.int64)
        for axis, stride in zip(axes, strides, strict=True):
            offset = np.add.outer(offset, np.arange(axis.length) * stride).ravel()
        return offset

    return (
        length,
        offsets(prefill, [axis.prefill for axis in axes]),
        offsets(decode, [axis.decode for axis in axes]),
    )
