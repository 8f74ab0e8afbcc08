"""A digest of what KV depends on, so that a ticket serves only the prompt it was made for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b

import numpy as np

DIGEST_BYTES = 16


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
    tokens = np.asarray(token_ids, dtype="<i8").tobytes()
    parts = [tokens, b"\0" if lora is None else b"\1" + lora.encode("utf-8", "surrogatepass")]
    parts.extend(item.encode("utf-8", "surrogatepass") for item in multimodal_hashes)
    digest = blake2b(digest_size=DIGEST_BYTES, person=b"pdcluster-prompt")
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()
