"""Plays the nodes: pods on the real API server get addresses, run, and their launchers answer.

Every launcher says that its engine is ready, and that KV moved over each link that it was told of.
It speaks TLS with the files that its pod mounts.
"""

from __future__ import annotations

import base64
import contextlib
import http.server
import itertools
import json
import os
import ssl
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Self

from operator_runs import CHILDREN
from real_api import RealApi

from pdcluster_operator.api.labels import LAUNCHER_PORT, EngineName, engine_of

BEAT = 0.2


class PlayedNodes:
    """Use as a context manager."""

    def __init__(self, real: RealApi, namespace: str) -> None:
        self._real, self._path = real, CHILDREN["Pod"].format(namespace)
        self._numbers = itertools.count(1)
        self._servers: dict[str, http.server.ThreadingHTTPServer] = {}
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._play, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        for server in self._servers.values():
            _end(server)

    def silence(self, uid: str) -> None:
        """Let the launcher of a pod answer nobody any more, as if its node were gone."""
        _end(self._servers[uid])

    def _play(self) -> None:
        while not self._done.wait(BEAT):
            with contextlib.suppress(OSError, KeyError):
                self._beat()

    def _beat(self) -> None:
        query = "?labelSelector=pdcluster.dev/cluster"
        pods = self._real.call("GET", self._path + query)[1]["items"]
        for uid in self._servers.keys() - {pod["metadata"]["uid"] for pod in pods}:
            _end(self._servers.pop(uid))
        for pod in pods:
            if not pod["status"].get("podIP") and "deletionTimestamp" not in pod["metadata"]:
                self._run(pod)

    def _run(self, pod: dict[str, Any]) -> None:
        number, here = next(self._numbers), os.getpid()
        address = f"127.{64 + here % 128}.{here // 128 % 256}.{number}"
        engine = engine_of(pod)
        if engine is not None:
            tls = self._tls(pod)
            server = _Server((address, LAUNCHER_PORT), _launcher(engine))
            if tls is not None:
                # Each thread makes its own handshake, so a silent client stops nobody.
                server.socket = tls.wrap_socket(
                    server.socket, server_side=True, do_handshake_on_connect=False
                )
            threading.Thread(target=server.serve_forever, daemon=True).start()
            self._servers[pod["metadata"]["uid"]] = server
        moment = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        ready = {"type": "Ready", "status": "True", "lastTransitionTime": moment}
        status = {
            "phase": "Running",
            "podIP": address,
            "podIPs": [{"ip": address}],
            "conditions": [ready],
            "containerStatuses": [
                {
                    "name": container["name"],
                    "image": container["image"],
                    "imageID": "",
                    "ready": True,
                    "restartCount": 0,
                    "state": {"running": {"startedAt": moment}},
                }
                for container in pod["spec"]["containers"]
            ],
        }
        name = pod["metadata"]["name"]
        merge = "application/merge-patch+json"
        self._real.call("PATCH", f"{self._path}/{name}/status", {"status": status}, merge)

    def _tls(self, pod: dict[str, Any]) -> ssl.SSLContext | None:
        """Return what the pod's certificate makes of connections; None if it mounts none."""
        for volume in pod["spec"]["volumes"]:
            files = {one["path"]: one["key"] for one in volume.get("secret", {}).get("items", ())}
            if "tls.crt" in files:
                break
        else:
            return None
        secrets = self._path.removesuffix("/pods") + "/secrets"
        data = self._real.call("GET", f"{secrets}/{volume['secret']['secretName']}")[1]["data"]
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        with tempfile.TemporaryDirectory() as folder:
            for path, key in files.items():
                (Path(folder) / path).write_bytes(base64.b64decode(data[key]))
            context.load_cert_chain(f"{folder}/tls.crt", f"{folder}/tls.key")
            context.load_verify_locations(f"{folder}/ca.crt")
        return context


class _Server(http.server.ThreadingHTTPServer):
    def handle_error(self, *_: object) -> None:
        """Say nothing: an operator that ends leaves its connections."""


def _launcher(name: EngineName) -> type[http.server.BaseHTTPRequestHandler]:
    me = f"{name.logical}/{os.urandom(8).hex()}"
    peers: list[dict[str, Any]] = []
    report = {"ready": True, "engine": name.logical, "engine_id": me, "state": "Ready"}

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            return

        def do_GET(self) -> None:
            if self.path == "/readyz":
                self._answer(report | {"role": name.role.value})
            elif self.path == "/v1/links":
                links = [
                    {
                        "prefill": peer["engine"],
                        "prefill_engine_id": peer["engine_id"],
                        "state": "Established",
                        "shards": "1/1",
                        "canary": {"state": "Passed", "bytes": 1},
                    }
                    for peer in peers
                ]
                self._answer({"engine": name.logical, "engine_id": me, "links": links})
            else:
                self._answer({}, 404)

        def do_PUT(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            peers[:] = json.loads(body)["peers"]
            self._answer({})

        def _answer(self, document: dict[str, Any], status: int = 200) -> None:
            text = json.dumps(document).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

    return Handler


def _end(server: http.server.ThreadingHTTPServer) -> None:
    server.shutdown()
    server.server_close()
