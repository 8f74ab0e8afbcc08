"""Runs vllm-router so that it asks its clients for the API key.

``python3 -m pdcluster_connector.launcher.router_gate [--host H] [--port N] -- ROUTER ARGUMENTS``

With ``--vllm-pd-disaggregation`` the router drops a client's ``Authorization``. It sends engines
the key of its own environment (``OPENAI_API_KEY``), so everybody who reaches the router would reach
the engines. But the router can ask a URL about every key (``api_key_validation_urls``). It then
refuses each request without a right key, also on its administration endpoints. This process serves
that URL. It also asks the router for its readiness, with the key, because a kubelet's probe has no
key.

It uses only Python's standard library, because a router's image holds little else.
"""

import argparse
import asyncio
import importlib.util
import io
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from http.client import HTTPConnection, HTTPException, parse_headers
from typing import Final

from pdcluster_connector import listening
from pdcluster_connector.protocol.api_key import VARIABLE, admits, headers, problem
from pdcluster_connector.protocol.host_port import reachable
from pdcluster_connector.sidechannel.loop_thread import LoopThread

ROUTER_KEY: Final = "OPENAI_API_KEY"
CHECK: Final = "/check"
READY: Final = "/readyz"
EX_CONFIG: Final = 78
_READY_SECONDS: Final = 1.5
# The wheel's command line lacks the option that its Rust half has.
_WHEEL: Final = """\
import sys
from vllm_router.launch_router import launch_router, parse_router_args
arguments = parse_router_args(sys.argv[2:])
arguments.api_key_validation_urls = [sys.argv[1]]
launch_router(arguments)
"""


class Gate:
    """Says whether a key is right, and whether the router is ready. It listens once it is made.

    Args:
        address: host and port to listen on.
        key: the API key.
        router: the router's host and port.
    """

    def __init__(self, address: tuple[str, int], key: str, router: tuple[str, int]) -> None:
        self._key, self._router = key, router
        listener = listening.open_port(*address)
        self.port: int = listener.getsockname()[1]
        self._asking: asyncio.Task[int] | None = None
        self._guard: listening.ConnectionGuard
        self._thread = LoopThread("pdcluster-router-gate")
        self._thread.call(self._listen, listener)
        self._thread.start()

    def _listen(self, listener: socket.socket) -> None:
        def handler() -> asyncio.Protocol:
            return asyncio.StreamReaderProtocol(asyncio.StreamReader(), self._serve)

        self._guard = listening.ConnectionGuard(handler, listener)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the one request of a connection. A client that says none just goes."""
        with suppress(OSError, EOFError, HTTPException, asyncio.LimitOverrunError, IndexError):
            head = io.BytesIO(await reader.readuntil(b"\r\n\r\n"))
            self._guard.enter(writer.transport.get_protocol(), "busy")
            path = head.readline().decode("latin-1").split(" ")[1]
            status = await self._status(path, parse_headers(head).get_all("Authorization") or [])
            writer.write(b"HTTP/1.1 %d \r\nContent-Length: 0\r\nConnection: close\r\n\r\n" % status)
        writer.close()

    async def _status(self, path: str, keys: Sequence[str]) -> int:
        if path == CHECK:
            return 200 if len(keys) == 1 and admits(self._key, keys[0]) else 401
        if path != READY:
            return 404
        # All who ask meanwhile get the same answer: a crowd takes one thread.
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(asyncio.to_thread(self._readiness))
        return await self._asking

    def _readiness(self) -> int:
        router = HTTPConnection(*self._router, timeout=_READY_SECONDS)
        try:
            router.request("GET", "/readiness", headers=headers(self._key))
            return router.getresponse().status
        except (OSError, HTTPException):
            return 503
        finally:
            router.close()


def router_command(url: str, arguments: Sequence[str]) -> list[str]:
    """Return the command that starts the router: the wheel in this Python, or else the program."""
    if importlib.util.find_spec("vllm_router_rs") is not None:
        return [sys.executable, "-c", _WHEEL, url, *arguments]
    return ["vllm-router", "--api-key-validation-urls", url, *arguments]


def main() -> int:
    """Run the router until it ends; returns its exit code."""
    words = sys.argv[1:]
    cut = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(prog="router_gate", description=__doc__.partition("\n")[0])
    parser.add_argument("--host", default="127.0.0.1", help="address to answer on (%(default)s)")
    parser.add_argument("--port", type=int, default=5590, help="its port (%(default)s)")
    known, arguments = parser.parse_args(words[:cut]), words[cut + 1 :]
    router = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    router.add_argument("--host", default="127.0.0.1")
    router.add_argument("--port", type=int, default=30000)
    at = router.parse_known_args(arguments)[0]

    key = os.environ.get(VARIABLE, "")
    if (wrong := problem(key)) is not None:
        print(f"pdcluster: {wrong}", file=sys.stderr, flush=True)
        return EX_CONFIG
    url = f"http://{reachable(known.host)}:{known.port}{CHECK}"
    listening.allow_many_connections()
    Gate((known.host, known.port), key, (reachable(at.host), at.port))
    environment = {**os.environ, ROUTER_KEY: key}
    try:
        process = subprocess.Popen(router_command(url, arguments), env=environment)
    except OSError as error:
        print(f"pdcluster: vllm-router: {error.strerror}", file=sys.stderr, flush=True)
        return EX_CONFIG
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: process.send_signal(number))
    code = process.wait()
    return 128 - code if code < 0 else code


if __name__ == "__main__":
    sys.exit(main())
