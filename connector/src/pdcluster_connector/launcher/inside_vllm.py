"""What the launcher puts into vLLM's processes, beside ``vllm_shim.py`` and what is in ``vllm/``.

**The door.** Routers of the operator forget an engine before it ends. A router of the user's may
send requests for as long as it likes, and the engine would wait for all of them. So the launcher
closes the door of an engine that drains, and an ASGI middleware in vLLM's API server answers new
requests with 503. vLLM may run several API servers, so a file says that the door is closed.

Routers ask for ``/health``. A decode engine that needs prefill and has no link that works answers
them with 503. The kubelet and the launcher get vLLM's own answer, because the engine is well.

**Request ids.** vllm-router sends ``X-Request-Id:
___prefill_addr_HOST:PORT___decode_addr_HOST:PORT_UUID``, and vLLM copies it into the ``id`` of its
answer. A middleware removes the addresses. Some connectors read them; ours does not.

**Deaths.** Only a parent process learns how its child ended. vLLM's API server learns this about
its engine core but does not print it: if the engine core was killed, the log only says that a
handler failed. So the parent prints a line for each child that was ended by a signal from somebody
else. ``engine/last_words.py`` reads that line.
"""

import contextlib
import hashlib
import multiprocessing.process
import os
import re
import secrets
import signal
import tempfile
from collections.abc import Awaitable, Callable, MutableMapping
from multiprocessing.popen_fork import Popen
from pathlib import Path
from typing import Any, Final

from pdcluster_connector.launcher import say

Scope = MutableMapping[str, Any]
App = Callable[[Scope, Any, Any], Awaitable[None]]

DOOR: Final = f"{__name__}.Door"
DOOR_VARIABLE: Final = "PDCLUSTER_DOOR"
"""Environment variable of an engine: path of the file that exists when the door is closed."""
_REFUSAL: Final = '{"error":{"message":"%s","type":"ServiceUnavailable","param":null,"code":503}}'
_CLOSED: Final = _REFUSAL % (
    "this engine is told to end and takes no new requests; send the request to another engine"
)
_NO_LINK: Final = "-no-link"
_LEFT_OUT: Final = _REFUSAL % "no link to a prefill engine works; the cluster's status says why"
LAUNCHER_AGENT: Final = "pdcluster-launcher"
_NOT_ROUTERS: Final = (LAUNCHER_AGENT.encode(), b"kube-probe/")


class DoorFile:
    """The launcher's end of the door.

    Attributes:
        path: where the file will be. It does not exist before the door is closed.
        no_link: where another one is while routers have to leave the engine out.
    """

    def __init__(self) -> None:
        self.path = Path(tempfile.gettempdir(), f"pdcluster-door-{secrets.token_hex(8)}")
        self.no_link = Path(f"{self.path}{_NO_LINK}")

    def close(self) -> None:
        """Close the door for good. Without a place to write to, the engine goes on as before."""
        if self.path.exists():
            return
        try:
            self.path.touch()
        except OSError as error:
            say(f"new requests cannot be turned away: {self.path}: {error.strerror}")

    def leave_out(self, why: str) -> None:
        """Have routers leave the engine out, or, for no reason, take it back."""
        if bool(why) == self.no_link.exists():
            return
        with contextlib.suppress(OSError):  # routers then go on as before
            self.no_link.touch() if why else self.no_link.unlink()
            say(f"routers leave this engine out: no link works ({why})" if why else "a link works")

    def clean_up(self) -> None:
        """Leave no file behind."""
        self.path.unlink(missing_ok=True)
        self.no_link.unlink(missing_ok=True)


class Door:
    """ASGI middleware: answers 503 as its module says. All else passes."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._file = os.environ.get(DOOR_VARIABLE, "")

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        """Handle one connection."""
        if (refusal := self._refusal(scope)) is not None:
            headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
            await send({"type": "http.response.start", "status": 503, "headers": headers})
            await send({"type": "http.response.body", "body": refusal.encode()})
        else:
            await self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> str | None:
        if not self._file or scope["type"] != "http":
            return None
        if scope["method"] == "POST":
            return _CLOSED if Path(self._file).exists() else None
        if not scope["path"].endswith("/health") or not Path(f"{self._file}{_NO_LINK}").exists():
            return None
        agents = [value for name, value in scope["headers"] if name == b"user-agent"]
        return None if any(agent.startswith(_NOT_ROUTERS) for agent in agents) else _LEFT_OUT


PLAIN_REQUEST_IDS: Final = f"{__name__}.PlainRequestIds"
_HEADER: Final = b"x-request-id"
_MARKS: Final = (b"___prefill_addr_", b"___decode_addr_")
_UNIQUE: Final = re.compile(rb"_([0-9A-Fa-f-]{16,64})\Z")


class PlainRequestIds:
    """Changes one header of a request. Bodies, answers and streams pass unchanged."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        """Handle one connection."""
        if scope["type"] == "http":
            headers = [
                (name, plain(value) if name == _HEADER else value)
                for name, value in scope["headers"]
            ]
            scope = {**scope, "headers": headers}
        await self._app(scope, receive, send)


def plain(request_id: bytes) -> bytes:
    """Return the id; if it holds addresses, only its unique part.

    Every engine makes the same part of the same id.
    """
    if not any(mark in request_id for mark in _MARKS):
        return request_id
    unique = _UNIQUE.search(request_id)
    # The id has an unknown form. Remove the addresses in this case too.
    return unique[1] if unique else hashlib.sha256(request_id).hexdigest()[:32].encode()


_PF_EXITING: Final = 4


def report_deaths() -> None:
    """Report each child of this process that a signal ends, from now on.

    It hooks into Python's own ``multiprocessing``, for all of its start methods.
    """
    poll, kill = Popen.poll, os.kill
    sent: set[tuple[int, int]] = set()

    def telling_poll(self: Popen, flag: int = os.WNOHANG) -> int | None:
        before = self.returncode
        code = poll(self, flag)
        if before is None and code is not None and code < 0 and (self.pid, -code) not in sent:
            with contextlib.suppress(Exception):  # an engine never fails for its obituary
                say(obituary(_name(self), self.pid, -code))
        return code

    def noting_kill(pid: int, number: int) -> None:
        # vLLM learns of an end by a closed pipe, and signals a child that is still on its way out.
        if not _is_ending(pid):
            sent.add((pid, int(number)))
        kill(pid, number)

    Popen.poll, os.kill = telling_poll, noting_kill  # type: ignore[method-assign]


def _is_ending(pid: int) -> bool:
    """Whether a process has begun to end: a signal that comes now is not the cause of its end."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        return fields[0] in (b"Z", b"X") or bool(int(fields[6]) & _PF_EXITING)
    except (OSError, ValueError, IndexError):
        return False


def obituary(name: str, pid: int, number: int) -> str:
    """Return the line that ``KILLED`` of ``engine/last_words.py`` reads."""
    try:
        how = signal.Signals(number).name
    except ValueError:
        how = f"signal {number}"
    return f"vLLM's process {name} (pid {pid}) was killed by {how}"


def _name(popen: Popen) -> str:
    children = multiprocessing.process._children  # type: ignore[attr-defined]  # noqa: SLF001
    for process in tuple(children):
        if getattr(process, "_popen", None) is popen:
            return str(process.name)
    return "without-a-name"
