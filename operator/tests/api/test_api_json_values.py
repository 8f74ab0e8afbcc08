"""Whatever stands at any place of a manifest gets an answer, never an exception."""

from __future__ import annotations

import copy
import datetime as dt
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from hypothesis import given, settings, strategies as st
from said_findings import assert_said, check_manifest

from pdcluster_operator.api.rules import validate

VALID = yaml.safe_load("""
apiVersion: pdcluster.dev/v1alpha1
kind: PDCluster
metadata: {name: llama, namespace: d, labels: {a: b}}
spec:
  model: {name: m, source: {huggingFace: {repo: a/b, revision: abc123}}}
  commonMetadata: {labels: {team: a}, annotations: {note: b}}
  engine:
    image: docker.io/vllm/vllm-openai:v0.32.0
    maxModelLen: 8192
    extraArgs: [--seed, "1"]
    env: [{name: A, value: b}, {name: B, valueFrom: {secretKeyRef: {name: s, key: k}}}]
  transfer: {rdma: {resource: rdma/ib}}
  monitoring: {scrapeFrom: [{podSelector: {matchExpressions: [{key: a, operator: Exists}]}}]}
  router:
    podTemplate: {spec: {containers: [{name: router, env: [{name: C, value: d}]}]}}
  podTemplate:
    metadata: {labels: {team: a}}
    spec:
      tolerations: [{key: a, operator: Exists}]
      volumes: [{name: data, emptyDir: {sizeLimit: 1Gi}}]
  prefill:
    replicas: 2
    engine: {kvOffload: {cpuMemory: 1Gi}}
    resources: {requests: {cpu: "4", memory: 64Gi}, limits: {memory: 64Gi, nvidia.com/gpu: 1}}
  decode:
    parallelism: {tensor: 2, nodes: 2}
    resources: {requests: {memory: 64Gi}}
    podTemplate:
      spec:
        hostNetwork: true
        dnsPolicy: ClusterFirstWithHostNet
        resourceClaims: [{name: nic, resourceClaimTemplateName: nic}]
        containers:
        - name: engine
          env: [{name: D, value: e}]
          ports: [{name: more, containerPort: 9000, hostPort: 9000}]
          volumeMounts: [{name: data, mountPath: /data}]
          livenessProbe: {httpGet: {path: /readyz, port: launcher, scheme: HTTPS}}
          resources: {claims: [{name: nic}], limits: {nvidia.com/gpu: "1"}}
        - {name: side, image: busybox, lifecycle: {preStop: {exec: {command: [a]}}}}
        initContainers: [{name: first, image: busybox, restartPolicy: Always}]
""")
YAML_KEYS = st.text(max_size=4) | st.integers() | st.booleans() | st.none() | st.dates()
NUMBERS = st.integers() | st.sampled_from([1 << 63, -(1 << 70)]) | st.floats()
WORDS = st.sampled_from(["1e28", "1e99", "-1e99", ".5", "engine", "data", "/", "$(A)", "http"])
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | WORDS | st.text(max_size=8) | st.dates(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(YAML_KEYS, inner, max_size=3),
    max_leaves=8,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the way to each value."""
    if path:
        yield path
    listed = enumerate(value) if isinstance(value, list) else ()
    for key, inner in value.items() if isinstance(value, dict) else listed:
        yield from places(inner, (*path, key))


def with_value(path: tuple[Any, ...], value: Any) -> Any:
    manifest = copy.deepcopy(VALID)
    target = manifest
    for step in path[:-1]:
        target = target[step]
    target[path[-1]] = value
    return manifest


def nested(depth: int, *, in_lists: bool = False) -> Any:
    value: Any = "x"
    for _ in range(depth):
        value = [value] if in_lists else {"a": value}
    return value


def test_the_manifest_itself_is_accepted() -> None:
    assert check_manifest(VALID)[1].errors == ()


@settings(max_examples=3 * settings().max_examples)
@given(st.sampled_from(list(places(VALID))), VALUES)
def test_any_value_at_any_place_gets_an_answer(path: tuple[Any, ...], value: Any) -> None:
    check_manifest(with_value(path, value))


ODD = {
    "an object": {"a": "b"}, "a list": [1], "a deep object": nested(600),
    "a deep list": nested(600, in_lists=True), "a number as a key": {1: "x"},
    "a long number as a key": {1 << 20_000: "x"}, "a date as a key": {dt.date(2026, 1, 1): "x"},
    "a long number": 1 << 20_000, "a large quantity": "1e28", "null": None,
}  # fmt: skip


@pytest.mark.parametrize("name", ODD)
def test_an_odd_value_at_each_place_gets_an_answer(name: str) -> None:
    for path in places(VALID):
        manifest = with_value(path, ODD[name])
        check_manifest(manifest)
        validate.review({**manifest, "spec": {}}, manifest, host_paths=True)


def test_what_no_api_server_stores_is_the_only_finding() -> None:
    path = ("spec", "podTemplate", "metadata", "labels")
    for value, where, rule in (
        ({1: "x"}, "spec.podTemplate.metadata.labels", "WrongType"),
        ({"a": 1 << 63}, "spec.podTemplate.metadata.labels.a", "OutOfRange"),
        (nested(600), "spec.podTemplate.metadata.labels." + ".".join(["a"] * 60), "TooLarge"),
    ):
        [error] = check_manifest(with_value(path, value))[1].errors
        assert (error.path, error.rule) == (where, rule)
    deep = check_manifest(with_value(path, {"a": nested(59)}))[1].errors
    assert [error.rule for error in deep] == ["WrongType"]  # of Kubernetes' own type


def test_an_object_inside_of_itself_gets_an_answer() -> None:
    whole: dict[str, Any] = {}
    whole |= {"a": whole, "b": [whole, whole]}
    found = check_manifest(with_value(("spec", "podTemplate"), whole))[1].errors
    assert {error.rule for error in found} == {"TooLarge"}


def test_a_scaler_is_read_behind_the_same_door() -> None:
    for value in ({"replicas": 1 << 20_000}, {1: 2}, nested(600)):
        [error] = validate.check_scaler({"metadata": {"name": "x"}, "spec": value}).errors
        assert_said(error)


def test_a_stored_manifest_that_no_rule_can_judge_may_be_mended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another version of the operator, or a rule with a mistake, may have let it through."""
    whole = validate.check_manifest
    broken = with_value(("spec", "prefill", "replicas"), 3)

    def check(manifest: Any, **known: Any) -> Any:
        if manifest is broken:
            raise TypeError
        return whole(manifest, **known)

    monkeypatch.setattr(validate, "check_manifest", check)
    assert validate.review(VALID, broken, host_paths=True).errors == ()
