"""Notices that the transfer thread hangs in one call, which nothing else could notice.

Deadlines and quarantines are kept by the transfer thread itself. While a call of NIXL does not
return, no receive fails and none ends. A process cannot end such a call. So the worker ends, and
the launcher starts the engine anew. It watches no receive: ``transfer/receive.py``
decides when a receive is given up.

The clock alone proves nothing: it also goes on while the whole process is stopped (a frozen cgroup,
a paused machine, SIGSTOP). The watched thread did not run either then. So the watchdog counts its
own looks, too: a piece of work is over its limit when so many looks in a row have found it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

LOOKS: Final = 4  # at one call, before it is over its limit


class Watchdog:
    """Watches one thread.

    Args:
        name: of the watched thread, for the message.
        seconds: how long one piece of work may last.
        since: says when the thread began its present piece of work; None while it waits for work.
        clock: seconds.
        hangs: called once, with a sentence, on the watchdog's own thread.
    """

    def __init__(
        self,
        name: str,
        seconds: float,
        *,
        since: Callable[[], float | None],
        clock: Callable[[], float],
        hangs: Callable[[str], None],
    ) -> None:
        self._name = name
        self._seconds = seconds
        self._clock = clock
        self._hangs = hangs
        self._since = since
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name=f"{name}-watchdog", daemon=True)

    def start(self) -> None:
        """Start to watch."""
        self._thread.start()

    def stop(self) -> None:
        """Watch no more. May be called before :meth:`start`."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(1.0)

    def _watch(self) -> None:
        seen, looks = None, 0
        while not self._ended.wait(self._seconds / LOOKS):
            since = self._since()
            looks = looks + 1 if since == seen else 1
            seen = since
            if since is None or looks < LOOKS:
                continue
            if (lasts := self._clock() - since) > self._seconds:
                self._hangs(
                    f"{self._name} has been in one call for {lasts:.0f} s. Most likely NIXL or its "
                    "transport hangs: look for errors of the network or of its driver"
                )
                return
