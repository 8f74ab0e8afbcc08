"""What makes a pair of engines sick, and what ``pdcluster status`` alone then says of it."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass

from kv_load import text
from local_run import LocalRun

import machine
from pdcluster_operator.api.object_names import HTTP_PORT

RECOVERY_SECONDS = 300.0
ENGINE_BYTES = 300 << 20
"""Less than an engine of any size needs."""


@contextmanager
def frozen(run: LocalRun) -> Iterator[None]:
    with run.standing_still("decode"):
        yield


@contextmanager
def killed(run: LocalRun) -> Iterator[None]:
    run.kill("decode")
    yield


@contextmanager
def past_the_router(run: LocalRun) -> Iterator[None]:
    for seed in range(30):
        assert run.complete(text(60, seed), role="decode", tokens=1).status == 200
    yield


@contextmanager
def port_taken(run: LocalRun) -> Iterator[None]:
    """Take the API's port while the engine starts again."""
    address = (run.address("decode"), HTTP_PORT)
    run.kill("decode")
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)

        def bound() -> bool:
            with suppress(OSError):
                taken.bind(address)
                return True
            return False

        run.wait("port that is free", bound, 30)
        taken.listen()
        yield


@contextmanager
def out_of_memory(run: LocalRun) -> Iterator[None]:
    """Let the next start have less memory than it needs."""
    with machine.small_cgroup(ENGINE_BYTES) as folder:
        before = run.launcher("decode").pid
        run.kill("decode")

        def starts() -> bool:
            with suppress(AssertionError):
                return run.launcher("decode").pid != before
            return False

        run.wait("next start", starts, 60)
        (folder / "cgroup.procs").write_text(str(run.launcher("decode").pid))
        yield
        run.wait("end of the engine", lambda: not (folder / "cgroup.procs").read_text(), 120)


@dataclass(frozen=True)
class Sickness:
    """What is done, and what the status has to say: why, under which name, and the next command."""

    provoke: Callable[[LocalRun], AbstractContextManager[None]]
    why: str
    step: str
    next: str


LOGS = r"pdcluster logs tiny --local .+"
SICKNESSES = {
    "past the router": Sickness(
        past_the_router,
        r"tiny serves, but is not Ready: LocalPrefill: .*because of NoTicket",
        "PromptsPastRouter",
        "pdcluster check tiny --local",
    ),
    "frozen": Sickness(
        frozen,
        r"EngineFrozen: .*a signal \(SIGSTOP\) has stopped \d+ of vLLM's processes \(since 20",
        "EngineFrozen",
        LOGS,
    ),
    "port taken": Sickness(
        port_taken, r"port [0-9.]+:8000 .*is in use by another process", "PortInUse", LOGS
    ),
    "out of memory": Sickness(
        out_of_memory, r"out of memory: the kernel killed vLLM's API server", "OutOfMemory", LOGS
    ),
    "killed": Sickness(killed, r"killed by SIGKILL", "EngineRestarted", LOGS),
}


def said_by_status(run: LocalRun, why: str, step: str, command: str) -> None:
    """Wait until the printed status names the step; it never says that an engine warms up.

    Args:
        why: a pattern for what it says then.
        command: one for its first next command.
    """
    deadline, said = time.monotonic() + RECOVERY_SECONDS, ""
    while not re.search(rf"^{step}: ", said, re.MULTILINE):
        assert time.monotonic() < deadline, f"{said}\n{run.report()}"
        code, said = run.command("status")
        assert code in (0, 3), said
        assert "WarmingUp" not in said or "last process ended" in said, said
    assert re.search(why, said), said
    [first, *_] = re.findall(r"^  next: (.+)$", said, re.MULTILINE)
    assert re.fullmatch(command, first), said
