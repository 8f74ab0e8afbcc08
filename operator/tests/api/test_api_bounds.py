"""Every bound and every default of the spec, to both readers of it: the parser and the CRD.

docs/api.md and the CRD are generated, so they follow a bound that is changed by mistake.
"""

from __future__ import annotations

import copy
import re

import pytest

from pdcluster_operator.api.schema.crd import crd
from pdcluster_operator.api.spec.fields import LABEL_KEY, LABEL_VALUE, Text, describe
from pdcluster_operator.api.spec.parse import parse_cluster
from pdcluster_operator.api.spec.types import Spec

SPEC = crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
MINIMAL = {
    "apiVersion": "pdcluster.dev/v1alpha1",
    "kind": "PDCluster",
    "metadata": {"name": "llama", "namespace": "ns", "uid": "u", "generation": 4},
    "spec": {"model": {"source": {"hostPath": {"path": "/models/x"}}}},
}
NONE = None
ENGINES = ("engine", "prefill.engine", "decode.engine")
ROLES = ("prefill", "decode")

# Path -> least, most, default.
NUMBERS = {
    "requestTimeoutSeconds": (10, 43_200, 1800),
    "router.replicas": (0, 64, 1),
    "rollout.maxSurge": (1, 64, 1),
    "rollout.progressDeadlineSeconds": (10, 86_400, 3600),
    "rollout.scheduleTimeoutSeconds": (30, 86_400, 600),
    "rollout.revisionHistoryLimit": (0, 100, 10),
    "transfer.leaseSeconds": (5, 3600, 60),
    "transfer.minBandwidthMBps": (1, 1_000_000, NONE),
    "transfer.nixlThreads": (0, 64, NONE),
    "transfer.localTokensPerStep": (0, 1_048_576, NONE),
    "transfer.rdma.perGPU": (1, 16, 1),
    "autoscaling.ttftMs": (1, 3_600_000, NONE),
    "autoscaling.itlMs": (1, 3_600_000, NONE),
    **{f"autoscaling.{role}.min": (1, 1000, 1) for role in ROLES},
    **{f"autoscaling.{role}.max": (1, 1000, NONE) for role in ROLES},
    "verification.canary.intervalSeconds": (5, 86_400, 300),
    "verification.maxLocalShare": (0, 100, 5),
    **{f"{role}.replicas": (0, 1000, 1) for role in ROLES},
    **{f"{role}.parallelism.tensor": (1, 1024, 1) for role in ROLES},
    **{f"{role}.parallelism.pipeline": (1, 256, 1) for role in ROLES},
    **{f"{role}.parallelism.data": (1, 1024, 1) for role in ROLES},
    **{f"{role}.parallelism.nodes": (1, 256, 1) for role in ROLES},
    **{f"{engine}.blockSize": (1, 65_536, NONE) for engine in ENGINES},
    **{f"{engine}.maxModelLen": (1, 100_000_000, NONE) for engine in ENGINES},
    **{f"{engine}.startupTimeoutSeconds": (60, 604_800, NONE) for engine in ENGINES},
    "engine.startupTimeoutSeconds": (60, 604_800, 7200),
}
POLICIES = (
    "RoundRobin", "Random", "CacheAware", "PowerOfTwo", "ConsistentHash", "KVAware",
    "StickyLeastLoaded",
)  # fmt: skip
# Path -> the values, the default.
WORDS = {
    "autoscaling.mode": (("Advise", "Apply"), "Advise"),
    "model.cache.downloadedBy": (("Engines", "Job"), None),
    "transfer.device": (("CUDA", "CPU"), "CUDA"),
    "transfer.kvLayout": (("Auto", "LBHNC", "BLHNC", "BHLNC"), "Auto"),
    "transfer.loadFailurePolicy": (("Fail", "Recompute"), "Fail"),
    "transfer.tls": (("Enabled", "Mounted", "Disabled"), "Enabled"),
    "transfer.internalNames": (("Hidden", "Shown"), "Hidden"),
    "scheduling.gang": (("Enabled", "Disabled"), "Disabled"),
    "rollout.type": (("Surge", "Replace", "Recreate"), "Surge"),
    "router.type": (("VLLMRouter", "LLMD", "None"), "VLLMRouter"),
    "router.policy": (POLICIES, "RoundRobin"),
    "router.prefillPolicy": (POLICIES, NONE),
    "router.decodePolicy": (POLICIES, NONE),
    "router.service.type": (("ClusterIP", "NodePort", "LoadBalancer"), "ClusterIP"),
    "router.service.externalTrafficPolicy": (("Cluster", "Local"), NONE),
    "router.logLevel": (("Debug", "Info", "Warning", "Error", "Critical"), NONE),
    **{f"{engine}.prefixCaching": (("Enabled", "Disabled"), NONE) for engine in ENGINES},
    **{f"{engine}.connector": (("Bundled", "Image"), NONE) for engine in ENGINES},
    "engine.prefixCaching": (("Enabled", "Disabled"), "Enabled"),
    "engine.connector": (("Bundled", "Image"), "Bundled"),
}  # fmt: skip
HUB = "model.source.huggingFace"
CLAIM = "model.source.persistentVolumeClaim"
OCI = "model.source.oci"
STORAGE = "model.source.objectStorage"
# Path -> shortest, longest, default. The text that is tried is made of the letter beside it.
TEXTS = {
    "operatorClass": (1, 32, NONE, "a"),
    "scheduling.queueName": (1, 63, NONE, "a"),
    "rollout.renew": (1, 64, NONE, "a"),
    "model.name": (1, 200, NONE, "a"),
    "model.configMapRef.name": (1, 253, NONE, "a"),
    "model.configMapRef.key": (1, 253, "config.json", "a"),
    "transfer.rdma.resource": (1, 253, NONE, "a/"),
    "router.extraArgs[]": (0, 16_384, NONE, "a"),
    "router.image": (1, 500, "docker.io/vllm/vllm-router:nightly", "a"),
    "router.sidecarImage": (
        1,
        500,
        "ghcr.io/llm-d/llm-d-router-disagg-sidecar:v0.10.0",
        "a",
    ),
    "router.apiKeySecretRef.name": (1, 253, NONE, "a"),
    "router.apiKeySecretRef.key": (1, 253, "token", "a"),
    f"{HUB}.repo": (1, 200, NONE, "a"),
    f"{HUB}.revision": (1, 200, NONE, "a"),
    f"{HUB}.tokenSecretRef.name": (1, 253, NONE, "a"),
    f"{HUB}.tokenSecretRef.key": (1, 253, "token", "a"),
    f"{CLAIM}.claimName": (1, 253, NONE, "a"),
    f"{CLAIM}.path": (1, 1024, NONE, "a"),
    f"{OCI}.image": (1, 500, NONE, "a"),
    f"{OCI}.path": (1, 1024, NONE, "a"),
    f"{OCI}.pullSecretRef.name": (1, 253, NONE, "a"),
    f"{STORAGE}.credentialsSecretRef.name": (1, 253, NONE, "a"),
    "model.source.hostPath.path": (1, 1024, NONE, "/"),
    **{f"{engine}.image": (1, 500, NONE, "a") for engine in ENGINES},
    **{f"{engine}.kvCacheDtype": (1, 40, NONE, "a") for engine in ENGINES},
    **{f"{engine}.attentionBackend": (1, 60, NONE, "A") for engine in ENGINES},
    **{f"{engine}.kvOffload.cpuMemory": (1, 20, NONE, "1") for engine in ENGINES},
    **{f"{engine}.extraArgs[]": (0, 16_384, NONE, "a") for engine in ENGINES},
    **{f"{engine}.env[].name": (1, 256, NONE, "a") for engine in ENGINES},
    **{f"{engine}.env[].value": (0, 8192, NONE, "a") for engine in ENGINES},
    "engine.image": (1, 500, "docker.io/vllm/vllm-openai:v0.32.0", "a"),
}
PEER_LISTS = ("router.allowFrom", "monitoring.scrapeFrom")
SELECTORS = [
    f"{peers}[].{kind}" for peers in PEER_LISTS for kind in ("podSelector", "namespaceSelector")
]
# Path -> fewest, most, an item. In a name, {} stands for a number, so that names differ.
LISTS = {
    "transfer.backends": (1, 4, "UCX"),
    "transfer.rdma.networks": (0, 32, "a"),
    "router.extraArgs": (0, 128, "a"),
    "router.allowFrom": (1, 64, {"podSelector": {}}),
    "router.service.loadBalancerSourceRanges": (0, 64, "10.0.0.0/8"),
    "monitoring.scrapeFrom": (0, 32, {"podSelector": {}}),
    **{f"{engine}.extraArgs": (0, 128, "a") for engine in ENGINES},
    **{f"{engine}.env": (0, 128, {"name": "A{}", "value": "x"}) for engine in ENGINES},
    **{f"{peers}[].ipBlock.except": (0, 32, "10.0.0.0/8") for peers in PEER_LISTS},
    **{
        f"{selector}.matchExpressions": (0, 32, {"key": "a", "operator": "Exists"})
        for selector in SELECTORS
    },
}
REQUIRED = {"huggingFace": {"repo": "a"}, "persistentVolumeClaim": {"claimName": "a"},
            "oci": {"image": "a"}, "objectStorage": {"uri": "s3://a"},
            "pullSecretRef": {"name": "a"}, "credentialsSecretRef": {"name": "a"},
            "rdma": {"resource": "a/b"}, "tokenSecretRef": {"name": "a"},
            "apiKeySecretRef": {"name": "a"}, "ipBlock": {"cidr": "10.0.0.0/8"},
            "env": {"name": "A"},
            "autoscaling": {"itlMs": 9, "prefill": {"max": 2}, "decode": {"max": 2}}}  # fmt: skip


def schema(path):
    found = SPEC
    for part in re.findall(r"\w+|\[\]", path):
        found = found["items"] if part == "[]" else found["properties"][part]
    return found


def with_value(path, value):
    """The smallest manifest that has this value at this path."""
    manifest = copy.deepcopy(MINIMAL)
    if path.startswith("model.source"):
        manifest["spec"]["model"]["source"] = {}
    target = manifest["spec"]
    *parents, last = path.split(".")
    for parent in parents:
        name = parent.removesuffix("[]")
        item = copy.deepcopy(REQUIRED.get(name, {}))
        if parent.endswith("[]"):
            target = target.setdefault(name, [item])[0]
        else:
            target = target.setdefault(name, item)
    target[last.removesuffix("[]")] = [value] if last.endswith("[]") else value
    return manifest


def refused(path, value):
    """The rules that the parser names for this path, with a value there."""
    plain = path.replace("[]", "[0]")
    errors = parse_cluster(with_value(path, value)).errors
    return {error.rule for error in errors if error.path.startswith(f"spec.{plain}")}


def default(path):
    """What the parser gives for a field that is not written, although its object is."""
    found = parse_cluster(with_value(path, None)).cluster.spec
    for part in path.split("."):
        snake = re.sub(r"(?<=[a-z])([A-Z]+)", lambda m: f"_{m[1].lower()}", part)
        found = getattr(found, snake.lower())
    return found


def fields(part, path=""):
    for name, below in part.get("properties", {}).items():
        here = f"{path}.{name}" if path else name
        yield here, below
        yield from fields(below, here)
        if "items" in below:
            yield f"{here}[]", below["items"]
            yield from fields(below["items"], f"{here}[]")


def test_no_number_and_no_word_is_missing_here():
    found = dict(fields(SPEC))
    numbers = {path for path, part in found.items() if part.get("type") == "integer"}
    words = {path for path, part in found.items() if "enum" in part}
    assert numbers == set(NUMBERS)
    elsewhere = {path for path in words if path.endswith(("backends[]", "operator"))}
    assert words - elsewhere == set(WORDS)
    lists = {path for path, part in found.items() if part.get("type") == "array"}
    assert {path for path in lists if not path.endswith("values")} == set(LISTS)


@pytest.mark.parametrize("path", list(NUMBERS))
def test_the_bounds_and_the_default_of_a_number(path):
    least, most, usual = NUMBERS[path]
    part = schema(path)
    assert (part["minimum"], part["maximum"], part.get("default")) == (least, most, usual)
    assert refused(path, least - 1) == refused(path, most + 1) == {"OutOfRange"}
    assert refused(path, least) == refused(path, most) == set()
    if path.endswith(".max"):
        assert refused(path, NONE) == {"Required"}
    else:
        assert default(path) == usual


@pytest.mark.parametrize("path", list(WORDS))
def test_the_words_and_the_default_of_a_choice(path):
    words, usual = WORDS[path]
    part = schema(path)
    assert (tuple(part["enum"]), part.get("default")) == (words, usual)
    assert [refused(path, word) for word in words] == [set()] * len(words)
    assert refused(path, words[0].swapcase()) == {"NotAllowed"}
    assert default(path) == usual


@pytest.mark.parametrize("path", list(TEXTS))
def test_the_lengths_and_the_default_of_a_text(path):
    shortest, longest, usual, letters = TEXTS[path]
    part = schema(path)
    assert (part.get("minLength", 0), part["maxLength"]) == (shortest, longest)
    assert part.get("default") == usual
    letter, rest = letters[0], letters[1:]

    def text(length):
        if not rest:
            return letter * length
        return (letter + rest).ljust(length, letter)[:length] if length > 1 else letter * length

    assert refused(path, text(longest)) == set()
    assert refused(path, text(longest + 1))
    assert bool(refused(path, "")) is (shortest > 0)
    if "[]" not in path and usual is not None:
        assert default(path) == usual


@pytest.mark.parametrize("path", list(LISTS))
def test_how_many_items_a_list_may_have(path):
    fewest, most, item = LISTS[path]

    def items(count):
        if "A{}" in str(item):
            return [{k: v.replace("{}", str(n)) for k, v in item.items()} for n in range(count)]
        return [copy.deepcopy(item) for _ in range(count)]

    part = schema(path)
    assert (part.get("minItems", 0), part["maxItems"]) == (fewest, most)
    assert refused(path, items(most)) == refused(path, items(fewest)) == set()
    assert refused(path, items(most + 1)) == {"OutOfRange"}
    if fewest:
        assert refused(path, []) == {"OutOfRange"}


def api_fields(cls, path=""):
    for field in describe(cls):
        here = f"{path}.{field.json_name}"
        yield here, field
        inner = field.item_info if field.kind == "list" else field
        if inner.kind == "object":
            yield from api_fields(inner.item, here)
        elif inner is not field:
            yield f"{here}[]", inner


def test_a_text_that_has_a_form_says_which():
    """The finding is otherwise `is not .`, and the remedy `Write .`"""
    formed = 0
    for path, field in api_fields(Spec):
        bounds = field.mark(Text)
        if bounds is not None and bounds.pattern:
            formed += 1
            assert re.fullmatch(r"[A-Za-z].+[^.]", bounds.says), path
    assert formed > 20
    assert LABEL_KEY.says
    assert LABEL_VALUE.says


@pytest.mark.parametrize("wrong", [-1, "x y", [[]], {"zzz": 1}], ids=str)
def test_each_finding_says_what_is_wrong_and_then_what_to_do(wrong):
    """`path = value: what is wrong [Rule] What to do.`"""
    for path, _ in fields(SPEC):
        for error in parse_cluster(with_value(path, wrong)).errors:
            assert error.path.startswith("spec."), path
            assert not error.message.endswith((".", "?")), error
            assert not error.message[0].isupper() or error.message.split()[0].isupper(), error
            assert error.remedy[0].isupper(), error
            assert error.remedy.endswith((".", "?")), error


def test_the_remaining_defaults():
    spec = parse_cluster(MINIMAL).cluster.spec
    assert spec.rollout.paused is schema("rollout.paused")["default"] is False
    assert spec.transfer.backends == ("UCX",)
    assert (spec.transfer.rdma, spec.router.api_key_secret_ref, spec.router.allow_from) == (
        None, None, None,
    )  # fmt: skip
    assert dict(spec.router.resources.requests) == {"cpu": "250m", "memory": "256Mi"}
    assert dict(spec.router.resources.limits) == {"memory": "2Gi"}
    for role in (spec.prefill, spec.decode):
        assert (dict(role.resources.requests), dict(role.resources.limits)) == ({}, {})
        assert role.pod_template is None
    assert spec.monitoring.scrape_from == ()
    assert spec.model.cache.persistent_volume_claim is None
