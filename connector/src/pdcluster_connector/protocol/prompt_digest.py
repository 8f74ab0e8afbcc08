"""A digest of what KV depends on, so that a ticket serves only the prompt it was made for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Final

import numpy as np

DIGEST_BYTES: Final = 16


class PromptDigest:
    """The digest of one prompt, a part at a time: a million token ids take 20 ms.

    Args:
        token_ids: the prompt's token ids, each within int64; must not change.
        count: how many of them count, from the first on.
    """

    def __init__(self, token_ids: Sequence[int], count: int) -> None:
        self.count = count
        self._token_ids = token_ids
        self._done = 0
        self._hash = blake2b(digest_size=DIGEST_BYTES, person=b"pdcluster-prompt")
        self._hash.update((8 * count).to_bytes(8, "little"))

    @property
    def left(self) -> int:
        """Token ids that are still to be read."""
        return self.count - self._done

    def read(self, most: int) -> int:
        """Read up to ``most`` more token ids; return how many were read."""
        stop = min(self.count, self._done + most)
        part = self._token_ids[self._done : stop]
        self._hash.update(np.asarray(part, dtype="<i8").tobytes())
        read, self._done = stop - self._done, stop
        return read

    def result(self, multimodal_hashes: Iterable[str] = (), lora: str | None = None) -> bytes:
        """Return the digest, see :func:`prompt_digest`; reads what is left."""
        self.read(self.left)
        parts = [b"\0" if lora is None else b"\1" + lora.encode("utf-8", "surrogatepass")]
        parts.extend(item.encode("utf-8", "surrogatepass") for item in multimodal_hashes)
        digest = self._hash.copy()
        for part in parts:
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
        return digest.digest()


def prompt_digest(
    token_ids: Sequence[int],
    multimodal_hashes: Iterable[str] = (),
    lora: str | None = None,
) -> bytes:
    """Return 16 bytes that equal prompts share and others do not.

    Args:
        token_ids: the prompt's token ids, each within int64.
        multimodal_hashes: content hashes of images and the like, in prompt order.
        lora: name of the adapter; None for the base model.

    A cache salt is left out on purpose: it steers reuse of KV and does not change it.
    Each part is preceded by its length, so that parts cannot run into one another.
    """
    return PromptDigest(token_ids, len(token_ids)).result(multimodal_hashes, lora)
