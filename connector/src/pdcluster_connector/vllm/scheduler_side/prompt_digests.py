"""The digest of a prompt, by which a ticket serves only the prompt that it was made for.

The digest of a million tokens takes a scheduler's thread 25 to 35 ms, in which all requests of the
engine would stand still. So it is made in pieces: the first ones when the request arrives, and the
others in the steps that follow. A prefill engine computes the prompt meanwhile. A decode engine
lets vLLM ask again until it has the whole digest.
"""

from __future__ import annotations

import os
import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Final
from weakref import WeakSet

import numpy as np

from pdcluster_connector.protocol.ticket import DIGEST_BYTES

if TYPE_CHECKING:  # vLLM takes five seconds to import; the tests of the digest do not need it
    from vllm.v1.request import Request

PIECE: Final = 8192  # tokens, about 0.25 ms
SECONDS: Final = 0.002  # of a step


class PromptDigest:
    """16 bytes that equal prompts share and others do not, made in pieces.

    A cache salt is left out on purpose: it steers reuse of KV and does not change it.
    Each part is preceded by its length, so that parts cannot run into one another.

    Args:
        token_ids: begin with the prompt, and are never changed.
        tokens: how many of them count.
        contents: hashes of images and the like, in prompt order.
        lora: name of the adapter; None for the base model.

    Attributes:
        tokens: how many tokens count.
        left: how many of them are not taken in yet.
    """

    def __init__(
        self,
        token_ids: Sequence[int],
        tokens: int,
        contents: Iterable[str] = (),
        lora: str | None = None,
    ) -> None:
        adapter = b"\0" if lora is None else b"\1" + lora.encode("utf-8", "surrogatepass")
        self._rest = [adapter, *(item.encode("utf-8", "surrogatepass") for item in contents)]
        self._token_ids = token_ids
        self.tokens = self.left = tokens
        self._digest = blake2b(digest_size=DIGEST_BYTES, person=b"pdcluster-prompt")
        self._digest.update((8 * tokens).to_bytes(8, "little"))

    def take(self) -> None:
        """Take in the next tokens, ``PIECE`` at most. With one that is none, no digest is equal."""
        first = self.tokens - self.left
        try:
            piece = array("q", self._token_ids[first : first + min(PIECE, self.left)])
        except (OverflowError, TypeError):
            self._digest.update(os.urandom(DIGEST_BYTES))
            self.left = 0
            return
        self._digest.update(np.asarray(piece, "<i8").data)
        self.left -= len(piece)

    def value(self) -> bytes:
        """Take in what is left, and return the digest."""
        while self.left:
            self.take()
        whole = self._digest.copy()
        for part in self._rest:
            whole.update(len(part).to_bytes(8, "little"))
            whole.update(part)
        return whole.digest()


def digest_of_prompt(request: Request, tokens: int) -> PromptDigest | None:
    """Return the digest of the first ``tokens`` prompt tokens: what their KV depends on.

    Images and the like count with their content hash and position if they begin within those
    tokens. Prompts given as embeddings have no digest.
    """
    token_ids = request.prompt_token_ids
    if token_ids is None or request.prompt_embeds is not None or tokens > len(token_ids):
        return None
    features = [
        f"{feature.mm_position.offset}:{feature.mm_hash or feature.identifier}"
        for feature in request.mm_features
        if feature.mm_position.offset < tokens
    ]
    adapter = request.lora_request.lora_name if request.lora_request else None
    return PromptDigest(token_ids, tokens, features, adapter)


@dataclass(eq=False)
class PromptDigests:
    """Takes a bounded time of each step for the digests of long prompts.

    Not thread-safe: lives on the scheduler's thread. A digest that its request no longer holds is
    forgotten.
    """

    clock: Callable[[], float] = time.perf_counter

    def __post_init__(self) -> None:
        self._unfinished = WeakSet[PromptDigest]()
        self._seconds = SECONDS  # left of this step

    def begin(self, request: Request, tokens: int) -> PromptDigest | None:
        """Return a digest with at least its first piece; see :func:`digest_of_prompt`.

        It takes half of the time that the step has left: other requests may arrive in it.
        """
        digest = digest_of_prompt(request, tokens)
        if digest is not None:
            self._take(digest, self._seconds / 2)
        return digest

    def step(self) -> None:
        """Go on. The shortest one comes first: it does not wait for a long one."""
        self._seconds = SECONDS
        for digest in sorted(self._unfinished, key=lambda one: one.left):
            if self._seconds <= 0:
                return
            self._unfinished.discard(digest)
            self._take(digest, self._seconds)

    def _take(self, digest: PromptDigest, seconds: float) -> None:
        since = now = self.clock()
        while digest.left:
            digest.take()
            now = self.clock()
            if now - since >= seconds:
                break
        self._seconds -= now - since
        if digest.left:
            self._unfinished.add(digest)
