"""Pairs that could only exchange wrong KV are refused: by admission, status and handshake."""

from __future__ import annotations

import json
import re

import pytest
from cluster_access import Proxy
from cluster_install import Installation
from cluster_run import ClusterRun, manifest, running
from local_run import appended, condition, idle

from cluster.report import ClusterError
from cluster.session import Cluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

RULE = "PrefixCachingHeterogeneousBlocks"
# Only the handshake knows that the CPU backend packs all keys, then all values of a block.
HANDSHAKE_RULE = "BlockInteriorOpaque"
REMEDIES = ("equal block sizes", "Disabled", "configMapRef")


@pytest.fixture(scope="module")
def door(cluster: Cluster, proxy: Proxy, operator: Installation) -> ClusterRun:
    """A namespace where nothing runs yet."""
    with running(cluster, proxy, None, "door") as run:
        yield run


def unequal() -> dict:
    over = {"podTemplate": idle()}
    return manifest("door", prefill=over, decode={"engine": {"blockSize": 64}, **over})


def test_helm_test_tries_the_real_webhook(operator: Installation) -> None:
    said = operator.test()
    print(said)
    assert re.search(r"Phase:\s+Succeeded", said)


def test_the_webhook_names_field_value_rule_and_remedy(door: ClusterRun) -> None:
    said = door.refused(unequal())
    print(said)
    assert RULE in said
    assert "spec.decode.engine.blockSize" in said
    assert "32" in said
    assert "64" in said
    assert any(remedy.lower() in said.lower() for remedy in REMEDIES)
    assert door.get() is None


def test_the_schema_refuses_before_the_webhook(door: ClusterRun) -> None:
    document = manifest("door")
    document["spec"]["prefill"]["replicas"] = -1
    document["spec"]["transfer"]["device"] = "TPU"
    said = door.refused(document)
    print(said)
    assert "spec.prefill.replicas" in said
    assert "spec.transfer.device" in said


def test_what_slips_past_a_webhook_that_is_down_is_not_accepted(
    door: ClusterRun, operator: Installation
) -> None:
    hook = "validatingwebhookconfiguration/pdcluster"
    policy = '[{"op": "replace", "path": "/webhooks/0/failurePolicy", "value": "%s"}]'
    operator.kubectl("patch", hook, "--type=json", f"--patch={policy % 'Ignore'}")
    operator.scale("webhook", 0)
    try:
        # The API server reads the other policy, and the webhook's end, a moment later.
        door.wait("admission without a review", lambda: applied(door), 120)
        status = door.wait_status(
            "verdict", lambda seen: condition(seen, "Accepted")["status"] == "False", 120
        )
        accepted = condition(status, "Accepted")
        print(accepted)
        assert accepted["reason"] == RULE
        assert "32" in accepted["message"]
        assert "64" in accepted["message"]
        assert condition(status, "Ready")["status"] == "False"
        assert door.pods() == []
    finally:
        operator.scale("webhook", 1)
        operator.kubectl("patch", hook, "--type=json", f"--patch={policy % 'Fail'}")
    # The webhook's pod is ready. The API server reaches it a moment later.
    door.wait("review", lambda: reviewed(door), 120)
    # It may be deleted although it would not be admitted.
    door.kubectl("delete", "pdc", "door", "--timeout=120s")


def applied(door: ClusterRun) -> bool:
    try:
        door.apply(unequal())
    except ClusterError as error:
        print(error)
        return False
    return True


def reviewed(door: ClusterRun) -> bool:
    new = {**unequal(), "metadata": {"name": "another"}}
    try:
        door.kubectl("apply", "--dry-run=server", "--filename=-", stdin=json.dumps(new))
    except ClusterError as error:
        return RULE in str(error)
    return False


def test_the_handshake_refuses_what_admission_could_not_see(
    cluster: Cluster, proxy: Proxy, operator: Installation
) -> None:
    template = appended("--block-size", "64")
    document = manifest("unequal", decode={"podTemplate": template})
    with running(cluster, proxy, document, "unequal") as run:
        seen: set[str] = set()

        def refused() -> bool:
            seen.add(run.condition("Ready")["status"])
            return bool(run.failed_links(HANDSHAKE_RULE))

        run.wait(f"link refused as {HANDSHAKE_RULE}", refused)
        for role in ("prefill", "decode"):
            run.wait_pod(role)
        status = run.status()
        [link] = status["failedLinks"]
        print(link)
        established = condition(status, "KVLinksEstablished")
        print(established)
        print(run.kubectl("get", "pdc", "--output=wide"))
        assert established["status"] == "False"
        assert established["reason"] == HANDSHAKE_RULE
        for message in (link["message"], established["message"]):
            assert "32" in message
            assert "64" in message
        assert (link["prefill"], link["decode"]) == tuple(
            run.pod(role).rpartition("-")[0] for role in ("prefill", "decode")
        )
        assert condition(status, "Ready")["status"] == "False"
        assert "True" not in seen
        prompt = "A prompt of several blocks, as both compute it. " * 2
        asked = {"do_remote_decode": True}
        fetch = run.complete(prompt, role="prefill", tokens=1, kv_transfer_params=asked).document
        params = {"kv_transfer_params": fetch["kv_transfer_params"]}
        reply = run.complete(prompt, role="decode", **params)
        assert reply.status == 503
        assert HANDSHAKE_RULE in reply.document["error"]["message"]

        def left_out() -> bool:
            router = run.pods("router")[0]["status"]["conditions"]
            return ("Ready", "True") not in [(one["type"], one["status"]) for one in router]

        run.wait("router without decode engines", left_out, 120)
        assert run.complete("x", role="decode").status == 200, "the engine lives"
