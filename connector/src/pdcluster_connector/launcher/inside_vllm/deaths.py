"""Prints which of vLLM's processes was ended by which signal, in the output of its parent.

Only a parent learns how its child ended. vLLM's API server learns this about its engine core but
does not print it. If the engine core was killed, the log only says that a handler failed. So the
parent prints a line of ours for each child that was ended by a signal from somebody else.
:mod:`..engine.last_words` reads that line.
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
    """Report each child of this process that a signal ends; returns a function that stops this.

    It hooks into Python's own ``multiprocessing``, for all of its start methods.
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
    """Whether a process has begun to end: a signal that comes now is not the cause of its end."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        return fields[0] in (b"Z", b"X") or bool(int(fields[6]) & _PF_EXITING)
    except (OSError, ValueError, IndexError):
        return False


def obituary(name: str, pid: int, number: int) -> str:
    """Return the line that :data:`..engine.last_words.KILLED` reads."""
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
