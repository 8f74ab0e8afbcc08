"""The API server's audit log: who wrote what. It shows that the operator writes nothing at rest."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

WRITE_VERBS = ("create", "update", "patch", "delete", "deletecollection")
# Requests that only read are not logged. Those that write are logged once, after the answer.
POLICY = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived", "ResponseStarted"],
    "rules": [{"level": "Metadata", "verbs": list(WRITE_VERBS)}, {"level": "None"}],
}


@dataclass(frozen=True)
class Write:
    """One request that wrote, or tried to: `code` is the HTTP status of its answer."""

    user: str
    verb: str
    resource: str  # with its subresource: "pods", "pdclusters/status"
    namespace: str
    name: str
    code: int
    at: float  # seconds since 1970, when the request came


def flags(policy: Path, log: Path) -> list[str]:
    """The API server's arguments; its log is complete when a request is answered."""
    policy.write_text(json.dumps(POLICY))
    return [f"--audit-policy-file={policy}", f"--audit-log-path={log}", "--audit-log-mode=blocking"]


def read_writes(log: Path, since: float = 0.0, user: str = "") -> Iterator[Write]:
    """Writes from `since` (seconds since 1970) on, of one user or of all."""
    with log.open() as lines:
        for line in lines:
            # The last line may still be on its way to the disk.
            if not line.endswith("\n"):
                return
            write = _write(json.loads(line))
            if write.at >= since and user in ("", write.user):
                yield write


def _write(event: dict[str, Any]) -> Write:
    target = event.get("objectRef", {})
    parts = (target.get("resource", ""), target.get("subresource", ""))
    return Write(
        user=event["user"].get("username", ""),
        verb=event["verb"],
        resource="/".join(part for part in parts if part),
        namespace=target.get("namespace", ""),
        name=target.get("name", ""),
        code=event.get("responseStatus", {}).get("code", 0),
        at=datetime.fromisoformat(event["requestReceivedTimestamp"]).timestamp(),
    )
