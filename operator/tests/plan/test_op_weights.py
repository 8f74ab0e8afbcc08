"""What pods are made of for weights of a registry and of object storage."""

from __future__ import annotations

from typing import Any

import pytest
from simulated_cluster import SimulatedCluster, manifest

from pdcluster_operator.api.object_names import engine_of
from pdcluster_operator.api.rules.validate import check_manifest

LOGIN = {"name": "login"}
S3: dict[str, Any] = {"uri": "s3://models/llama/"}


def pods(source, **spec):
    """(pod spec, engine container) of both roles."""
    plan = SimulatedCluster(manifest(model={"source": source}, **spec)).plan()
    sets = [step.manifest for step in plan.steps if step.manifest["kind"] == "StatefulSet"]
    assert len(sets) == 2, plan.status["conditions"]
    found = [one["spec"]["template"]["spec"] for one in sets]
    return [(pod, pod["containers"][0]) for pod in found]


def model(container):
    return container["args"][container["args"].index("--") + 1]


def variables(container):
    return {var["name"]: var.get("value", var.get("valueFrom")) for var in container["env"]}


def findings(source, **spec):
    found = check_manifest(manifest(model={"source": source}, **spec))[1]
    return [
        (one.path.removeprefix("spec."), str(one.rule)) for one in (*found.errors, *found.warnings)
    ]


@pytest.mark.parametrize(("path", "folder"), [(None, ""), ("a/llama/", "/a/llama")])
def test_an_image_is_mounted_read_only_and_pulled_with_its_secret(path, folder):
    oci = {"image": "r.example.com/llama:v1", "pullSecretRef": LOGIN}
    for pod, container in pods({"oci": oci | ({"path": path} if path else {})}):
        image = {"reference": "r.example.com/llama:v1", "pullPolicy": "IfNotPresent"}
        assert {"name": "model", "image": image} in pod["volumes"]
        mount = {"name": "model", "mountPath": "/models/model", "readOnly": True}
        assert mount in container["volumeMounts"]
        assert model(container) == f"/models/model{folder}"
        assert pod["imagePullSecrets"] == [LOGIN]
        assert not {"HF_HOME", "HF_TOKEN"} & set(variables(container))


def test_pull_secrets_of_a_template_stay_beside_it():
    oci = {"image": "r.example.com/llama:v1", "pullSecretRef": LOGIN}
    role = {"podTemplate": {"spec": {"imagePullSecrets": [{"name": "vllm"}]}}}
    for pod, _ in pods({"oci": oci}, prefill=role, decode=role):
        assert pod["imagePullSecrets"] == [LOGIN, {"name": "vllm"}]
    for pod, _ in pods({"oci": {"image": "r.example.com/llama:v1"}}):
        assert "imagePullSecrets" not in pod


def test_vllm_reads_a_bucket_with_the_keys_of_a_secret():
    source = S3 | {"endpoint": "http://minio:9000", "credentialsSecretRef": LOGIN}
    for pod, container in pods({"objectStorage": source}):
        assert model(container) == "s3://models/llama"
        given = variables(container)
        for key in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            assert given[key] == {"secretKeyRef": {"name": "login", "key": key}}
        assert given["AWS_ENDPOINT_URL"] == "http://minio:9000"
        assert given["RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING"] == "0"
        assert not {"model", "cache"} & {volume["name"] for volume in pod["volumes"]}
        assert "--load-format" not in container["args"], "vLLM takes runai_streamer by itself"


def test_the_keys_of_google_are_a_file():
    source = {"uri": "gs://models/llama", "credentialsSecretRef": LOGIN}
    for pod, container in pods({"objectStorage": source}):
        secret = {"name": "weights-credentials", "secret": {"secretName": "login"}}
        assert secret in pod["volumes"]
        path = variables(container)["GOOGLE_APPLICATION_CREDENTIALS"]
        [mount] = [m for m in container["volumeMounts"] if m["name"] == "weights-credentials"]
        assert path == f"{mount['mountPath']}/credentials.json"
        assert mount["readOnly"] is True
        assert not [name for name in variables(container) if name.startswith("AWS_")]


@pytest.mark.parametrize("uri", ["s3://models/llama", "gs://models/llama"])
def test_without_a_secret_pods_use_their_own_identity(uri):
    for pod, container in pods({"objectStorage": {"uri": uri}}):
        assert not {"weights-credentials", "model"} & {one["name"] for one in pod["volumes"]}
        assert not [n for n in variables(container) if n.startswith(("AWS_", "GOOGLE", "RUNAI"))]


def test_other_weights_are_other_engines():
    keys = set()
    sources = [
        {"objectStorage": S3},
        {"objectStorage": {"uri": "s3://models/other"}},
        {"oci": {"image": "r.example.com/llama:v1"}},
        {"oci": {"image": "r.example.com/llama:v2"}},
        {"hostPath": {"path": "/models/model"}},
    ]
    for source in sources:
        plan = SimulatedCluster(manifest(model={"source": source})).plan()
        engines = [step.manifest for step in plan.steps if engine_of(step.manifest)]
        keys |= {one["metadata"]["labels"]["pdcluster.dev/pairing-key"] for one in engines}
    assert len(keys) == len(sources)


@pytest.mark.parametrize("secret", ["AKIA:key@b", "b?token=key", "b#key"])
def test_no_secret_stands_in_the_address_of_a_bucket(secret):
    """Whoever may read a PDCluster would read it."""
    for field, value in (("uri", f"s3://{secret.lower()}"), ("endpoint", f"https://{secret}")):
        found = findings({"objectStorage": {**S3, field: value}})
        assert found[0][0] == f"model.source.objectStorage.{field}"


OWNED = ("engine.env[0].name", "OwnedVariable")


@pytest.mark.parametrize(
    ("source", "engine", "found"),
    [
        (S3, {}, []),
        (S3, {"extraArgs": ["--load-format", "runai_streamer_sharded"]}, []),
        (
            S3,
            {"extraArgs": ["--load-format", "dummy"]},
            [("engine.extraArgs", "ConflictingSettings")] * 2,
        ),
        (
            {"uri": "gs://models/llama", "endpoint": "http://minio:9000"},
            {},
            [("model.source.objectStorage.endpoint", "ConflictingSettings")],
        ),
        (
            S3 | {"credentialsSecretRef": LOGIN},
            {"env": [{"name": "AWS_ACCESS_KEY_ID", "value": "mine"}]},
            [("engine.env[0].name", "OwnedVariable")],
        ),
        (S3, {"env": [{"name": "AWS_ACCESS_KEY_ID", "value": "mine"}]}, []),
        *(
            (source, {"env": [{"name": name, "value": "mine"}]}, [OWNED])
            for source in (S3, S3 | {"endpoint": "http://minio:9000"})
            for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3")
        ),
    ],
)
def test_what_does_not_fit_object_storage_is_refused(source, engine, found):
    memory = {"resources": {"requests": {"memory": "8Gi"}}}
    spec = {"engine": engine, "prefill": memory, "decode": memory}
    assert findings({"objectStorage": source}, **spec) == found


@pytest.mark.parametrize(
    ("image", "rules"),
    [
        ("r/llama:latest", ["WeightsNotPinned"]),
        ("r/llama", ["WeightsNotPinned"]),
        (f"r/llama:latest@sha256:{'0' * 64}", []),
        ("r/llama:v1", []),
    ],
)
def test_a_tag_that_moves_is_named(image, rules):
    memory = {"resources": {"requests": {"memory": "8Gi"}}}
    found = findings({"oci": {"image": image}}, prefill=memory, decode=memory)
    assert [rule for _, rule in found] == rules
