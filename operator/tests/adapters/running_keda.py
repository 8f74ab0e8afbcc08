"""KEDA's operator and its metrics server, as processes beside the control plane of the tests.

Both have the ServiceAccount and the roles that KEDA's own manifests give them.
Source: https://github.com/kedacore/keda
"""

from __future__ import annotations

import base64
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from operator_runs import until
from other_operators import install, process
from real_api import RealApi

from authority import Authority
from cluster import binaries
from cluster.places import Places
from loopback import free_ports

NAMESPACE = "keda"
ACCOUNT = "keda-operator"
SERVICE = f"keda-metrics-apiserver.{NAMESPACE}.svc"
METRICS = "/apis/external.metrics.k8s.io/v1beta1"
PLACES = {
    "Namespace": "/api/v1/namespaces",
    "ServiceAccount": "/api/v1/namespaces/{}/serviceaccounts",
    "Service": "/api/v1/namespaces/{}/services",
    "ClusterRole": "/apis/rbac.authorization.k8s.io/v1/clusterroles",
    "ClusterRoleBinding": "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings",
    "Role": "/apis/rbac.authorization.k8s.io/v1/namespaces/{}/roles",
    "RoleBinding": "/apis/rbac.authorization.k8s.io/v1/namespaces/{}/rolebindings",
    "APIService": "/apis/apiregistration.k8s.io/v1/apiservices",
}
MANIFESTS = (
    "general/namespace.yaml",
    "service_account/service_account.yaml",
    "rbac/role.yaml",
    "rbac/role_binding.yaml",
    "metrics-server/role.yaml",
    "metrics-server/role_binding.yaml",
)


@contextlib.contextmanager
def running_keda(real: RealApi) -> Iterator[Path]:
    """Install KEDA and run it; gives the log of its operator."""
    programs = binaries.provide(binaries.KEDA, Places.of_user())
    sources = binaries.sources(binaries.KEDA[0]) / "config"
    for file in sorted((sources / "crd" / "bases").glob("*.yaml")):
        install(real, yaml.safe_load(file.read_text()))
    for name in MANIFESTS:
        for manifest in yaml.safe_load_all((sources / name).read_text()):
            create(real, manifest)
    kubeconfig = _kubeconfig(real)
    keys = real.folder / "keda-keys"
    authority = Authority().files(keys, "keda", name=SERVICE).ca
    metrics, health, service, secure, own = free_ports(5)
    environment = {
        "KUBECONFIG": str(kubeconfig),
        "POD_NAMESPACE": NAMESPACE,
        "KEDA_CLUSTER_OBJECT_NAMESPACE": NAMESPACE,
        "WATCH_NAMESPACE": "",
    }
    operator = (
        str(programs["keda"]),
        f"--metrics-bind-address=127.0.0.1:{metrics}",
        f"--health-probe-bind-address=127.0.0.1:{health}",
        f"--metrics-service-bind-address=127.0.0.1:{service}",
        f"--cert-dir={keys}",
    )
    adapter = (
        str(programs["keda-adapter"]),
        "--bind-address=127.0.0.1",
        f"--secure-port={secure}",
        f"--port={own}",
        f"--cert-dir={keys}",
        f"--tls-cert-file={keys / 'tls.crt'}",
        f"--tls-private-key-file={keys / 'tls.key'}",
        f"--metrics-service-address=127.0.0.1:{service}",
        f"--metrics-service-grpc-authority={SERVICE}",
        *(f"--{who}-kubeconfig={kubeconfig}" for who in ("lister", "authentication")),
        f"--authorization-kubeconfig={kubeconfig}",
    )
    log, of_adapter = real.folder / "keda.log", real.folder / "keda-adapter.log"
    with (
        process(operator, environment, log, service),
        process(adapter, environment, of_adapter, secure),
    ):
        _register(real, sources, secure, authority.read_bytes())
        until(lambda: real.call("GET", METRICS)[0] == 200, 60, of_adapter.read_text)
        yield log


def create(real: RealApi, manifest: dict[str, Any]) -> None:
    """Create an object of a kind of PLACES."""
    path = PLACES[manifest["kind"]].format(manifest["metadata"].get("namespace"))
    status, answer = real.call("POST", path, manifest)
    assert status == 201, answer


def _kubeconfig(real: RealApi) -> Path:
    """Return a kubeconfig of KEDA's ServiceAccount."""
    path = f"{PLACES['ServiceAccount'].format(NAMESPACE)}/{ACCOUNT}/token"
    status, answer = real.call("POST", path, {"spec": {"expirationSeconds": 86_400}})
    assert status == 201, answer
    return real.kubeconfig(ACCOUNT, answer["status"]["token"])


def _register(real: RealApi, sources: Path, port: int, authority: bytes) -> None:
    """Register the metrics server, which listens on this machine."""
    registration = yaml.safe_load((sources / "metrics-server" / "api_service.yaml").read_text())
    spec = registration["spec"]
    spec["caBundle"] = base64.b64encode(authority).decode()
    spec["service"]["port"] = port
    metadata = {"name": spec["service"]["name"], "namespace": NAMESPACE}
    here = {"type": "ExternalName", "externalName": "localhost"}
    create(real, {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": here})
    create(real, registration)
