"""An engine's OpenAI API as the launcher uses it: health, metrics, one completion, and a drain.

Its metrics say which work the engine still has that a stop would break: running requests, and
leases. In a drain, the engine serves on until it has nothing left to do, and will get nothing more.
``launcher/supervisor.py`` decides when a drain begins.
"""

import asyncio
import errno
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import inf, isfinite
from typing import Any, Final

import aiohttp
import msgspec

from pdcluster_connector.compat.findings import counted
from pdcluster_connector.launcher.engine.readiness import Readiness
from pdcluster_connector.launcher.inside_vllm import LAUNCHER_AGENT
from pdcluster_connector.protocol import api_key
from pdcluster_connector.sidechannel.handshake import read_bounded

_SAMPLE: Final = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)")
_LABEL: Final = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def samples(metrics: str, *names: str) -> Iterator[tuple[str, dict[str, str], float]]:
    """Yield (name, labels, value) of these metrics in Prometheus' text. A value is a number."""
    for line in metrics.splitlines():
        if line.startswith(names) and (match := _SAMPLE.match(line)) and match[1] in names:
            with suppress(ValueError):
                if isfinite(value := float(match[3])):
                    yield match[1], dict(_LABEL.findall(match[2] or "")), value


_REQUESTS: Final = ("vllm:num_requests_running", "vllm:num_requests_waiting")
_FINISHED: Final = "vllm:request_success_total"
_LEASES: Final = "pdcluster_kv_leases_held"


@dataclass(frozen=True, slots=True)
class Work:
    """The work that an engine still has.

    Attributes:
        requests: running or waiting, on all data-parallel ranks.
        leases: finished prefills whose KV blocks a decode engine may still read.
        finished: requests that have finished since the engine started.
    """

    requests: int
    leases: int
    finished: int = 0

    @property
    def done(self) -> bool:
        """Whether the engine can stop without anybody noticing."""
        return self.requests == 0 and self.leases == 0

    def __str__(self) -> str:
        if self.done:
            return "drained: no request and no lease is left"
        return (
            f"waiting for {counted(self.requests, 'request')} and {counted(self.leases, 'lease')}"
        )


def work(metrics: str) -> Work:
    """Sum up an engine's ``/metrics`` (Prometheus text); a metric that is missing counts as 0."""
    sums: Counter[str] = Counter()
    for name, _, value in samples(metrics, *_REQUESTS, _LEASES, _FINISHED):
        sums[name] += round(value)
    return Work(sum(sums[name] for name in _REQUESTS), sums[_LEASES], sums[_FINISHED])


MAX_ANSWER: Final = 4 << 20
TEXT_FORMAT: Final = "text/plain;version=0.0.4"
# vLLM has this rank compute the request, whatever its load.
DATA_RANK_HEADER: Final = "X-data-parallel-rank"


class ApiError(Exception):
    """The API answered with an error, of this HTTP status, or with something else (status 0).

    The message quotes the answer.
    """

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class ApiUnreachableError(Exception):
    """The API did not answer: no connection, or it broke. The message says why."""


class OwnFaultError(ApiUnreachableError):
    """The launcher could not call the API. That says nothing about the engine."""


OWN_FAULTS: Final = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
"""Errors of a call that nobody but the calling machine can cause."""
NO_ANSWER: Final = (ApiError, ApiUnreachableError, TimeoutError)
"""What a call raises when the engine gave no good answer."""


class EngineApi:
    """One engine's API at ``http://host:port``.

    Answers are read up to ``MAX_ANSWER`` bytes; every call has a deadline in seconds. ``key`` is
    the API key that the engine asks for, if it asks for one.
    """

    def __init__(
        self, session: aiohttp.ClientSession, address: str, key: str | None = None
    ) -> None:
        self._session = session
        self._key = api_key.headers(key)
        self.address = address

    async def health(self, seconds: float = 2.0) -> None:
        """Return if ``/health`` answers 200; raises ApiError or ApiUnreachableError."""
        await self._call("GET", "/health", None, seconds, {"User-Agent": LAUNCHER_AGENT})

    async def work(self, seconds: float = 5.0) -> Work:
        """Ask what the engine still has to do; raises ApiError or ApiUnreachableError."""
        return work((await self.metrics(seconds)).decode(errors="replace"))

    async def metrics(self, seconds: float = 5.0) -> bytes:
        """Read ``/metrics`` as Prometheus' text; raises as :meth:`work`, or TimeoutError."""
        return await self._call("GET", "/metrics", None, seconds, {"Accept": TEXT_FORMAT})

    async def complete(
        self, body: Mapping[str, Any], seconds: float, data_rank: int = 0
    ) -> dict[str, Any]:
        """POST ``/v1/completions``, for one data-parallel rank.

        Raises ApiError, ApiUnreachableError or TimeoutError.
        """
        headers = {DATA_RANK_HEADER: str(data_rank)}
        data = await self._call("POST", "/v1/completions", body, seconds, headers)
        try:
            return msgspec.json.decode(data, type=dict[str, Any])
        except msgspec.DecodeError as error:
            raise ApiError(f"{self.address} did not answer with a JSON object: {error}") from None

    async def _call(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
        seconds: float,
        headers: Mapping[str, str] | None = None,
    ) -> bytes:
        timeout = aiohttp.ClientTimeout(total=seconds, connect=min(seconds, 5.0))
        address = f"{self.address}{path}"
        try:
            async with self._session.request(
                method,
                address,
                json=body,
                headers={**self._key, **(headers or {})},
                timeout=timeout,
                allow_redirects=False,
            ) as answer:
                data = await read_bounded(answer, MAX_ANSWER)
        except TimeoutError:
            raise
        except aiohttp.ClientResponseError as error:
            raise ApiError(f"{address} did not answer in HTTP: {error.message}") from None
        except (aiohttp.ClientError, OSError) as error:
            if getattr(error, "errno", None) in OWN_FAULTS:
                raise OwnFaultError(
                    f"the launcher cannot call {address}: {_cause(error)}"
                ) from None
            raise ApiUnreachableError(f"{address} does not answer: {_cause(error)}") from None
        if len(data) > MAX_ANSWER:
            raise ApiError(f"{address} answered more than {MAX_ANSWER} bytes")
        if answer.status != 200:
            raise ApiError(f"{address} answered {answer.status}: {_said(data)}", answer.status)
        return data


def _cause(error: BaseException) -> str:
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return text.lower()


def _said(data: bytes) -> str:
    """Find the message in an error's body: OpenAI's ``error.message``, or the beginning."""
    try:
        document = msgspec.json.decode(data)
        message = document["error"]["message"]
    except (msgspec.DecodeError, TypeError, KeyError):
        message = data.decode(errors="replace")
    return " ".join(str(message).split())[:300]


_POLL: Final = 0.5
SETTLE_SECONDS: Final = 3.0
"""For so long at least an engine serves on when it is told to end."""
FORGET_SECONDS: Final = 60.0
"""For so long at most an engine serves on because routers may still send it requests.

The operator replaces the routers by new ones that do not know it. It says when that is done, mostly
after half a minute. A router of the user's has as long to notice. After that, new requests are
turned away.
"""
QUIET_SECONDS: Final = 2.0
"""For so long no request may have finished: then no router sends any more."""


async def wait_until_idle(
    api: EngineApi, readiness: Readiness, deadline: float, close: Callable[[], None]
) -> None:
    """Wait until nothing is left to do, and nothing more comes; say in ``readiness`` what is left.

    Args:
        deadline: when to stop waiting, in seconds of the monotonic clock. Infinite: go on when
            nothing is left, too, because the engine stays drained.
        close: has new requests turned away. It is called more than once.
    """
    readiness.draining("draining")
    began = time.monotonic()
    calm, ends = Calm(began), False
    while time.monotonic() < deadline and (deadline == inf or not ends):
        left: Work | None = None
        try:
            left = await api.work()
        except NO_ANSWER as error:
            readiness.draining(f"the engine's work is not known: {error}")
        else:
            readiness.draining(str(left))
        ends = calm.seen(left, time.monotonic(), routed=readiness.routed)
        # While a router of the operator's sends requests, each that is turned away would fail.
        if not readiness.routed and time.monotonic() - began >= FORGET_SECONDS:
            close()
        await asyncio.sleep(_POLL)


class Calm:
    """Tells when an engine that drains has nothing left to do, and will get nothing more.

    A moment without work is not enough: the next request may be on its way.

    Args:
        now: when the drain began, in seconds of any clock.
    """

    def __init__(self, now: float) -> None:
        self._began = now
        self._since = now
        self._finished: int | None = None

    def seen(self, work: Work | None, now: float, *, routed: bool = False) -> bool:
        """Take in the work of this moment, None if it is not known; return whether all is calm.

        Args:
            routed: routers may still send requests.
        """
        if work is None or not work.done or work.finished != self._finished:
            self._since = now
        if work is not None:
            self._finished = work.finished
        settled = now - self._began >= (FORGET_SECONDS if routed else SETTLE_SECONDS)
        return settled and now - self._since >= QUIET_SECONDS
