"""Memory in slices: where an allocation is cut for registration, and descriptor rows at the seams.

vLLM may put all layers into one allocation of tens of GiB. Network cards lose speed on registered
memory above 4 GiB (mlx5: 45 %, LMCache #4432), so an allocation is registered in slices. NIXL needs
each strided row to lie in one slice, so a row that reaches over a seam becomes two. The indices of
descriptors stay the same, because they are counted over all rows.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from pdcluster_connector.compat.reasons import Reason
from pdcluster_connector.plan import PlanError, descriptors, geometry

SLICE_BYTES = 4 * 2**30
PAGE_BYTES = 64 * 1024  # GPU memory is pinned in such pages; seams lie between them if possible
MOST_ROWS = 2**20
_TRIES = 128

Span = tuple[int, int]  # first address, and the one behind the last


def joined(spans: Iterable[Span]) -> list[Span]:
    """Return spans that cover the same bytes and do not overlap; neighbours stay apart."""
    found: list[Span] = []
    for start, stop in sorted(spans):
        if found and start < found[-1][1]:
            found[-1] = found[-1][0], max(stop, found[-1][1])
        else:
            found.append((start, stop))
    return found


def sliced(span: Span, regions: Sequence[geometry.Region], limit: int = SLICE_BYTES) -> list[Span]:
    """Cut ``span`` so that no descriptor of ``regions``, which lie in it, crosses a seam.

    Slices are as long as ``limit`` allows, and longer where no seam is possible before.
    """
    start, stop = span
    found = [start]
    if stop - start > limit:
        grids = {(r.block_stride, r.base % r.block_stride) for r in regions}
        runs = _runs(regions)
        while (seam := _seam(found[-1], stop, grids, runs, limit)) is not None:
            found.append(seam)
    return list(pairwise([*found, stop]))


@dataclass(frozen=True, slots=True)
class _Run:
    """Bytes that a descriptor may hold; repeated along ``axes``, (stride, count) each."""

    start: int
    length: int
    axes: tuple[tuple[int, int], ...]

    def holds(self, seam: int) -> bool:
        """Whether ``seam`` lies inside of one of the runs."""
        rest = seam - self.start
        for stride, count in self.axes:
            rest -= min(max(0, rest) // stride, count - 1) * stride
        return 0 < rest < self.length


def _runs(regions: Sequence[geometry.Region]) -> list[_Run]:
    """Return the runs that hold each region's descriptors: a block, or one head of a block.

    Neighbours in a block become one run: with blocks outermost, a descriptor spans layers.
    """
    found: list[_Run] = []
    for run in sorted((_run(region) for region in regions), key=lambda run: (run.axes, run.start)):
        last = found[-1] if found else None
        if last is not None and run.axes == last.axes and run.start <= last.start + last.length:
            length = max(last.length, run.start + run.length - last.start)
            # A run longer than its shortest stride would overlap its own next repetition.
            strides = [stride for stride, count in run.axes if count > 1]
            if length <= min(strides, default=SLICE_BYTES):
                found[-1] = _Run(last.start, length, run.axes)
                continue
        found.append(run)
    return found


def _run(region: geometry.Region) -> _Run:
    length, axes = region.block_layout
    inner = [(stride, count) for stride, count in axes if stride < region.block_stride]
    outer = [(stride, count) for stride, count in axes if stride >= region.block_stride]
    length += sum(stride * (count - 1) for stride, count in inner)
    blocks = (region.block_stride, region.num_blocks)
    return _Run(region.base, length, tuple(sorted([*outer, blocks], reverse=True)))


def _seam(
    after: int, stop: int, grids: Collection[Span], runs: Sequence[_Run], limit: int
) -> int | None:
    """Return the next seam, where a block begins in one of the ``grids`` (stride, remainder).

    None if the rest is one slice, or cannot be cut.
    """
    most = after + limit
    if stop <= most:
        return None
    before, behind = [], []
    for stride, phase in grids:
        last = most - (most - phase) % stride
        before += [seam for i in range(_TRIES) if (seam := last - i * stride) > after]
        behind += [seam for i in range(1, _TRIES) if (seam := last + i * stride) < stop]
    clear = [
        seam for seam in sorted(before, reverse=True) if not any(run.holds(seam) for run in runs)
    ]
    between_pages = [seam for seam in clear if seam % PAGE_BYTES == 0]
    if clear:
        return (between_pages or clear)[0]
    return next((seam for seam in sorted(behind) if not any(r.holds(seam) for r in runs)), None)


def seams(spans: Iterable[Span]) -> tuple[int, ...]:
    """Return the addresses at which one of ``spans`` ends and another begins."""
    known = list(spans)
    return tuple(sorted({start for start, _ in known} & {stop for _, stop in known}))


def split_rows(rows: descriptors.Rows, cuts: Sequence[int], side: str) -> descriptors.Rows:
    """Return rows of the same descriptors that do not reach over any of ``cuts``.

    Raises:
        PlanError: LayoutUnsupported, where a descriptor itself lies across a cut.
    """
    if not len(cuts) or not len(rows):
        return rows
    at = np.unique(np.asarray(cuts, np.int64))
    address, length, _, stride, count = rows.T.astype(np.int64)
    end = address + (count - 1) * stride + length
    low = np.searchsorted(at, address, side="right")  # the first cut behind the row's start
    crossed = np.maximum(np.searchsorted(at, end, side="left") - low, 0)
    if int(crossed.sum()) + len(rows) > MOST_ROWS:
        message = f"{side}'s memory is registered in too many slices"
        raise PlanError(Reason.LAYOUT_UNSUPPORTED, message)
    if not crossed.any():
        return rows
    # One entry for each row and each cut that it reaches over, in order.
    row = np.repeat(np.arange(len(rows)), crossed)
    cut = at[np.arange(row.size) + np.repeat(low - np.cumsum(crossed) + crossed, crossed)]
    # How many descriptors of the row end at the cut or before it.
    before = cut - address[row] - length[row]
    whole = np.where(before < 0, 0, 1 + before // np.maximum(1, stride[row]))
    whole = np.minimum(whole, count[row])
    if ((whole < count[row]) & (address[row] + whole * stride[row] < cut)).any():
        message = f"one descriptor of {side}'s KV lies in two slices of its registered memory"
        raise PlanError(Reason.LAYOUT_UNSUPPORTED, message)
    inside = (whole > 0) & (whole < count[row])
    starts = np.concatenate([np.arange(len(rows)), row[inside]])
    firsts = np.concatenate([np.zeros(len(rows), np.int64), whole[inside]])
    starts, firsts = np.unique(np.stack([starts, firsts]), axis=1)
    made: descriptors.Rows = rows[starts]
    made[:, 0] += firsts.astype(np.uint64) * made[:, 3]
    ends = np.append(firsts[1:], 0)
    ends[np.append(starts[1:] != starts[:-1], True)] = count
    made[:, 4] = (ends - firsts).astype(np.uint64)
    return made
