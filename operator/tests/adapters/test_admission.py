"""The webhook's own process, asked by a real API server."""

from __future__ import annotations

import asyncio
import http.client
import json
import ssl
import time
from pathlib import Path

import pytest
import yaml
from operator_runs import (
    GROUP,
    Operator,
    cluster,
    condition,
    create,
    delete,
    edit,
    get,
    owned,
    until,
)
from rights import CERTIFICATE_RULES, RBAC, SUBJECT

from conftest import may
from loopback import free_ports
from monitoring_files import ALERTS, alerts, expressions
from pdcluster_operator.adapters.api_server.client import KubeClient
from pdcluster_operator.adapters.api_server.kubeconfig import find_configuration
from pdcluster_operator.adapters.own_secrets import (
    LIFETIME,
    WebhookPlace,
    read_certificates,
    renew_certificate,
)
from pdcluster_operator.api.rules.engines import MOST_LINKS
from prometheus_server import Prometheus

pytestmark = pytest.mark.cluster

CONFIGURATIONS = "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations"
BAD = {
    "prefill": {"engine": {"blockSize": 16}},
    "decode": {"engine": {"blockSize": 32}, "replicas": 1},
}
RULE = "PrefixCachingHeterogeneousBlocks"
LLAMA = json.dumps({
    "model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
    "num_key_value_heads": 8, "max_position_embeddings": 131_072, "torch_dtype": "bfloat16",
})  # fmt: skip


@pytest.fixture
def configuration(real, namespace):
    """A webhook configuration of the chart's shape, for one namespace, without a CA yet."""
    port = free_ports(1)[0]
    name = f"hook-{namespace}"
    body = {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingWebhookConfiguration",
        "metadata": {"name": name},
        "webhooks": [
            {
                "name": "validate.pdcluster.dev",
                "admissionReviewVersions": ["v1"],
                "sideEffects": "None",
                "failurePolicy": "Fail",
                "timeoutSeconds": 30,
                "clientConfig": {"url": f"https://127.0.0.1:{port}/validate"},
                "rules": [
                    {
                        "apiGroups": ["pdcluster.dev"],
                        "apiVersions": ["v1alpha1"],
                        "resources": ["pdclusters"],
                        "operations": ["CREATE", "UPDATE", "DELETE"],
                    }
                ],
                "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}},
            }
        ],
    }
    assert real.call("POST", CONFIGURATIONS, body)[0] == 201
    kind = {"apiVersion": "rbac.authorization.k8s.io/v1", "metadata": {"name": name}}
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": name}
    rules = {**kind, "kind": "ClusterRole", "rules": CERTIFICATE_RULES[1:]}
    binding = {**kind, "kind": "ClusterRoleBinding", "roleRef": role, "subjects": SUBJECT}
    assert real.call("POST", f"{RBAC}/clusterroles", rules)[0] == 201
    assert real.call("POST", f"{RBAC}/clusterrolebindings", binding)[0] == 201
    may(real, CERTIFICATE_RULES[1])
    # As the chart makes it: empty, for the operator to fill.
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "tls"}}
    assert real.call("POST", f"/api/v1/namespaces/{namespace}/secrets", secret)[0] == 201
    yield name, port
    for path in (f"{CONFIGURATIONS}/{name}", f"{RBAC}/clusterroles/{name}"):
        real.call("DELETE", path)
    real.call("DELETE", f"{RBAC}/clusterrolebindings/{name}")


@pytest.fixture
def keep(real, namespace, configuration):
    """Let the keeper look once, at a time of its choice; what it kept is written to a folder."""
    folder = real.folder / f"tls-{namespace}"
    folder.mkdir()
    place = WebhookPlace(configuration[0], (namespace, "hook"), (namespace, "tls"))

    async def look(now: float) -> dict[str, bytes]:
        found = await find_configuration(str(real.folder / "operator.kubeconfig"))
        async with KubeClient(found) as client:
            await renew_certificate(client, place, now)
        return publish(real, namespace, folder)

    look.folder = folder
    return look


def publish(real, namespace, folder) -> dict[str, bytes]:
    """Do the kubelet's work: the Secret's keys as files."""
    import base64

    secret = real.call("GET", f"/api/v1/namespaces/{namespace}/secrets/tls")[1]
    data = {key: base64.b64decode(value) for key, value in (secret.get("data") or {}).items()}
    for key, value in data.items():
        (folder / key).write_bytes(value)
    return data


@pytest.fixture
async def webhook(real, namespace, keep, configuration):
    await keep(time.time())
    process = Operator(
        real,
        "webhook",
        f"--certificate-folder={keep.folder}",
        f"--port={configuration[1]}",
        "--allow-host-path-models",
    )
    process.start()

    def reviewed() -> bool:
        # Only the webhook warns of this. The API server reads its certificate a moment later.
        warnings = tried(real, namespace, cluster())[1].get("warnings-of-the-answer", ())
        return any("NodeLocalModel" in line for line in warnings)

    until(reviewed, 60, process.said)
    yield process
    process.stop()


def tried(real, namespace, manifest):
    return real.call("POST", f"{GROUP}/namespaces/{namespace}/pdclusters?dryRun=All", manifest)


async def test_a_refusal_names_field_value_rule_and_remedy(real, namespace, webhook):
    status, answer = tried(real, namespace, cluster(**BAD))
    assert status == 422, answer
    for part in ("spec.", "blockSize", RULE, "16", "32"):
        assert part in answer["message"], answer["message"]
    assert webhook.metric(f'pdcluster_webhook_refusals_total{{rule="{RULE}"}}') == 1
    assert (
        webhook.metric('pdcluster_webhook_reviews_total{operation="CREATE",outcome="refused"}') == 1
    )


async def test_all_errors_at_once_and_warnings_beside(real, namespace, webhook):
    worse = {**BAD, "engine": {"extraArgs": ["--port", "1", "--tensor-parallel-size", "2"]}}
    message = tried(real, namespace, cluster(**worse))[1]["message"]
    assert RULE in message
    assert message.count("OwnedFlag") == 2
    status, answer = tried(real, namespace, cluster())
    assert status == 201
    assert any("NodeLocalModel" in line for line in answer["warnings-of-the-answer"])


CLAIM = {"persistentVolumeClaim": {"claimName": "c", "path": "../../etc"}}
HUB = {"huggingFace": {"repo": "a/b", "revision": "--trust-remote-code"}}
HYBRID = {
    "engine": {"prefixCaching": "Enabled", "attentionBackend": "FLASH_ATTN"},
    "prefill": {"engine": {"blockSize": 544}},
    "decode": {"engine": {"blockSize": 1008}},
}


ELSEWHERE = [
    (HYBRID, "spec.decode.engine.blockSize"),
    ({"model": {"source": CLAIM}}, "spec.model.source.persistentVolumeClaim.path"),
    ({"model": {"source": HUB}}, "spec.model.source.huggingFace.revision"),
    ({"decode": {"resources": {"limits": {"cpu": "-1"}}}}, "spec.decode.resources.limits.cpu"),
    ({"decode": {"resources": {"limits": {"cpu": -1}}}}, "spec.decode.resources.limits.cpu"),
    ({"transfer": {"device": "CPU", "rdma": {"resource": "ib"}}},
     "spec.transfer.rdma.resource"),
    ({"prefill": {"podTemplate": {"spec": {"containers": {"engine": {}}}}}},
     "spec.prefill.podTemplate.spec.containers"),
    ({"router": {"podTemplate": {"spec": {"nodeSelectr": {}}}}},
     "spec.router.podTemplate.spec.nodeSelectr"),
    ({"decode": {"podTemplate": {"spec": {"terminationGracePeriodSeconds": 0}}}},
     "spec.decode.podTemplate.spec.terminationGracePeriodSeconds"),
    ({"engine": {"extraArgs": ["--enable-sleep-mode"]}}, "spec.engine.extraArgs[0]"),
]  # fmt: skip
"""Specs that would end as the error of somebody else, with the field that is wrong."""


async def test_what_would_end_as_another_s_error_is_refused(real, namespace, webhook):
    """By the CRD's schema or by the webhook: with the field's path, and before a pod is made."""
    admitted = []
    for spec, field in ELSEWHERE:
        status, answer = tried(real, namespace, cluster(**spec))
        if status != 422 or field not in answer["message"]:
            admitted.append((field, status, answer))
    assert admitted == []


async def test_what_is_legal_and_suspicious_is_shown(real, namespace, webhook):
    decode = {"engine": {"kvCacheDtype": "fp8", "image": "a/vllm:latest"}, "replicas": 1}
    status, answer = tried(real, namespace, cluster(decode=decode))
    assert status == 201, answer
    said = " ".join(answer["warnings-of-the-answer"])
    for rule in ("SetOnOneRole", "ImageNotPinned", "ImagesDiffer", "NoMemoryRequest"):
        assert rule in said, said


async def test_admission_and_the_operator_read_the_models_config_map(
    real, namespace, webhook, operator
):
    maps = f"/api/v1/namespaces/{namespace}/configmaps"
    source = {"hostPath": {"path": "/models/tiny"}}
    model = {"source": source, "configMapRef": {"name": "llama"}}

    def review(tensor):
        sizes = {"parallelism": {"tensor": tensor}}
        manifest = cluster("other", model=model, prefill=sizes, decode=sizes)
        status, answer = tried(real, namespace, manifest)
        return status, answer.get("message", ""), answer.get("warnings-of-the-answer", ())

    status, _, warnings = review(3)
    assert status == 201, "nobody knows the model"
    [line] = [one for one in warnings if "ModelNotChecked" in one]
    assert f"there is no such ConfigMap in namespace {namespace}" in line
    operator.start()
    create(real, namespace, cluster(model=model))
    said = until(lambda: condition(real, namespace, "Accepted").get("message"), 60, operator.said)
    assert condition(real, namespace, "Accepted")["reason"] == "PartiallyChecked"
    assert "no such ConfigMap" in said

    body = {"metadata": {"name": "llama"}, "data": {"config.json": LLAMA}}
    assert real.call("POST", maps, body)[0] == 201
    status, message, _ = review(3)
    assert status == 422
    assert "the model's 32 attention heads cannot be spread evenly over 3 ranks" in message
    assert review(4)[0] == 201
    assert not [one for one in review(4)[2] if "ModelNotChecked" in one]
    # A change of the spec has the operator read it again, and at once.
    assert edit(real, namespace, {"engine": {"maxModelLen": 4096}})[0] == 200
    until(
        lambda: condition(real, namespace, "Accepted")["reason"] == "ModelChecked",
        60,
        operator.said,
    )
    said = condition(real, namespace, "Accepted")["message"]
    assert "131,072 bytes for one token" in said
    assert edit(real, namespace, {"engine": {"maxModelLen": 200_000}})[0] == 422


async def test_the_block_size_of_a_hybrid_is_admitted(real, namespace, webhook):
    status, answer = tried(real, namespace, cluster(engine={"blockSize": 66 * 16}))
    assert status == 201, answer


async def test_only_what_an_update_adds_is_refused(real, namespace, configuration, webhook):
    policy(real, configuration[0], "validate.pdcluster.dev", operations=["DELETE"])
    until(lambda: tried(real, namespace, cluster(**BAD))[0] == 201, 60, lambda: "still asked")
    create(real, namespace, cluster(**BAD))
    policy(real, configuration[0], "validate.pdcluster.dev", operations=["UPDATE", "DELETE"])
    broken = {"engine": {"extraArgs": ["--port", "1"]}}
    path = f"{GROUP}/namespaces/{namespace}/pdclusters/tiny"
    merge = "application/merge-patch+json"
    # A dry run: what was admitted before the API server knew would not be refused any more.
    asked = f"{path}?dryRun=All"
    until(
        lambda: real.call("PATCH", asked, {"spec": broken}, merge)[0] == 422,
        60,
        lambda: "never asked",
    )
    assert edit(real, namespace, broken)[0] == 422
    assert edit(real, namespace, {"decode": {"replicas": 2}})[0] == 200
    labels = {"metadata": {"labels": {"team": "a"}}}
    assert real.call("PATCH", path, labels, merge)[0] == 200
    delete(real, namespace)


def policy(real, name, hook, **rule):
    path = f"{CONFIGURATIONS}/{name}"
    live = real.call("GET", path)[1]
    live["webhooks"][0]["rules"][0] |= rule
    assert live["webhooks"][0]["name"] == hook
    assert real.call("PUT", path, live)[0] == 200


async def test_ready_means_that_a_review_is_answered(real, namespace, keep, configuration):
    process = Operator(
        real, "webhook", f"--certificate-folder={keep.folder}", f"--port={configuration[1]}"
    )
    process.start(ready=False)
    try:
        until(lambda: process.page("/healthz")[0] == 200, 60, process.said)
        assert process.page("/readyz")[0] == 503, "no certificate, no answer"
        await keep(time.time())
        until(process.is_ready, 60, process.said)
        # The API server reads the new certificate's authority a moment later.
        until(lambda: tried(real, namespace, cluster())[0] == 422, 60, process.said)
        answer = tried(real, namespace, cluster())[1]
        assert "HostPathNotAdmitted" in answer["message"], "not allowed on this command line"
    finally:
        assert process.stop() == 0


async def test_webhook_and_operator_may_admit_different_folders(
    real, namespace, keep, configuration
):
    """What the webhook lets through, the operator still judges by its own list."""
    await keep(time.time())
    words = (f"--certificate-folder={keep.folder}", f"--port={configuration[1]}")
    hook = Operator(real, "webhook", *words, "--allow-host-path=/models/", "--allow-host-path=/k")
    authority = f"--authority-secret={namespace}/authority"
    other = Operator(real, "run", authority, f"--namespace={namespace}", "--allow-host-path=/k")
    hook.start()
    try:
        until(lambda: tried(real, namespace, at("/etc"))[0] == 422, 60, hook.said)
        answers = {path: tried(real, namespace, at(path)) for path in FOLDERS}
        assert {path: status for path, (status, _) in answers.items()} == FOLDERS
        said = answers["/models-evil"][1]["message"]
        assert "spec.model.source.hostPath.path" in said
        assert "HostPathNotAdmitted" in said
        assert "Use a folder in /models/ or /k." in said
        create(real, namespace, cluster())
        other.start()
        accepted = until(lambda: condition(real, namespace, "Accepted"), 60, other.said)
        assert (accepted["status"], accepted["reason"]) == ("False", "HostPathNotAdmitted")
        assert "Use a folder in /k." in accepted["message"]
        assert owned(real, namespace, "StatefulSet") == []
    finally:
        assert hook.stop() == 0
        other.stop()


FOLDERS = {
    "/models": 201,
    "/models/tiny": 201,
    "/models-evil": 422,
    "/k/": 201,
    "/models/../etc": 422,
}


def at(path):
    """A cluster whose model lies in a folder of the node."""
    return cluster(model={"source": {"hostPath": {"path": path}}})


async def test_the_certificate_is_renewed_while_reviews_go_on(real, namespace, keep, webhook):
    first = await keep(time.time())
    assert await keep(time.time()) == first, "nothing to do is nothing done"
    second = await keep(time.time() + LIFETIME.total_seconds() - 86_400 * 30)
    assert second["tls.crt"] != first["tls.crt"]
    authorities = read_certificates(second["ca.crt"])
    assert len(authorities) == 2
    # The webhook still shows the first certificate, and takes up the second within 10 s.
    serial = read_certificates(second["tls.crt"])[0].serial_number
    open_one = _connection(webhook_port(real, namespace))
    assert _asked(open_one) == 400
    deadline = time.monotonic() + 240
    asked = 0
    while asked <= 3 or _served(webhook_port(real, namespace)) != serial:
        status, answer = tried(real, namespace, cluster(**BAD))
        assert (status, RULE in answer["message"]) == (422, True), answer["message"]
        assert _asked(open_one) == 400, "a connection that is open is not cut"
        asked += 1
        assert time.monotonic() < deadline, webhook.said()
        await asyncio.sleep(0.2)
    assert _asked(open_one) == 400, "a connection that is open is not cut"
    open_one.close()


def _connection(port: int) -> http.client.HTTPSConnection:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return http.client.HTTPSConnection("127.0.0.1", port, timeout=60, context=context)


def _asked(connection: http.client.HTTPSConnection) -> int:
    """The answer to what is no review."""
    connection.request("POST", "/validate", body=b"no review")
    answer = connection.getresponse()
    answer.read()
    return answer.status


def webhook_port(real, namespace) -> int:
    live = real.call("GET", f"{CONFIGURATIONS}/hook-{namespace}")[1]
    return int(live["webhooks"][0]["clientConfig"]["url"].split(":")[2].split("/")[0])


def _served(port: int) -> int:
    try:
        pem = ssl.get_server_certificate(("127.0.0.1", port), timeout=60)
    except OSError:
        return 0
    return read_certificates(pem.encode())[0].serial_number


async def test_what_somebody_did_to_the_bundle_or_the_secret_is_put_right(
    real, namespace, keep, configuration
):
    first = await keep(time.time())
    path = f"{CONFIGURATIONS}/{configuration[0]}"
    live = real.call("GET", path)[1]
    live["webhooks"][0]["clientConfig"]["caBundle"] = None
    live["webhooks"][0]["timeoutSeconds"] = 7
    assert real.call("PUT", path, live)[0] == 200
    assert await keep(time.time()) == first
    hook = real.call("GET", path)[1]["webhooks"][0]
    assert hook["clientConfig"]["caBundle"]
    assert hook["timeoutSeconds"] == 7, "the rest is the chart's"
    broken = {"data": {"tls.key": "bm9uc2Vuc2U="}}
    secret = f"/api/v1/namespaces/{namespace}/secrets/tls"
    assert real.call("PATCH", secret, broken, "application/merge-patch+json")[0] == 200
    assert (await keep(time.time()))["tls.crt"] != first["tls.crt"]


@pytest.fixture
def keeper(real, namespace, configuration):
    """The operator's process, which keeps the webhook's certificate; not started yet."""
    operator = Operator(
        real,
        "run",
        f"--authority-secret={namespace}/authority",
        f"--namespace={namespace}",
        f"--webhook-configuration={configuration[0]}",
        f"--webhook-service={namespace}/hook",
        f"--webhook-secret={namespace}/tls",
        "--allow-host-path-models",
    )
    yield operator
    operator.stop()


async def test_the_operator_keeps_the_certificate_by_itself(real, namespace, configuration, keeper):
    operator = keeper.start()
    folder = real.folder / f"kept-{namespace}"
    folder.mkdir()
    until(lambda: publish(real, namespace, folder).get("ca.crt"), 60, operator.said)
    kept = f"{CONFIGURATIONS}/{configuration[0]}"
    until(
        lambda: real.call("GET", kept)[1]["webhooks"][0]["clientConfig"]["caBundle"],
        60,
        operator.said,
    )
    until(
        lambda: operator.metric("pdcluster_webhook_certificate_expiry_seconds") > time.time(),
        60,
        operator.said,
    )


async def test_the_same_rule_stands_in_the_status_when_no_webhook_is_there(
    real, namespace, operator
):
    assert tried(real, namespace, cluster(**BAD))[0] == 201, "no webhook in this namespace"
    operator.start()
    create(real, namespace, cluster(**BAD))
    accepted = until(lambda: condition(real, namespace, "Accepted"), 60, operator.said)
    assert (accepted["status"], accepted["reason"]) == ("False", RULE)
    assert "blockSize" in accepted["message"]
    await asyncio.sleep(2)
    assert not owned(real, namespace)
    assert get(real, namespace)["status"]["observedGeneration"] == 1


def scaled(real, namespace, plural: str, replicas: int) -> tuple[int, str]:
    """Do as `kubectl scale` does; return the status, and what the server says of a refusal."""
    path = f"{GROUP}/namespaces/{namespace}/{plural}/tiny/scale"
    change = {"spec": {"replicas": replicas}}
    status, answer = real.call("PATCH", path, change, "application/merge-patch+json")
    return status, answer.get("message", "")


def test_a_scale_that_the_rules_do_not_allow_is_refused(real, namespace):
    """The subresource passes no webhook, but the rules of the CRD."""
    create(real, namespace, cluster(prefill={"replicas": 5}))
    status, said = scaled(real, namespace, "pdclusters", 100_000)
    assert status == 422
    assert "spec.decode.replicas" in said
    assert "less than or equal to 1000" in said
    status, said = scaled(real, namespace, "pdclusters", 820)
    assert status == 422
    assert f"{MOST_LINKS} links (rule TooManyLinks)" in said
    assert scaled(real, namespace, "pdclusters", 819)[0] == 200
    assert edit(real, namespace, {"prefill": {"replicas": 6}})[0] == 422
    # With both numbers in one change, each may be what the other one allows.
    assert edit(real, namespace, {"prefill": {"replicas": 6}, "decode": {"replicas": 6}})[0] == 200
    delete(real, namespace)
    scaler = {
        "apiVersion": "pdcluster.dev/v1alpha1",
        "kind": "PrefillScaler",
        "metadata": {"name": "tiny"},
        "spec": {"replicas": 1},
    }
    path = f"{GROUP}/namespaces/{namespace}/prefillscalers"
    assert real.call("POST", path, scaler)[0] == 201
    status, said = scaled(real, namespace, "prefillscalers", 100_000)
    assert (status, "less than or equal to 1000" in said) == (422, True)
    assert real.call("DELETE", f"{path}/tiny")[0] == 200


def test_a_cluster_of_before_with_too_many_links_can_be_changed_and_scaled_down(real, namespace):
    """An older CRD has no rule about links, and an operator writes its status."""
    create(real, namespace, cluster(prefill={"replicas": 100}, decode={"replicas": 100}))
    assert edit(real, namespace, {"verification": {"maxLocalShare": 10}})[0] == 200
    path = f"{GROUP}/namespaces/{namespace}/pdclusters/tiny/status"
    status = {"status": {"observedGeneration": 2}}
    assert real.call("PATCH", path, status, "application/merge-patch+json")[0] == 200
    assert scaled(real, namespace, "pdclusters", 101)[0] == 422
    assert scaled(real, namespace, "pdclusters", 90)[0] == 200
    assert scaled(real, namespace, "pdclusters", 91)[0] == 422
    delete(real, namespace)


def conditions_of_the_chart(case: str) -> list[dict[str, str]]:
    """Return the match conditions that the chart renders; see ``charts/tests``."""
    golden = Path(__file__).parents[3] / "charts" / "tests" / "golden" / f"{case}.yaml"
    (found,) = (
        one
        for one in yaml.safe_load_all(golden.read_text())
        if one["kind"] == "ValidatingWebhookConfiguration"
    )
    return found["webhooks"][0]["matchConditions"]


@pytest.fixture
def two_releases(real, namespace):
    """The webhooks of a release without a class and of one with the class blue.

    Nobody listens at their address, so the API server's refusal names the one that it asked.
    """
    names = []
    for release, case in (("plain", "default"), ("blue", "everything")):
        hook = {
            "name": f"{release}.pdcluster.dev",
            "admissionReviewVersions": ["v1"],
            "sideEffects": "None",
            "failurePolicy": "Fail",
            "clientConfig": {"url": f"https://127.0.0.1:{free_ports(1)[0]}/validate"},
            "rules": [
                {
                    "apiGroups": ["pdcluster.dev"],
                    "apiVersions": ["v1alpha1"],
                    "resources": ["pdclusters"],
                    "operations": ["CREATE", "UPDATE"],
                }
            ],
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}},
            "matchConditions": conditions_of_the_chart(case),
        }
        names.append(f"{release}-{namespace}")
        body = {
            "apiVersion": "admissionregistration.k8s.io/v1",
            "kind": "ValidatingWebhookConfiguration",
            "metadata": {"name": names[-1]},
            "webhooks": [hook],
        }
        assert real.call("POST", CONFIGURATIONS, body)[0] == 201
    yield names
    for name in names:
        real.call("DELETE", f"{CONFIGURATIONS}/{name}")


def test_each_release_judges_the_pdclusters_of_its_own_class(real, namespace, two_releases):
    def asked(status, answer) -> list[str]:
        found = [one for one in ("plain", "blue") if f'"{one}.pdcluster.dev"' in str(answer)]
        assert bool(found) == (status == 500), answer
        return found

    def judges(spec) -> list[str]:
        return asked(*tried(real, namespace, cluster(**spec)))

    blue, plain, green = {"operatorClass": "blue"}, {}, {"operatorClass": "green"}
    until(lambda: (judges(plain), judges(blue)) == (["plain"], ["blue"]), 60, lambda: "not asked")
    assert judges(green) == [], "there is no such release"
    create(real, namespace, cluster(**green))
    path = f"{GROUP}/namespaces/{namespace}/pdclusters/tiny?dryRun=All"
    merge = "application/merge-patch+json"

    def judges_change(**spec) -> list[str]:
        return asked(*real.call("PATCH", path, {"spec": spec}, merge))

    # The new class judges a change of the class: its operator is going to work on the spec.
    assert judges_change(operatorClass="blue") == ["blue"]
    assert judges_change(operatorClass=None) == ["plain"]
    assert judges_change(decode={"replicas": 2}) == []
    delete(real, namespace)


async def test_every_query_about_the_operator_has_samples(
    real, namespace, webhook, keeper, tmp_path
):
    """Those about engines have them in e2e/tests/test_local_pair.py, which has no API server."""
    no_samples = {
        "pdcluster_local_prefill_share": "no engine runs here",
        "pdcluster_unlisted_namespace": "the operator may list its namespace",
    }
    [down] = [rule["expr"] for rule in alerts() if rule["alert"] == "PDClusterOperatorDown"]
    asked = {
        where: query.replace("$__rate_interval", "1m")
        for where, query in expressions().items()
        if where.startswith("operator/") and not any(part in query for part in no_samples)
    }
    assert len(asked) > 10
    operator = keeper.start()
    create(real, namespace, cluster())
    shown = {f"127.0.0.1:{process.metrics}": {} for process in (operator, webhook)}
    with Prometheus(tmp_path, shown, [ALERTS]) as scraper:

        def changes() -> None:
            tried(real, namespace, cluster(**BAD))
            edit(real, namespace, {"decode": {"replicas": time.monotonic_ns() % 3 + 1}})

        scraper.wait_for_samples(asked, changes)
        assert scraper.samples(down) == []
        assert scraper.alerts_of("PDClusterWebhookCertificateExpires") == []
        operator.stop()
        scraper.wait_for("alert on no operator", lambda: scraper.samples(down))
        assert {rule["health"] for rule in scraper.rules()} == {"ok"}
