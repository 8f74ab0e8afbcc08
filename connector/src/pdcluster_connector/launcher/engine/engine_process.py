"""The engine as a child process: output, signals, reaping, and nothing left behind."""

import asyncio
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from pdcluster_connector.protocol import launcher_documents

_PR_SET_CHILD_SUBREAPER: Final = 36
_MAX_PARTIAL_LINE: Final = 64 * 1024
_READ_SIZE: Final = 64 * 1024

# Waits until the launcher has ended, for whatever reason, and kills the engine's process group.
_GUARD: Final = "import os, sys; sys.stdin.buffer.read(); os.killpg(int(sys.argv[1]), 9)"

OnLine = Callable[[str], None]


def engine_environment(package: Path, control: str, token: str) -> dict[str, str]:
    """Return the environment of an engine: ours, and what its connector needs.

    Args:
        package: folder or zip file of the connector.
        control: address of the launcher that its ranks report to.
        token: for these reports.
    """
    inherited = os.environ.get("PYTHONPATH", "")
    return {
        **os.environ,
        "PYTHONPATH": f"{package}{os.pathsep}{inherited}" if inherited else str(package),
        launcher_documents.URL_VARIABLE: control,
        launcher_documents.TOKEN_VARIABLE: token,
    }


class EngineProcess:
    """One engine and all of its descendants. Lives in an asyncio loop of the main thread.

    Its output passes to this process's own stdout and stderr byte by byte; every complete line
    also goes to ``on_line`` (in the reading thread).
    """

    def __init__(self, on_line: OnLine) -> None:
        self._on_line = on_line
        self._process: subprocess.Popen[bytes] | None = None
        self._guard: subprocess.Popen[bytes] | None = None
        self._exited: asyncio.Future[int] | None = None
        self._pumps: list[threading.Thread] = []

    @property
    def pid(self) -> int:
        """The engine's process id, which is its process group's id too; 0 before the start."""
        return self._process.pid if self._process else 0

    @property
    def running(self) -> bool:
        """Whether the engine's first process lives."""
        return self._exited is not None and not self._exited.done()

    def start(self, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start the engine in a session of its own. Raises OSError if it cannot be started."""
        loop = asyncio.get_running_loop()
        self._exited = loop.create_future()
        # Become the parent of orphans, as PID 1 is by default. A worker whose parent was killed
        # would else become a child of the machine's init.
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        loop.add_signal_handler(signal.SIGCHLD, self._reap)
        self._process = subprocess.Popen(
            list(arguments),
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            bufsize=0,
        )
        for name, source, sink in (
            ("engine-stdout", self._process.stdout, sys.__stdout__),
            ("engine-stderr", self._process.stderr, sys.__stderr__),
        ):
            if source is None:
                continue
            target = sink.fileno() if sink is not None else -1
            pump = threading.Thread(
                target=_pump, args=(source.fileno(), target, self._on_line), name=name, daemon=True
            )
            pump.start()
            self._pumps.append(pump)
        if os.getpid() != 1:  # with PID 1 everything ends anyway
            self._guard = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _GUARD, str(self.pid)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._reap()

    def stopped(self) -> int:
        """Return how many of its processes a signal has stopped: they wait for SIGCONT."""
        found, below = 0, [self.pid] if self.running else []
        while below:
            folder = Path(f"/proc/{(pid := below.pop())}")
            with contextlib.suppress(OSError):  # it has ended
                found += (folder / "stat").read_bytes().rpartition(b")")[2].split()[0] == b"T"
                # vLLM starts each process from the first thread of another one.
                below += map(int, (folder / f"task/{pid}/children").read_text().split())
        return found

    async def wait(self) -> int:
        """Wait for the exit code as a shell has it: 0 to 255, and 128 + n for signal n."""
        if self._exited is None:
            raise RuntimeError("the engine was not started")
        return await asyncio.shield(self._exited)

    def signal(self, number: int) -> None:
        """Send a signal to the engine's first process, which looks after its own children."""
        if self.running:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL to the whole process group."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    def clean_up(self, patience: float = 5.0) -> None:
        """End every descendant that is left, wait until none is left, and copy the last output.

        Blocks for at most ``patience`` seconds. It may block, because the engine and its requests
        have ended.
        """
        self.kill()
        deadline = time.monotonic() + patience
        while (children := _children()) and time.monotonic() < deadline:
            for child in children:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
            self._reap()
            time.sleep(0.01)
        for pump in self._pumps:
            pump.join(max(0.1, deadline - time.monotonic()))

    def _reap(self) -> None:
        """Collect every child that has ended, the engine's adopted orphans included."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if self._guard is not None and pid == self._guard.pid:
                self._guard.returncode = os.waitstatus_to_exitcode(status)
            if pid == self.pid and self._process is not None and self._exited is not None:
                code = os.waitstatus_to_exitcode(status)
                self._process.returncode = code  # or Popen would wait for a process that is gone
                if not self._exited.done():
                    self._exited.set_result(code if code >= 0 else 128 - code)


def _pump(source: int, sink: int, on_line: OnLine) -> None:
    """Copy ``source`` to ``sink`` until its end. After an error of the sink, stop writing to it."""
    partial = b""
    while True:
        try:
            data = os.read(source, _READ_SIZE)
        except OSError:
            data = b""
        if not data:
            break
        if sink >= 0 and not _write(sink, data):
            sink = -1
        *lines, partial = (partial + data).replace(b"\r", b"\n").split(b"\n")
        for line in lines:
            on_line(line.decode(errors="replace"))
        if len(partial) > _MAX_PARTIAL_LINE:
            partial = partial[:_MAX_PARTIAL_LINE]
    if partial:
        on_line(partial.decode(errors="replace"))


def _write(sink: int, data: bytes) -> bool:
    view = memoryview(data)
    try:
        while view:
            view = view[os.write(sink, view) :]
    except OSError:
        return False
    return True


def _children() -> list[int]:
    """Process ids of this process's children, of all of its threads."""
    found: list[int] = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            found += map(int, (task / "children").read_text().split())
    return found
