"""An engine's OpenAI API as the launcher uses it: health, metrics, one completion.

Its metrics say which work the engine still has that a stop would break: running requests, and
leases. ``drain.py`` waits until nothing of it is left.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import aiohttp
import msgspec

from pdcluster_connector.compat.counted import counted
from pdcluster_connector.protocol import api_key

_SAMPLE = re.compile(r"^(?P<name>[a-zA-Z_:][\w:]*)(?:\{[^}]*\})? (?P<value>\S+)")
_REQUESTS: Final = frozenset({"vllm:num_requests_running", "vllm:num_requests_waiting"})
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
    requests = leases = finished = 0.0
    names = {*_REQUESTS, _LEASES, _FINISHED}
    for line in metrics.splitlines():
        match = _SAMPLE.match(line)
        if match is None or match["name"] not in names:
            continue
        try:
            value = float(match["value"])
        except ValueError:
            continue
        if match["name"] == _LEASES:
            leases += value
        elif match["name"] == _FINISHED:
            finished += value
        else:
            requests += value
    return Work(round(requests), round(leases), round(finished))


MAX_ANSWER: Final = 4 << 20
TEXT_FORMAT: Final = "text/plain;version=0.0.4"
# vLLM has this rank compute the request, whatever its load.
DATA_RANK_HEADER: Final = "X-data-parallel-rank"


class ApiError(Exception):
    """The API answered with an error or with something else. The message quotes the answer."""


class ApiUnreachableError(Exception):
    """The API did not answer: no connection, or it broke. The message says why."""


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
        await self._call("GET", "/health", None, seconds)

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
                data = await answer.content.read(MAX_ANSWER)
                while chunk := await answer.content.read(MAX_ANSWER - len(data) + 1):
                    data += chunk
                    if len(data) > MAX_ANSWER:
                        raise ApiError(f"{address} answered more than {MAX_ANSWER} bytes")
        except TimeoutError:
            raise
        except aiohttp.ClientResponseError as error:
            raise ApiError(f"{address} did not answer in HTTP: {error.message}") from None
        except (aiohttp.ClientError, OSError) as error:
            raise ApiUnreachableError(f"{address} does not answer: {_cause(error)}") from None
        if answer.status != 200:
            raise ApiError(f"{address} answered {answer.status}: {_said(data)}")
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
