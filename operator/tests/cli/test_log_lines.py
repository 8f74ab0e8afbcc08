"""``pdcluster logs``: which logs there are, their order, and what may reach the terminal."""

from __future__ import annotations

import asyncio
import contextlib
import io
import random

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from kubernetes.aio.client import Configuration
from rich.console import Console

import virtual_time
from pdcluster_operator.adapters.api_server import client
from pdcluster_operator.adapters.api_server.client import KubeClient
from pdcluster_operator.cli import logs
from pdcluster_operator.cli.logs import Line, Part, Printer, Source, merged, sortable, sources_of
from pdcluster_operator.runtime.interfaces import ApiError, Key

ONE, TWO = Source("one-0", "engine", False, 0), Source("two-0", "router", False, 0)


def pod(*containers: dict) -> dict:
    return {"metadata": {"name": "one-0"}, "status": {"containerStatuses": list(containers)}}


ENDED = {"terminated": {"exitCode": 1}}


@pytest.mark.parametrize(
    ("container", "found"),
    [
        ({"state": {"running": {}}}, [(False, 0)]),
        (
            {"state": {"running": {}}, "lastState": ENDED, "restartCount": 2},
            [(True, 2), (False, 2)],
        ),
        ({"state": {"waiting": {}}}, []),
        # The last process is the one that the API server still calls the present one.
        ({"state": {"waiting": {}}, "lastState": ENDED, "restartCount": 1}, [(False, 1)]),
    ],
)
def test_the_logs_of_a_pod(container: dict, found: list[tuple[bool, int]]) -> None:
    others = pod({"name": "engine", **container}, {"name": "istio-proxy", "state": {"running": {}}})
    assert [(one.former, one.start) for one in sources_of(others)] == found


def test_lines_are_in_the_order_of_their_times_and_each_log_keeps_its_own() -> None:
    times = [f"2026-11-27T02:00:{n // 10:02}.{n % 10}" for n in range(200)]
    draw = random.Random(1)
    parts: tuple[list[Line], list[Line]] = ([], [])
    for n, moment in enumerate(times):
        parts[draw.randrange(2)].append(Line(sortable(moment), ONE, str(n)))
    assert [int(line.text) for line in merged(parts)] == list(range(200))
    stamps = ["2026-11-27T02:00:00", "2026-11-27T02:00:00.05", "2026-11-27T02:00:00.123456789"]
    assert sorted(map(sortable, reversed(stamps))) == list(map(sortable, stamps))
    same = [Line("t", ONE, str(n)) for n in range(5)]
    assert [line.text for line in merged([same, []])] == list("01234")


def test_what_an_engine_logs_cannot_change_the_terminal() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, color_system=None, width=40)
    printer = Printer(console, [ONE.label, TWO.label])
    printer.print(
        Line("t", ONE, "\x1b[31mred\x1b[0m \x1b]0;title\x07 [bold]x[/bold] \t" + "y" * 60)
    )
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "\x1b" not in text
    assert "\x07" not in text
    assert text.startswith("one-0 red ?]0;title? [bold]x[/bold]")
    assert text.endswith("y" * 60 + "\n"), "a line stays whole, so that it can be copied"


def test_what_is_asked_for() -> None:
    part = Part(since=0.5, tail=7, follow=True, request="")
    assert part.query(ONE) == {
        "container": "engine",
        "timestamps": "true",
        "follow": "true",
        "sinceSeconds": "1",
        "tailLines": "7",
    }
    assert part.query(ONE._replace(former=True)).get("follow") is None


class Answer:
    """Answers as the API server does: with lines, and then with an error if there is one."""

    def __init__(self, *lines: bytes, error: ApiError | None = None) -> None:
        self._lines, self._error = lines, error

    async def lines(self, path: str, query: dict[str, str]) -> object:
        for line in self._lines:
            yield line
        if self._error is not None:
            raise self._error


async def read(
    answer: Answer, request: str = "", *, probes: bool = False, source: Source = ONE
) -> tuple[list[Line], list[str]]:
    said: list[str] = []
    part, key = Part(None, None, False, request, probes), Key("ns", "tiny")
    limit = asyncio.Semaphore(1)
    read = logs._read(answer, key, source, part, limit, said.append)  # type: ignore[arg-type]
    return list(await read), said


async def test_lines_of_one_request_and_lines_without_a_time() -> None:
    answer = Answer(
        b"2026-11-27T02:00:00.5Z request cmpl-1 came\n",
        b"  a line that belongs to it, cmpl-1\n",
        b"2026-11-27T02:00:01Z request cmpl-2 came\n",
    )
    lines, said = await read(answer, "cmpl-1")
    assert [line.text for line in lines] == [
        "request cmpl-1 came",
        "  a line that belongs to it, cmpl-1",
    ]
    assert {line.time for line in lines} == {"2026-11-27T02:00:00.500000000"}
    assert said == []


async def test_memory_is_bounded_and_what_is_left_out_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logs, "MOST_LINES", 10)
    lines, said = await read(Answer(*(f"{n}\n".encode() for n in range(55))))
    assert [line.text for line in lines] == [str(n) for n in range(45, 55)]
    assert said == ["one-0: only its last 10 lines are shown"]
    lines, _ = await read(Answer(b"x" * 100_000))
    assert len(lines[0].text) == logs.LONGEST


async def test_the_memory_of_long_lines_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    long = b"\xff" * logs.LONGEST  # each byte that is no UTF-8 becomes a wider character
    answer = Answer(*(str(n).encode() + long + b"\n" for n in range(50)))
    said: list[str] = []
    kept = await logs._read(
        answer, Key("ns", "tiny"), ONE, Part(None, None, False, ""),  # type: ignore[arg-type]
        asyncio.Semaphore(1), said.append, 10 * 3 * logs.LONGEST,
    )  # fmt: skip
    assert 10 <= len(kept) < 20
    assert kept[-1].text.startswith("49")
    assert said == [f"one-0: only its last {len(kept)} lines are shown"]


async def test_a_line_that_is_too_long_is_said_and_what_came_before_is_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client, "HALF_A_LINE", 4096)

    async def answer(_: web.Request) -> web.Response:
        return web.Response(body=b"first\n" + b"x" * 10_000 + b"\nlast\n")

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    configuration = Configuration()
    async with TestServer(app) as server:
        configuration.host = str(server.make_url("")).rstrip("/")
        async with KubeClient(configuration) as real:
            for source in (ONE, ONE._replace(former=True)):
                lines, said = await read(real, source=source)  # type: ignore[arg-type]
                assert [line.text for line in lines] == ["first"]
                [complaint] = said
                assert complaint.startswith(f"{source.label}: GET ")
                assert complaint.endswith("a line is longer than 8,192 bytes")
                with pytest.raises(ApiError) as refused:
                    _ = [one async for one in real.lines("/log", {})]
                assert refused.value.reason == "LineTooLong"


async def test_a_log_that_cannot_be_read_hides_no_other() -> None:
    lines, said = await read(Answer(b"first\n", error=ApiError("Forbidden", "no right")))
    assert [line.text for line in lines] == ["first"]
    assert said == ["one-0: no right"]


async def test_answers_to_probes_are_left_out_unless_asked_for() -> None:
    lines = (b'INFO: 10.0.0.1:1 - "GET /health HTTP/1.1" 200 OK\n',
             b'INFO: 10.0.0.1:1 - "GET /health HTTP/1.1" 503 Service Unavailable\n',
             b'INFO: 10.0.0.1:1 - "POST /v1/completions HTTP/1.1" 200 OK\n')  # fmt: skip
    shown, _ = await read(Answer(*lines))
    assert [line.text for line in shown] == [line.decode().rstrip() for line in lines[1:]]
    shown, _ = await read(Answer(*lines), probes=True)
    assert len(shown) == 3


class Quiet(Answer):
    """A server whose connection is quiet, and counts as broken, once."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[dict[str, str]] = []

    async def call(self, method: str, path: str, query: dict[str, str]) -> dict:
        engine = {"name": "engine", "state": {"running": {}}}
        labels = {"app.kubernetes.io/component": "prefill"}
        return {"items": [{**pod(engine), "metadata": {"name": "one-0", "labels": labels}}]}

    async def lines(self, path: str, query: dict[str, str]) -> object:
        self.asked.append(query)
        yield b"2026-11-27T02:00:00Z first\n"
        if len(self.asked) == 1:
            yield b"2026-11-27T02:00:01Z second\n"
            raise ApiError("ApiServerUnreachable", "silent")
        yield b"2026-11-27T02:00:01Z second\n"
        yield b"2026-11-27T02:00:02Z third\n"
        await asyncio.Event().wait()


def test_a_log_that_is_quiet_for_minutes_is_followed_on_without_a_line_twice() -> None:
    client, said = Quiet(), []
    console = Console(file=io.StringIO(), width=80)

    async def follow() -> None:
        part = Part(None, 5, True, "")
        one = logs.Follower(client, Key("ns", "tiny"), logs.ROLES, part, said.append)  # type: ignore[arg-type]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(20):
                await one.run(Printer(console, [ONE.label]))

    virtual_time.run(follow())
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().split() == [
        "one-0",
        "first",
        "one-0",
        "second",
        "one-0",
        "third",
    ]
    assert [query.get("tailLines") for query in client.asked] == ["5", None]
    assert "sinceSeconds" in client.asked[1]
    assert said == []
