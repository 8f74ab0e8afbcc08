"""The operator's tests rely on this: real pods, names, policies and the audit log."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import pytest

from cluster import audit
from cluster.report import ClusterError
from cluster.session import Cluster

pytestmark = pytest.mark.cluster

PEERS = """
apiVersion: v1
kind: Service
metadata: {name: peers}
spec:
  clusterIP: None
  publishNotReadyAddresses: true
  selector: {app: peers}
  ports: [{port: 8080}]
---
apiVersion: v1
kind: Service
metadata: {name: balanced}
spec:
  selector: {app: peers}
  ports: [{port: 80, targetPort: 8080}]
---
apiVersion: apps/v1
kind: StatefulSet
metadata: {name: peer}
spec:
  serviceName: peers
  replicas: 2
  podManagementPolicy: Parallel
  selector: {matchLabels: {app: peers}}
  template:
    metadata: {labels: {app: peers}}
    spec:
      terminationGracePeriodSeconds: 1
      securityContext: {runAsNonRoot: true, runAsUser: 65534}
      containers:
      - name: server
        image: local/pod:1
        imagePullPolicy: Never
        args: [serve, "8080"]
        readinessProbe: {httpGet: {path: /, port: 8080}, periodSeconds: 1}
"""

# Nobody but pods labelled role=friend may speak to peers.
FRIENDS_ONLY = """
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: friends-only}
spec:
  podSelector: {matchLabels: {app: peers}}
  policyTypes: [Ingress]
  ingress:
  - from: [{podSelector: {matchLabels: {role: friend}}}]
    ports: [{port: 8080}]
"""

NO_EGRESS = """
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: no-egress}
spec:
  podSelector: {matchLabels: {role: friend}}
  policyTypes: [Egress]
"""


class Namespace:
    """kubectl in one namespace that goes with the test."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.cluster = cluster
        self.name = name

    def kubectl(self, *arguments: str, stdin: str | None = None) -> str:
        return self.cluster.kubectl("--namespace", self.name, *arguments, stdin=stdin)

    def apply(self, manifests: str) -> None:
        self.kubectl("apply", "--server-side", "-f", "-", stdin=manifests)

    def client(self, name: str, role: str) -> None:
        spec = {"terminationGracePeriodSeconds": 1}
        spec["containers"] = [{"name": "pod", "image": "local/pod:1", "imagePullPolicy": "Never"}]
        self.apply(
            json.dumps(
                {
                    "apiVersion": "v1",
                    "kind": "Pod",
                    "spec": spec,
                    "metadata": {"name": name, "labels": {"role": role}},
                }
            )
        )
        self.kubectl("wait", "--for=condition=Ready", f"pod/{name}", "--timeout=120s")

    def ask(self, client: str, url: str) -> str:
        """What the pod `client` gets from a URL; nothing where it gets no answer."""
        try:
            return self.kubectl("exec", client, "--", "/bin/pod", "get", url).strip()
        except ClusterError:
            return ""


@pytest.fixture(scope="module")
def space(cluster: Cluster) -> Iterator[Namespace]:
    name = f"test-{time.time_ns():x}"
    cluster.make_namespace(name)
    yield Namespace(cluster, name)
    cluster.kubectl("delete", "namespace", name, "--timeout=120s")


@pytest.fixture(scope="module")
def peers(space: Namespace) -> Namespace:
    space.apply(PEERS)
    space.kubectl("rollout", "status", "statefulset/peer", "--timeout=120s")
    space.client("friend", "friend")
    space.client("stranger", "stranger")
    return space


def eventually(condition, seconds: float = 120.0) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.2)
    return True


def test_pod_reaches_pod_by_its_name(peers):
    url = f"http://peer-1.peers.{peers.name}.svc:8080/"
    assert eventually(lambda: peers.ask("friend", url) == "peer-1")


def test_pod_reaches_pod_by_its_own_address_untranslated(peers):
    address = peers.kubectl("get", "pod", "peer-0", "-o", "jsonpath={.status.podIP}")
    assert eventually(lambda: peers.ask("peer-1", f"http://{address}:8080/") == "peer-0")


def test_service_balances_over_both_pods(peers):
    url = f"http://balanced.{peers.name}/"
    seen: set[str] = set()
    assert eventually(lambda: seen.add(peers.ask("friend", url)) or len(seen) == 2)
    assert seen == {"peer-0", "peer-1"}


def test_name_of_nobody_is_refused(peers):
    name = f"peer-7.peers.{peers.name}.svc.cluster.local"

    def answered() -> bool:
        """Whether the DNS says so. One that is late says nothing."""
        try:
            found = peers.kubectl("exec", "friend", "--", "/bin/pod", "lookup", name)
        except ClusterError as error:
            return "no such host" in str(error)
        raise AssertionError(found)

    assert eventually(answered)


def test_host_reaches_pods_and_services(peers):
    import urllib.request

    address = peers.kubectl("get", "service", "balanced", "-o", "jsonpath={.spec.clusterIP}")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def reached() -> bool:
        try:
            with opener.open(f"http://{address}/", timeout=10) as answer:
                return answer.read().decode().strip() in ("peer-0", "peer-1")
        except OSError:
            return False

    assert eventually(reached)


def test_policy_admits_friends_and_nobody_else(peers):
    url = f"http://peer-0.peers.{peers.name}.svc:8080/"
    assert eventually(lambda: peers.ask("stranger", url) == "peer-0")
    peers.apply(FRIENDS_ONLY)
    try:
        assert eventually(lambda: peers.ask("stranger", url) == "")
        assert eventually(lambda: peers.ask("friend", url) == "peer-0")
        # Egress rules count too: both policies must allow the connection.
        peers.apply(NO_EGRESS)
        assert eventually(lambda: peers.ask("friend", url) == "")
        peers.kubectl("delete", "networkpolicy", "no-egress")
        assert eventually(lambda: peers.ask("friend", url) == "peer-0")
    finally:
        peers.kubectl("delete", "networkpolicy", "--all")
    assert eventually(lambda: peers.ask("stranger", url) == "peer-0")


def test_policy_ends_what_was_open_before_it(peers):
    address = peers.kubectl("get", "pod", "peer-0", "-o", "jsonpath={.status.podIP}")
    spec = {
        "name": "pod",
        "image": "local/pod:1",
        "imagePullPolicy": "Never",
        "args": ["beat", f"http://{address}:8080/"],
    }
    peers.apply(
        json.dumps(
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": "beat"},
                "spec": {"terminationGracePeriodSeconds": 1, "containers": [spec]},
            }
        )
    )

    def last() -> str:
        lines = peers.kubectl("logs", "beat", "--tail=1").split()
        return lines[0] if lines else ""

    peers.kubectl("wait", "--for=condition=Ready", "pod/beat", "--timeout=120s")
    try:
        assert eventually(lambda: last() == "ok")
        peers.apply(FRIENDS_ONLY)
        assert eventually(lambda: last() == "failed")
    finally:
        peers.kubectl("delete", "networkpolicy", "--all")
    assert eventually(lambda: last() == "ok")
    assert "ok" in peers.kubectl("logs", "beat")


def test_audit_log_names_who_wrote_what_and_is_silent_about_reads(peers, cluster):
    since = time.time()
    peers.kubectl("create", "configmap", "written")
    peers.kubectl("get", "configmap", "written")
    peers.kubectl("delete", "configmap", "written")
    mine = [
        (write.verb, write.resource, write.code)
        for write in audit.read_writes(cluster.audit_log, since, user="admin")
        if write.namespace == peers.name and write.name == "written"
    ]
    assert mine == [("create", "configmaps", 201), ("delete", "configmaps", 200)]


def test_pod_that_is_deleted_comes_back_under_its_name(peers):
    before = peers.kubectl("get", "pod", "peer-1", "-o", "jsonpath={.metadata.uid}")
    peers.kubectl("delete", "pod", "peer-1", "--wait=false")
    url = f"http://peer-1.peers.{peers.name}.svc:8080/"

    def replaced() -> bool:
        now = peers.kubectl(
            "get", "pod", "peer-1", "--ignore-not-found", "-o", "jsonpath={.metadata.uid}"
        )
        return now not in ("", before) and peers.ask("friend", url) == "peer-1"

    assert eventually(replaced)
