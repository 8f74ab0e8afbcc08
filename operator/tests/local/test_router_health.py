"""vllm-router with our arguments: when it leaves an engine out, and when it takes it back."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from lean_router import lean_environment
from manifests import tiny

from loopback import free_port
from pdcluster_operator.api.object_names import ROUTER_METRICS_PORT, ROUTER_PORT, EngineName
from pdcluster_operator.api.spec.flags import OWNED_ROUTER_FLAGS, owned_flag, parse_flags
from pdcluster_operator.api.spec.parse import parse_cluster
from pdcluster_operator.api.spec.types import Role
from pdcluster_operator.plan.builders.router import bound, build_router_template
from waiting import until

pytestmark = pytest.mark.process


class Engine(ThreadingHTTPServer):
    """Answers completions and health checks. It fails while ``ill``.

    Before it answers a check, it asks the router whether that is ready. It appends the router's
    status to ``failed`` or to ``passed``, by how it then answers the check itself.
    """

    daemon_threads = True

    def __init__(self) -> None:
        self.ill = False
        self.router: int | None = None
        self.failed: list[int] = []
        self.passed: list[int] = []
        super().__init__(("127.0.0.1", 0), _Answers)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class _Answers(BaseHTTPRequestHandler):
    server: Engine
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        engine, ill = self.server, self.server.ill
        if engine.router is not None and self.path == "/health":
            seen = engine.failed if ill else engine.passed
            seen.append(ask(engine.router, "GET", "/readiness"))
        self._answer(ill)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self._answer(self.server.ill)

    def _answer(self, ill: bool) -> None:
        body = b'{"choices": [{"index": 0, "text": "x"}], "data": []}'
        self.send_response(500 if ill else 200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def engine() -> Iterator[Engine]:
    with Engine() as made:
        Thread(target=made.serve_forever, daemon=True).start()
        yield made
        made.shutdown()


@contextmanager
def router(folder: Path, prefill: Engine, *decodes: Engine) -> Iterator[int]:
    """Start the router with the arguments of its pods; yields its port."""
    manifest = tiny(folder)
    cluster = parse_cluster({**manifest, "metadata": {"name": "c", "namespace": "n"}}).cluster
    assert cluster is not None
    engines = {EngineName("n", "c", Role.PREFILL, "r", 0): prefill} | {
        EngineName("n", "c", Role.DECODE, "r", number): one for number, one in enumerate(decodes)
    }
    template = bound(build_router_template(cluster, "key", "digest"), engines)
    (container,) = template["spec"]["containers"]
    port, metrics = free_port(), free_port()
    here = {
        **{name.api_url: one.url for name, one in engines.items()},
        "0.0.0.0": "127.0.0.1",
        str(ROUTER_PORT): str(port),
        str(ROUTER_METRICS_PORT): str(metrics),
    }
    words = [here.get(word, word) for word in container["args"]]
    assert not set(here) & set(words)
    process = subprocess.Popen(
        [*container["command"], *words], env=lean_environment(), stdout=subprocess.DEVNULL
    )
    try:
        yield port
    finally:
        process.kill()
        process.wait(60)


def ask(port: int, method: str, path: str) -> int:
    """Return the status; 0 if nobody answers."""
    body = json.dumps({"model": "m", "prompt": "hello", "max_tokens": 1})
    connection = HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request(method, path, body, {"Content-Type": "application/json"})
        return connection.getresponse().status
    except OSError:
        return 0
    finally:
        connection.close()


def test_three_failed_checks_leave_an_engine_out_and_one_good_check_takes_it_back(
    tmp_path: Path,
) -> None:
    """The pod's readiness is what the status hears of it, so both must change together."""
    with engine() as prefill, engine() as decode, router(tmp_path, prefill, decode) as port:

        def seen() -> str:
            return f"failed {decode.failed}, passed {decode.passed}"

        until("ready router", lambda: ask(port, "GET", "/readiness") == 200, 60, seen)
        assert ask(port, "POST", "/v1/completions") == 200
        decode.router, decode.ill = port, True
        until("unready router", lambda: 503 in decode.failed, 60, seen)
        assert decode.failed[:4] == [200, 200, 200, 503]
        assert ask(port, "POST", "/v1/completions") == 503
        decode.passed.clear()
        decode.ill = False
        until("router that is ready again", lambda: 200 in decode.passed, 60, seen)
        assert decode.passed[:2] == [503, 200]
        assert ask(port, "POST", "/v1/completions") == 200


def test_an_engine_that_is_left_out_keeps_no_router_from_starting(tmp_path: Path) -> None:
    """A decode engine without a working link says so to routers that start, too."""
    with engine() as prefill, engine() as decode, engine() as left_out:
        left_out.ill = True
        with router(tmp_path, prefill, decode, left_out) as port:

            def answered() -> bool:
                return {ask(port, "POST", "/v1/completions") for _ in range(6)} == {200}

            until("ready router", lambda: ask(port, "GET", "/readiness") == 200, 60, str)
            until("requests that are answered", answered, 60, str)


def test_the_router_takes_what_may_be_added_and_has_each_flag_that_may_not() -> None:
    """The flags come from the real router's own parser, in a process of its own."""
    program = (
        "import argparse, json\n"
        "from vllm_router.router_args import RouterArgs\n"
        "parser = argparse.ArgumentParser()\n"
        "RouterArgs.add_cli_args(parser, use_router_prefix=False)\n"
        "print(json.dumps([word for one in parser._actions for word in one.option_strings]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, check=True, text=True
    )
    flags = set(json.loads(done.stdout.splitlines()[-1])) | {"--host", "--port"}
    assert flags >= OWNED_ROUTER_FLAGS.keys()
    free = {flag for flag in flags if flag.startswith("--")} - OWNED_ROUTER_FLAGS.keys()
    assert {"--decode-policy", "--prefill-policy", "--log-level"} <= free
    refused = {
        str(flag): [owned_flag(parse_flags((flag,))[0], OWNED_ROUTER_FLAGS)] for flag in free
    }
    assert {flag for flag, owned in refused.items() if owned != [None]} == set()
