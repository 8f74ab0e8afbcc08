"""What one READ of the in-memory NIXL does: lands, waits, fails, or lies."""

from __future__ import annotations

from dataclasses import dataclass

from pdcluster_connector.nixl_io.interface import NixlErrorKind


@dataclass(frozen=True, slots=True)
class Behaviour:
    """What one transfer does.

    Attributes:
        polls: this many polls answer PROC before the transfer lands (or ``poll_error`` comes).
        delay: seconds during which polls are answered PROC.
        reorder: the bytes land from the last descriptor to the first.
        drop: the last descriptor's bytes never come, and the transfer is DONE all the same.
        corrupt: the first byte that lands is a wrong one.
        late: DONE is answered while the bytes are still under way; :meth:`.nixl.Fabric.land` brings
            them.
        hang: every poll answers PROC; bytes move only by :meth:`.nixl.Fabric.land`.
        post_error: posting raises this. With ``hang``, the bytes are under way nevertheless
            (not for DISCONNECTED).
        poll_error: polling raises this. DISCONNECTED and TRANSPORT end the transfer. After the
            other errors, its bytes may still land.
        poll_raises: polling raises exactly this exception (a broken agent).
        refuse_release: releasing the handle raises while the transfer is under way.
    """

    polls: int = 0
    delay: float = 0.0
    reorder: bool = False
    drop: bool = False
    corrupt: bool = False
    late: bool = False
    hang: bool = False
    post_error: NixlErrorKind | None = None
    poll_error: NixlErrorKind | None = None
    poll_raises: BaseException | None = None
    refuse_release: bool = False


@dataclass(eq=False, slots=True)
class Transfer:
    """One READ: (destination, source, length) copies that are still to be made."""

    agent: str
    peer: str
    copies: list[tuple[int, int, int]]
    behaviour: Behaviour = Behaviour()
    polls: int = 0
    error: NixlErrorKind | None = None
    due: float = 0.0
    spoiled: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes not moved yet."""
        return sum(length for _, _, length in self.copies)
