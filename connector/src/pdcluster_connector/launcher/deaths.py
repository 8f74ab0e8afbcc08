"""Says which of vLLM's processes was ended by which signal, in the output of its parent.

Only a parent learns how its child ended. vLLM's API server reads that of its engine core and
does not print it: of an engine core that was killed, its log tells that a handler failed. So
the parent prints a line of ours for each child that a signal ended and that it did not end
itself; :mod:`.last_words` reads it.
"""

from __future__ import annotations

import contextlib
import multiprocessing.process
import os
import signal
from collections.abc import Callable
from multiprocessing.popen_fork import Popen
from typing import Final

from pdcluster_connector.launcher.terminal import say

_ENDED_BY_US: Final = "_pdcluster_ended_by_us"


def tell_deaths(tell: Callable[[str], None] = say) -> Callable[[], None]:
    """From now on tell of each child of this process that a signal ended; returns the way back.

    Python's own ``multiprocessing`` is listened to, whichever of its start methods made the child.
    """
    poll, send_signal = Popen.poll, Popen._send_signal  # noqa: SLF001 - there is no other place

    def telling_poll(self: Popen, flag: int = os.WNOHANG) -> int | None:
        before = self.returncode
        code = poll(self, flag)
        asked = getattr(self, _ENDED_BY_US, False)
        if before is None and code is not None and code < 0 and not asked:
            with contextlib.suppress(Exception):  # an engine never fails for its obituary
                tell(obituary(_name(self), self.pid, -code))
        return code

    def marking_send_signal(self: Popen, number: int) -> None:
        setattr(self, _ENDED_BY_US, True)
        send_signal(self, number)

    def back() -> None:
        Popen.poll, Popen._send_signal = poll, send_signal  # noqa: SLF001

    Popen.poll, Popen._send_signal = telling_poll, marking_send_signal  # noqa: SLF001
    return back


def obituary(name: str, pid: int, number: int) -> str:
    """One line; :data:`.last_words.KILLED` reads it."""
    try:
        how = signal.Signals(number).name
    except ValueError:
        how = f"signal {number}"
    return f"vLLM's process {name} (pid {pid}) was killed by {how}"


def _name(popen: Popen) -> str:
    for process in tuple(multiprocessing.process._children):  # noqa: SLF001
        if getattr(process, "_popen", None) is popen:
            return str(process.name)
    return "without-a-name"
