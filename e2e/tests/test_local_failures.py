"""What clients and routers see when KV does not come, with ``loadFailurePolicy: Fail``.

docs/failures.md has the seconds that are printed.
"""

from __future__ import annotations

import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from pathlib import Path
from typing import Any

import pytest
from kv_load import moved, text
from local_run import LocalRun, manifest
from reply import Reply

from pdcluster_operator.api.object_names import HTTP_PORT, LAUNCHER_PORT

pytestmark = [pytest.mark.local, pytest.mark.timeout(900)]

BOUND = 2.0
LOADED = 1.5  # what a machine with two busy cores may add
# Over TCP, a read waits for a prefill that is stopped.
TCP = {"podTemplate": {"spec": {"containers": [{"name": "engine", "env": [
    {"name": "UCX_TLS", "value": "tcp"}]}]}}}  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalRun]:
    with LocalRun(manifest(prefill=TCP, decode=TCP), tmp_path_factory.mktemp("local")) as run:
        run.wait_ready()
        yield run


def ticket(run: LocalRun, prompt: str) -> dict[str, Any]:
    asked = {"do_remote_decode": True}
    reply = run.complete(prompt, role="prefill", tokens=1, kv_transfer_params=asked)
    return {"kv_transfer_params": reply.document["kv_transfer_params"]}


def timed(what: str, call: Callable[..., Reply], *args: Any, **more: Any) -> tuple[float, Reply]:
    began = time.monotonic()
    reply = call(*args, **more)
    seconds = time.monotonic() - began
    print(f"{what}: {reply.status} after {seconds:.2f} s")
    return seconds, reply


def log_of(run: LocalRun, role: str) -> str:
    logs = Path(run.folder).glob(f"*{role}*/engine/container*.log")
    return "".join(log.read_text(errors="replace") for log in logs)


def health(run: LocalRun, agent: str = "") -> int:
    """What decode's API answers to a health check: a router's, or of another client."""
    url = f"http://{run.address('decode')}:{HTTP_PORT}/health"
    headers = {"User-Agent": agent} if agent else {}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers)) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def says_why(run: LocalRun, error: dict[str, Any], *reasons: str) -> None:
    """An error has vLLM's shape, the reason and the id in decode's log, and no name."""
    print(error)
    assert error["code"] == 503
    found = re.fullmatch(r"KV was not received: (\w+) \(request (\S+)\)", error["message"])
    assert found is not None
    assert found[1] in reasons
    line = f"KV of {found[2]} was not received: {found[1]}"
    run.wait("line in decode's log", lambda: line in log_of(run, "decode"), 30)


def left_out(run: LocalRun) -> None:
    """Routers leave decode out; the kubelet and the operator find it well."""
    seconds = run.wait("decode that routers leave out", lambda: health(run) == 503, 60)
    print(f"routers leave decode out after {seconds:.2f} s more")
    assert health(run, "kube-probe/1.37") == 200
    assert json.loads(run.get("decode", LAUNCHER_PORT, "/readyz"))["ready"] is True


def taken_back(run: LocalRun) -> None:
    seconds = run.wait("decode that routers take back", lambda: health(run) == 200, 300)
    print(f"decode is taken back after {seconds:.2f} s")
    # The router asks each second, and the status follows it.
    run.wait("router that answers", lambda: run.complete(text(60, 99)).status == 200, 30)
    run.wait_ready()


def test_a_prefill_that_stands_still(run: LocalRun) -> None:
    early, late, streamed = (text(60, seed) for seed in (1, 2, 3))
    tickets = {prompt: ticket(run, prompt) for prompt in (early, late, streamed)}
    with ThreadPoolExecutor(1) as pool:
        with run.standing_still("prefill"):
            waiting = pool.submit(
                timed, "waits", run.complete, early, role="decode", **tickets[early]
            )
            time.sleep(6.5)
            seconds, reply = timed("new", run.complete, late, role="decode", **tickets[late])
            assert seconds <= BOUND + LOADED
            assert reply.status == 503, reply.text
            assert reply.document["error"]["type"] == "ServiceUnavailableError"
            says_why(run, reply.document["error"], "SideChannelUnreachable")
            _, reply = timed(
                "new stream",
                run.complete,
                streamed,
                role="decode",
                stream=True,
                **tickets[streamed],
            )
            event, end = re.findall("^data: (.*)$", reply.text, re.MULTILINE)
            says_why(run, json.loads(event)["error"], "SideChannelUnreachable")
            assert end == "[DONE]"
            left_out(run)
            assert not waiting.done(), "its lease stands"
        assert waiting.result(60)[1].kv_path["outcome"] == "transferred"
    taken_back(run)
    moved(run, text(60, 4))


def test_a_prefill_that_is_killed(run: LocalRun) -> None:
    early, late = text(60, 11), text(60, 12)
    tickets = {prompt: ticket(run, prompt) for prompt in (early, late)}
    with ThreadPoolExecutor(1) as pool, run.standing_still("prefill"):
        waiting = pool.submit(run.complete, early, role="decode", **tickets[early])
        time.sleep(1.5)
        assert not waiting.done()
        run.kill("prefill")
        began = time.monotonic()
        reply = waiting.result(60)
        print(f"waited for a killed prefill: {time.monotonic() - began:.2f} s")
        assert time.monotonic() - began <= BOUND + LOADED
        assert reply.status == 503, reply.text
        gone = ("SideChannelUnreachable", "PeerRestarted", "BackendError")
        says_why(run, reply.document["error"], *gone)
        seconds, reply = timed("new", run.complete, late, role="decode", **tickets[late])
        assert seconds <= BOUND + LOADED
        says_why(run, reply.document["error"], *gone)
    taken_back(run)
    moved(run, text(60, 13))


def test_a_decode_engine_that_is_killed(run: LocalRun) -> None:
    """The router has its answer under way; nothing of it can be kept."""
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(run.complete, text(40, 21), tokens=700)
        name = "vllm:num_requests_running"
        run.wait("request that runs", lambda: run.metric("decode", name) == 1, 60)
        run.kill("decode")
        began = time.monotonic()
        try:
            seen = f"{answer.result(60).status}"
        except (OSError, HTTPException) as error:
            seen = repr(error)
        print(f"ran on a killed decode: {seen} after {time.monotonic() - began:.2f} s")
        assert time.monotonic() - began <= BOUND + LOADED
        assert not seen.startswith("2")
    taken_back(run)
    moved(run, text(60, 22))
