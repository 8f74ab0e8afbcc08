"""Reads the JSON of an API server, which holds what anybody may have written.

A pod template of a PDCluster and the data of a ControllerRevision may have any fields, 10,000
levels deep. Parsers give up at about 1,000. An error here would end the operator, and would end it
again after each start.

An object may also be longer than the lines that aiohttp reads: a ConfigMap of one megabyte is six
megabytes of JSON if its text is ``<<<``.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterable, AsyncIterator, Iterator
from typing import Any

import msgspec

LEVELS = 200
"""What is deeper is cut off, in a document that cannot be read otherwise.

The deepest field that Kubernetes knows is not half as deep, so it refuses what remains of a field.
"""
_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|[\[{]|[\]}]')
_OPENING = (b"[", b"{")


def document_of(text: bytes) -> Any:
    """Return what a JSON document says; null stands for what is too deep.

    Raises:
        ValueError: it is no JSON.
    """
    try:
        return msgspec.json.decode(text)
    except RecursionError:
        return msgspec.json.decode(without_depths(text))


def without_depths(text: bytes) -> bytes:
    """Return a document with null for what is too deep."""
    return b"".join(_shallow_parts(text))


def _shallow_parts(text: bytes) -> Iterator[bytes]:
    level = written = 0
    for token in _TOKEN.finditer(text):
        if token[0] in _OPENING:
            level += 1
            if level == LEVELS + 1:
                yield text[written : token.start()]
        elif token[0][:1] != b'"':
            if level == LEVELS + 1:
                yield b"null"
                written = token.end()
            level -= 1
    if level <= LEVELS:  # what is cut off has an end
        yield text[written:]


async def lines_of(pieces: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
    """Yield each line of a stream, however long it is."""
    begun: list[bytes] = []
    async for piece in pieces:
        first, *others = piece.split(b"\n")
        begun.append(first)
        for other in others:
            yield b"".join(begun)
            begun = [other]
    if any(begun):
        yield b"".join(begun)
