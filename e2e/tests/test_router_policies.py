"""Which links the policies of vLLM's own router use: docs/routers.md says what is counted here.

The router is the real one. The engines only answer, and count which prefill engine's parameters
came to which decode engine.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from loopback import free_ports
from waiting import until

pytestmark = pytest.mark.process

ROUTER = Path(sys.executable).parent / "vllm-router"
REQUESTS = 80


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Engine

    def do_GET(self) -> None:
        self._answer({"object": "list", "data": [{"id": "m", "object": "model"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.count(body.get("kv_transfer_params") or {})
        choice = {"index": 0, "text": "a", "finish_reason": "length"}
        given = {"do_remote_prefill": True, "ticket": self.server.name}
        self._answer({"id": "x", "model": "m", "choices": [choice], "kv_transfer_params": given})

    def _answer(self, document: dict[str, Any]) -> None:
        body = json.dumps(document).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


class _Engine(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, name: str, links: Counter[tuple[str, str]]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.name, self._links, self._lock = name, links, threading.Lock()
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    def count(self, params: dict[str, Any]) -> None:
        if ticket := params.get("ticket"):
            with self._lock:
                self._links[ticket, self.name] += 1


@contextmanager
def router(engines: list[_Engine], *policy: str) -> Iterator[str]:
    port, metrics = free_ports(2)
    known = [
        word
        for one in engines
        for word in (f"--{one.name[:-1]}", f"http://127.0.0.1:{one.server_port}")
    ]
    command = [
        str(ROUTER), "--vllm-pd-disaggregation", *known, "--host", "127.0.0.1", "--port", str(port),
        "--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics),
        "--worker-startup-check-interval", "1", *policy,
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        url = f"http://127.0.0.1:{port}"
        until("ready router", lambda: answers(f"{url}/readiness"), 60, lambda: str(process.poll()))
        yield url
    finally:
        process.kill()
        process.wait()


def answers(url: str, document: dict[str, Any] | None = None) -> bool:
    body = None if document is None else json.dumps(document).encode()
    request = urllib.request.Request(url, body, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=20) as reply:
            return bool(reply.read() or True)
    except OSError:
        return False


@pytest.mark.skipif(not ROUTER.exists(), reason="needs vllm-router")
@pytest.mark.parametrize(
    ("policy", "links"),
    [
        (("--policy", "round_robin"), 2),
        (("--policy", "round_robin", "--decode-policy", "random"), 4),
        (("--policy", "random"), 4),
        (("--policy", "power_of_two"), 4),
    ],
    ids=lambda value: "-".join(value[1::2]) if isinstance(value, tuple) else str(value),
)
def test_round_robin_uses_half_of_the_links_of_two_and_two_engines(
    policy: tuple[str, ...], links: int
) -> None:
    seen: Counter[tuple[str, str]] = Counter()
    engines = [_Engine(f"{role}{n}", seen) for role in ("prefill", "decode") for n in range(2)]
    try:
        with router(engines, *policy) as url, ThreadPoolExecutor(4) as pool:
            asked = [{"model": "m", "prompt": f"p{n}", "max_tokens": 4} for n in range(REQUESTS)]
            assert all(pool.map(lambda one: answers(f"{url}/v1/completions", one), asked))
    finally:
        for one in engines:
            one.shutdown()
            one.server_close()
    assert seen.total() == REQUESTS
    assert len(seen) == links, seen
