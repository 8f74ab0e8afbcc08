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
import zlib
from pathlib import Path
from typing import Any, Self

from operator_runs import CHILDREN
from real_api import RealApi

from pdcluster_operator.api.object_names import LAUNCHER_PORT, EngineName, engine_of

BEAT = 0.2


class PlayedNodes:
    """Use as a context manager.

    Args:
        node: a Node for the pods to run on. Then pods end as a kubelet ends them. An engine drains
            first: it ends when it is told that no router sends it requests.
        clock: seconds that the clock of the nodes is ahead.
    """

    def __init__(
        self, real: RealApi, namespace: str, node: str = "", *, clock: float = 0.0
    ) -> None:
        self._real, self._path = real, CHILDREN["Pod"].format(namespace)
        self._deployments, self._node = CHILDREN["Deployment"].format(namespace), node
        self._clock = clock
        self._reports: dict[str, dict[str, Any]] = {}
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
        self._reports[uid].clear()
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
            if "deletionTimestamp" in pod["metadata"]:
                if self._node:
                    self._end_pod(pod)
            elif not pod["status"].get("podIP") and not pod["spec"].get("schedulingGates"):
                if self._node and "nodeName" not in pod["spec"]:
                    self._bind(pod)
                self._run(pod)

    def _bind(self, pod: dict[str, Any]) -> None:
        target = {"apiVersion": "v1", "kind": "Node", "name": self._node}
        name = pod["metadata"]["name"]
        metadata = {"name": name, "uid": pod["metadata"]["uid"]}
        body = {"apiVersion": "v1", "kind": "Binding", "metadata": metadata, "target": target}
        self._real.call("POST", f"{self._path}/{name}/binding", body)

    def _end_pod(self, pod: dict[str, Any]) -> None:
        engine = engine_of(pod)
        uid = pod["metadata"]["uid"]
        ran = uid in self._reports
        needed = ran and engine is not None and engine.api_url in self.routed()
        if report := self._reports.get(uid):  # a silent one is empty
            report.update(ready=False, state="Draining")
            needed = report["routed"]
        if not needed:
            # Kueue lets a pod go once it has ended.
            self._patch_status(pod, {"phase": "Succeeded"})
            options = {"gracePeriodSeconds": 0, "preconditions": {"uid": uid}}
            self._real.call("DELETE", f"{self._path}/{pod['metadata']['name']}", options)

    def routed(self) -> set[str]:
        """Return the addresses of engines that routers have."""
        found = self._real.call("GET", self._deployments)[1]["items"]
        return {
            word
            for deployment in found
            for container in deployment["spec"]["template"]["spec"]["containers"]
            for word in container.get("args") or ()
            if word.startswith("http")
        }

    def _run(self, pod: dict[str, Any]) -> None:
        number, here = next(self._numbers), os.getpid()
        address = f"127.{64 + here % 128}.{here // 128 % 256}.{number}"
        engine = engine_of(pod)
        if engine is not None:
            tls = self._tls(pod)
            report = self._reports[pod["metadata"]["uid"]] = _report(engine)
            server = _Server((address, LAUNCHER_PORT), _launcher(engine, report))
            if tls is not None:
                # Each thread makes its own handshake, so a silent client stops nobody.
                server.socket = tls.wrap_socket(
                    server.socket, server_side=True, do_handshake_on_connect=False
                )
            threading.Thread(target=server.serve_forever, daemon=True).start()
            self._servers[pod["metadata"]["uid"]] = server
        moment = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + self._clock))
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
        self._patch_status(pod, status)

    def _patch_status(self, pod: dict[str, Any], status: dict[str, Any]) -> None:
        path = f"{self._path}/{pod['metadata']['name']}/status"
        self._real.call("PATCH", path, {"status": status}, "application/merge-patch+json")

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


def _report(name: EngineName) -> dict[str, Any]:
    me = f"{name.logical}/{os.urandom(8).hex()}"
    known = {"engine": name.logical, "engine_id": me, "role": name.role.value}
    return {"ready": True, "state": "Ready", "routed": False, **known}


def _launcher(name: EngineName, report: dict[str, Any]) -> type[http.server.BaseHTTPRequestHandler]:
    me = report["engine_id"]
    peers: list[dict[str, Any]] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            return

        def parse_request(self) -> bool:
            # Connections that are open outlive the server: a silent launcher closes them.
            self.close_connection = True
            return bool(report) and super().parse_request()

        def do_GET(self) -> None:
            """Answer at once, also if nothing has changed since."""
            if not self.path.startswith("/v1/changes?"):
                self._answer({}, 404)
                return
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
            linked = {"engine": name.logical, "engine_id": me, "links": links}
            state = {"readyz": report, "links": linked}
            revision = str(zlib.crc32(json.dumps(state).encode()))
            self._answer({"revision": revision, **state})

        def do_PUT(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if self.path == "/v1/routed":
                report["routed"] = True
                self._answer({})
                return
            peers[:] = json.loads(body)["peers"]
            self._answer({})

        def do_DELETE(self) -> None:
            report["routed"] = False
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
