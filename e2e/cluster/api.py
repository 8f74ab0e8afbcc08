"""Asks the API server, without a client library. It is just enough to wait for a node."""

from __future__ import annotations

import base64
import json
import ssl
import urllib.request
from pathlib import Path
from typing import Any

from cluster import network


class Api:
    """Plain GET requests to the API server that a kubeconfig of ours names."""

    def __init__(self, kubeconfig: Path) -> None:
        document = json.loads(kubeconfig.read_text())
        cluster = document["clusters"][0]["cluster"]
        authority = base64.b64decode(cluster["certificate-authority-data"]).decode()
        # A proxy that the environment names could not reach the node.
        self._opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}),
            urllib.request.HTTPSHandler(context=ssl.create_default_context(cadata=authority)),
        )
        self._server = cluster["server"]
        self._token = document["users"][0]["user"]["token"]

    def get(self, path: str) -> str | None:
        """The body; None if there is no answer within 10 seconds, or its status is not 200."""
        request = urllib.request.Request(
            self._server + path, headers={"Authorization": f"Bearer {self._token}"}
        )
        try:
            with self._opener.open(request, timeout=10) as answer:
                body: bytes = answer.read()
                return body.decode()
        except OSError:  # urllib's own errors are among them
            return None

    def ready(self) -> bool:
        return self.get("/readyz") is not None

    def node_ready(self) -> bool:
        node = self._read(f"/api/v1/nodes/{network.NODE_NAME}")
        conditions = node.get("status", {}).get("conditions", [])
        return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)

    def available_replicas(self, namespace: str, deployment: str) -> int:
        path = f"/apis/apps/v1/namespaces/{namespace}/deployments/{deployment}"
        return int(self._read(path).get("status", {}).get("availableReplicas", 0))

    def exists(self, path: str) -> bool:
        return self.get(path) is not None

    def _read(self, path: str) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(self.get(path) or "{}")
        return document
