"""What is seen of a PDCluster during a change, sample by sample: engines, links, endpoints.

``dev/rollout_picture.py`` draws a record.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from pathlib import Path
from typing import Any, Self

from client_account import Account
from cluster_run import ClusterRun

from cluster.report import ClusterError
from pdcluster_operator.api.object_names import PAIRING_LABEL, engine_of

SAMPLE_SECONDS = 0.25
LINKS_SECONDS = 2.0


class Record:
    """Samples in a thread of its own, until the block ends. Times are those of the account."""

    def __init__(self, run: ClusterRun, account: Account) -> None:
        self._run, self._account = run, account
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._keys: dict[str, str] = {}
        self._links: list[tuple[str, str]] = []
        self._asked = 0.0
        self.samples: list[dict[str, Any]] = []
        self.marks: list[tuple[float, str]] = []

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        died = not self._thread.is_alive()
        self._stop.set()
        self._thread.join()
        assert not died, "nobody looked any more; the thread's error is above"

    def mark(self, what: str) -> None:
        self.marks.append((self._account.now(), what))

    @property
    def fewest_endpoints(self) -> int:
        return min(int(sample["endpoints"]) for sample in self.samples)

    @property
    def crossed(self) -> list[tuple[str, str]]:
        """Links and requests between engines of two pairing keys."""
        links = {pair for sample in self.samples for pair in sample["links"]}
        used = {(a, b) for a, b in (one.engines for one in self._account.sent if one.engines)}
        pairs = {(_logical(a), _logical(b)) for a, b in links | used}
        assert links, "no decode engine told of its links"
        return sorted(pair for pair in pairs if self._keys[pair[0]] != self._keys[pair[1]])

    def write(self, path: Path) -> None:
        sent = [
            {
                "began": one.began,
                "ended": one.ended,
                "failed": bool(one.wrong),
                "stream": one.stream,
            }
            for one in self._account.sent
        ]
        document = {"marks": self.marks, "samples": self.samples, "requests": sent}
        path.write_text(json.dumps(document))

    def _look(self) -> None:
        while not self._stop.wait(SAMPLE_SECONDS):
            # The API server may break a connection off, or answer with an error, for a moment.
            with contextlib.suppress(OSError, AssertionError):
                self.samples.append(self._sample())

    def _sample(self) -> dict[str, Any]:
        pods = self._run.pods()
        for pod in pods:
            if engine := engine_of(pod):
                self._keys[engine.logical] = pod["metadata"]["labels"][PAIRING_LABEL]
        if time.monotonic() - self._asked > LINKS_SECONDS:
            self._asked = time.monotonic()
            self._links = self._ask_links(pods)
        return {
            "at": self._account.now(),
            "engines": {
                pod["metadata"]["name"]: _state(pod)
                for pod in pods
                if "pdcluster.dev/role" in pod["metadata"]["labels"]
            },
            "routers": sum(_state(pod) == "ready" for pod in self._run.pods("router")),
            "endpoints": self._endpoints(),
            "links": list(self._links),
            "ready": self._run.condition("Ready")["reason"],
        }

    def _ask_links(self, pods: list[dict[str, Any]]) -> list[tuple[str, str]]:
        found = []
        for pod in pods:
            if pod["metadata"]["labels"].get("pdcluster.dev/role") != "decode":
                continue
            if _state(pod) not in ("ready", "ending"):
                continue
            with contextlib.suppress(ClusterError):  # the pod may end meanwhile
                document = self._run.at_own_launcher(pod["metadata"]["name"], "/v1/links")
                found += [
                    (link["prefill"], document["engine"])
                    for link in document.get("links", ())
                    if link["state"] == "Established"
                ]
        return found

    def _endpoints(self) -> int:
        """How many addresses the Service sends to: ready ones, or else those that still serve."""
        label = f"kubernetes.io%2Fservice-name%3D{self._run.name}-router"
        path = f"/apis/discovery.k8s.io/v1/namespaces/{self._run.namespace}/endpointslices"
        slices = (self._run.proxy.get(f"{path}?labelSelector={label}") or {})["items"]
        states = [one["conditions"] for part in slices for one in part.get("endpoints") or ()]
        ready = sum(bool(state.get("ready")) for state in states)
        return ready or sum(bool(state.get("serving")) for state in states)


def _logical(engine: str) -> str:
    return engine.partition("/")[0]


def _state(pod: dict[str, Any]) -> str:
    if "deletionTimestamp" in pod["metadata"]:
        return "ending"
    conditions = {c["type"]: c["status"] for c in pod["status"].get("conditions", ())}
    return "ready" if conditions.get("Ready") == "True" else "starting"
