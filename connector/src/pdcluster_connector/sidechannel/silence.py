"""For how long the addresses of peers have answered nothing."""

import time
from collections.abc import Awaitable
from typing import TypeVar

from pdcluster_connector.sidechannel.handshake import TryAgain

T = TypeVar("T")
Address = tuple[str, int]

SILENT_SECONDS = 5.0  # whoever asks after a longer silence does not wait for the lease's end
MOST_ADDRESSES = 4096


class Silence:
    """The questions that are not answered yet, of a peer book and of links. Thread-safe."""

    def __init__(self) -> None:
        self._asked_at: dict[Address, float] = {}

    async def asking(self, address: Address, question: Awaitable[T]) -> T:
        """Await a question to ``address``, and note whether it is answered."""
        if len(self._asked_at) >= MOST_ADDRESSES:  # of engines that are long gone
            self._asked_at.clear()
        asked = time.monotonic()
        is_first = self._asked_at.setdefault(address, asked) == asked
        is_answered = is_first  # a question that is given up says nothing
        try:
            outcome = await question
            is_answered = not (isinstance(outcome, TryAgain) and outcome.silent)
        finally:
            if is_answered:
                self._asked_at.pop(address, None)
        return outcome

    def seconds(self, address: Address) -> float:
        """Return for how many seconds questions to an address have had no answer."""
        since = self._asked_at.get(address)
        return 0.0 if since is None else time.monotonic() - since

    def is_long(self, address: Address, since: float | None = None) -> bool:
        """Whether nothing new is begun with a peer before it answers.

        ``since``: when what asks began; it is not new if it began before the peer was silent.
        """
        asked = self._asked_at.get(address)
        begun = time.monotonic() if since is None else since
        return asked is not None and begun - asked >= SILENT_SECONDS
