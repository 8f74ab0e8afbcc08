"""When helm returns, the API server reaches the webhook, so the first `kubectl apply` works."""

from __future__ import annotations

import subprocess
import threading

import pytest
from chart_release import CHART, Release

from cluster.report import ClusterError
from images.for_cluster import operator_values
from waiting import until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

SAMPLES = CHART / "files" / "samples"
RULE = "PrefixCachingHeterogeneousBlocks"
ROUNDS = 3
POLICIES = ("Fail", "Ignore")
SERVICE = "chart-pdcluster-webhook"


@pytest.fixture(params=(pytest.param(3, marks=pytest.mark.soak), 4), ids="helm{}".format)
def release(cluster, request) -> Release:
    one = Release(cluster, request.param)
    cluster.make_namespace(one.namespace)
    yield one
    one.take_away()


@pytest.fixture(scope="module")
def image(cluster) -> tuple[str, str]:
    # A webhook that does not answer for some seconds is late, and no failure.
    values = {"webhook.timeoutSeconds": 30}
    values |= {f"image.{key}": value for key, value in operator_values(cluster).items()}
    return ("--set", ",".join(f"{key}={value}" for key, value in values.items()))


def tried(release: Release, sample: str) -> str:
    """Apply a sample as a dry run, so that no pod starts. Returns what kubectl says."""
    words = ("apply", "--dry-run=server", "--namespace=default", "--filename")
    try:
        return release.cluster.kubectl(*words, str(SAMPLES / f"{sample}.json"))
    except ClusterError as error:
        return str(error)


def left(release: Release) -> str:
    kinds = "jobs,pods,configmaps,serviceaccounts,roles,rolebindings"
    names = [
        release.cluster.kubectl("get", kinds, "--namespace", namespace, "--output=name")
        for namespace in (release.namespace, "default")
    ]
    return "".join(names)


@pytest.mark.parametrize(
    ("policy", "rounds"),
    [
        ("Fail", 1),
        ("Ignore", 1),
        *(pytest.param(p, ROUNDS, marks=pytest.mark.soak) for p in POLICIES),
    ],
)
def test_the_first_apply_is_reviewed(release, image, policy, rounds):
    """Without --wait: the hook alone holds helm back until the webhook answers."""
    for number in range(rounds):
        release.install(*image, "--set", f"webhook.failurePolicy={policy},webhook.replicas=1")
        assert RULE in tried(release, "bad"), f"round {number}"
        assert "created (server dry run)" in tried(release, "good"), f"round {number}"
        # The Job is gone; its pod goes when Kubernetes finds it.
        until(
            "end of the check",
            lambda: "startup-check" not in left(release),
            60,
            lambda: left(release),
        )
        release.helm("uninstall", "chart", "--wait")


def test_reviews_go_on_while_an_upgrade_replaces_the_webhook(release, image):
    one = ("--set", "webhook.replicas=1,watchNamespaces={default}")
    release.install(*image, *one)
    component = "--selector=app.kubernetes.io/component=webhook"
    webhook = release.cluster.kubectl(
        *("get", "pods", "--namespace", release.namespace, component, "--output=name")
    )
    said: list[str] = []
    ended = threading.Event()

    def apply() -> None:
        while not ended.is_set():
            said.append(tried(release, "bad"))

    thread = threading.Thread(target=apply)
    thread.start()
    try:
        change = ("--set", "webhook.podAnnotations.example/restart=now")
        release.helm("upgrade", "chart", *release.words()[2:], *image, *one, *change)
        gone = ("wait", webhook.strip(), "--for=delete", "--timeout=180s")
        release.cluster.kubectl("--namespace", release.namespace, *gone)
        until("ten reviews", lambda: len(said) > 10, 120, lambda: "\n".join(said))
    finally:
        ended.set()
        thread.join()
    assert [one for one in said if RULE not in one] == []
    assert "Succeeded" in release.helm("test", "chart")


def test_a_certificate_of_the_users_is_enough(release, image, tmp_path):
    key, certificate = tmp_path / "tls.key", tmp_path / "tls.crt"
    name = f"{SERVICE}.{release.namespace}.svc"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
            *("-nodes", "-subj", "/CN=webhook", "-addext", f"subjectAltName=DNS:{name}"),
            *("-days", "1", "-keyout", str(key), "-out", str(certificate)),
        ],
        capture_output=True,
        check=True,
    )
    words = ("create", "secret", "tls", "own", f"--cert={certificate}", f"--key={key}")
    release.cluster.kubectl("--namespace", release.namespace, *words)
    own = ("--set", "webhook.certificate.existingSecret=own")
    bundle = ("--set-file", f"webhook.certificate.caBundle={certificate}")
    release.install(*image, *own, *bundle, "--set", "webhook.replicas=1")
    assert RULE in tried(release, "bad")


@pytest.mark.parametrize("policy", ["Fail", pytest.param("Ignore", marks=pytest.mark.soak)])
def test_helm_fails_with_the_reason_where_the_webhook_never_answers(release, image, policy):
    """Its pod waits for a Secret that nobody makes; under Ignore the API server admits all."""
    settings = (
        f"webhook.failurePolicy={policy}",
        "webhook.certificate.existingSecret=missing",
        "webhook.startupCheck.timeoutSeconds=5",
    )
    done = release.run(*release.words(*image, "--set", ",".join(settings)))
    said = done.stdout + done.stderr
    print(said)
    assert done.returncode != 0
    assert "FAILED: no review by the webhook within 5 s" in said
    assert ("admitted" if policy == "Ignore" else "failed calling webhook") in said
    assert "webhook.startupCheck.enabled=false" in said
    # The rights are gone. The Job's log is still there.
    remains = left(release)
    assert "job.batch/chart-pdcluster-startup-check" in remains
    assert "role.rbac.authorization.k8s.io/chart-pdcluster-startup-check" not in remains
