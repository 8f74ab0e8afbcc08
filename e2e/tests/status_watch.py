"""Every status that a PDCluster has in a block, also one that lasts only a moment.

The API server sends them one after the other. So none is lost if the test is late to look.
"""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from cluster_run import ClusterRun


class StatusWatch:
    """Use as a context manager."""

    def __init__(self, run: ClusterRun) -> None:
        self._run = run
        self._seen: list[dict[str, Any]] = []
        self._broken = ""
        self._thread = threading.Thread(target=self._read)

    def __enter__(self) -> Self:
        live = self._run.get()
        assert live is not None
        path = (
            f"/apis/pdcluster.dev/v1alpha1/namespaces/{self._run.namespace}/pdclusters?watch=true"
            f"&fieldSelector=metadata.name%3D{self._run.name}"
            f"&resourceVersion={live['metadata']['resourceVersion']}"
        )
        self._connection = http.client.HTTPConnection("127.0.0.1", self._run.proxy.port)
        self._connection.connect()
        self._socket = self._connection.sock
        self._connection.request("GET", path)
        self._answer = self._connection.getresponse()
        assert self._answer.status == 200, self._answer.read()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._connection.close()

    def wait(
        self, what: str, holds: Callable[[Mapping[str, Any]], Any], seconds: float
    ) -> dict[str, Any]:
        """Wait for a status since the block began; returns the first one."""

        def found() -> bool:
            assert not self._broken, self._broken
            return any(holds(status) for status in list(self._seen))

        self._run.wait(what, found, seconds)
        return next(status for status in self._seen if holds(status))

    def _read(self) -> None:
        try:
            for line in self._answer:
                event = json.loads(line)
                assert event["type"] != "ERROR", event
                self._seen.append(event["object"].get("status") or {})
        except (OSError, ValueError, AssertionError, http.client.HTTPException) as error:
            self._broken = repr(error)
