"""``pdcluster logs``: engines, launchers and routers of a PDCluster together, in order of time."""

import asyncio
import heapq
import re
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import click
from rich.console import Console
from rich.text import Text

from pdcluster_connector.compat.findings import counted
from pdcluster_operator.adapters.api_server.client import KubeClient, NotFound
from pdcluster_operator.adapters.api_server.kinds import POD
from pdcluster_operator.api.object_names import CLUSTER_LABEL
from pdcluster_operator.api.spec.pod_templates import ENGINE_CONTAINER, ROUTER_CONTAINER, as_mapping
from pdcluster_operator.cli import output as outputs
from pdcluster_operator.cli.commands import Command, Target, duration, target_or_run
from pdcluster_operator.cli.connection import read_named, with_cluster
from pdcluster_operator.cli.exits import Exit, UserError
from pdcluster_operator.plan.observed import pods as seen
from pdcluster_operator.runtime.interfaces import ApiError, Key

DETAILS = """\
Prints the logs of all pods together, in the order of their times, one prefix a pod. Launchers write
into the log of their engine. Of a container that was started again, the log of the process before
is printed, too; its prefix ends with -.

--request prints the lines that name a request. A router gives each request an id, which the engines
log with it when they log requests.
"""
EXAMPLES = (
    ("pdcluster logs llama --since 10m", "of the last ten minutes"),
    ("pdcluster logs llama --role decode --follow", "decode engines, as they write"),
    ("pdcluster logs tiny --local", "of a pdcluster up on this machine"),
)
ROLES = ("prefill", "decode", "router")
COMPONENT = "app.kubernetes.io/component"
OURS = (ENGINE_CONTAINER, ROUTER_CONTAINER)
MOST_PODS = 256
MOST_BYTES = 256 * 1024 * 1024
"""Of memory for the lines of all logs. Each log has an equal share."""
AT_ONCE = 16
"""So many logs are read at once, unless they are followed."""
TAIL = 1000
"""Lines of each log without --since and --tail."""
LONGEST = 8192
COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "bright_cyan", "bright_magenta")
PROBE = re.compile(rb'"GET /(?:health|metrics|v1/models|readiness) HTTP/1\.1" 200')
STAMP = re.compile(rb"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?)Z ")


Complain = Callable[[str], None]


class Source(NamedTuple):
    """One log.

    Attributes:
        former: whether it is that of the process before the last restart.
        start: how often the container had been started again.
    """

    pod: str
    container: str
    former: bool
    start: int

    @property
    def label(self) -> str:
        """The prefix of its lines."""
        return f"{self.pod}{'-' if self.former else ''}"


class Line(NamedTuple):
    """One line, and when it was written, as the API server says it."""

    time: str
    source: Source
    text: str

    @property
    def size(self) -> int:
        """The bytes of memory that it takes."""
        return sum(map(sys.getsizeof, (self, self.time, self.text)))


@dataclass(frozen=True, slots=True)
class Part:
    """Which part of the logs is asked for.

    Attributes:
        since: the last so many seconds; None for all.
        tail: the last so many lines of each log; None for all.
        request: lines with this text alone.
        probes: with lines that only say that a probe or a scrape was answered.
    """

    since: float | None
    tail: int | None
    follow: bool
    request: str
    probes: bool = False

    def query(self, source: Source) -> dict[str, str]:
        """Return what the API server is asked for."""
        asked = {"container": source.container, "timestamps": "true"}
        if source.former:
            asked["previous"] = "true"
        elif self.follow:
            asked["follow"] = "true"
        if self.since is not None:
            asked["sinceSeconds"] = str(max(1, int(self.since)))
        if self.tail is not None:
            asked["tailLines"] = str(self.tail)
        return asked


@click.command("logs", cls=Command, help=DETAILS, examples=EXAMPLES)
@target_or_run
@click.option("--role", type=click.Choice(ROLES), multiple=True, help="of these pods alone")
@click.option("--since", type=duration, metavar="DURATION", help="such as 90s, 30m or 1h")
@click.option(
    "--tail",
    type=click.IntRange(0),
    metavar="LINES",
    help=f"the last so many of each pod (default: {TAIL:,}, with --since all)",
)
@click.option("-f", "--follow", is_flag=True, help="go on until Ctrl-C")
@click.option("--probes", is_flag=True, help="with the lines that engines write of each probe")
@click.option("--request", default="", metavar="ID", help="lines that name this request alone")
def logs(
    target: Target,
    role: Sequence[str],
    since: float | None,
    tail: int | None,
    follow: bool,
    request: str,
    probes: bool,
) -> Exit:
    """Print the logs of one PDCluster."""
    if tail is None and since is None and not request:
        tail = TAIL
    part = Part(since, tail, follow, request, probes)
    return with_cluster(target, show, part, role or ROLES, target.elsewhere)


async def show(
    client: KubeClient, key: Key, part: Part, roles: Sequence[str], elsewhere: str = ""
) -> Exit:
    """Print the logs; ``elsewhere`` is that of the :class:`Target`."""
    await read_named(client, key)
    sources = await _sources(client, key, roles)
    if not sources and not part.follow:
        among = f" of {' and '.join(roles)}" if tuple(roles) != ROLES else ""
        raise UserError(
            f'no container{among} of PDCluster "{key.name}" has begun to write a log; see '
            f"`pdcluster status {key.name}{elsewhere}`",
            Exit.REQUEST_FAILED,
        )
    warn = outputs.console(stderr=True)
    printer = Printer(outputs.console(), [source.label for source in sources])
    complaints: list[str] = []

    def complain(text: str) -> None:
        complaints.append(text)
        warn.print(Text(text, "yellow"))

    if part.follow:
        await Follower(client, key, roles, part, complain).run(printer)
    else:
        limit = asyncio.Semaphore(AT_ONCE)
        each = MOST_BYTES // len(sources)
        read = (_read(client, key, source, part, limit, complain, each) for source in sources)
        for line in merged(await asyncio.gather(*read)):
            printer.print(line)
    if complaints and not printer.printed:
        return Exit.REQUEST_FAILED
    if not printer.printed and part.request:
        warn.print(
            Text(
                f"none of the {counted(len(sources), 'log')} names {part.request}: engines log "
                "requests with --enable-log-requests in extraArgs"
            )
        )
    return Exit.DONE


async def _sources(client: KubeClient, key: Key, roles: Sequence[str]) -> list[Source]:
    """Return the logs that there are now, of ``MOST_PODS`` pods at most."""
    query = {"labelSelector": f"{CLUSTER_LABEL}={key.name}", "limit": str(MOST_PODS)}
    listed = (await client.call("GET", POD.path(key.namespace), query=query)).get("items") or []
    return [source for pod in listed if _role(pod) in roles for source in sources_of(pod)]


def sources_of(pod: Mapping[str, Any]) -> Iterator[Source]:
    """Yield the logs of a pod: of its engine or router, and of the process before, if any."""
    name = str(pod["metadata"]["name"])
    for container in seen.status_of(pod).get("containerStatuses") or ():
        if container.get("name") in OURS:
            state, last = (as_mapping(container.get(one)) for one in ("state", "lastState"))
            start = int(container.get("restartCount") or 0)
            if last.get("terminated") and "waiting" not in state:
                yield Source(name, container["name"], True, start)
            if "waiting" not in state or last.get("terminated"):
                yield Source(name, container["name"], False, start)


def _role(pod: Mapping[str, Any]) -> str:
    return str(as_mapping(seen.metadata_of(pod).get("labels")).get(COMPONENT) or "")


async def lines_of(client: KubeClient, key: Key, source: Source, part: Part) -> AsyncIterator[Line]:
    """Yield the lines of one log; raises ApiError."""
    path, moment = f"{POD.path(key.namespace, source.pod)}/log", ""
    wanted = part.request.encode()
    async with aclosing(client.lines(path, part.query(source))) as answer:
        async for raw in answer:
            stamp = STAMP.match(raw)
            body = raw[stamp.end() :] if stamp else raw
            moment = sortable(stamp[1].decode()) if stamp else moment
            if wanted in body and (part.probes or not PROBE.search(body)):
                text = body[:LONGEST].decode(errors="replace").rstrip()
                yield Line(moment, source, text)


def sortable(stamp: str) -> str:
    """Return a time so that texts are in the order of times: nine digits after the point."""
    whole, _, rest = stamp.partition(".")
    return f"{whole}.{rest:0<9.9}"


async def _read(
    client: KubeClient,
    key: Key,
    source: Source,
    part: Part,
    limit: asyncio.Semaphore,
    complain: Complain,
    most_bytes: int = MOST_BYTES,
) -> Sequence[Line]:
    """Read one log as a whole. Its end counts if it is longer than is kept."""
    kept: deque[Line] = deque()
    size, left_out = 0, False
    async with limit:
        try:
            async for line in lines_of(client, key, source, part):
                kept.append(line)
                size += line.size
                while size > most_bytes or len(kept) > MOST_LINES:
                    size -= kept.popleft().size
                    left_out = True
        except ApiError as error:
            _refused(source, error, complain)
    if left_out:
        complain(f"{source.label}: only its last {len(kept):,} lines are shown")
    return kept


MOST_LINES = 20_000
"""Lines of each log that are kept in memory."""


def _refused(source: Source, error: ApiError, complain: Complain) -> None:
    # A pod goes at any time, and the former log of a container with it.
    gone = isinstance(error, NotFound) or (source.former and error.reason != "LineTooLong")
    if not gone:
        complain(f"{source.label}: {error}")


def merged(logs: Sequence[Sequence[Line]]) -> Iterator[Line]:
    """Yield the lines of all logs in the order of their times. Each log keeps its own order."""
    return heapq.merge(*logs, key=lambda line: line.time)


GATHER_SECONDS = 0.5
LOOK_SECONDS = 3.0
QUEUED = 10_000


class Follower:
    """Prints lines as they come: those of one moment together, in the order of their times.

    Pods that come later, and containers that start again, are followed from their first line on.
    """

    def __init__(
        self, client: KubeClient, key: Key, roles: Sequence[str], part: Part, complain: Complain
    ) -> None:
        self._client, self._key, self._roles, self._part = client, key, roles, part
        self._complain = complain
        self._queue: asyncio.Queue[Line] = asyncio.Queue(QUEUED)
        self._feeds: dict[Source, asyncio.Task[None]] = {}

    async def run(self, printer: "Printer") -> None:
        """Print until cancelled; raises ApiError if the pods cannot be listed."""
        finding = asyncio.create_task(self._find())
        try:
            while not finding.done():
                await asyncio.sleep(GATHER_SECONDS)
                batch = [self._queue.get_nowait() for _ in range(self._queue.qsize())]
                for line in sorted(batch, key=lambda one: one.time):
                    printer.print(line)
            finding.result()
        finally:
            tasks = [finding, *self._feeds.values()]
            for one in tasks:
                one.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _find(self) -> None:
        part = self._part
        while True:
            for source in await _sources(self._client, self._key, self._roles):
                # The former log of a container that starts again was followed to its end.
                if source not in self._feeds and (part is self._part or not source.former):
                    self._feeds[source] = asyncio.create_task(self._feed(source, part))
            part = replace(part, since=None, tail=None)
            await asyncio.sleep(LOOK_SECONDS)

    async def _feed(self, source: Source, part: Part) -> None:
        last, newest, heard = "", "", time.monotonic()
        while True:
            try:
                async for line in lines_of(self._client, self._key, source, part):
                    if line.time > last or not line.time:
                        newest, heard = line.time, time.monotonic()
                        await self._queue.put(line)
                return
            except ApiError as error:
                # Without a byte for three minutes, a connection counts as broken.
                if error.reason != "ApiServerUnreachable" or source.former:
                    _refused(source, error, self._complain)
                    return
            last, silent = newest, time.monotonic() - heard
            part = replace(part, since=silent + LOOK_SECONDS, tail=None)
            await asyncio.sleep(LOOK_SECONDS)


class Printer:
    """Prints lines, each with the short name of its pod."""

    def __init__(self, console: Console, labels: Sequence[str]) -> None:
        self._console = console
        self._styles = {
            label: COLOURS[n % len(COLOURS)] for n, label in enumerate(dict.fromkeys(labels))
        }
        self._width = max(map(len, labels), default=0)
        self.printed = 0

    def print(self, line: Line) -> None:
        """Print one line."""
        label = line.source.label
        text = Text(f"{label:{self._width}} ", self._styles.get(label, ""))
        self._console.print(text.append(outputs.plain(line.text), "default"), soft_wrap=True)
        self.printed += 1
