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

_PF_EXITING: Final = 4


def tell_deaths(tell: Callable[[str], None] = say) -> Callable[[], None]:
    """From now on tell of each child of this process that a signal ended; returns the way back.

    Python's own ``multiprocessing`` is listened to, whichever of its start methods made the child.
    """
    poll, kill = Popen.poll, os.kill
    sent: set[tuple[int, int]] = set()

    def telling_poll(self: Popen, flag: int = os.WNOHANG) -> int | None:
        before = self.returncode
        code = poll(self, flag)
        if before is None and code is not None and code < 0 and (self.pid, -code) not in sent:
            with contextlib.suppress(Exception):  # an engine never fails for its obituary
                tell(obituary(_name(self), self.pid, -code))
        return code

    def noting_kill(pid: int, number: int) -> None:
        # vLLM learns of an end by a closed pipe, and signals a child that is still on its way out.
        if not _is_ending(pid):
            sent.add((pid, int(number)))
        kill(pid, number)

    def back() -> None:
        Popen.poll, os.kill = poll, kill

    Popen.poll, os.kill = telling_poll, noting_kill
    return back


def _is_ending(pid: int) -> bool:
    """Whether a process has begun to end, so that no signal is the cause of it any more."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        return fields[0] in (b"Z", b"X") or bool(int(fields[6]) & _PF_EXITING)
    except (OSError, ValueError, IndexError):
        return False


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
