"""Clients of a PDCluster while it changes: what each sent, when, and what came back."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.client import HTTPException
from typing import Self

from cluster_run import ClusterRun
from kv_load import text

from connecting import connected
from pdcluster_operator.api.object_names import HTTP_PORT

EVERY = 0.3
STREAM_TOKENS = 3000


@dataclass(frozen=True)
class Sent:
    """One request. Times are seconds since the account was opened.

    ``wrong`` says why it failed, and is empty if it did not. ``engines`` are the engine ids that
    its KV moved between; a stream does not tell them.
    """

    began: float
    ended: float
    prompt: str
    tokens: int
    answer: str
    wrong: str
    engines: tuple[str, ...] = ()
    stream: bool = False


class Account:
    """A short request every few moments and one long stream after the other, until the block ends.

    ``every`` is how many seconds lie between two short requests. One that hangs delays no other.
    No prompt is sent twice.
    """

    def __init__(
        self, run: ClusterRun, seed: int, every: float = EVERY, *, streams: bool = True
    ) -> None:
        self._run, self._every = run, every
        self._numbers = itertools.count(seed)
        self._stop = threading.Event()
        works = (self._short, self._long) if streams else (self._short,)
        self._threads = [threading.Thread(target=work) for work in works]
        self._lock = threading.Lock()
        self.sent: list[Sent] = []

    def __enter__(self) -> Self:
        self.host = self._run.service_address()
        self.opened = time.monotonic()
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, wrong: type[BaseException] | None, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        if wrong is not None:
            print(f"until {wrong.__name__}: {self.said()}", *self.failed[:10], sep="\n")

    def now(self) -> float:
        """Seconds since the account was opened."""
        return time.monotonic() - self.opened

    @property
    def failed(self) -> list[str]:
        return [f"{one.began:.1f} s: {one.wrong}" for one in self.sent if one.wrong]

    @property
    def longest_gap(self) -> float:
        """The longest time without an answer to a short request, in seconds."""
        good = [one.ended for one in self.sent if not one.wrong and not one.stream]
        times = sorted([0.0, *good, max((one.began for one in self.sent), default=0.0)])
        return max(later - earlier for earlier, later in itertools.pairwise(times))

    def said(self) -> str:
        streams = [one for one in self.sent if one.stream]
        longest = max((one.ended - one.began for one in streams), default=0.0)
        return (
            f"{len(self.sent)} requests, {len(self.failed)} failed, the longest gap between two "
            f"answers {self.longest_gap:.1f} s; {len(streams)} of them streams of up to "
            f"{longest:.0f} s"
        )

    def _short(self) -> None:
        with ThreadPoolExecutor(200) as pool:
            while not self._stop.wait(self._every):
                pool.submit(self._once, self._completion, text(20, next(self._numbers)), 4)

    def _long(self) -> None:
        while not self._stop.is_set():
            self._once(self._stream, text(20, next(self._numbers)), STREAM_TOKENS)
            self._stop.wait(1)

    def _once(self, ask: Callable[[str, int], tuple[str, tuple[str, ...]]], *what: object) -> None:
        prompt, tokens = str(what[0]), int(str(what[1]))
        began, answer, wrong = self.now(), "", ""
        engines: tuple[str, ...] = ()
        try:
            answer, engines = ask(prompt, tokens)
        except (OSError, HTTPException, ValueError, KeyError) as error:
            wrong = repr(error)
        stream = tokens == STREAM_TOKENS
        done = Sent(*(began, self.now(), prompt, tokens, answer, wrong, engines, stream))
        with self._lock:
            self.sent.append(done)

    def _completion(self, prompt: str, tokens: int) -> tuple[str, tuple[str, ...]]:
        reply = self._run.complete(prompt, tokens=tokens)
        if reply.status != 200:
            raise ValueError(f"{reply.status} {reply.text[:300]}")
        path = reply.kv_path
        if path.get("outcome") != "transferred":
            raise ValueError(f"KV did not move: {path}")
        return reply.completion, (str(path.get("prefill")), str(path.get("decode")))

    def _stream(self, prompt: str, tokens: int) -> tuple[str, tuple[str, ...]]:
        body = {
            "model": self._run.name,
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        connection = connected(self.host, HTTP_PORT, 120)
        try:
            words = json.dumps(body).encode()
            connection.request(
                "POST", "/v1/completions", words, {"Content-Type": "application/json"}
            )
            reply = connection.getresponse()
            if reply.status != 200:
                raise ValueError(f"{reply.status} {reply.read()[:300]!r}")
            parts, last = [], b""
            for line in reply:
                if line.startswith(b"data: {"):
                    parts.append(str(json.loads(line[6:])["choices"][0]["text"]))
                last = line.strip() or last
            if last != b"data: [DONE]" or len("".join(parts)) != tokens:
                raise ValueError(f"cut off after {len(''.join(parts))} of {tokens}: {last!r}")
            return "".join(parts), ()
        finally:
            connection.close()
