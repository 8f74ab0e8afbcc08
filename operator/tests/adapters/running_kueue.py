"""Kueue with its webhooks, as a process beside the control plane of the tests.

A queue here is a ClusterQueue and the LocalQueue of the same name that leads to it.
Source: https://github.com/kubernetes-sigs/kueue
"""

from __future__ import annotations

import base64
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from other_operators import controllers, hooks_at, install, place
from real_api import RealApi

from cluster import binaries
from cluster.commands import run
from cluster.places import Places
from loopback import free_ports

NAMESPACE = "kueue-system"
API = "/apis/kueue.x-k8s.io/v1beta1"
FRAMEWORKS = ["pod", "statefulset", "deployment"]


@contextlib.contextmanager
def running_kueue(real: RealApi) -> Iterator[Path]:
    """Install Kueue and run its controllers; gives their log."""
    program = binaries.provide([binaries.KUEUE], Places.of_user())[binaries.KUEUE.name]
    sources = binaries.sources(binaries.KUEUE) / "config" / "components"
    webhooks, health = free_ports(2)
    keys = _keys(real)
    authority = (keys / "ca.crt").read_bytes()
    patches = yaml.safe_load((sources / "crd" / "kustomization.yaml").read_text())["patches"]
    converted = {Path(one["path"]).stem.removeprefix("webhook_in_") for one in patches}
    for file in (sources / "crd" / "bases").glob("*.yaml"):
        crd = yaml.safe_load(file.read_text())
        if crd["spec"]["names"]["plural"] in converted:
            webhook = {"clientConfig": place("/convert", webhooks, authority)}
            webhook["conversionReviewVersions"] = ["v1"]
            crd["spec"]["conversion"] = {"strategy": "Webhook", "webhook": webhook}
        install(real, crd)
    for hooks in yaml.safe_load_all((sources / "webhook" / "manifests.yaml").read_text()):
        # As Kueue's own installation names them: it puts its authority into them by name.
        hooks["metadata"]["name"] = f"kueue-{hooks['metadata']['name']}"
        install(real, hooks_at(hooks, webhooks, authority))
    log = real.folder / "kueue.log"
    configuration = _configuration(real.folder, keys, webhooks, health)
    kubeconfig = real.folder / "admin.kubeconfig"
    with controllers(program, configuration, kubeconfig, log, webhooks):
        yield log


def _keys(real: RealApi) -> Path:
    """Return a folder with a certificate that Kueue takes for its own, and make it Kueue's Secret.

    Kueue's own certificates name a Service only. The API server asks 127.0.0.1 here.
    """
    folder = real.folder / "kueue-keys"
    folder.mkdir()
    names = f"DNS:kueue-ca,DNS:kueue-webhook-service.{NAMESPACE}.svc,IP:127.0.0.1"
    # Kueue reads the key of an authority only in this form.
    run("openssl", *["genrsa", "-traditional", "-out", "tls.key", "2048"], cwd=folder)
    request = "req -x509 -new -key tls.key -subj /CN=kueue-ca -days 365 -out tls.crt"
    run("openssl", *request.split(), "-addext", f"subjectAltName={names}", cwd=folder)
    for end in ("crt", "key"):
        (folder / f"ca.{end}").write_bytes((folder / f"tls.{end}").read_bytes())
    data = {one.name: base64.b64encode(one.read_bytes()).decode() for one in folder.iterdir()}
    namespaces = "/api/v1/namespaces"
    assert real.call("POST", namespaces, {"metadata": {"name": NAMESPACE}})[0] == 201
    secret = {"metadata": {"name": "kueue-webhook-server-cert"}, "data": data}
    assert real.call("POST", f"{namespaces}/{NAMESPACE}/secrets", secret)[0] == 201
    return folder


def _configuration(folder: Path, keys: Path, webhooks: int, health: int) -> Path:
    document = {
        "apiVersion": "config.kueue.x-k8s.io/v1beta2",
        "kind": "Configuration",
        "namespace": NAMESPACE,
        "leaderElection": {"leaderElect": False},
        "webhook": {"host": "127.0.0.1", "port": webhooks, "certDir": str(keys)},
        "metrics": {"bindAddress": "0"},
        "health": {"healthProbeBindAddress": f"127.0.0.1:{health}"},
        "featureGates": {"VisibilityOnDemand": False},
        "integrations": {"frameworks": FRAMEWORKS},
    }
    path = folder / "kueue.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


def make_queue(real: RealApi, namespace: str, name: str, quota: dict[str, str]) -> None:
    """Make a queue that admits pods of a namespace until they ask for the quota."""
    resources = [{"name": what, "nominalQuota": amount} for what, amount in quota.items()]
    flavors = [{"name": name, "resources": resources}]
    groups = [{"coveredResources": list(quota), "flavors": flavors}]
    _create(real, API, "ResourceFlavor", name)
    spec = {"namespaceSelector": {}, "resourceGroups": groups}
    _create(real, API, "ClusterQueue", name, spec=spec)
    local = {"clusterQueue": name}
    _create(real, f"{API}/namespaces/{namespace}", "LocalQueue", name, spec=local)


def workloads(real: RealApi, namespace: str) -> list[dict[str, Any]]:
    """Return Kueue's Workloads: one for each engine."""
    found = real.call("GET", f"{API}/namespaces/{namespace}/workloads")[1]["items"]
    return list(found)


def _create(real: RealApi, path: str, kind: str, name: str, **parts: Any) -> None:
    version = API.removeprefix("/apis/")
    body = {"apiVersion": version, "kind": kind, "metadata": {"name": name}, **parts}
    status, answer = real.call("POST", f"{path}/{kind.lower()}s", body)
    assert status == 201, answer
