"""What ``pdcluster up`` says: of the KV cache of a prompt, of pods, and of what it waits for."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from rich.console import Console

from pdcluster_connector.protocol.launcher_documents import EngineReport, LinkReport, LinksReport
from pdcluster_operator.api.object_names import short
from pdcluster_operator.cli import once, view
from pdcluster_operator.cli.exits import UserError
from pdcluster_operator.cli.once import Answer, ask, describe_path
from pdcluster_operator.cli.up import UpRun
from pdcluster_operator.cli.view import (
    Condition,
    PodLine,
    Snapshot,
    View,
    take_snapshot,
    waiting_for,
)
from pdcluster_operator.runtime.interfaces import Key

PREFILL, DECODE = "ns.tiny.prefill.aaaaa.0", "ns.tiny.decode.bbbbb.1"
PATH = {
    "outcome": "transferred", "prefill": f"{PREFILL}/1", "decode": f"{DECODE}/2",
    "bytes": 2_000_000, "seconds": 0.004, "blocks": 1, "tokens": 16,
}  # fmt: skip


@pytest.mark.parametrize(
    ("path", "received", "moved", "said"),
    [
        (PATH, 0, True, ("prefill/0 -> decode/1: 1 block (16 tokens), 2,000,000 bytes in 4.0 ms, "
         "0.500 GB/s")),
        ({**PATH, "seconds": 0}, 0, True, ("prefill/0 -> decode/1: 1 block (16 tokens), 2,000,000 "
         "bytes in 0.0 ms")),
        ({**PATH, "decode": None, "blocks": 2, "tokens": 1}, 0, True,
         "prefill/0 -> ?: 2 blocks (1 token), 2,000,000 bytes in 4.0 ms, 0.500 GB/s"),
        ({**PATH, "bytes": 0}, 9, False, ("prefill/0 -> decode/1: 1 block (16 tokens), 0 bytes in "
         "4.0 ms, 0.000 GB/s")),
        ({"outcome": "transferred"}, 0, False,
         "prefill -> decode: 0 blocks (0 tokens), 0 bytes in 0.0 ms"),
        ({"outcome": "local", "bytes": 7, "reason": "NoTicket"}, 9, False, ("prefill -> decode: "
         "no KV was transferred (NoTicket); decode computed the prompt itself")),
        ({"outcome": "local"}, 0, False, ("prefill -> decode: no KV was transferred (local); "
         "decode computed the prompt itself")),
        ({}, 4096, True, "4,096 bytes were pulled into decode (from its metrics)"),
        ({}, 0, False, "no KV was transferred; decode computed the prompt itself"),
    ],
)  # fmt: skip
def test_the_way_of_a_prompt_in_one_sentence(
    path: Mapping[str, Any], received: int, moved: bool, said: str
) -> None:
    answer = Answer("text", 3, path, received)
    assert describe_path(answer) == said
    assert answer.moved is moved


def asked(
    completion: web.Response, metrics: tuple[str, ...] = (), key: str | None = None
) -> tuple[Answer, dict[str, Any]]:
    """Ask a router and a decode engine on one port; ``metrics`` are its pages, one after another.

    Returns:
        The answer, and what the router was sent.
    """
    pages, sent = list(metrics), {}

    async def complete(request: web.Request) -> web.Response:
        sent.update(await request.json(), key=request.headers.get("Authorization"))
        return completion

    async def numbers(_: web.Request) -> web.Response:
        return web.Response(text=pages.pop(0))

    async def run() -> Answer:
        app = web.Application()
        app.router.add_post("/v1/completions", complete)
        app.router.add_get("/metrics", numbers)
        async with TestServer(app) as server:
            url = str(server.make_url("")).rstrip("/")
            decode = (one for one in ([url, "http://127.0.0.1:1"] if metrics else []))
            return await ask(url, "tiny", "Once", 5, decode, key)

    return asyncio.run(run()), sent


def counter(value: str) -> str:
    name = "pdcluster_kv_received_bytes_total"
    return f'# TYPE {name} counter\n{name}{{engine="a"}} {value}\n{name}{{engine="b"}} 1e3\nx 5\n'


def test_an_answer_brings_its_text_and_the_bytes_that_decode_counted() -> None:
    document = {
        "choices": [{"text": " upon a time"}, {"text": "another"}],
        "usage": {"completion_tokens": 4},
        "kv_transfer_params": {"kv_path": PATH},
    }
    answer, sent = asked(web.json_response(document), (counter("4096"), counter("8192")), "k")
    assert answer == Answer(" upon a time", 4, PATH, 4096), "an engine that is silent counts as 0"
    assert sent == {
        "model": "tiny", "prompt": "Once", "max_tokens": 5, "temperature": 0, "key": "Bearer k",
    }  # fmt: skip


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"choices": [], "usage": None, "kv_transfer_params": None},
        {"choices": [{}], "usage": {}, "kv_transfer_params": {"kv_path": None}},
        {"choices": [{"text": ""}], "usage": {"completion_tokens": None},
         "kv_transfer_params": {"do_remote_prefill": False}},
    ],
)  # fmt: skip
def test_an_answer_of_few_words_is_read(document: dict[str, Any]) -> None:
    answer, sent = asked(web.json_response(document))
    assert answer == Answer("", 0, {}, 0)
    assert sent["key"] is None


def test_a_request_that_fails_says_where_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(once, "MAX_ANSWER", 2 << 20)
    for response, said in (
        (web.Response(status=503, text=" no engine " + "x" * 900), "answers 503: no engine x"),
        (web.Response(text="[]"), "answers what is no completion: Expected `object`, got `array`$"),
        (web.Response(text='{"x": ' + "[" * 200_000), "no completion: it is nested too deeply$"),
        (web.Response(text="words"), "answers what is no completion: JSON is malformed"),
        (web.json_response({"kv_transfer_params": {"kv_path": 7}}), "kv_path`$"),
        (web.Response(text="x" * (2 << 20) + "y"), "answers with more than 2 MiB$"),
    ):
        with pytest.raises(UserError, match=said) as failed:
            asked(response)
        assert failed.value.exit == 4
        assert len(str(failed.value)) < 600


async def read_from(*pieces: bytes, status: int = 200, **headers: str) -> tuple[str | None, int]:
    """Return the metrics page of a server that sends pieces, and how many requests it got."""
    asked = 0

    async def answer(request: web.Request) -> web.StreamResponse:
        nonlocal asked
        asked += 1
        response = web.StreamResponse(status=status, headers=headers)
        await response.prepare(request)
        for piece in pieces:
            await response.write(piece)
            await asyncio.sleep(0)
        return response

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    async with TestServer(app) as server, aiohttp.ClientSession() as http:
        return await once.metrics(http, str(server.make_url("")).rstrip("/")), asked


async def test_a_metrics_page_is_read_to_its_end_or_not_at_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pieces = [b"# a comment\n"] + [b"x" * 65_000 + b"\n"] * 8 + [b"last 7\n"]
    page, _ = await read_from(*pieces)
    assert page == b"".join(pieces).decode()
    assert await read_from(b"", status=200) == ("", 1), "read, and empty"
    assert await read_from(b"last 7\n", status=503) == (None, 1)
    assert await read_from(b"", status=307, Location="/elsewhere") == (None, 1)
    monkeypatch.setattr(once, "MAX_ANSWER", 1 << 10)
    assert await read_from(b"x" * 1025) == (None, 1)


def test_a_prompt_follows_no_redirect() -> None:
    elsewhere = web.Response(status=307, headers={"Location": "/metrics"})
    with pytest.raises(UserError, match="/v1/completions answers 307: "):
        asked(elsewhere)


@pytest.mark.parametrize("value", ["NaN", "+Inf", "1e999", "1.1.1"])
def test_a_counter_that_is_no_number_counts_nothing(value: str) -> None:
    answer, _ = asked(web.json_response({}), (counter("1e3"), counter(value)))
    assert answer.received == 0


CONDITIONS = (
    Condition("Accepted", "True", "Accepted", ""),
    Condition("DecodeReady", "False", "Starting", "0 of 1 engines are ready"),
    Condition("KVLinksEstablished", "Unknown", "WaitingForEngines", "no engine"),
    Condition("Available", "False", "NoVerifiedPair", "nothing is served"),
    Condition("Progressing", "False", "Paused", ""),
    Condition("Ready", "False", "Starting", ""),
)


def snapshot(*conditions: Condition, pods: tuple[PodLine, ...] = ()) -> Snapshot:
    return Snapshot(pods, conditions, ())


def test_it_waits_for_what_does_not_hold_and_not_for_what_follows_from_it() -> None:
    assert not snapshot(*CONDITIONS).ready
    assert waiting_for(snapshot(*CONDITIONS)) == (
        "DecodeReady=False Starting: 0 of 1 engines are ready"
    )
    two = (replace(CONDITIONS[1], type="PrefillReady", message=""), *CONDITIONS)
    assert waiting_for(snapshot(*two)).startswith("PrefillReady=False Starting; DecodeReady=")
    assert waiting_for(snapshot(*CONDITIONS[2:])) == (
        "KVLinksEstablished=Unknown WaitingForEngines: no engine"
    )
    assert waiting_for(snapshot()) == "the operator's first status"
    ready = snapshot(CONDITIONS[0], Condition("Ready", "True", "Ready", ""))
    assert ready.ready
    assert ready.missing == ()


def test_an_engine_has_a_short_name() -> None:
    assert short(PREFILL) == "prefill/0"
    assert short("ns.tiny.prefill.0") == "ns.tiny.prefill.0"


class Shown:
    """A view that prints lines, and its clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(view, "time", SimpleNamespace(monotonic=lambda: self.now))
        self.output = io.StringIO()
        self.view = View(Console(file=self.output, width=40), plain=True)

    def lines(self) -> list[str]:
        found = self.output.getvalue().splitlines()
        self.output.truncate(0)
        self.output.seek(0)
        return found


POD = PodLine("tiny-0", "decode", "127.0.0.2", "Starting", "", None, 0)


def test_lines_are_for_what_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = Shown(monkeypatch)
    shown.now += 2.5
    for doing in ("", "", "loading", "loading"):
        shown.view.show(snapshot(*CONDITIONS, pods=(replace(POD, doing=doing),)))
    assert shown.lines() == ["[   2.5 s] tiny-0: Starting", "[   2.5 s] tiny-0: Starting - loading"]


def test_what_it_waits_for_is_said_once_after_a_while_and_again_when_it_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown = Shown(monkeypatch)
    waits = snapshot(*CONDITIONS)
    said = []
    for _ in range(70):
        shown.view.show(waits)
        said += shown.lines()
        shown.now += 0.5
    text = "waiting for DecodeReady=False Starting: 0 of 1 engines are ready"
    assert said == [f"[  15.5 s] {text}"]
    shown.view.show(snapshot(replace(CONDITIONS[1], message="x" * 500)))
    [line] = shown.lines()
    assert line.endswith("xxx…")
    assert len(line) == len("[  35.0 s] ") + view.LONGEST_LINE
    shown.now += 60.0
    shown.view.show(snapshot(Condition("Ready", "True", "Ready", "")))
    assert shown.lines() == []


def test_a_condition_is_shown_when_its_status_or_reason_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown = Shown(monkeypatch)
    accepted, decode, *_ = CONDITIONS
    shown.view.mark_as_shown(snapshot(accepted))
    types = {"DecodeReady", "Accepted", "KVLinksEstablished"}
    shown.view.show_conditions(snapshot(accepted, decode), types)
    shown.view.show_conditions(snapshot(accepted, replace(decode, message="still")), types)
    shown.view.show_conditions(snapshot(replace(accepted, status="False")), {"DecodeReady"})
    shown.view.show_conditions(
        snapshot(replace(decode, reason="LoadingWeights", message="")), types
    )
    shown.view.show_conditions(snapshot(replace(decode, status="True", reason="Good")), types)
    shown.view.show_conditions(snapshot(*CONDITIONS[2:]), types)  # it waits for engines
    assert shown.lines() == [
        "[   0.0 s] DecodeReady: False Starting - 0 of 1 engines are ready",
        "[   0.0 s] DecodeReady: False LoadingWeights",
        "[   0.0 s] DecodeReady: True Good",
    ]


def pod(name: str, **parts: Any) -> dict[str, Any]:
    labels = {"pdcluster.dev/cluster": "tiny", "app.kubernetes.io/component": "router"}
    return {"metadata": {"name": name, "namespace": "ns", "labels": labels}, **parts}


def engine(**parts: Any) -> dict[str, Any]:
    made = pod("tiny-decode-bbbbb-1-0", **parts)
    made["metadata"]["labels"] |= {
        "pdcluster.dev/role": "decode", "pdcluster.dev/revision": "bbbbb",
        "pdcluster.dev/engine": "tiny-decode-bbbbb-1", "app.kubernetes.io/component": "decode",
    }  # fmt: skip
    return made


def line_of(found: dict[str, Any], *reports: EngineReport, stopped: Any = ()) -> PodLine:
    local: Any = SimpleNamespace(
        cluster=lambda _: {},
        loop=SimpleNamespace(
            monitor=SimpleNamespace(
                engines=lambda _: {one.engine: one for one in reports}, links=lambda _: {}
            )
        ),
        kubelet=SimpleNamespace(
            logs=lambda: {"tiny-decode-bbbbb-1-0": Path("/log")},
            stopped=lambda: {"tiny-decode-bbbbb-1-0": stopped},
        ),
        api=SimpleNamespace(list=lambda kind, namespace: [found, {"metadata": {"name": "x"}}]),
    )
    [line] = take_snapshot(local, Key("ns", "tiny")).pods
    return line


def container(**state: Any) -> dict[str, Any]:
    return {"containerStatuses": [{"restartCount": 2, **state}], "podIP": "127.0.0.3"}


DIED = {"terminated": {"exitCode": 1, "message": "no GPU"}}


@pytest.mark.parametrize(
    ("found", "reports", "state", "doing"),
    [
        (engine(), (), "Starting", ""),
        (pod("router"), (), "Starting", "waits until every engine answers"),
        (pod("router", status={"conditions": [{"type": "Ready", "status": "True"}]}), (), "Ready",
         ""),
        (engine(), (EngineReport(ready=False, engine=DECODE, engine_id="", state="WarmingUp",
                                 message="graphs"),), "WarmingUp", "graphs"),
        (engine(), (EngineReport(ready=True, engine=DECODE, engine_id="", state="WarmingUp"),),
         "Ready", ""),
        (engine(), (EngineReport(ready=True, engine=PREFILL, engine_id=""),), "Starting", ""),
        (engine(status={"conditions": [
            {"type": "Ready", "status": "False", "reason": "x", "message": "x"},
            {"type": "PodScheduled", "status": "False", "reason": "Unschedulable",
             "message": "no GPU is free"}]}), (), "Unschedulable", "no GPU is free"),
        (engine(status={"conditions": [{"type": "PodScheduled", "status": "True"}]}), (),
         "Starting", ""),
        (engine(status=container(state={"waiting": {"reason": "ContainerCreating"}})), (),
         "ContainerCreating", ""),
        (engine(status=container(state={"waiting": {"reason": "CrashLoopBackOff",
                                                    "message": "again in 10 s"}}, lastState=DIED)),
         (), "Died", "no GPU (exit code 1); again in 10 s"),
    ],
)  # fmt: skip
def test_what_a_pod_is_doing(
    found: dict[str, Any], reports: tuple[EngineReport, ...], state: str, doing: str
) -> None:
    line = line_of(found, *reports)
    assert (line.state, line.doing) == (state, doing)
    going = {**found, "metadata": {**found["metadata"], "deletionTimestamp": "2026-11-24"}}
    assert line_of(going, *reports).state == "Terminating"


def test_an_engine_with_a_stopped_process_is_frozen_whatever_its_launcher_said() -> None:
    ready = EngineReport(ready=True, engine=DECODE, engine_id="")
    line = line_of(engine(), ready, stopped=[7, 9])
    assert line.state == "Frozen"
    assert line.doing.endswith("kill -CONT 7 9 lets it go on")


def test_only_an_engine_of_a_cluster_that_was_ready_begins_to_be_counted_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown: Any = Shown(monkeypatch).view
    options: Any = SimpleNamespace(keep_going=False)
    cluster: Any = SimpleNamespace(namespace="ns", name="tiny")
    run = UpRun(options, cluster, shown, None, Path("/run"))  # type: ignore[arg-type]
    died = replace(POD, state="Died", end="SIGILL")
    run._judge(replace(POD, serves=True), True)
    run._judge(died, False)  # the one that served
    run._judge(replace(died, restarts=1), False)
    # It is ready, and dies of the canary: the cluster was not ready.
    run._judge(replace(POD, state="Ready", serves=True, restarts=2), False)
    with pytest.raises(UserError, match="died 2 times: SIGILL; see None") as error:
        run._judge(replace(died, restarts=2), False)
    assert error.value.exit == 3


def test_the_line_of_a_pod_has_its_place_its_log_and_its_starts() -> None:
    line = line_of(engine(status=container(lastState=DIED)))
    assert line == PodLine(
        "tiny-decode-bbbbb-1-0", "decode", "127.0.0.3", "Starting", "", Path("/log"), 2,
        "no GPU (exit code 1)",
    )  # fmt: skip
    assert line_of(pod("router")) == PodLine(
        "router", "router", "", "Starting", "waits until every engine answers", None, 0, ""
    )


def test_a_snapshot_has_the_conditions_and_the_links_of_all_decode_engines() -> None:
    condition = {"type": "Ready", "status": "False", "reason": "Starting"}
    links = [LinkReport(name) for name in (PREFILL, "another")]
    reports = {
        "z": LinksReport("z", "", (links[0],)),
        DECODE: LinksReport(DECODE, "", tuple(links)),
    }
    monitor = SimpleNamespace(engines=lambda _: {}, links=lambda _: reports)
    local: Any = SimpleNamespace(
        cluster=lambda _: {"status": {"conditions": [condition]}},
        loop=SimpleNamespace(monitor=monitor),
        kubelet=SimpleNamespace(logs=dict, stopped=dict),
        api=SimpleNamespace(list=lambda kind, namespace: []),
    )
    found = take_snapshot(local, Key("ns", "tiny"))
    assert found.conditions == (Condition("Ready", "False", "Starting", ""),)
    assert found.links == ((DECODE, links[0]), (DECODE, links[1]), ("z", links[0]))
