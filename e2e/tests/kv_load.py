"""Prompts that nobody has cached, sent one after the other while something breaks."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from typing import Any, Protocol, Self

from local_run import BLOCK_TOKENS, KV_BYTES_PER_TOKEN
from reply import Reply


class Run(Protocol):
    """A PDCluster that serves, locally or on Kubernetes."""

    def complete(
        self, prompt: str, *, role: str = "router", tokens: int = 16, **more: Any
    ) -> Reply:
        """One greedy completion."""
        ...


def text(words: int, seed: int) -> str:
    source = random.Random(seed)
    return " ".join(f"{source.randrange(16**4):04x}" for _ in range(words))


def moved(run: Run, prompt: str) -> Reply:
    """Send a prompt that nobody has cached. Its KV must move; decode answers as prefill does."""
    reply = run.complete(prompt)
    assert reply.status == 200, reply.text
    assert reply.kv_path["outcome"] == "transferred", reply.kv_path
    blocks = -(-len(prompt) // BLOCK_TOKENS)  # the tokenizer has one token a byte
    assert reply.kv_path["bytes"] == blocks * BLOCK_TOKENS * KV_BYTES_PER_TOKEN
    assert reply.completion == run.complete(prompt, role="prefill").completion
    return reply


class Load:
    """Requests through the router, one after the other, until the block ends.

    ``replies`` holds every answer, of whatever status; ``broken`` the connections that gave none.
    """

    def __init__(self, run: Run, prompts: Callable[[int], str]) -> None:
        self._run, self._prompts = run, prompts
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._send)
        self.replies: list[Reply] = []
        self.broken: list[str] = []

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    @property
    def answered(self) -> list[Reply]:
        return [reply for reply in self.replies if reply.status == 200]

    def _send(self) -> None:
        number = 0
        while not self._stop.is_set():
            number += 1
            try:
                self.replies.append(self._run.complete(self._prompts(number), tokens=8))
            except (OSError, HTTPException) as error:
                self.broken.append(f"request {number}: {error!r}")
                self._stop.wait(0.2)


class Knocks:
    """A new connection every few milliseconds, until the block ends.

    A connection that hangs delays no other. ``failed`` holds what went wrong, with the second at
    which the connection was opened; ``longest`` is the longest answer in seconds.
    """

    def __init__(self, knock: Callable[[], Reply], every: float = 0.05) -> None:
        self._knock, self._every = knock, every
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._open)
        self._lock = threading.Lock()
        self.opened = 0
        self.longest = 0.0
        self.failed: list[str] = []

    def __enter__(self) -> Self:
        self._began = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _open(self) -> None:
        with ThreadPoolExecutor(200) as pool:
            while not self._stop.wait(self._every):
                pool.submit(self._once)

    def _once(self) -> None:
        began = time.monotonic()
        try:
            reply = self._knock()
            wrong = "" if reply.status == 200 else f"{reply.status} {reply.text[:200]}"
        except (OSError, HTTPException) as error:
            wrong = repr(error)
        took = time.monotonic() - began
        with self._lock:
            self.opened += 1
            self.longest = max(self.longest, took)
            if wrong:
                self.failed.append(f"{began - self._began:.1f} s: {wrong}")
