"""Plans with a fault, by name: what a comparison must notice."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from pdcluster_connector.plan.request_descriptors import Runs, SourceIndices

Spoiler = Callable[[SourceIndices], SourceIndices]


def remade(
    part: SourceIndices,
    prefill_indices: np.ndarray | None = None,
    decode_indices: np.ndarray | None = None,
    nbytes: int | None = None,
) -> SourceIndices:
    """The same with other indices: one run from 0, and what is given as its elements."""
    prefill = part.prefill_indices if prefill_indices is None else prefill_indices
    decode = part.decode_indices if decode_indices is None else decode_indices
    zero = np.zeros(1, np.int64)
    runs = Runs(zero, zero, prefill.astype(np.int64), decode.astype(np.int64))
    return SourceIndices(part.source, [runs], part.nbytes if nbytes is None else nbytes)


def shifted(part: SourceIndices) -> SourceIndices:
    """Every run lands in its neighbour's place."""
    return remade(part, decode_indices=np.roll(part.decode_indices, 1))


def halved(part: SourceIndices) -> SourceIndices:
    """Half of the runs are left out."""
    half = len(part.prefill_indices) // 2
    return remade(
        part,
        prefill_indices=part.prefill_indices[:half],
        decode_indices=part.decode_indices[:half],
        nbytes=part.nbytes // 2,
    )


def doubled(part: SourceIndices) -> SourceIndices:
    """Every run is moved twice."""
    return remade(
        part,
        prefill_indices=np.tile(part.prefill_indices, 2),
        decode_indices=np.tile(part.decode_indices, 2),
        nbytes=part.nbytes * 2,
    )


def strayed(part: SourceIndices) -> SourceIndices:
    """One run lands in a block that is not the request's (block 0 of the first array)."""
    decode = part.decode_indices.copy()
    decode[0] = 0
    return remade(part, decode_indices=decode)


SPOILERS: dict[str, Spoiler] = {
    spoil.__name__: spoil for spoil in (shifted, halved, doubled, strayed)
}
