"""The first process of every local container. It ends all processes of the container.

It runs as ``python -I -S shim.py NAME``, with a pipe as standard input. The first line of the pipe
is the command as JSON. The command is not among the arguments, because a search for the engine's
arguments would then also find the shim.

It starts the command and adopts every orphan below it. When the command ends, it kills what is
left. A later ``t`` in the pipe passes SIGTERM on; the end of the pipe kills everything. The pipe
ends when the mini-kubelet's process ends, also by SIGKILL, so no engine outlives it. It uses only
the standard library, and no module that is slow to import.
"""

import ctypes
import json
import os
import select
import signal
import sys

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def processes() -> dict[int, tuple[int, str]]:
    """Return the parent and the state of every process, by its pid."""
    found = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat", "rb") as file:
                    state, parent = file.read().rpartition(b")")[2].split()[:2]
            except (OSError, ValueError):
                continue
            found[int(entry)] = int(parent), state.decode()
    return found


def children() -> list[int]:
    """Pids of the direct children of this process, adopted ones included."""
    me = os.getpid()
    return [pid for pid, (parent, _) in processes().items() if parent == me]


def stopped(shim: int, known: dict[int, tuple[int, str]]) -> list[int]:
    """Return those of the known processes below a shim that a signal has stopped (SIGSTOP)."""
    found, below = [], {shim}
    while below:
        below = {pid for pid, (parent, _) in known.items() if parent in below}
        found += [pid for pid in sorted(below) if known[pid][1] in "tT"]
    return found


def sweep() -> None:
    """Kill children until none is left. Their own children become ours, and are killed next."""
    while pids := children():
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            except OSError:
                continue


def kill_below(folder: os.PathLike[str]) -> None:
    """Kill every process whose working directory is ``folder``, after its shim was killed."""
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.readlink(f"/proc/{entry}/cwd") == os.fspath(folder):
                os.kill(int(entry), signal.SIGKILL)
        except OSError:
            continue


def start(command: list[str], libc: ctypes.CDLL) -> int:
    """Start the command so that it dies with this process, even if that is killed."""
    pid = os.fork()
    if pid:
        return pid
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    try:
        os.execvp(command[0], command)  # noqa: S606 - an argument list, no shell
    except OSError as error:
        os.write(2, f"{command[0]}: {error.strerror}\n".encode())
        os._exit(127)


def read_command() -> list[str]:
    """Read the pipe's first line and no byte more."""
    line = b""
    while not line.endswith(b"\n"):
        if not (byte := os.read(0, 1)):
            sys.exit(128 + signal.SIGKILL)
        line += byte
    return [str(word) for word in json.loads(line)]


def main() -> int:
    """Return the command's exit code; 128 + n when signal n ended it."""
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
    woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    main_pid = start(read_command(), libc)
    signal.signal(signal.SIGTERM, lambda *_: os.kill(main_pid, signal.SIGTERM))
    while True:
        readable, _, _ = select.select([0, woken], [], [])
        if 0 in readable:
            order = os.read(0, 1)
            if order != b"t":
                sweep()
                return 128 + signal.SIGKILL
            os.kill(main_pid, signal.SIGTERM)
        if woken in readable:
            os.read(woken, 512)
            while True:
                try:
                    pid, status = os.waitpid(-1, os.WNOHANG)
                except ChildProcessError:
                    pid, status = 0, 0
                if pid == main_pid:
                    sweep()
                    code = os.waitstatus_to_exitcode(status)
                    return code if code >= 0 else 128 - code
                if pid == 0:
                    break


if __name__ == "__main__":
    sys.exit(main())
