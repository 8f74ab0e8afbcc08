"""Where the KV of one shard lies in memory, and whether such memory can exist.

A layer's cache in vLLM is logically ``[block, head, token, content]``, whatever its physical order
(vLLM RFC #42082). Strides say where each of them lies. Some backends pack the inside of a block:
CPU_ATTN keeps K of all tokens of a head, then V of all of them. Such a region has no token stride.
It can be cut by head and not by token. A block that holds its own scales is described so, too: as
equal shares for its heads. It is never cut, because a rule asks for equal heads on both sides.

``vllm/kv_caches/registration.py`` makes these regions for each layer of its rank:

* attention: one region (``part`` empty), or one for K and one for V where a backend keeps them
  apart; ``block_tokens`` is the kernel block's: the group's block size divided by its ratio;
* MLA: one region with heads [0, 1) on every rank;
* Mamba: one region for each :class:`~pdcluster_connector.compat.shape.PartShape` of the layer,
  ``block_tokens`` 1 (a slot counts as one token), ``num_blocks`` the logical blocks,
  ``block_stride`` the page's stride, ``token_bytes`` the part's ``head_bytes``. With vLLM's DS
  order of the conv state (dim, rows), ``conv.x`` is cut into Mamba heads, ``conv.b`` and
  ``conv.c`` into groups (:func:`~pdcluster_connector.plan.rank_pairs.head_interval` says which
  ones a rank holds, also where groups are replicated).

Regions of different groups may lie on the same memory (vLLM's hybrid tensors do).

A peer states its regions itself, and this engine's own come from strides. The handshake refuses a
region with a fault, and the planner computes addresses only from regions without one. So every
descriptor lies inside of its region.
"""

from msgspec import Struct

from pdcluster_connector.compat import shape


class MemoryRange(Struct, frozen=True):
    """Memory to register, or registered for peers: ``length`` bytes from ``address`` on."""

    address: shape.Address
    length: shape.Bytes
    device: shape.DeviceNumber = 0
    memory: shape.Memory = shape.Memory.DRAM

    @property
    def span(self) -> tuple[int, int]:
        """Return the first address, and the one behind the last."""
        return self.address, self.address + self.length


class Region(Struct, frozen=True, array_like=True):
    """One layer's KV cache in one shard. Handshakes send it as an array of its fields.

    Attributes:
        layer: vLLM's layer name; layers are matched by it.
        base: address of block 0.
        num_blocks: kernel blocks.
        block_stride: bytes from one block to the next.
        block_tokens: tokens in a kernel block.
        head_start, head_stop: global KV heads that this shard holds.
        head_stride: bytes from one head to the next in a block.
        token_stride: bytes from one token to the next in a head; None if it is packed.
        token_bytes: bytes of one token of one head.
        device: device index.
        memory: NIXL memory type.
        group: KV cache group of the layer in its own engine.
        part: which of the layer's arrays; empty if it has one.
    """

    layer: shape.Identifier
    base: shape.Address
    num_blocks: shape.Count
    block_stride: shape.Bytes
    block_tokens: shape.Count
    head_start: shape.HeadNumber
    head_stop: shape.HeadNumber
    head_stride: shape.Bytes
    token_stride: shape.Bytes | None
    token_bytes: shape.Bytes
    device: shape.DeviceNumber = 0
    memory: shape.Memory = shape.Memory.DRAM
    group: shape.GroupNumber = 0
    part: shape.Name = ""

    @property
    def heads(self) -> int:
        """Return the number of KV heads that this shard holds."""
        return self.head_stop - self.head_start

    @property
    def block_layout(self) -> tuple[int, list[tuple[int, int]]]:
        """Return how the bytes of a block lie: a length, and the axes over which it repeats.

        The length is that of one token of one head, or of one head where a block is packed.
        Each axis is (stride in bytes, count): heads, then tokens.
        """
        axes = [(self.head_stride, self.heads)]
        if self.token_stride is None:
            return self.block_tokens * self.token_bytes, axes
        return self.token_bytes, [*axes, (self.token_stride, self.block_tokens)]


class Shard(Struct, frozen=True):
    """One rank's regions.

    Attributes:
        rank: (pipeline rank, tensor rank).
        regions: of all its layers.
        seams: addresses at which one registered slice of memory ends and the next one begins.
    """

    rank: tuple[int, int]
    regions: tuple[Region, ...]
    seams: tuple[int, ...] = ()


ADDRESS_LIMIT = 2**63
EXTENT_LIMIT = 2**48
SIZE_LIMIT = 2**31
STRIDES = ("block_stride", "head_stride", "token_stride")


def region_fault(region: Region) -> str | None:
    """Return what is wrong with a region, with the values; None for a sound one."""
    for field in ("num_blocks", "block_tokens", "token_bytes", "heads"):
        value = getattr(region, field)
        if not 1 <= value < SIZE_LIMIT:
            return f"{field} is {value}"
    if region.head_start < 0:
        return f"head_start is {region.head_start}"
    found = {name: getattr(region, name) for name in STRIDES}
    strides = {name: stride for name, stride in found.items() if stride is not None}
    shown = ", ".join(f"{name} {stride}" for name, stride in strides.items())
    extent = region_extent(region)
    if extent is None:
        return f"{shown}: blocks, heads and tokens overlap"
    if min(strides.values()) < 1:
        return f"{shown}: a stride is not positive"
    end = region.base + extent
    if region.base < 0 or end > ADDRESS_LIMIT or extent > EXTENT_LIMIT:
        return f"addresses [{region.base}, {end}) do not exist"
    return None


def region_extent(region: Region) -> int | None:
    """Return the bytes from the region's first to behind its last.

    None if blocks, heads or tokens overlap.
    The axes may be nested in any order: vLLM's ``LHBNC`` has the blocks inside of a head.
    """
    extent, axes = region.block_layout
    axes.append((region.block_stride, region.num_blocks))
    for stride, count in sorted((stride, count) for stride, count in axes if count > 1):
        if stride < extent:
            return None
        extent += stride * (count - 1)
    return extent
