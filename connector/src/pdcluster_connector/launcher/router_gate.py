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
import importlib.util
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from http.client import HTTPConnection, HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Final

from pdcluster_connector.protocol.api_key import VARIABLE, admits, headers, problem

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


class Gate(ThreadingHTTPServer):
    """Says whether a key is right, and whether the router is ready.

    Args:
        address: host and port to listen on.
        key: the API key.
        router: the router's host and port.
    """

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, address: tuple[str, int], key: str, router: tuple[str, int]) -> None:
        self.key, self.router = key, router
        super().__init__(address, _Answers)


class _Answers(BaseHTTPRequestHandler):
    server: Gate
    timeout = 10.0

    def do_GET(self) -> None:
        if self.path == CHECK:
            given = self.headers.get_all("Authorization") or []
            right = len(given) == 1 and admits(self.server.key, given[0])
            self._answer(200 if right else 401)
        elif self.path == READY:
            self._answer(self._readiness())
        else:
            self._answer(404)

    def _readiness(self) -> int:
        router = HTTPConnection(*self.server.router, timeout=_READY_SECONDS)
        try:
            router.request("GET", "/readiness", headers=headers(self.server.key))
            return router.getresponse().status
        except (OSError, HTTPException):
            return 503
        finally:
            router.close()

    def _answer(self, status: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Log nothing, because a probe asks each second."""


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
    url = f"http://{_reachable(known.host)}:{known.port}{CHECK}"
    gate = Gate((known.host, known.port), key, (_reachable(at.host), at.port))
    threading.Thread(target=gate.serve_forever, daemon=True).start()
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


def _reachable(host: str) -> str:
    return "127.0.0.1" if host in ("", "0.0.0.0") else host  # noqa: S104


if __name__ == "__main__":
    sys.exit(main())
