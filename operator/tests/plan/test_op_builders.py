"""What the children of a cluster must say, whatever the golden files hold."""

from __future__ import annotations

import copy
import json

import pytest
from simulated_cluster import SimulatedCluster, manifest

from pdcluster_operator.api.object_names import engine_of

GPU = {"device": "CUDA"}


def children(kind, **spec):
    """The children of one kind that a spec makes, by name."""
    plan = SimulatedCluster(manifest(**spec)).plan()
    manifests = [step.manifest for step in plan.steps]
    assert manifests, plan.status["conditions"]
    return {m["metadata"]["name"]: m for m in manifests if m["kind"] == kind}


def one(kind, part, **spec):
    (found,) = [child for name, child in children(kind, **spec).items() if part in name]
    return found


def limits(role, **spec):
    template = one("StatefulSet", f"-{role}-", **spec)["spec"]["template"]
    return template["spec"]["containers"][0]["resources"]["limits"]


# Labels: selectors, network policies, links and revisions go by them.

STOLEN = {
    "pdcluster.dev/cluster": "other",
    "pdcluster.dev/role": "none",
    "pdcluster.dev/engine": "other-decode-aaaaa-0",
    "pdcluster.dev/pairing-key": "other",
    "pdcluster.dev/revision": "other",
    "app.kubernetes.io/component": "other",
    "app.kubernetes.io/managed-by": "other",
}


@pytest.mark.parametrize("value", ["changed", "removed"])
@pytest.mark.parametrize(
    ("part", "kind"),
    [("prefill", "StatefulSet"), ("decode", "StatefulSet"), ("router", "Deployment")],
)
def test_a_pod_template_adds_labels_and_changes_none_of_ours(part, kind, value):
    stolen = STOLEN if value == "changed" else dict.fromkeys(STOLEN)
    template = {"metadata": {"labels": {**stolen, "team": "x"}}}
    child = one(kind, f"-{part}-", **{part: {"podTemplate": template}})
    labels = child["spec"]["template"]["metadata"]["labels"]
    assert labels["team"] == "x"
    assert {key: labels[key] for key in child["metadata"]["labels"]} == child["metadata"]["labels"]
    assert child["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert labels["pdcluster.dev/cluster"] == "llama"
    if kind == "StatefulSet":
        assert engine_of({"metadata": {"namespace": "default", "labels": labels}}) == engine_of(
            child
        )


# Network policies: the side channel and the KV ports have no other fence.


def admits(policy, pod_labels, port, namespace="default"):
    """Whether a policy lets a pod in, by the rules of the NetworkPolicy API."""
    for rule in policy["spec"]["ingress"]:
        ports = rule.get("ports")
        if ports and port not in [entry["port"] for entry in ports]:
            continue
        peers = rule.get("from")
        if not peers:  # an absent or empty list lets everybody in
            return True
        if any(_is_peer(peer, pod_labels, namespace) for peer in peers):
            return True
    return False


def _is_peer(peer, pod_labels, namespace):
    assert set(peer) <= {"podSelector", "namespaceSelector"}
    names = peer.get("namespaceSelector")
    if names is None:
        if namespace != "default":  # where the policy is
            return False
    elif not _selected(names, {"kubernetes.io/metadata.name": namespace}):
        return False
    return _selected(peer.get("podSelector", {}), pod_labels)


def _selected(selector, labels):
    for key, value in selector.get("matchLabels", {}).items():
        if labels.get(key) != value:
            return False
    for rule in selector.get("matchExpressions", ()):
        assert rule["operator"] == "In"
        if labels.get(rule["key"]) not in rule["values"]:
            return False
    return True


OPERATOR = {
    "app.kubernetes.io/part-of": "pdcluster",
    "app.kubernetes.io/component": "operator",
}
API, LAUNCHER, SIDE_CHANNEL, UCX = 8000, 5590, 5600, 41234


def test_engines_let_in_only_whom_they_need():
    policy = one("NetworkPolicy", "engines")
    assert policy["spec"]["policyTypes"] == ["Ingress"]
    templates = {
        part: one(kind, f"-{part}-")["spec"]["template"]["metadata"]["labels"]
        for part, kind in (
            ("prefill", "StatefulSet"), ("decode", "StatefulSet"), ("router", "Deployment"),
        )
    }  # fmt: skip
    for part in ("prefill", "decode"):
        assert _selected(policy["spec"]["podSelector"], templates[part])
        for port in (API, LAUNCHER, SIDE_CHANNEL, UCX):
            assert admits(policy, templates[part], port)
            assert not admits(policy, templates[part], port, namespace="elsewhere")
    assert not _selected(policy["spec"]["podSelector"], templates["router"])
    allowed = {
        "operator": [p for p in (API, LAUNCHER, SIDE_CHANNEL, UCX) if admits(policy, OPERATOR, p)],
        "router": [
            p for p in (API, LAUNCHER, SIDE_CHANNEL, UCX) if admits(policy, templates["router"], p)
        ],
    }
    assert allowed == {"operator": [LAUNCHER], "router": [API]}
    neighbour = {**templates["decode"], "pdcluster.dev/cluster": "other"}
    router_of_another = {**templates["router"], "pdcluster.dev/cluster": "other"}
    for stranger in ({}, {"app": "x"}, neighbour, router_of_another):
        for port in (API, LAUNCHER, SIDE_CHANNEL, UCX):
            assert not admits(policy, stranger, port)


def test_without_our_router_anybody_reaches_the_api_and_nothing_else():
    policy = one("NetworkPolicy", "engines", router={"replicas": 0})
    for namespace in ("default", "elsewhere"):
        assert admits(policy, {"app": "x"}, API, namespace)
        for port in (LAUNCHER, SIDE_CHANNEL, UCX):
            assert not admits(policy, {"app": "x"}, port, namespace)


def test_routers_let_in_clients_from_anywhere_on_their_own_ports_alone():
    policy = one("NetworkPolicy", "router")
    assert admits(policy, {}, 8000, "elsewhere")
    assert not admits(policy, {}, 29000, "elsewhere")  # metrics: spec.monitoring.scrapeFrom
    assert not admits(policy, {}, 22, "elsewhere")


# What becomes of a request, of a pod, of an engine.


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize(
    ("policy", "word"), [("Fail", "fail"), ("Recompute", "recompute"), (None, "fail")]
)
def test_the_engines_are_told_what_a_request_without_its_kv_costs(role, policy, word):
    transfer = {"device": "CPU"} | ({"loadFailurePolicy": policy} if policy else {})
    template = one("StatefulSet", f"-{role}-", transfer=transfer)["spec"]["template"]
    words = template["spec"]["containers"][0]["args"]
    config = json.loads(words[words.index("--kv-transfer-config") + 1])
    assert config["kv_load_failure_policy"] == word


@pytest.mark.parametrize("tokens", [0, 256, None])
def test_decode_alone_is_told_how_many_prompt_tokens_it_computes_in_a_step(tokens):
    transfer = {"device": "CPU"} | ({} if tokens is None else {"localTokensPerStep": tokens})
    told = {}
    for role in ("prefill", "decode"):
        template = one("StatefulSet", f"-{role}-", transfer=transfer)["spec"]["template"]
        words = template["spec"]["containers"][0]["args"]
        config = json.loads(words[words.index("--kv-transfer-config") + 1])
        told[role] = config["kv_connector_extra_config"].get("local_tokens_per_step")
    assert told == {"prefill": None, "decode": tokens}


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_evictions_take_one_engine_at_a_time_and_a_broken_one_always(role):
    spec = one("PodDisruptionBudget", role)["spec"]
    assert spec["minAvailable"] == 0  # the example has one engine of each role
    none = one("PodDisruptionBudget", role, **{role: {"replicas": 0}})["spec"]
    assert none["minAvailable"] == 0
    large = {"replicas": 3, "parallelism": {"tensor": 2, "nodes": 2}}
    assert one("PodDisruptionBudget", role, **{role: large})["spec"]["minAvailable"] == 5
    # A node must be drainable although the engine on it never becomes ready.
    assert spec["unhealthyPodEvictionPolicy"] == "AlwaysAllow"
    for other in ("prefill", "decode"):
        labels = one("StatefulSet", f"-{other}-")["spec"]["template"]["metadata"]["labels"]
        assert _selected(spec["selector"], labels) is (other == role)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_no_controller_restarts_the_pods_of_an_engine_by_itself(role):
    """A rolling update would restart one pod of an engine after the other, each time all of it."""
    engine = one("StatefulSet", f"-{role}-", **{role: {"parallelism": {"tensor": 2, "nodes": 2}}})
    assert engine["spec"]["updateStrategy"] == {"type": "OnDelete"}
    # Ranks wait for each other at the start: the pods of an engine start together.
    assert engine["spec"]["podManagementPolicy"] == "Parallel"


# RDMA and GPUs.

RDMA = {"resource": "rdma/hca", "perGPU": 2}


def test_rdma_devices_are_asked_for_by_the_gpu():
    wide = {"parallelism": {"tensor": 4}}
    spec = {"transfer": {**GPU, "rdma": RDMA}, "prefill": wide}
    assert limits("prefill", **spec) == {"nvidia.com/gpu": "4", "rdma/hca": "8"}
    assert limits("decode", **spec) == {"nvidia.com/gpu": "1", "rdma/hca": "2"}


@pytest.mark.parametrize("amount", ["1", 1])
def test_a_limit_that_the_user_writes_is_left_as_it_is(amount):
    own = {"resources": {"limits": {"rdma/hca": amount, "memory": "8Gi"}}}
    spec = {"transfer": {**GPU, "rdma": RDMA}, "decode": own}
    assert limits("decode", **spec) == {
        "rdma/hca": "1", "memory": "8Gi", "nvidia.com/gpu": "1",
    }  # fmt: skip
    assert limits("prefill", **spec)["rdma/hca"] == "2"


# The pairing key: engines of another key never exchange KV.


def pairing_keys(**spec):
    found = {
        child["metadata"]["labels"]["pdcluster.dev/pairing-key"]
        for kind in ("StatefulSet", "Deployment")
        for child in children(kind, **spec).values()
    }
    assert len(found) == 1
    return found.pop()


PAIRING = {
    "the shared KV dtype": {"engine": {"kvCacheDtype": "bfloat16"}},
    "another KV dtype": {"engine": {"kvCacheDtype": "fp8_e4m3"}},
    "a KV dtype by flag": {"engine": {"extraArgs": ["--kv-cache-dtype", "float16"]}},
    "the block size": {"engine": {"blockSize": 64}},
    "the attention backend": {"engine": {"attentionBackend": "FLASH_ATTN"}},
    "a model flag": {"engine": {"extraArgs": ["--hf-overrides", '{"a": 1}']}},
    "the draft model": {
        "engine": {"extraArgs": ["--speculative-config", '{"method": "eagle", "model": "o/draft"}']}
    },
    "the model": {"model": {"source": {"hostPath": {"path": "/models/other"}}}},
    "the memory": {"transfer": {"device": "CUDA"}},
    "the layout of KV": {"transfer": {"device": "CPU", "kvLayout": "BHLNC"}},
    "NIXL's backend": {"transfer": {"device": "CPU", "backends": ["LIBFABRIC"]}},
}


def test_whatever_decides_about_the_exchange_of_kv_changes_the_pairing_key():
    keys = {"nothing": pairing_keys()} | {what: pairing_keys(**s) for what, s in PAIRING.items()}
    assert len(set(keys.values())) == len(keys), keys


def test_what_does_not_decide_about_it_leaves_the_pairing_key():
    plain = pairing_keys()
    for spec in (
        {"engine": {"maxModelLen": 512}},
        {"decode": {"engine": {"env": [{"name": "A", "value": "1"}]}}},
        {"prefill": {"replicas": 3}},
        {"decode": {"parallelism": {"tensor": 2}}},
        {"transfer": {"device": "CPU", "loadFailurePolicy": "Recompute"}},
        {"transfer": {"device": "CPU", "kvLayout": "Auto"}},
        {"transfer": {"device": "CPU", "localTokensPerStep": 256}},
        {"transfer": {"device": "CPU", "backends": ["UCX"]}},
    ):
        assert pairing_keys(**copy.deepcopy(spec)) == plain, spec
