"""A name for what the launcher tells, so that the operator can wait for news. Pure.

It changes when the operator would judge the engine or a link otherwise. Numbers that change all the
time, such as a bandwidth, do not count. The operator reads those when it looks by itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from pdcluster_connector.launcher.links.link_table import LinkRow


def revision_of(
    readiness: Mapping[str, Any], rows: Iterable[LinkRow], prompts: Mapping[str, Any] | None
) -> str:
    """Return the revision of an engine's documents.

    Args:
        readiness: what ``/readyz`` tells.
        rows: what ``/v1/links`` tells of links.
        prompts: what it tells of prompts; None if it tells nothing.
    """
    links = [{**row.document(), "bytes_per_second": 0} for row in rows]
    for link in links:
        link["canary"] = {**link["canary"], "bytes": 0}
    text = msgspec.json.encode([readiness, links, _share(prompts)], order="deterministic")
    return hashlib.blake2b(text, digest_size=8).hexdigest()


def _share(prompts: Mapping[str, Any] | None) -> list[Any]:
    """Return what is judged of the prompts: whether they are known, the share and its cause."""
    if prompts is None:
        return []
    percent = -(-100 * prompts["local"] // prompts["prompts"]) if prompts["prompts"] else 0
    return [percent, prompts["cause"]]
