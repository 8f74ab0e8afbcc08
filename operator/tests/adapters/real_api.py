"""etcd and kube-apiserver on free loopback ports: the real thing, without nodes."""

from __future__ import annotations

import contextlib
import ctypes
import http.client
import json
import os
import shutil
import signal
import ssl
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from cluster import binaries
from cluster.certificates import make_certificates
from cluster.places import Places
from loopback import free_ports

TOKEN = "the-token-of-the-tests"
PROGRAMS = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler")
CONTROLLERS = (
    "garbagecollector,podgc,statefulset,deployment,replicaset,disruption,namespace,"
    "horizontal-pod-autoscaler-controller,job-controller"
)
GANGS = "--feature-gates=GenericWorkload=true"
"""Kubernetes serves PodGroups with this gate and with the API's version turned on."""
AUDIT = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [
        {"level": "None", "verbs": ["get", "list", "watch"]},
        {"level": "None", "resources": [{"group": "coordination.k8s.io"}]},
        {"level": "Request", "users": ["operator"]},
        {"level": "None"},
    ],
}


CRD_FILES = sorted((Path(__file__).parents[3] / "crds").glob("*.yaml"))
CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"


class RealApi:
    """A control plane without nodes: StatefulSets get pods, and pods stay Pending.

    Args:
        gangs: whether it serves PodGroups and has a scheduler. Nodes are then made by tests.
        environment: more variables for its programs.
    """

    def __init__(
        self,
        folder: Path,
        audit: dict[str, Any],
        *,
        gangs: bool = False,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.folder = folder
        self._audit = audit
        self._gangs = gangs
        self._environment = {**os.environ, **(environment or {})}
        self._audited = [0]  # where each line of the audit log begins, and where the next one will
        self._programs = _programs()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._etcd, self._peer, self._port = free_ports(3)
        self.url = f"https://127.0.0.1:{self._port}"

    def start(self) -> None:
        keys = self.folder / "keys"
        make_certificates(keys)
        (keys / "tokens.csv").write_text(
            f'{TOKEN},admin,admin,"system:masters"\noperator-token,operator,operator,""\n'
            'visitor-token,visitor,visitor,""\n'
        )
        (self.folder / "audit.json").write_text(json.dumps(self._audit))
        self.start_etcd()
        self.start_api_server()
        self.kubeconfig("admin", TOKEN)
        self.kubeconfig("operator", "operator-token")
        self._run(
            "kube-controller-manager",
            f"--kubeconfig={self.folder / 'admin.kubeconfig'}",
            f"--controllers={CONTROLLERS}" + ",podgroup-protection-controller" * self._gangs,
            f"--service-account-private-key-file={keys / 'service-account.key'}",
            "--leader-elect=false",
            "--horizontal-pod-autoscaler-sync-period=2s",
            "--secure-port=0",
            "--kube-api-qps=500",
            "--kube-api-burst=1000",
            *([GANGS] if self._gangs else ()),
        )
        if self._gangs:
            self._run(
                "kube-scheduler",
                f"--kubeconfig={self.folder / 'admin.kubeconfig'}",
                "--leader-elect=false",
                "--secure-port=0",
                GANGS,
            )

    def start_etcd(self) -> None:
        self._store = self._run(
            "etcd",
            f"--data-dir={self.folder / 'etcd'}",
            f"--listen-client-urls=http://127.0.0.1:{self._etcd}",
            f"--advertise-client-urls=http://127.0.0.1:{self._etcd}",
            f"--listen-peer-urls=http://127.0.0.1:{self._peer}",
            f"--initial-advertise-peer-urls=http://127.0.0.1:{self._peer}",
            f"--initial-cluster=default=http://127.0.0.1:{self._peer}",
            "--unsafe-no-fsync",
            "--quota-backend-bytes=8589934592",  # 2 GB by default: 5,000 PDClusters need more
            "--log-level=error",
        )

    @property
    def etcd_pid(self) -> int:
        return self._store.pid

    def kill_etcd(self) -> None:
        self._store.kill()
        self._store.wait()
        self._processes.remove(self._store)

    def start_api_server(self) -> None:
        keys = self.folder / "keys"
        self._api = self._run(
            "kube-apiserver",
            f"--etcd-servers=http://127.0.0.1:{self._etcd}",
            "--bind-address=127.0.0.1",
            f"--secure-port={self._port}",
            f"--tls-cert-file={keys / 'apiserver.crt'}",
            f"--tls-private-key-file={keys / 'apiserver.key'}",
            f"--client-ca-file={keys / 'ca.crt'}",
            # Who it is when it asks a metrics API for somebody, and how it says for whom.
            f"--proxy-client-cert-file={keys / 'apiserver-client.crt'}",
            f"--proxy-client-key-file={keys / 'apiserver-client.key'}",
            f"--requestheader-client-ca-file={keys / 'ca.crt'}",
            "--requestheader-allowed-names=kube-apiserver-kubelet-client",
            "--requestheader-username-headers=X-Remote-User",
            "--requestheader-group-headers=X-Remote-Group",
            f"--token-auth-file={keys / 'tokens.csv'}",
            "--authorization-mode=RBAC",
            "--disable-admission-plugins=ServiceAccount",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={keys / 'service-account.pub'}",
            f"--service-account-signing-key-file={keys / 'service-account.key'}",
            "--service-cluster-ip-range=10.96.0.0/16",
            "--allow-privileged=true",
            f"--audit-policy-file={self.folder / 'audit.json'}",
            f"--audit-log-path={self.folder / 'audit.log'}",
            "--audit-log-maxsize=10000",  # at 100 MB, by default, it begins another file
            "--shutdown-delay-duration=0s",
            *((GANGS, "--runtime-config=scheduling.k8s.io/v1beta1=true") if self._gangs else ()),
        )
        deadline = time.monotonic() + 200
        while not self.ready():
            assert self._api.poll() is None, self.log("kube-apiserver")
            assert time.monotonic() < deadline, self.log("kube-apiserver")
            time.sleep(0.2)

    def kill_api_server(self) -> None:
        self._api.kill()
        self._api.wait()
        self._processes.remove(self._api)

    def stop(self) -> None:
        for process in reversed(self._processes):
            process.kill()
        for process in self._processes:
            process.wait()

    def ready(self) -> bool:
        with contextlib.suppress(OSError):
            return self.call("GET", "/readyz")[0] == 200
        return False

    def call(
        self, method: str, path: str, body: Any = None, content: str = "application/json"
    ) -> tuple[int, Any]:
        """Status and answer of one call as the cluster's administrator.

        A server that is busy says so (429) and took nothing, so it is asked again. With the same
        status, a disruption budget refuses an eviction.
        """
        while True:
            status, answer = self._call(method, path, body, content)
            causes = (answer.get("details") or {}).get("causes") or ()
            if status != 429 or any(one["reason"] == "DisruptionBudget" for one in causes):
                return status, answer
            time.sleep(1)

    def _call(self, method: str, path: str, body: Any, content: str) -> tuple[int, Any]:
        request = urllib.request.Request(
            self.url + path,
            None if body is None else json.dumps(body).encode(),
            {"Authorization": f"Bearer {TOKEN}", "Content-Type": content},
            method=method,
        )
        context = ssl.create_default_context(cafile=str(self.folder / "keys" / "ca.crt"))
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
        try:
            with urllib.request.urlopen(request, context=context, timeout=60) as answer:
                status, text, headers = answer.status, answer.read(), answer.headers
        except urllib.error.HTTPError as error:
            status, text, headers = error.code, error.read(), error.headers
        except http.client.HTTPException as error:
            raise OSError(f"{method} {path} broke off: {error!r}") from error
        if "json" not in headers.get("Content-Type", ""):
            return status, {"message": text.decode()}
        document = json.loads(text)
        if warnings := headers.get_all("Warning"):
            document["warnings-of-the-answer"] = warnings
        return status, document

    def apply(self, manifest: dict[str, Any], path: str, manager: str = "tests") -> Any:
        name = manifest["metadata"]["name"]
        status, answer = self.call(
            "PATCH",
            f"{path}/{name}?fieldManager={manager}&force=true",
            manifest,
            "application/apply-patch+yaml",
        )
        assert status in (200, 201), answer
        return answer

    def kubeconfig(self, user: str, token: str) -> Path:
        path = self.folder / f"{user}.kubeconfig"
        cluster = {
            "server": self.url,
            "certificate-authority": str(self.folder / "keys" / "ca.crt"),
        }
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "it",
            "clusters": [{"name": "it", "cluster": cluster}],
            "users": [{"name": "it", "user": {"token": token}}],
            "contexts": [{"name": "it", "context": {"cluster": "it", "user": "it"}}],
        }
        path.write_text(json.dumps(document))
        return path

    def writes(self, since: int = 0) -> list[dict[str, Any]]:
        """Every write of the user `operator` that the audit log holds, but for the first ones."""
        begin, end = self._audited[min(since, self.written)], self._audited[-1]
        if begin == end:
            return []
        with (self.folder / "audit.log").open("rb") as log:
            log.seek(begin)
            return [json.loads(line) for line in log.read(end - begin).splitlines()]

    @property
    def written(self) -> int:
        """How many writes the audit log holds. What was read of it once is not read again."""
        path = self.folder / "audit.log"
        if path.exists():
            with path.open("rb") as log:
                log.seek(self._audited[-1])
                for line in log:
                    if line.endswith(b"\n"):  # the last one may be half written
                        self._audited.append(self._audited[-1] + len(line))
        return len(self._audited) - 1

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()[-4000:]

    def _run(self, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                [self._programs[name], *arguments],
                env=self._environment,
                stdout=log,
                stderr=log,
                preexec_fn=die_with_us,  # noqa: PLW1509
            )
        self._processes.append(process)
        return process


def add_crds(api: RealApi) -> None:
    """Create our CRDs; returns when they are served."""
    deadline = time.monotonic() + 60
    for path in CRD_FILES:
        status, answer = api.call("POST", CRDS, yaml.safe_load(path.read_text()))
        assert status == 201, answer
        plural = answer["spec"]["names"]["plural"]
        while api.call("GET", f"/apis/pdcluster.dev/v1alpha1/{plural}")[0] != 200:
            assert time.monotonic() < deadline
            time.sleep(0.1)


def die_with_us() -> None:
    """In a child before it starts: killed tests leave no process behind."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _programs() -> dict[str, Path]:
    programs = [program for program in binaries.PROGRAMS if program.name in PROGRAMS]
    places = Places.of_user()
    built = {
        one.name: places.programs / f"{one.tool}-{binaries.digest(one.tool)}" / one.name
        for one in programs
    }
    # Looking first: another process may hold the lock of the builds for minutes.
    if all(path.exists() for path in built.values()):
        return built
    return binaries.provide(programs, places)


@contextlib.contextmanager
def running_api(
    audit: dict[str, Any] = AUDIT,
    *,
    gangs: bool = False,
    environment: Mapping[str, str] | None = None,
) -> Iterator[RealApi]:
    folder = Path(tempfile.mkdtemp(prefix="pdcluster-api-", dir=os.environ.get("TMPDIR")))
    api = RealApi(folder, audit, gangs=gangs, environment=environment)
    try:
        api.start()
        yield api
    finally:
        api.stop()
        shutil.rmtree(folder, ignore_errors=True)
