"""``pdcluster up --once``: one prompt through the router, and the path of its KV cache."""

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp

from pdcluster_connector.compat.findings import counted
from pdcluster_connector.protocol.api_key import headers
from pdcluster_operator.api.object_names import short
from pdcluster_operator.cli import answers, engine_metrics, exits

TIMEOUT_SECONDS = 120.0
MAX_ANSWER = 16 << 20
PAGE_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to the prompt.

    Attributes:
        text: the generated text.
        tokens: how many tokens that is.
        kv_path: from the decode engine; empty if a router removed it.
        received: bytes that all decode engines received meanwhile.
    """

    text: str
    tokens: int
    kv_path: answers.Path
    received: int

    @property
    def moved(self) -> bool:
        """Whether KV came from a prefill engine for this request."""
        if self.kv_path:
            return self.kv_path.get("outcome") == "transferred" and bool(self.kv_path.get("bytes"))
        return self.received > 0


async def ask(
    url: str,
    model: str,
    prompt: str,
    max_tokens: int,
    decode: Iterable[str],
    key: str | None = None,
) -> Answer:
    """Send one completion.

    Args:
        url: base URL of the router.
        decode: base URLs of the decode engines' APIs, whose metrics are read before and after.
        key: the API key, if the cluster requires one.

    Raises :class:`exits.UserError` when the request fails.
    """
    decode = list(decode)
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_SECONDS)
    async with aiohttp.ClientSession(timeout=timeout) as http:
        before = await _received(http, decode)
        body = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
        answer = await post(http, f"{url}/v1/completions", body, headers(key))
        after = await _received(http, decode)
    return Answer(
        answer.choice.text or "",
        (answer.usage and answer.usage.completion_tokens) or 0,
        answer.path,
        sum(engine_metrics.received(before[one], after[one]) for one in before if one in after),
    )


def describe_path(answer: Answer) -> str:
    """Return how the KV cache moved, in one sentence."""
    path = answer.kv_path
    if not path:
        if answer.received:
            return f"{answer.received:,} bytes were pulled into decode (from its metrics)"
        return "no KV was transferred; decode computed the prompt itself"
    pair = "prefill -> decode"
    if path.get("prefill") or path.get("decode"):
        names = (path.get("prefill"), path.get("decode"))
        pair = " -> ".join(short((name or "?").partition("/")[0]) for name in names)
    return words_of_path(pair, path)


def words_of_path(pair: str, path: answers.Path) -> str:
    """Return how the KV cache moved between a pair of engines."""
    if path.get("outcome") != "transferred":
        reason = path.get("reason") or path.get("outcome")
        return f"{pair}: no KV was transferred ({reason}); decode computed the prompt itself"
    size, seconds = path.get("bytes") or 0, path.get("seconds") or 0.0
    speed = f", {size / seconds / 1e9:.3f} GB/s" if seconds >= 1e-9 else ""
    return (
        f"{pair}: {counted(path.get('blocks') or 0, 'block')} "
        f"({counted(path.get('tokens') or 0, 'token')}), {size:,} bytes "
        f"in {seconds * 1e3:.1f} ms{speed}"
    )


async def post(
    http: aiohttp.ClientSession, url: str, body: Mapping[str, Any], sent: Mapping[str, str]
) -> answers.Answer:
    """Return the answer to a completion; raises :class:`exits.UserError` if there is none."""
    problem, data = f" answers with more than {MAX_ANSWER >> 20} MiB", b""
    try:
        async with http.post(url, json=body, headers=sent, allow_redirects=False) as answer:
            if (whole := await _whole(answer)) is not None:
                problem, data = "", whole
        if not problem and answer.status != 200:
            problem = f" answers {answer.status}: {data.decode(errors='replace').strip()[:500]}"
        if not problem:
            return answers.read_answer(data)
    except TimeoutError:
        problem = f" did not answer within {TIMEOUT_SECONDS:.0f} s: see the engines' logs"
    except ValueError as error:
        problem = f" answers what is no completion: {error}"
    except (aiohttp.ClientError, OSError) as error:
        problem = f": {error}"
    raise exits.UserError(f"{url}{problem}", exits.Exit.REQUEST_FAILED)


async def _whole(answer: aiohttp.ClientResponse) -> bytes | None:
    """Return the body up to its end; None if it has more than 16 MiB."""
    try:
        await answer.content.readexactly(MAX_ANSWER + 1)
    except asyncio.IncompleteReadError as whole:
        return whole.partial
    return None


async def metrics(http: aiohttp.ClientSession, url: str) -> str | None:
    """Return the whole metrics page of an engine; None if it was not read.

    Args:
        url: base URL of the port that has it.
    """
    timeout = aiohttp.ClientTimeout(total=PAGE_SECONDS)
    try:
        async with http.get(f"{url}/metrics", timeout=timeout, allow_redirects=False) as answer:
            page = await _whole(answer) if answer.status == 200 else None
    except (TimeoutError, aiohttp.ClientError, OSError):
        return None
    return None if page is None else page.decode(errors="replace")


async def _received(
    http: aiohttp.ClientSession, urls: Iterable[str]
) -> dict[str, engine_metrics.Page]:
    """Return what decode engines have counted, by URL, without those that do not answer."""
    texts = {url: await metrics(http, url) for url in urls}
    return {url: engine_metrics.read_page(text) for url, text in texts.items() if text is not None}
