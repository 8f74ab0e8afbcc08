"""Pods of small real programs, and the mini-kubelet around them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import textwrap
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from pathlib import Path

from loopback import free_network
from pdcluster_operator.local.addresses import AddressBook, resolve
from pdcluster_operator.local.api_server import LocalApi
from pdcluster_operator.local.kubelet import Kubelet
from pdcluster_operator.plan.observed.pods import is_pod_ready

ENVIRONMENT = {"PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))}

SERVER = textwrap.dedent("""
    import http.server, json, os, sys
    host, port, code_file = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            try: code = int(open(code_file).read())
            except OSError: code = 200
            body = json.dumps({"pid": os.getpid(), "argv": sys.argv,
                               "env": dict(os.environ)}).encode()
            self.send_response(code); self.send_header("Content-Length", str(len(body)))
            self.end_headers(); self.wfile.write(body)
        def log_message(self, *args): pass
    http.server.ThreadingHTTPServer((host, port), Handler).serve_forever()
""")


def pod(name: str, *command: str, **container: object) -> dict:
    spec = {"name": "main", "command": list(command), **container}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "ns"},
        "spec": {"containers": [spec], "terminationGracePeriodSeconds": 2},
    }


def python_pod(name: str, code: str, *args: str, **container: object) -> dict:
    return pod(name, "python3", "-c", textwrap.dedent(code), *args, **container)


@contextlib.asynccontextmanager
async def running_kubelet(
    folder: Path, ports: tuple[int, ...] = (), say: Callable[[str], None] = print
) -> AsyncIterator[Kubelet]:
    api = LocalApi()
    book = AddressBook(ports, say, first=f"{free_network()}.2")
    kubelet = Kubelet(api, book, folder, partial(resolve, api, book.address), ENVIRONMENT)
    try:
        yield kubelet
    finally:
        kubelet.kill()
        await kubelet.stop(1)
        book.close()


async def until(condition: Callable[[], object], seconds: float = 120) -> object:
    async with asyncio.timeout(seconds):
        while not (value := condition()):  # noqa: ASYNC110 - it watches other processes
            await asyncio.sleep(0.02)
        return value


def container_status(api: LocalApi, name: str) -> dict:
    found = api.get("Pod", "ns", name) or {}
    return (found.get("status", {}).get("containerStatuses") or [{}])[0]


def pod_ready(api: LocalApi, name: str) -> bool:
    found = api.get("Pod", "ns", name)
    return found is not None and is_pod_ready(found)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def carrying(mark: str) -> list[int]:
    """Pids of live processes whose environment holds ``mark``."""
    return [pid for pid in _pids() if mark.encode() in _environment(pid) and alive(pid)]


def _pids() -> Iterator[int]:
    return (int(entry.name) for entry in Path("/proc").glob("[0-9]*"))


def _environment(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""
