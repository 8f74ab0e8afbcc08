"""The real vllm-router behind its gate: nobody gets through, or around it, without the key."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest
from launched import wait_for

import machine
from loopback import free_port
from pdcluster_connector.launcher import router_gate
from pdcluster_connector.launcher.router_gate import EX_CONFIG, Gate

KEY, WRONG = "sk-the-right-one", "sk-a-wrong-one"
MODULE = "pdcluster_connector.launcher.router_gate"


class Engine(BaseHTTPRequestHandler):
    """An engine that notes whose key it was shown."""

    keys: ClassVar[set[str]] = set()

    def do_GET(self) -> None:
        self._answer({"data": [{"id": "tiny"}]})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"] or 0))
        if self.path == "/v1/completions":
            self.keys.add(self.headers["Authorization"])
        self._answer({"choices": [], "kv_transfer_params": {"do_remote_prefill": True}})

    def _answer(self, document: object) -> None:
        body = json.dumps(document).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the router and its gate say, at the router's most talkative."""
    return tmp_path_factory.mktemp("router") / "log"


@pytest.fixture(scope="module")
def urls(log: Path) -> Iterator[tuple[str, str]]:
    """The router's URL and its gate's."""
    engines = [ThreadingHTTPServer(("127.0.0.1", 0), Engine) for _ in range(2)]
    for engine in engines:
        threading.Thread(target=engine.serve_forever, daemon=True).start()
    prefill, decode = (f"http://127.0.0.1:{engine.server_port}" for engine in engines)
    port, gate, metrics = free_port(), free_port(), free_port()
    with log.open("wb") as out:
        process = subprocess.Popen(
            [
                sys.executable, "-m", MODULE, "--port", str(gate), "--",
                "--vllm-pd-disaggregation", "--prefill", prefill, "--decode", decode,
                "--host", "127.0.0.1", "--port", str(port), "--policy", "round_robin",
                "--worker-startup-check-interval", "1", "--prometheus-port", str(metrics),
                "--log-level", "debug",
            ],
            env={**os.environ, "VLLM_API_KEY": KEY},
            stdout=out,
            stderr=out,
        )  # fmt: skip
    try:
        wait_for(lambda: asked(f"http://127.0.0.1:{gate}/readyz") == 200, 240)
        yield f"http://127.0.0.1:{port}", f"http://127.0.0.1:{gate}"
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    except (AssertionError, subprocess.TimeoutExpired) as error:
        raise AssertionError(f"{error}\n{log.read_text()[-3000:]}") from None
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(60)
        for engine in engines:
            engine.shutdown()
            engine.server_close()
    assert asked(f"http://127.0.0.1:{port}/liveness", KEY) == 0, "the router ends with its gate"
    assert not {key for key in (KEY, WRONG) if key in log.read_text()}


def asked(url: str, key: str | None = None, body: object = None) -> int:
    """The status of an answer; 0 where nothing listens."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    if key is not None:
        request.add_header("Authorization", f"Bearer {key}")
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


COMPLETION = {"model": "tiny", "prompt": "x", "max_tokens": 2}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", COMPLETION),
        ("/v1/completions", {**COMPLETION, "stream": True}),
        ("/v1/chat/completions", CHAT),
        ("/v1/responses", {"model": "tiny", "input": "x"}),
        ("/v1/models", None),
        ("/v1/anything", COMPLETION),
        ("/tokenize", COMPLETION),
        ("/invocations", COMPLETION),
        ("/workers", None),
        ("/list_workers", None),
        ("/readiness", None),
        ("/flush_cache", {}),
        ("/remove_worker?url=http://127.0.0.1:1", {}),
    ],
)
def test_every_path_of_the_router_asks_for_the_key(
    urls: tuple[str, str], path: str, body: object
) -> None:
    router = urls[0]
    assert asked(router + path, None, body) == 401
    assert asked(router + path, WRONG, body) == 401
    assert asked(router + path, "", body) == 401
    assert asked(router + path, KEY, body) < 300


def test_engines_see_the_key_and_no_other(urls: tuple[str, str]) -> None:
    assert asked(f"{urls[0]}/v1/completions", KEY, COMPLETION) == 200
    assert Engine.keys == {f"Bearer {KEY}"}


def test_no_key_of_a_client_stands_in_the_log(urls: tuple[str, str], log: Path) -> None:
    """The fixture looks again when the router has ended."""
    for key, status in ((KEY, 200), (WRONG, 401)):
        assert asked(f"{urls[0]}/v1/completions", key, COMPLETION) == status
    wait_for(lambda: "DEBUG" in log.read_text(), 30)
    assert not {key for key in (KEY, WRONG) if key in log.read_text()}


def test_the_gate_itself_tells_no_more_than_the_router(urls: tuple[str, str]) -> None:
    gate = urls[1]
    assert asked(f"{gate}/check") == 401
    assert asked(f"{gate}/check", KEY[:-1]) == 401
    assert asked(f"{gate}/check", KEY) == 200
    assert asked(f"{gate}/v1/models", KEY) == 404


def test_ready_is_what_the_router_says() -> None:
    nobody = free_port()
    gate = Gate(("127.0.0.1", 0), KEY, ("127.0.0.1", nobody))
    try:
        assert asked(f"http://127.0.0.1:{gate.port}/readyz") == 503
    finally:
        gate._thread.submit(gate._guard.close()).result(60)
        gate._thread.stop()


@pytest.mark.parametrize("key", ["", "newline\n", "sp ace", "schlüssel"])
def test_a_key_that_nobody_can_send_is_refused_at_the_start(key: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", MODULE, "--", "--vllm-pd-disaggregation"],
        env={**os.environ, "VLLM_API_KEY": key},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == EX_CONFIG
    assert done.stderr.startswith("pdcluster: VLLM_API_KEY")
    assert not key or key not in done.stderr


def test_an_image_with_the_program_alone_gets_the_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router_gate.importlib.util, "find_spec", lambda _: None)
    command = router_gate.router_command("http://127.0.0.1:5590/check", ["--port", "8000"])
    url = ["--api-key-validation-urls", "http://127.0.0.1:5590/check"]
    assert command == ["vllm-router", *url, "--port", "8000"]


ROUTER = """\
#!%s
import sys, urllib.request
from http.server import BaseHTTPRequestHandler, HTTPServer
option, url, _, host, _, port = sys.argv[1:]
assert option == "--api-key-validation-urls"
key = {"Authorization": "Bearer %s"}
assert urllib.request.urlopen(urllib.request.Request(url, headers=key)).status == 200
class Router(BaseHTTPRequestHandler):
    def do_GET(self):
        ready = self.path == "/readiness" and self.headers["Authorization"] == key["Authorization"]
        self.send_response(200 if ready else 401)
        self.send_header("Content-Length", "0")
        self.end_headers()
HTTPServer((host, int(port)), Router).serve_forever()
"""


@pytest.mark.process
@pytest.mark.needs("python310")
def test_the_gate_runs_with_python_3_10_and_no_packages(tmp_path: Path) -> None:
    """A router's image may have no newer one. There the gate serves the router and the kubelet."""
    router, gate = free_port(), free_port()
    program = tmp_path / "vllm-router"
    program.write_text(ROUTER % (machine.python310(), KEY))
    program.chmod(0o755)
    options = ["--host", "127.0.0.1", "--port", str(router)]
    process = subprocess.Popen(
        [machine.python310(), "-S", "-m", MODULE, "--port", str(gate), "--", *options],
        env={**os.environ, "VLLM_API_KEY": KEY, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_for(lambda: asked(f"http://127.0.0.1:{gate}/readyz") == 200, 60)
        with ExitStack() as stack:
            place = ("127.0.0.1", gate)
            silent = [stack.enter_context(socket.create_connection(place)) for _ in range(50)]
            assert asked(f"http://127.0.0.1:{gate}/check", KEY) == 200
            assert asked(f"http://127.0.0.1:{gate}/check", KEY[:-1]) == 401
            silent[0].sendall(b"GET /check HTTP/1.1\r\n\r\n")
            assert silent[0].recv(4096).startswith(b"HTTP/1.1 401 ")
    finally:
        process.terminate()
        said = process.communicate(timeout=60)[1]
    assert process.returncode == 128 + signal.SIGTERM
    assert "Traceback" not in said
