"""The chart on a real API server, with helm 3 and helm 4: installed, upgraded, uninstalled.

A quota of zero pods limits these tests to the chart's objects. One test removes the quota.
"""

from __future__ import annotations

import base64
import json
import subprocess

import pytest
from chart_release import CHART, CRD, Release

from cluster.report import ClusterError
from images.for_cluster import operator_values
from waiting import until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

# No pod can start here. So any image name will do, and the check at the start is off.
NO_PODS = ("--set", "image.repository=none.example/none,webhook.startupCheck.enabled=false")


@pytest.fixture(params=(3, 4), ids="helm{}".format)
def release(cluster, request) -> Release:
    one = Release(cluster, request.param)
    quota = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "no-pods"},
        "spec": {"hard": {"pods": "0"}},
    }
    cluster.make_namespace(one.namespace)
    cluster.kubectl("apply", "-n", one.namespace, "-f", "-", stdin=json.dumps(quota))
    counted = ("--for=jsonpath={.status.hard.pods}=0", "--timeout=60s")  # else pods still start
    cluster.kubectl("wait", "-n", one.namespace, "resourcequota/no-pods", *counted)
    yield one
    one.take_away()


def test_install_upgrade_uninstall(release):
    notes = release.install(*NO_PODS)
    assert "helm test chart" in notes
    hook = release.get("validatingwebhookconfiguration", "chart-pdcluster")["webhooks"][0]
    assert hook["clientConfig"]["service"]["namespace"] == release.namespace

    # What the operator writes beside the chart must outlive an upgrade.
    bundle = base64.b64encode(AUTHORITY.encode()).decode()
    path = '{"webhooks":[{"name":"validate.pdcluster.dev","clientConfig":{"caBundle":"%s"}}]}'
    kubectl = release.cluster.kubectl
    kubectl("patch", "validatingwebhookconfiguration", "chart-pdcluster", "-p", path % bundle)
    written = json.dumps({"data": {"tls.crt": bundle, "tls.key": bundle}})
    secret = ("secret", "chart-pdcluster-webhook-tls")
    kubectl("patch", *secret, "-n", release.namespace, "-p", written)
    change = ("--reuse-values", "--set", "webhook.timeoutSeconds=7")
    release.helm("upgrade", "chart", str(CHART), *change)
    hook = release.get("validatingwebhookconfiguration", "chart-pdcluster")["webhooks"][0]
    assert hook["timeoutSeconds"] == 7
    assert hook["clientConfig"]["caBundle"] == bundle
    assert set(release.get(*secret)["data"]) == {"tls.crt", "tls.key"}

    release.helm("uninstall", "chart")
    kinds = ("all,secrets,roles,networkpolicies,pdb", "--namespace", release.namespace)
    # ReplicaSets go after their Deployments, when Kubernetes finds them.
    until(
        "end of all objects",
        lambda: "chart-pdcluster" not in kubectl("get", *kinds),
        60,
        lambda: kubectl("get", *kinds),
    )


def test_crd_outlives_its_release_and_serves_the_next(release):
    if not release.brings_crd:
        pytest.skip(f"this cluster has a CRD {CRD} of somebody's already")
    release.install(*NO_PODS)
    release.helm("uninstall", "chart")
    assert CRD in release.cluster.kubectl("get", "crd", CRD, "-o", "name")
    release.install(*NO_PODS)


def given(release: Release, *rights: tuple[str, ...]) -> None:
    """Wait until the API server knows these rights: it reads new roles a moment later."""

    def missing() -> list[tuple[str, ...]]:
        return [right for right in rights if not release.may(*right)]

    until("rights", lambda: missing() == [], 60, lambda: str(missing()))


def test_rights_as_the_api_server_sees_them(release):
    release.install(*NO_PODS)
    given(
        release,
        ("patch", "statefulsets.apps"),
        ("create", "networkpolicies.networking.k8s.io"),
        ("patch", "pdclusters.pdcluster.dev:status"),
        ("patch", "secrets/chart-pdcluster-webhook-tls", release.namespace),
        ("patch", "validatingwebhookconfigurations/chart-pdcluster"),
        # A dry run of a new pod needs the right. StatefulSets could create pods without it.
        ("create", "pods"),
    )
    # Ticket keys are read and written by name. No Secret is found without knowing its name.
    assert not release.may("list", "secrets")
    assert not release.may("watch", "secrets", release.namespace)
    assert not release.may("delete", "secrets", release.namespace)
    assert not release.may("patch", "pods")
    assert not release.may("patch", "pdclusters.pdcluster.dev")
    assert not release.may("patch", "validatingwebhookconfigurations/another")


def test_namespaced_mode_has_rights_in_its_namespaces_alone(release):
    release.install(*NO_PODS, "--set", "watchNamespaces={default}")
    given(release, ("patch", "statefulsets.apps"))
    assert not release.may("patch", "statefulsets.apps", "kube-public")
    assert not release.may("list", "namespaces")


def test_test_pod_tries_the_real_api_server(release):
    """Without the webhook, the CRD's own rules refuse the bad sample."""
    image = operator_values(release.cluster)
    release.cluster.kubectl("delete", "quota", "no-pods", "-n", release.namespace)
    until("pods", lambda: admitted(release), 60, lambda: "the quota is still counted")
    named = (f"image.{key}={image[key]}" for key in ("repository", "tag"))
    release.install("--set", ",".join((*named, "webhook.enabled=false")))
    # Not --logs: helm 3 removes the pod that succeeded before it reads them.
    assert "Phase:          Succeeded" in release.helm("test", "chart")
    events = ("get", "events", "-n", release.namespace)
    until(
        "event of the test's pod",
        lambda: "pod/chart-pdcluster-test" in release.cluster.kubectl(*events),
        60,
        lambda: release.cluster.kubectl(*events),
    )


def admitted(release: Release) -> bool:
    """Whether the API server takes a pod here: it reads the end of a quota a moment later."""
    words = ("run", "tried", "--image=none.example/none", "--dry-run=server")
    try:
        release.cluster.kubectl(*words, "-n", release.namespace)
    except ClusterError as error:
        if "exceeded quota" not in str(error):
            raise
        return False
    return True


# Any well-formed certificate: the API server parses a caBundle.
AUTHORITY = subprocess.run(
    [
        *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
        *("-nodes", "-subj", "/CN=test", "-days", "1", "-keyout", "/dev/null"),
    ],
    capture_output=True,
    text=True,
    check=True,
).stdout
