"""Which links are kept and proved: all of them, or a sample if there are very many.

64 engines of each role have 4,096 links. To probe each of them would cost more than it tells. A
request over a link outside of the sample makes its connection when it arrives.

The sample needs no memory: each pair has a weight that is a hash of its two names. So an engine
that comes or goes changes few links of the other engines (rendezvous hashing).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import lru_cache, partial
from heapq import nsmallest

ALL_LINKS = 64
"""Up to this number, every link of a pairing key is kept."""

Sample = Mapping[str, frozenset[str]]
"""The prefill engines that each decode engine keeps links to."""


def sample_links(prefill: tuple[str, ...], decode: tuple[str, ...]) -> Sample:
    """Return the links to keep between engines of one pairing key.

    Each prefill engine and each decode engine has a link. Beyond ``ALL_LINKS`` pairs, there are at
    least as many links, and at most one more for each engine. The order of the names does not
    matter.

    Args:
        prefill: names of the prefill engines.
        decode: names of the decode engines.
    """
    if len(prefill) * len(decode) <= ALL_LINKS:
        return dict.fromkeys(decode, frozenset(prefill))
    return _sampled(prefill, decode)


@lru_cache(maxsize=32)
def _sampled(prefill: tuple[str, ...], decode: tuple[str, ...]) -> Sample:
    share = min(len(prefill), -(-ALL_LINKS // len(decode)))
    kept = {reader: set(nsmallest(share, prefill, partial(_weight, reader))) for reader in decode}
    for name in set(prefill).difference(*kept.values()):
        weights = {_weight(reader, name): reader for reader in decode}
        kept[weights[min(weights)]].add(name)
    return {reader: frozenset(names) for reader, names in kept.items()}


def _weight(decode: str, prefill: str) -> bytes:
    return hashlib.sha256(f"{decode} {prefill}".encode()).digest()
