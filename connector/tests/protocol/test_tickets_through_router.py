"""What vLLM's own router passes on: prefill's ticket, however long, and what clients say of KV."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest

from loopback import free_port
from pdcluster_connector.protocol.prompt_outcomes import no_ticket
from pdcluster_connector.protocol.ticket import BlockIds, Ticket, kv_transfer_params, ticket_of
from ticket_key import KEYS

ROUTER = Path(sys.executable).with_name("vllm-router")

pytestmark = [
    pytest.mark.nixl,  # starts processes, as those tests do
    pytest.mark.skipif(not ROUTER.exists(), reason="vllm-router is not installed"),
]


class Engine(ThreadingHTTPServer):
    """Answers a completion with ``fields`` and keeps what it was asked."""

    def __init__(self, **fields: Any) -> None:
        self.asked: list[dict[str, Any]] = []
        engine = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: Any) -> None:
                pass

            def do_GET(self) -> None:
                self._answer({"object": "list", "data": [{"id": "m", "object": "model"}]})

            def do_POST(self) -> None:
                raw = self.rfile.read(int(self.headers["Content-Length"]))
                if self.path.endswith("/completions"):  # the router also asks for …/render
                    engine.asked.append(json.loads(raw))
                choices = [{"index": 0, "text": "x", "finish_reason": "length"}]
                self._answer({"id": "x", "object": "text_completion", "created": 1, "model": "m",
                              "choices": choices, **fields})  # fmt: skip

            def _answer(self, document: dict[str, Any]) -> None:
                body = json.dumps(document).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


@contextmanager
def router(prefill: Engine, decode: Engine) -> Iterator[str]:
    port = free_port()
    words = [str(ROUTER), "--vllm-pd-disaggregation", "--prefill", prefill.url, "--decode",
             decode.url, "--host", "127.0.0.1", "--port", str(port), "--prometheus-port",
             str(free_port()), "--worker-startup-check-interval", "1"]  # fmt: skip
    environment = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    process = subprocess.Popen(
        words, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT
    )
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait(60)


def complete(url: str, seconds: float = 120.0, *, chat: bool = False, **more: Any) -> None:
    what = {"messages": [{"role": "user", "content": "hello"}]} if chat else {"prompt": "hello"}
    body = json.dumps({"model": "m", "max_tokens": 4, **what, **more}).encode()
    path = "chat/completions" if chat else "completions"
    request = Request(f"{url}/v1/{path}", body, {"Content-Type": "application/json"})
    until = time.monotonic() + seconds
    while True:
        try:
            with urlopen(request, timeout=120) as response:
                response.read()
            return
        except OSError:
            assert time.monotonic() < until, "the router does not answer"
            time.sleep(0.2)


def test_a_million_tokens_in_four_groups_reach_decode() -> None:
    dice = random.Random(4)
    blocks = tuple(BlockIds(dice.sample(range(1, 300_000), 62_500)) for _ in range(4))
    ticket = Ticket("e/1", "h", 5600, "r", 7, blocks, 16, 1_000_000, b"d" * 16, 0.0)
    prefill, decode = Engine(kv_transfer_params=kv_transfer_params(ticket, KEYS)), Engine()
    with router(prefill, decode) as url:
        complete(url)
    for engine in (prefill, decode):
        engine.shutdown()
        engine.server_close()
    asked = decode.asked[-1]
    params = asked["kv_transfer_params"]
    assert len(params["ticket"]) > 1_300_000
    assert ticket_of(params, KEYS) == ticket


FORGED = {"do_remote_prefill": True, "ticket": "forged"}
GIVEN = {"do_remote_prefill": True, "do_remote_decode": False, "ticket": "prefill's"}


@pytest.mark.parametrize(
    ("answer", "passed_on"),
    [
        ({"kv_transfer_params": GIVEN}, GIVEN),
        ({"kv_transfer_params": no_ticket("NotFinished")}, no_ticket("NotFinished")),
        ({"kv_transfer_params": None}, None),
        ({}, "theirs"),
    ],
    ids=["ticket", "no ticket", "null", "nothing"],
)
def test_what_a_client_says_of_kv_reaches_no_engine_that_hears_of_prefill(
    answer: dict[str, Any], passed_on: Any
) -> None:
    """vLLM's answers always have the field, and our prefill's are never null. Without it,
    the client's own goes to decode: there, only a ticket that an engine of ours has signed counts
    (``test_a_request_for_prefill_at_decode_is_a_prompt_without_a_ticket``).
    """
    prefill, decode = Engine(**answer), Engine()
    with router(prefill, decode) as url:
        for chat in (False, True):
            for stream in (False, True):
                for theirs in ({"do_remote_decode": True}, FORGED):
                    complete(url, chat=chat, stream=stream, kv_transfer_params=theirs)
                    asked = prefill.asked[-1]["kv_transfer_params"]
                    assert (asked["do_remote_decode"], asked["do_remote_prefill"]) == (True, False)
                    assert "ticket" not in asked
                    expected = theirs if passed_on == "theirs" else passed_on
                    assert decode.asked[-1]["kv_transfer_params"] == expected
    for engine in (prefill, decode):
        engine.shutdown()
        engine.server_close()
