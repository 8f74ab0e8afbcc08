"""A running page of `pdcluster ui`, for tests of who may see it and of how it looks.

The objects come from the door of `pdcluster up`, through the client that reads any API server.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from ui_objects import cluster, condition, pods

from pdcluster_operator.adapters.api_server.client import KubeClient
from pdcluster_operator.adapters.api_server.kubeconfig import find_configuration
from pdcluster_operator.cli.ui.readers import KubeReader
from pdcluster_operator.cli.ui.server import UiServer
from pdcluster_operator.local.api_server import LocalApi
from pdcluster_operator.local.door import Door
from pdcluster_operator.runtime.interfaces import Key


class ShownPage:
    """A running page, a client that is no browser, and the objects that it shows."""

    def __init__(self, ui: UiServer, http: aiohttp.ClientSession, api: LocalApi) -> None:
        self.ui, self.http, self.api = ui, http, api
        self.base = ui.url.removesuffix("/")
        self.origin, _, self.token = self.base.rpartition("/")

    async def get(self, path: str, **options: object) -> tuple[int, str]:
        async with self.http.get(f"{self.base}{path}", **options) as answer:  # type: ignore[arg-type]
            return answer.status, await answer.text()

    def put(self, manifest: dict[str, Any]) -> None:
        """Apply an object, and write its status."""
        live = self.api.apply({key: one for key, one in manifest.items() if key != "status"})
        metadata = live["metadata"]
        where = manifest["kind"], metadata["namespace"], metadata["name"]
        self.api.set_status(*where, manifest["status"], metadata["uid"])

    def say(self, kind: str, status: str, reason: str, message: str = "") -> None:
        """Change one condition."""
        self.put(cluster(conditions=[condition(kind, status, reason, message)]))


@contextlib.asynccontextmanager
async def opened(
    folder: Path, monkeypatch: pytest.MonkeyPatch, first: Key | None = None
) -> AsyncIterator[ShownPage]:
    api = LocalApi()
    async with Door(api, dict, folder, "llm") as door:
        configuration = await find_configuration(str(door.kubeconfig))
        async with KubeClient(configuration) as client:
            reader = KubeReader(client, None, "llm", on_this_machine=True)
            reader.period = 0.05
            monkeypatch.setattr("pdcluster_operator.cli.ui.board.FRESH_SECONDS", 0.0)
            async with UiServer(reader, first) as ui, aiohttp.ClientSession() as http:
                shown = ShownPage(ui, http, api)
                for one in (cluster(), *pods()):
                    shown.put(one)
                yield shown
