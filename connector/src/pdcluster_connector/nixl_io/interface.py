"""The interface to NIXL that the rest of the connector uses. It has two implementations.

The real one is :class:`pdcluster_connector.nixl_io.nixl_agent.NixlAgent`; the one in memory,
with faults on request, is in :mod:`pdcluster_connector.testing.nixl`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from pdcluster_connector.compat.shape import Memory
from pdcluster_connector.plan import descriptors, geometry

Indices = NDArray[np.int32]


class NixlErrorKind(StrEnum):
    """What a failed NIXL call means for the transfer or the peer."""

    DISCONNECTED = "disconnected"  # the transport lost the peer
    TRANSPORT = "transport"  # the backend failed the operation
    LOST = "lost"  # NIXL has dropped the peer; its DMA may still run
    INVALID = "invalid"  # refused before anything happened
    INTERNAL = "internal"  # anything else


# The link to the peer is at fault, not one call.
OF_PEER = frozenset({NixlErrorKind.DISCONNECTED, NixlErrorKind.TRANSPORT, NixlErrorKind.LOST})


class NixlError(Exception):
    """A NIXL call failed.

    Attributes:
        kind: what failed, as far as NIXL reports it.
        flying: whether this transfer may still write bytes. False if it was refused before it
            was posted, or if the transport itself ended it.
    """

    def __init__(self, kind: NixlErrorKind, message: str, *, flying: bool = False) -> None:
        super().__init__(message)
        self.kind = kind
        self.flying = flying


class AgentSurvivedError(NixlError):
    """The agent could not be destroyed: its transfers may still write."""


@dataclass(eq=False, slots=True)
class Dlist:
    """A prepared descriptor list of one side; ``native`` is the agent's own."""

    native: Any
    peer: str | None


@dataclass(eq=False, slots=True)
class Handle:
    """One posted transfer; ``native`` is the agent's own."""

    native: Any


class AgentInterface(Protocol):
    """One NIXL agent. Every call may raise :class:`NixlError` and nothing else."""

    name: str

    def register(self, ranges: Sequence[geometry.MemoryRange]) -> None:
        """Register memory; it stays registered until :meth:`close`."""

    def metadata(self) -> bytes:
        """Return what a peer's :meth:`add_peer` needs. A capability: whoever has it can read."""

    def add_peer(self, metadata: bytes) -> str:
        """Load a peer's metadata; returns its agent name."""

    def remove_peer(self, name: str) -> None:
        """Forget a peer. Its transfers must have ended: this does not stop them."""

    def prepare(self, peer: str | None, rows: descriptors.Rows, memory: Memory) -> Dlist:
        """Prepare (n, 5) rows (address, length, device, stride, count).

        ``peer`` None means this agent's own memory. Element k of row r has the flattened
        index ``sum(counts before r) + k``. A row lies in one registered range as a whole.
        """

    def read(
        self, local: Dlist, local_indices: Indices, remote: Dlist, remote_indices: Indices
    ) -> Handle:
        """Make and post one READ of remote elements into the local elements of equal position.

        An error whose ``flying`` is true leaves a transfer that nobody can observe.
        """

    def state(self, handle: Handle) -> Literal["DONE", "PROC"]:
        """Return how far the transfer is; an error whose ``flying`` is false ended it."""

    def release(self, handle: Handle) -> None:
        """Free a handle. Does not stop a transfer under way."""

    def release_dlist(self, dlist: Dlist) -> None:
        """Free a descriptor list that no transfer uses any more."""

    def close(self) -> None:
        """Destroy the agent, which stops its DMA; :class:`AgentSurvivedError` if it lives on."""
