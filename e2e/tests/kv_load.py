"""Prompts that nobody has cached, sent one after the other while something breaks."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
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
