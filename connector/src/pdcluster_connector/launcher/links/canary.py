"""The canary: a request of the launcher's own that goes through prefill and decode.

A link is verified only when the KV of a real request went through it. The launcher asks prefill's
API for one token. It then asks decode's API for the next token, with the parameters that prefill
returned. Decode's answer says what its KV path did for this request. Each data-parallel rank of
either engine gets one canary. :class:`CanarySchedule` says when each link gets one.

A canary fails only if an answer shows that KV did not move. An engine that is busy answers too
late, or with HTTP 429 or 503. That says nothing about KV: the result of the canary before stands.
"""

import asyncio
import json
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import aiohttp
from msgspec.structs import replace

from pdcluster_connector.compat.reasons import Reason
from pdcluster_connector.launcher.engine.engine_api import ApiError, ApiUnreachableError, EngineApi
from pdcluster_connector.launcher.links.link_table import LinkRow, LinkTable
from pdcluster_connector.protocol.engine_id import id_of_rank
from pdcluster_connector.protocol.kv_path import KEY_PARAMETER
from pdcluster_connector.protocol.launcher_documents import CanaryReport, CanaryState, LinkState
from pdcluster_connector.protocol.prompt_outcomes import was_due

_FIRST_RETRY: Final = 2.0
_LAST_RETRY: Final = 60.0


class CanarySchedule:
    """Which links are due for a canary.

    A new link is due at once. A link that passed is due again after an interval, and one that
    failed after growing pauses. A link that was lost and is established again counts as new. Times
    are seconds of a monotonic clock.
    """

    def __init__(self) -> None:
        self._next: dict[str, float] = {}
        self._pause: dict[str, float] = {}
        self._last: dict[str, tuple[tuple[int, ...], float]] = {}

    def due(self, rows: Sequence[LinkRow], now: float) -> LinkRow | None:
        """Choose the established link that has waited longest, if any is due."""
        known = {row.report.prefill_engine_id for row in rows}
        self._next = {key: at for key, at in self._next.items() if key in known}
        self._pause = {key: pause for key, pause in self._pause.items() if key in known}
        self._last = {key: last for key, last in self._last.items() if key in known}
        waiting = [
            (self._at(row), row)
            for row in rows
            if row.report.state is LinkState.ESTABLISHED and row.peer.api.startswith("http://")
        ]
        at, row = min(waiting, key=lambda item: item[0], default=(0.0, None))
        return row if at <= now else None

    def _at(self, row: LinkRow) -> float:
        planned = self._next.get(row.report.prefill_engine_id, 0.0)
        establishment, ran = self._last.get(row.report.prefill_engine_id, (row.establishment, 0.0))
        # Wait for the first pause in any case. If the canary itself breaks the link, canaries would
        # otherwise follow one another without a pause.
        return planned if establishment == row.establishment else min(planned, ran + _FIRST_RETRY)

    def ran(self, row: LinkRow, result: CanaryReport, interval: float, now: float) -> None:
        """Plan this link's next canary; ``interval`` 0 means no other after a pass."""
        engine_id = row.report.prefill_engine_id
        self._last[engine_id] = row.establishment, now
        if result.state is CanaryState.PASSED:
            self._pause.pop(engine_id, None)
            self._next[engine_id] = now + interval if interval > 0 else float("inf")
            return
        pause = self._pause.get(engine_id, _FIRST_RETRY)
        self._next[engine_id] = now + pause
        self._pause[engine_id] = min(2 * pause, _LAST_RETRY)


TIMEOUT_SECONDS: Final = 120.0
_BLOCKS: Final = 3
# The block size that vLLM chooses on CPU. On GPUs it is smaller, and a canary moves more blocks.
_USUAL_BLOCK: Final = 128
# Nearly every vocabulary has these, and its special tokens are mostly the first ones.
_TOKEN_IDS: Final = (10, 256)
_LOOK_EVERY: Final = 0.5


def vocabulary(model: str) -> int | None:
    """Return the size of a model's vocabulary by its folder's config.json; None: not known."""
    try:
        size = json.loads((Path(model) / "config.json").read_bytes()).get("vocab_size")
    except (OSError, ValueError, AttributeError):
        return None
    return size if isinstance(size, int) and size > 0 else None


def prompt(block_tokens: int | None, limit: int | None, vocabulary: int | None) -> list[int]:
    """Random token ids: three blocks and one token, or fewer if ``limit`` (tokens a request) asks.

    Ids, not text, because a tokenizer could shorten a text. Random, because no prefix cache may
    have them. vLLM refuses ids outside of the ``vocabulary``; models of DNA or proteins have a
    small one.
    """
    length = _BLOCKS * (block_tokens or _USUAL_BLOCK) + 1
    if limit is not None:
        length = max(1, min(length, limit - 2))
    low, high = _TOKEN_IDS
    high = min(high, vocabulary or high)
    draw = random.SystemRandom()
    return [draw.randrange(min(low, high - 1), high) for _ in range(length)]


@dataclass(frozen=True, slots=True)
class Canaries:
    """Sends the canaries of one decode engine.

    Attributes:
        decode: its API.
        engine_id: its engine id.
        ranks: how many data-parallel ranks it has.
        make_prompt: makes a prompt's token ids.
        names_key: with it, decode's answer names the engines. Clients do not get these names.
        api_key: the API key of the cluster's engines, if they ask for one.
        seconds: how long both answers of one request may take together.
    """

    decode: EngineApi
    engine_id: str
    ranks: int
    make_prompt: Callable[[], list[int]]
    names_key: str = ""
    api_key: str | None = None
    seconds: float = TIMEOUT_SECONDS

    async def keep_running(
        self, links: LinkTable, session: aiohttp.ClientSession, ready: Callable[[], bool]
    ) -> None:
        """Run canaries until this task is cancelled: one at a time, for the link that is due."""
        schedule = CanarySchedule()
        while True:
            now = time.monotonic()
            row = schedule.due(links.rows(now), now) if ready() else None
            if row is None:
                await asyncio.sleep(_LOOK_EVERY)
                continue
            prefill = EngineApi(session, row.peer.api.rstrip("/"), self.api_key)
            engine_id, size = row.report.prefill_engine_id, row.peer.data_parallel_size
            result = await self.run(prefill, engine_id, size, links.peers.model)
            now = time.monotonic()
            links.set_canary(row, result, now)
            schedule.ran(row, result, links.peers.canary_interval_seconds, now)

    async def run(self, prefill: EngineApi, engine_id: str, ranks: int, model: str) -> CanaryReport:
        """Send requests until each data-parallel rank of both engines has had one.

        If the engines have different numbers of ranks, those of the smaller one get several.

        Args:
            prefill, engine_id, ranks: the prefill engine's.

        Returns:
            Passed with the bytes of all requests, or the first other result.
        """
        moved = 0
        for number in range(max(ranks, self.ranks)):
            pair = number % ranks, number % self.ranks
            source = id_of_rank(engine_id, pair[0], ranks)
            target = id_of_rank(self.engine_id, pair[1], self.ranks)
            result = await self._run(prefill, model, pair, (source, target))
            if result.state is not CanaryState.PASSED:
                if ranks == self.ranks == 1:
                    return result
                word = "data-parallel rank"
                named = f"{word} {pair[0]} of prefill with {word} {pair[1]} of decode"
                return replace(result, message=f"{named}: {result.message}")
            moved += result.bytes
        return CanaryReport(CanaryState.PASSED, moved)

    async def _run(
        self, prefill: EngineApi, model: str, ranks: tuple[int, int], ids: tuple[str, str]
    ) -> CanaryReport:
        """Send one request through a rank of prefill and one of decode, with these engine ids.

        The result is Passed if KV moved between these two, Failed if an answer shows that it did
        not, and Pending if nothing is known. Never raises.
        """
        tokens, seconds = self.make_prompt(), self.seconds
        given: object = None
        request = {"model": model, "prompt": tokens, "max_tokens": 1, "temperature": 0.0}
        try:
            async with asyncio.timeout(seconds):
                asked = {**request, "kv_transfer_params": {"do_remote_decode": True}}
                first = await prefill.complete(asked, seconds, ranks[0])
                given = first.get("kv_transfer_params")
                if not isinstance(given, dict) or given.get("do_remote_prefill") is not True:
                    return _failed(
                        f"prefill at {prefill.address} handed over no KV: "
                        "its answer holds no ticket"
                    )
                asked = {**request, "kv_transfer_params": {**given, KEY_PARAMETER: self.names_key}}
                second = await self.decode.complete(asked, seconds, ranks[1])
        except ApiError as error:
            # A request whose KV did not come ends with 503 and the reason, or with a bare 500.
            failed = error.status == 500 or any(reason in str(error) for reason in Reason)
            return _failed(str(error), shown=given is not None and failed)
        except (ApiUnreachableError, TimeoutError) as error:
            return _failed(str(error) or f"no answer within {seconds:g} s", shown=False)
        return judge(second.get("kv_transfer_params"), *ids)


def judge(answer: object, prefill_engine_id: str, decode_engine_id: str) -> CanaryReport:
    """Judge by what decode's ``kv_transfer_params`` say of the KV path of that request."""
    path = answer.get("kv_path") if isinstance(answer, Mapping) else None
    if not isinstance(path, Mapping):
        return _failed("decode's answer holds no kv_path: is its connector PDClusterConnector?")
    outcome, moved, reason = path.get("outcome"), path.get("bytes"), path.get("reason")
    why = f" ({reason})" if isinstance(reason, str) and reason else ""
    if outcome == "local":
        message = f"decode computed the prompt itself instead of receiving its KV{why}"
        # There is no reason if the request was ended before that, as by an engine that drains.
        return _failed(message, shown=bool(why) and was_due(outcome, str(reason)))
    if outcome != "transferred":
        return _failed(f"the KV transfer ended as {outcome!r}{why}")
    for name, wanted in (("prefill", prefill_engine_id), ("decode", decode_engine_id)):
        if (named := path.get(name)) != wanted:
            unnamed = f"decode's answer names no {name} engine: it did not accept our key"
            another = f"the KV went through another {name} engine: {named!r}"
            return _failed(another if named else unnamed)
    if not isinstance(moved, int) or isinstance(moved, bool) or moved <= 0:
        return _failed(f"the transfer is reported as done, but {moved!r} bytes moved")
    return CanaryReport(CanaryState.PASSED, moved)


def _failed(message: str, *, shown: bool = True) -> CanaryReport:
    """Return a result that is Pending if the answer does not show that KV did not move."""
    return CanaryReport(CanaryState.FAILED if shown else CanaryState.PENDING, message=message)
