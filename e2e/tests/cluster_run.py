"""One PDCluster on a real Kubernetes, with methods for what a person does with kubectl.

Clients' requests go to the router's Service. Only the cluster's own pods may reach an engine's API
and its launcher. Tests reach these through the API server (`kubectl proxy`), because no
NetworkPolicy stops it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from cluster_access import Proxy, ask, refuses
from kv_load import Load, text
from local_run import START_SECONDS, condition, manifest as local_manifest
from reply import Reply
from status_watch import StatusWatch

from cluster.report import ClusterError
from cluster.session import Cluster
from images.engine_image import CONTAINERS
from images.for_cluster import placed, template
from pdcluster_operator.api.object_names import HTTP_PORT, LAUNCHER_PORT
from pdcluster_operator.api.spec.pod_templates import merge
from waiting import until

SHARED_CONNECTOR = "configmap/pdcluster-connector-"


def manifest(name: str, **changes: Any) -> dict[str, Any]:
    """The example as it runs from the images of the tests; ``changes`` are merged into its spec.

    A role's ``podTemplate`` is merged over the one that the images need.
    """
    document = local_manifest(**changes)
    over = {part: (document["spec"][part] or {}).get("podTemplate") or {} for part in CONTAINERS}
    document = placed(document)
    for part in CONTAINERS:
        merged = merge(template(part), over[part])
        document["spec"][part] = {**document["spec"][part], "podTemplate": merged}
    return {**document, "metadata": {"name": name}}


def broken_under_load(
    run: ClusterRun,
    pod: str,
    seed: int,
    *words: str,
    also: str = "Ready",
    before: Callable[[], object] = lambda: None,
) -> None:
    """Delete a pod under load: Ready is False with a reason, and no token is made up.

    Args:
        also: another condition that is False then.
        before: called under load, right before the deletion.
    """
    with Load(run, lambda number: text(100, seed + number)) as load, StatusWatch(run) as statuses:
        run.wait("request that is answered", lambda: load.answered, 120)
        before()
        began = time.monotonic()
        run.kubectl("delete", "pod", pod, "--wait=false", *words)
        status = statuses.wait("Ready=False", is_false("Ready"), 60)
        ready = condition(status, "Ready")
        print(
            f"{pod} deleted: Ready=False {ready['reason']} after {time.monotonic() - began:.1f} s"
        )
        assert ready["reason"]
        statuses.wait(f"{also}=False", is_false(also), 60)
    for reply in load.replies:
        # Policy Fail: a request ends well or with an error, never with made-up tokens.
        if reply.status == 200:
            assert reply.kv_path["outcome"] == "transferred", reply.text
        else:
            assert 500 <= reply.status < 600, reply.text


def is_false(kind: str) -> Callable[[Mapping[str, Any]], bool]:
    """Return what tells whether a condition is False in a status."""
    return lambda status: condition(status, kind)["status"] == "False"


ASK_ONESELF = """
import ssl, sys, urllib.request
context = ssl.create_default_context(cafile="/pdcluster-tls/ca.crt")
context.check_hostname = False
context.load_cert_chain("/pdcluster-tls/tls.crt", "/pdcluster-tls/tls.key")
url = "https://localhost:5590" + sys.argv[1]
print(urllib.request.urlopen(url, timeout=10, context=context).read().decode())
"""
KILLED = ("--force", "--grace-period=0")


class ClusterRun:
    """One PDCluster in a namespace of its own. Both are created and deleted together."""

    def __init__(self, cluster: Cluster, proxy: Proxy, name: str) -> None:
        self.cluster, self.name, self.namespace = cluster, name, f"e2e-{name}"
        self.proxy = proxy

    def kubectl(self, *words: str, stdin: str | None = None) -> str:
        return self.cluster.kubectl("--namespace", self.namespace, *words, stdin=stdin)

    def apply(self, document: Mapping[str, Any]) -> str:
        return self.kubectl("apply", "--filename=-", stdin=json.dumps(document))

    def refused(self, document: Mapping[str, Any]) -> str:
        """What kubectl says when it is not let in."""
        try:
            said = self.apply(document)
        except ClusterError as error:
            return str(error)
        raise AssertionError(f"admitted: {said}")

    def get(self) -> dict[str, Any] | None:
        group = f"/apis/pdcluster.dev/v1alpha1/namespaces/{self.namespace}/pdclusters"
        return self.proxy.get(f"{group}/{self.name}")

    def status(self) -> dict[str, Any]:
        return dict((self.get() or {}).get("status") or {})

    def condition(self, kind: str) -> Mapping[str, Any]:
        return condition(self.status(), kind)

    def failed_links(self, reason: str) -> list[dict[str, Any]]:
        return [link for link in self.status().get("failedLinks", ()) if link["reason"] == reason]

    def wait(self, what: str, holds: Callable[[], Any], seconds: float = START_SECONDS) -> float:
        return until(what, holds, seconds, self.report)

    def wait_status(
        self, what: str, holds: Callable[[Mapping[str, Any]], Any], seconds: float = START_SECONDS
    ) -> dict[str, Any]:
        """Wait for a status; returns the very one that was seen, as the next may differ."""
        seen: dict[str, Any] = {}

        def read() -> bool:
            seen.clear()
            seen.update(self.status())
            return bool(holds(seen))

        self.wait(what, read, seconds)
        return seen

    def wait_ready(self, seconds: float = START_SECONDS) -> float:
        took = self.wait("Ready", lambda: self.condition("Ready")["status"] == "True", seconds)
        self._wait_service()
        return took

    def wait_pod(self, role: str, seconds: float = START_SECONDS) -> float:
        """Wait until a pod of a role is ready, whatever the PDCluster's status says."""
        ready = ("Ready", "True")
        took = self.wait(
            f"{role} pod that is ready",
            lambda: any(
                (one["type"], one["status"]) == ready
                for pod in self.pods(role)
                for one in pod["status"].get("conditions", ())
            ),
            seconds,
        )
        if role == "router":
            self._wait_service()
        return took

    def _wait_service(self) -> None:
        """Wait until this node's kube-proxy has heard of the router's pod. Until then it refuses.

        No status can tell this: each node hears of a ready pod in its own time.
        """
        if self.cluster.ours:
            address = self.service_address()
            self.wait("Service with a pod", lambda: not refuses(address, HTTP_PORT), 60)

    def report(self) -> str:
        status = self.status()
        lines = [str(c) for c in (*status.get("conditions", ()), *status.get("failedLinks", ()))]
        for words in (
            ("get", "pods", "--output=wide"),
            ("get", "events", "--sort-by=.lastTimestamp"),
            ("logs", "--selector=pdcluster.dev/role", "--tail=25", "--prefix"),
        ):
            try:
                lines.append(self.kubectl(*words))
            except ClusterError as error:
                lines.append(str(error))
        return "\n".join(lines)

    def pods(self, role: str = "") -> list[dict[str, Any]]:
        """Return the pods of an engine's role or of the ``router``; all our pods if empty.

        A pod that only has a role's labels is none of an engine.
        """
        chosen = f"pdcluster.dev/cluster={self.name}"
        if role:
            label = "app.kubernetes.io/component" if role == "router" else "pdcluster.dev/role"
            chosen += f",{label}={role}" + ("" if role == "router" else ",pdcluster.dev/engine")
        found = self.proxy.get(
            f"/api/v1/namespaces/{self.namespace}/pods?labelSelector={chosen.replace('=', '%3D')}"
        )
        items: list[dict[str, Any]] = (found or {})["items"]
        return [pod for pod in items if pod.get("status", {}).get("phase") != "Succeeded"]

    def pod(self, role: str) -> str:
        """The name of a role's first pod that is not being deleted."""
        for pod in self.pods(role):
            if "deletionTimestamp" not in pod["metadata"]:
                return str(pod["metadata"]["name"])
        raise AssertionError(f"no pod of {role}\n{self.report()}")

    def restarts(self, role: str, number: int = 0) -> tuple[str, int]:
        """UID and container restarts of a role's pod: the same as long as its container runs."""
        pod = self.pods(role)[number]
        counts = (c["restartCount"] for c in pod["status"].get("containerStatuses", ()))
        return pod["metadata"]["uid"], sum(counts)

    def at_pod(self, pod: str, port: int, method: str, path: str, body: object = None) -> Reply:
        """A request to a pod, sent by the API server, which shows no certificate."""
        scheme = "https:" if port == LAUNCHER_PORT and self.secured else ""
        url = f"/api/v1/namespaces/{self.namespace}/pods/{scheme}{pod}:{port}/proxy{path}"
        return ask("127.0.0.1", self.proxy.port, method, url, body)

    @property
    def secured(self) -> bool:
        """Whether the engines of the spec have certificates."""
        transfer = (self.get() or {}).get("spec", {}).get("transfer") or {}
        return transfer.get("tls") in {"Enabled", "Mounted"}

    def at_own_launcher(self, pod: str, path: str) -> dict[str, Any]:
        """What an engine's launcher tells the engine itself, which may have a certificate."""
        if not self.secured:
            return self.at_pod(pod, LAUNCHER_PORT, "GET", path).document
        answer = self.kubectl("exec", pod, "--", "python3", "-c", ASK_ONESELF, path)
        return dict(json.loads(answer))

    def complete(
        self, prompt: str, *, role: str = "router", tokens: int = 16, **more: Any
    ) -> Reply:
        """One greedy completion: through the Service, or straight from an engine."""
        body = {
            "model": self.name,
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            **more,
        }
        if role != "router":
            return self.at_pod(self.pod(role), HTTP_PORT, "POST", "/v1/completions", body)
        if self.cluster.ours:
            return ask(self.service_address(), HTTP_PORT, "POST", "/v1/completions", body)
        service = f"/api/v1/namespaces/{self.namespace}/services/{self.name}-router:{HTTP_PORT}"
        url = f"{service}/proxy/v1/completions"
        return ask("127.0.0.1", self.proxy.port, "POST", url, body)

    def knocker(self) -> Callable[[], Reply]:
        """Return what opens one new connection to the router, and asks whether it is ready."""
        if self.cluster.ours:
            host, port, path = self.service_address(), HTTP_PORT, "/readiness"
        else:
            service = f"/api/v1/namespaces/{self.namespace}/services/{self.name}-router:{HTTP_PORT}"
            host, port, path = "127.0.0.1", self.proxy.port, f"{service}/proxy/readiness"
        return lambda: ask(host, port, "GET", path, seconds=30)

    def service_address(self) -> str:
        """The router's Service; this machine routes to our own cluster's Services."""
        path = f"/api/v1/namespaces/{self.namespace}/services/{self.name}-router"
        service = self.proxy.get(path)
        assert service is not None, self.report()
        return str(service["spec"]["clusterIP"])

    def engine_id(self, role: str) -> str:
        reply = self.at_pod(self.pod(role), LAUNCHER_PORT, "GET", "/readyz")
        return str(reply.document["engine_id"])

    def children(self) -> list[str]:
        """Everything in the namespace that is not Kubernetes' own, as KIND/NAME.

        See ``connectors`` for what is not among it.
        """
        kinds = (
            "pdcluster,statefulset,deployment,replicaset,controllerrevision,pod,service,configmap,"
            "serviceaccount,networkpolicy,poddisruptionbudget,endpointslice"
        )
        names = self.kubectl("get", kinds, "--output=name", "--ignore-not-found").split()
        own = ("configmap/kube-root-ca.crt", "serviceaccount/default")
        return sorted(
            name for name in names if name not in own and not name.startswith(SHARED_CONNECTOR)
        )

    def connectors(self) -> list[str]:
        """The connectors of the namespace. They stay some minutes after the last PDCluster."""
        names = self.kubectl("get", "configmap", "--output=name").split()
        return sorted(name for name in names if name.startswith(SHARED_CONNECTOR))

    def make_namespace(self) -> None:
        self.cluster.make_namespace(self.namespace)

    def delete_namespace(self, *words: str) -> None:
        self.cluster.kubectl("delete", "namespace", self.namespace, "--ignore-not-found", *words)


@contextmanager
def running(
    cluster: Cluster, proxy: Proxy, document: Mapping[str, Any] | None, name: str
) -> Iterator[ClusterRun]:
    """A PDCluster, from its apply to the end of its namespace. With None, the test applies it."""
    run = ClusterRun(cluster, proxy, name)
    run.delete_namespace()  # what a run that was killed left
    run.make_namespace()
    try:
        if document is not None:
            run.apply(document)
        yield run
    finally:
        run.kubectl("delete", "pdc", "--all")
        # From now on no pod can be made here. The next test does not wait for the namespace's end.
        run.delete_namespace("--wait=false")
        # The grace period is for requests that are under way. Here nobody waits for an answer.
        run.kubectl("delete", "pod", "--all", "--force", "--grace-period=0", "--wait=false")
