"""Launchers for tests in which it does not matter when they report."""

from __future__ import annotations

import itertools
from typing import Any

from pdcluster_connector.protocol.launcher_documents import ChangesReport
from pdcluster_operator.plan.launchers import Target


class PolledLaunchers:
    """Each request gets a new revision, with what ``ready`` and ``links`` return."""

    _revisions = itertools.count(1)

    async def changes(self, target: Target, seen: str, *, wait: bool) -> ChangesReport:
        engine = await self.ready(target)
        return ChangesReport(str(next(self._revisions)), engine, await self.links(target))

    async def ready(self, target: Target) -> Any:
        raise AssertionError(target)

    async def links(self, target: Target) -> Any:
        raise AssertionError(target)
