"""One request's part of a plan, over all KV cache groups: indices into the plan's descriptors.

Each side's logical block ids become kernel block ids, with the side's own ratio. Then the two lists
of a group are paired by token position. What decode needs depends on the kind of the group:

* full attention and MLA: every token that decode lacks;
* sliding window: of those, the window before ``stop``;
* Mamba: the state after ``stop`` tokens, which is one slot.

This is where block ids from a peer become addresses. Every id and offset is checked against the
cache's bounds before anything is posted. The indices themselves are made when a read is posted, in
slices: those of a long prompt are millions, and numpy lets no other thread run meanwhile.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pdcluster_connector.compat.reasons import Reason
from pdcluster_connector.compat.shape import GroupShape, LayerKind
from pdcluster_connector.plan import CoverageError, PlanError, block_pairs, descriptors, peer_plan
from pdcluster_connector.plan.block_pairs import BlockList, EngineBlocks, GroupBlocks, Int32, Int64


@dataclass(frozen=True, slots=True, eq=False)
class Runs:
    """Descriptors of one stride class: in each run of both sides, the same elements.

    Attributes:
        prefill_runs, decode_runs: where runs begin, paired one with one.
        prefill_elements, decode_elements: from the begin of a run, paired one with one.
    """

    prefill_runs: Int64
    decode_runs: Int64
    prefill_elements: Int64
    decode_elements: Int64

    @property
    def count(self) -> int:
        """How many descriptors these are."""
        return self.prefill_runs.size * self.prefill_elements.size

    def between(self, first: int, stop: int) -> tuple[Int32, Int32]:
        """Return the prefill and the decode indices of the descriptors [first, stop)."""
        if first == 0 and stop == self.count:
            prefill = self.prefill_runs[:, None] + self.prefill_elements
            decode = self.decode_runs[:, None] + self.decode_elements
            return prefill.ravel().astype(np.int32), decode.ravel().astype(np.int32)
        run, element = np.divmod(np.arange(first, stop), max(1, self.prefill_elements.size))
        prefill = self.prefill_runs[run] + self.prefill_elements[element]
        decode = self.decode_runs[run] + self.decode_elements[element]
        return prefill.astype(np.int32), decode.astype(np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class SourceIndices:
    """One request's descriptors with one prefill shard: indices into the source's rows.

    Attributes:
        source: index in ``PeerPlan.sources``.
        nbytes: bytes that they move.
    """

    source: int
    classes: Sequence[Runs]
    nbytes: int

    @property
    def count(self) -> int:
        """How many descriptors these are."""
        return sum(runs.count for runs in self.classes)

    def between(self, first: int, stop: int) -> tuple[Int32, Int32]:
        """Return the flattened prefill and decode indices [first, stop), paired one with one."""
        before, found = 0, [(np.empty(0, np.int32), np.empty(0, np.int32))]
        for runs in self.classes:
            here = max(0, first - before), min(runs.count, stop - before)
            if here[0] < here[1]:
                found.append(runs.between(*here))
            before += runs.count
        if len(found) == 2:
            return found[1]
        prefill, decode = zip(*found, strict=True)
        return np.concatenate(prefill), np.concatenate(decode)

    @property
    def prefill_indices(self) -> Int32:
        """All indices into prefill's rows."""
        return self.between(0, self.count)[0]

    @property
    def decode_indices(self) -> Int32:
        """All indices into decode's rows."""
        return self.between(0, self.count)[1]


def plan_request(
    plan: peer_plan.PeerPlan,
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
        ours, our_blocks = _group(prefill, groups[0])
        theirs, their_blocks = _group(decode, groups[1])
        if LayerKind.MAMBA in (ours.kind, theirs.kind):
            if stop != tokens:
                message = f"the state after {stop} tokens is needed, the ticket's is after {tokens}"
                raise CoverageError(message)
            pairs = _pair_slots(our_blocks, their_blocks)
        else:
            lists = (
                _kernel_blocks(ours, our_blocks, stop),
                _kernel_blocks(theirs, their_blocks, stop),
            )
            first = _first_needed(theirs.window, lists, start, stop, unit)
            pairs = block_pairs.pair_blocks(*lists, first, stop)
        found += descriptor_indices(plan, pairs, groups)
    return found


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
    tokens = group.block_size // max(1, group.kernel_blocks_per_block)
    needed = max(0, -(-(stop - held.first_token) // max(1, tokens)))
    ids = block_pairs.expand_blocks(held.blocks, group.kernel_blocks_per_block, most=needed)
    return BlockList(ids, tokens, held.first_token)


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
    """Return whether ``token`` is the last one of a block that is not held any more."""
    index, offset = divmod(token - held.first_token, held.block_tokens)
    gone = index < 0 or (index < len(held.blocks) and held.blocks[index] < 0)
    return gone and offset == held.block_tokens - 1


def _pair_slots(prefill: GroupBlocks, decode: GroupBlocks) -> block_pairs.Pairs:
    """Pair two slots: each a list of one block of one token."""
    slots = []
    for side, held in (("prefill", prefill), ("decode", decode)):
        ids = block_pairs.expand_blocks(held.blocks, 1)
        if len(ids) != 1:
            raise CoverageError(f"{side} lists {len(ids)} states, not the running one alone")
        slots.append(BlockList(np.asarray(ids), 1))
    return block_pairs.pair_blocks(slots[0], slots[1], 0, 1)


def descriptor_indices(
    plan: peer_plan.PeerPlan, pairs: block_pairs.Pairs, groups: tuple[int, int] = (0, 0)
) -> list[SourceIndices]:
    """Return one request's descriptors in one (prefill, decode) KV cache group, by source.

    Pairs are sorted by prefill block, so that neighbours in memory become neighbours in
    the list and NIXL merges them. The last unit is always moved whole: what it holds behind
    the interval lies in the request's own last block.

    Raises:
        PlanError: TicketInvalid for a prefill block outside its region; otherwise
            CoverageIncomplete, for a decode block outside its region or an interval
            that starts inside of a unit.
    """
    found = []
    for number, source in enumerate(plan.sources):
        chosen = [item for item in source.classes if item.key.groups == groups]
        if not chosen:
            continue
        classes = [_class_runs(item, pairs) for item in chosen]
        nbytes = sum(
            runs.prefill_elements.size * item.unit_bytes
            for runs, item in zip(classes, chosen, strict=True)
        )
        found.append(SourceIndices(source=number, classes=classes, nbytes=nbytes))
    return found


def _class_runs(item: peer_plan.StrideClass, pairs: block_pairs.Pairs) -> Runs:
    key, tokens = item.key, pairs.tokens
    if tokens.size and int(tokens.min()) < 1:
        raise CoverageError("a pair of blocks has no tokens")
    most = int(tokens.max()) if tokens.size else 0
    prefill = _first_unit("prefill", key, pairs, most)
    decode = _first_unit("decode", key, pairs, most)
    order = pairs.prefill.blocks.argsort(kind="stable")
    prefill, decode = prefill[order], decode[order]
    if most > key.unit:
        counts = -(-tokens[order].astype(np.int64) // key.unit)
        before = np.repeat(np.cumsum(counts) - counts, counts)
        inner = np.arange(before.size) - before
        prefill = np.repeat(prefill, counts) + inner * key.prefill.per_unit
        decode = np.repeat(decode, counts) + inner * key.decode.per_unit
    return Runs(item.prefill_first, item.decode_first, prefill, decode)


def _first_unit(name: str, key: descriptors.ClassKey, pairs: block_pairs.Pairs, most: int) -> Int64:
    """Return each pair's first element within a run, after the checks that bound it.

    ``most``: the tokens of the longest pair.
    """
    side: descriptors.Side = getattr(key, name)
    blocks, offsets, size = getattr(pairs, name)
    if size != side.block_tokens:
        message = f"{name} blocks were paired as {size} tokens and have {side.block_tokens}"
        raise CoverageError(message)
    if not len(blocks):
        return np.empty(0, np.int64)
    if int(blocks.view(np.uint32).max()) >= side.num_blocks:  # so are negative ones
        low, high = int(blocks.min()), int(blocks.max())
        reason = Reason.TICKET_INVALID if name == "prefill" else Reason.COVERAGE_INCOMPLETE
        block = low if low < 0 else high
        message = f"{name} block {block} is outside of the cache's {side.num_blocks} blocks"
        raise PlanError(reason, message)
    first: Int64 = blocks.astype(np.int64) * side.per_block
    if most <= size and not offsets.any():
        return first
    offsets = offsets.astype(np.int64)
    if int(offsets.min()) < 0 or int((offsets + pairs.tokens).max()) > size:
        raise CoverageError(f"{name} tokens reach out of their block of {size}")
    units, rest = np.divmod(offsets, key.unit)
    if rest.any():
        message = f"tokens start inside of a {name} block's unit of {key.unit} tokens, "
        raise CoverageError(message + "which can only be moved whole")
    first += units * side.per_unit
    return first
