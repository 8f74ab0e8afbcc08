"""Where a receiver learns about prefill engines; ``peers.PeerBook`` implements it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from pdcluster_connector.protocol.failure import Failure
from pdcluster_connector.protocol.messages import EngineMetadata


class PeerSource(Protocol):
    """Where a receiver learns about prefill engines. Every method is thread-safe.

    Attributes:
        on_gone: called as ``on_gone(engine_id, failure)`` on the source's own thread when a
            connected incarnation has vanished; it must not block. May be None.
    """

    on_gone: Callable[[str, Failure], None] | None

    def connect(
        self,
        engine_id: str,
        host: str,
        port: int,
        deadline: Callable[[], float],
        done: Callable[[EngineMetadata | Failure], None],
    ) -> None:
        """Ask for an engine's metadata; ``done`` is called once, on the source's thread.

        Never blocks and never raises. Attempts go on until ``deadline()`` (time.monotonic
        seconds), which may move meanwhile; concurrent calls for one engine share the attempts;
        the metadata is kept until the engine is gone or forgotten. A refusal is reported at once.
        """
        ...

    def forget(self, engine_id: str, failure: Failure) -> None:
        """Drop what is known of an engine, because of ``failure``.

        The next ``connect`` shakes hands anew.
        """
        ...
