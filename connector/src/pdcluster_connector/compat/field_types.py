"""Bounded types for the fields that one engine tells another.

Nothing is checked when a value is made here. The bounds hold while a message is decoded, so a peer
cannot send a field that is too large.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

Identifier = Annotated[str, Meta(min_length=1, max_length=512)]
Name = Annotated[str, Meta(max_length=64)]
Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
ParallelSize = Annotated[int, Meta(ge=1, le=4096)]
GroupNumber = Annotated[int, Meta(ge=0, le=255)]
HeadNumber = Annotated[int, Meta(ge=0, le=2**20)]
DeviceNumber = Annotated[int, Meta(ge=0, le=4096)]
Address = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Bytes = Annotated[int, Meta(ge=0, le=2**48)]
