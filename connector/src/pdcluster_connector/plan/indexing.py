"""From one request's pairs to flattened descriptor indices, without a loop over descriptors.

This is where block ids that others sent become addresses: every id and offset is checked
against the cache's bounds first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from pdcluster_connector.compat.reasons import Reason
from pdcluster_connector.plan.descriptors import FamilyKey, Parts, Side
from pdcluster_connector.plan.errors import CoverageError, PlanError
from pdcluster_connector.plan.pairing import LIMIT, Int32, Int64, Pairs


@dataclass(frozen=True, slots=True, eq=False)
class Family:
    """Parts that are indexed together.

    Attributes:
        key: how they repeat.
        prefill_first, decode_first: flattened index of each part's first descriptor.
        grain_bytes: bytes of one grain over all parts.
    """

    key: FamilyKey
    prefill_first: Int64
    decode_first: Int64
    grain_bytes: int


def index_families(parts: Mapping[FamilyKey, Parts]) -> tuple[Family, ...]:
    """Give every descriptor of one source its index, family by family.

    Raises:
        PlanError: LayoutUnsupported, for more descriptors than int32 can count.
    """
    found = []
    prefill_used = decode_used = 0
    for key, part in parts.items():
        number = np.arange(part.length.size, dtype=np.int64)
        found.append(
            Family(
                key=key,
                prefill_first=prefill_used + number * key.prefill.elements,
                decode_first=decode_used + number * key.decode.elements,
                grain_bytes=int(part.length.sum()),
            )
        )
        prefill_used += number.size * key.prefill.elements
        decode_used += number.size * key.decode.elements
    if max(prefill_used, decode_used) > LIMIT:
        message = f"{max(prefill_used, decode_used)} descriptors are more than NIXL can index"
        raise PlanError(Reason.LAYOUT_UNSUPPORTED, message)
    return tuple(found)


def family_indices(family: Family, pairs: Pairs) -> tuple[Int32, Int32, int]:
    """Return prefill indices, decode indices and the bytes that they move.

    Raises:
        PlanError: as :meth:`PeerPlan.indices`.
    """
    key = family.key
    first = {
        "prefill": _first_grain("prefill", key, pairs, pairs.prefill_block, pairs.prefill_offset),
        "decode": _first_grain("decode", key, pairs, pairs.decode_block, pairs.decode_offset),
    }
    order = np.argsort(pairs.prefill_block, kind="stable")
    counts = -(-pairs.tokens[order].astype(np.int64) // key.grain)
    before = np.repeat(np.cumsum(counts) - counts, counts)
    inner = np.arange(before.size) - before
    indices = []
    for side, parts, start in (
        (key.prefill, family.prefill_first, first["prefill"]),
        (key.decode, family.decode_first, first["decode"]),
    ):
        elements = np.repeat(start[order], counts) + inner * side.steps[1]
        indices.append(np.add.outer(parts, elements).ravel().astype(np.int32))
    return indices[0], indices[1], family.grain_bytes * int(before.size)


def _first_grain(name: str, key: FamilyKey, pairs: Pairs, blocks: Int32, offsets: Int32) -> Int64:
    """Return each pair's first element within a part, after the checks that bound it."""
    prefill = name == "prefill"
    side: Side = key.prefill if prefill else key.decode
    size = pairs.prefill_block_tokens if prefill else pairs.decode_block_tokens
    if size != side.block_tokens:
        message = f"{name} blocks were paired as {size} tokens and have {side.block_tokens}"
        raise CoverageError(message)
    if not len(pairs):
        return np.empty(0, np.int64)
    low, high = int(blocks.min()), int(blocks.max())
    if low < 0 or high >= side.num_blocks:
        reason = Reason.TICKET_INVALID if prefill else Reason.COVERAGE_INCOMPLETE
        block = low if low < 0 else high
        message = f"{name} block {block} is outside of the cache's {side.num_blocks} blocks"
        raise PlanError(reason, message)
    end = offsets.astype(np.int64) + pairs.tokens
    if int(offsets.min()) < 0 or int(pairs.tokens.min()) < 1 or int(end.max()) > size:
        raise CoverageError(f"{name} tokens reach out of their block of {size}")
    grain, rest = np.divmod(offsets.astype(np.int64), key.grain)
    if rest.any():
        message = f"tokens start inside of a {name} block's unit of {key.grain} tokens, "
        raise CoverageError(message + "which can only be moved whole")
    per_block, per_grain = side.steps
    first: Int64 = blocks.astype(np.int64) * per_block + grain * per_grain
    return first
