"""What the policies of vLLM's own router do: docs/routers.md says what is counted here.

The router is the real one. The engines only answer, and count which prefill engine's parameters
came to which decode engine. The flags are those of the operator's router pods.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from loopback import free_ports
from pdcluster_operator.api.spec.parse import parse_cluster
from pdcluster_operator.plan.builders.router import build_router_template
from waiting import until

pytestmark = pytest.mark.process

ROUTER = Path(sys.executable).parent / "vllm-router"
REQUESTS = 80
needs_router = pytest.mark.skipif(not ROUTER.exists(), reason="needs vllm-router")


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Engine

    def do_GET(self) -> None:
        self._answer({"object": "list", "data": [{"id": "m", "object": "model"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.count(body.get("kv_transfer_params") or {})
        self.server.free.wait(60)
        choice = {"index": 0, "text": "a", "finish_reason": "length"}
        given = {"do_remote_prefill": True, "ticket": self.server.name}
        self._answer({"id": "x", "model": "m", "choices": [choice], "kv_transfer_params": given})

    def _answer(self, document: dict[str, Any]) -> None:
        body = json.dumps(document).encode()
        self.send_response(self.server.status if self.command == "POST" else 200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


class _Engine(ThreadingHTTPServer):
    """Answers prompts with `status`, while it is `free`."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, name: str, links: Counter[tuple[str, str]], status: int = 200) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.name, self._links, self._lock = name, links, threading.Lock()
        self.status, self.free = status, threading.Event()
        self.free.set()
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


def flags(**spec: Any) -> list[str]:
    """The flags about policies that router pods get for this spec.router."""
    source = {"source": {"hostPath": {"path": "/models/tiny"}}}
    parsed = parse_cluster({"metadata": {"name": "c"}, "spec": {"model": source, "router": spec}})
    (container,) = build_router_template(parsed.cluster, "key", "none")["spec"]["containers"]
    args: list[str] = container["args"]
    return [
        word
        for flag, value in pairwise(args)
        if flag in ("--policy", "--prefill-policy", "--decode-policy")
        for word in (flag, value)
    ]


@contextmanager
def two_and_two(seen: Counter[tuple[str, str]], status: int = 200) -> Iterator[list[_Engine]]:
    roles = ("prefill", 200), ("decode", status)
    engines = [_Engine(f"{role}{n}", seen, code) for role, code in roles for n in range(2)]
    try:
        yield engines
    finally:
        for one in engines:
            one.free.set()
            one.shutdown()
            one.server_close()


def prompt(number: int) -> dict[str, Any]:
    return {"model": "m", "prompt": f"p{number}", "max_tokens": 4}


@needs_router
@pytest.mark.parametrize(
    ("spec", "links"),
    [
        ({}, 4),
        ({"decodePolicy": "RoundRobin"}, 2),
        ({"policy": "PowerOfTwo"}, 4),
        ({"prefillPolicy": "StickyLeastLoaded", "decodePolicy": "ConsistentHash"}, 4),
    ],
    ids=lambda value: "-".join(value.values()) if isinstance(value, dict) else str(value),
)
def test_all_links_of_two_and_two_engines_are_used_unless_both_roles_go_in_turn(
    spec: dict[str, str], links: int
) -> None:
    seen: Counter[tuple[str, str]] = Counter()
    with (
        two_and_two(seen) as engines,
        router(engines, *flags(**spec)) as url,
        ThreadPoolExecutor(4) as pool,
    ):
        asked = map(prompt, range(REQUESTS))
        assert all(pool.map(lambda one: answers(f"{url}/v1/completions", one), asked))
    assert seen.total() == REQUESTS
    assert len(seen) == links, seen


@needs_router
def test_kv_aware_sends_a_decode_engine_that_is_busy_no_more_than_half_of_what_waits() -> None:
    """With another policy, all eight requests soon wait for the busy one, and none is answered."""
    seen: Counter[tuple[str, str]] = Counter()
    with (
        two_and_two(seen) as engines,
        router(engines, *flags(decodePolicy="KVAware")) as url,
        ThreadPoolExecutor(8) as pool,
    ):
        busy = engines[-1]
        busy.free.clear()
        asked = [pool.submit(answers, f"{url}/v1/completions", prompt(n)) for n in range(REQUESTS)]
        done = [one.result() for one, _ in zip(as_completed(asked), range(60), strict=False)]
        at_busy = sum(count for (_, decode), count in seen.items() if decode == busy.name)
        busy.free.set()
        assert all(done)
    assert at_busy <= 5, seen


@needs_router
def test_the_router_sends_no_request_again_whatever_its_flags_of_retries_say() -> None:
    seen: Counter[tuple[str, str]] = Counter()
    again = ("--retry-max-retries", "3", "--retry-initial-backoff-ms", "1")
    with two_and_two(seen, status=503) as engines, router(engines, *flags(), *again) as url:
        assert not answers(f"{url}/v1/completions", prompt(0))
    assert seen.total() == 1


@needs_router
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_request_at_an_engine_that_freezes_ends_after_the_routers_timeout(role: str) -> None:
    with two_and_two(Counter()) as engines, router(engines, "--request-timeout-secs", "1") as url:
        for one in engines:
            if one.name.startswith(role):
                one.free.clear()
        body = json.dumps(prompt(0)).encode()
        request = urllib.request.Request(
            f"{url}/v1/completions", body, {"content-type": "application/json"}
        )
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(request, timeout=30)
    assert refused.value.code == 500
    said = refused.value.read().decode()
    assert f"{role.capitalize()} request" in said
    assert "timed out" in said
