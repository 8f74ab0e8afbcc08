"""Python programs that begin at once: a host imports what they need and forks each of them.

An import of aiohttp takes longer than what most tests ask of a program. :class:`ForkedPython` is
the test's side and starts the host; :class:`Forked` is the handle of one program, used like
``subprocess.Popen``. Linux only, for its descriptors of processes.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

MOST = 1 << 20  # bytes of one message: arguments and environment


class Forked:
    """One forked program, in a session of its own."""

    def __init__(self, news: socket.socket) -> None:
        self._news = news
        self.pid = int(news.recv(100))
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code; minus the signal's number if one killed it; None while it runs."""
        if self.returncode is None and select.select([self._news], [], [], 0)[0]:
            self.returncode = int(self._news.recv(100))
            self._news.close()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end; raises subprocess.TimeoutExpired as Popen does."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
            select.select([self._news], [], [], left)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it ends right now
                os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL, unless it has ended."""
        self.send_signal(signal.SIGKILL)


class ForkedPython:
    """Starts the host: a Python with ``environment`` that has imported ``modules``."""

    def __init__(
        self, *modules: str, path: Sequence[Path] = (), environment: Mapping[str, str]
    ) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        words = [str(theirs.fileno()), json.dumps([str(folder) for folder in path]), *modules]
        with theirs:
            self._host = subprocess.Popen(
                [sys.executable, __file__, *words],
                env=dict(environment),
                pass_fds=[theirs.fileno()],
            )

    def start(
        self, *program: str, stdout: int, stderr: int, environment: Mapping[str, str]
    ) -> Forked:
        """Run a script, a folder or a zip file with its arguments, as ``python`` does."""
        news, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            message = json.dumps([program, dict(environment), os.getcwd()]).encode()
            socket.send_fds(self._control, [message], [stdout, stderr, theirs.fileno()])
        return Forked(news)

    def close(self) -> None:
        """End the host. Programs that still run go on."""
        self._control.close()
        self._host.wait()


def _host(control: socket.socket) -> list[str]:
    """Fork a program for each message. Returns in the children alone: their command lines."""
    gc.collect()
    gc.freeze()  # a collection in a child would copy all that was imported
    running: dict[int, tuple[int, int]] = {}
    while True:
        for ready in select.select([control, *running], [], [])[0]:
            if ready is not control:
                pid, news = running.pop(ready)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                _say(news, code)
                os.close(news)
                os.close(ready)
                continue
            message, descriptors, _, _ = socket.recv_fds(control, MOST, 3)
            if not message:
                os._exit(0)
            program, environment, folder = json.loads(message)
            if (pid := os.fork()) == 0:
                return _become(program, environment, folder, descriptors)
            out, err, news = descriptors
            os.close(out)
            os.close(err)
            _say(news, pid)
            running[os.pidfd_open(pid)] = pid, news


def _say(news: int, number: int) -> None:
    with contextlib.suppress(OSError):  # nobody listens any more
        os.write(news, b"%d" % number)


def _become(
    program: list[str], environment: dict[str, str], folder: str, descriptors: list[int]
) -> list[str]:
    os.setsid()
    os.dup2(descriptors[0], 1)
    os.dup2(descriptors[1], 2)
    os.closerange(3, 4096)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    return program


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    sys.path[:0] = json.loads(sys.argv[2])
    for module in sys.argv[3:]:
        importlib.import_module(module)
    sys.argv = _host(control)
    control.detach()  # closed in the child
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
