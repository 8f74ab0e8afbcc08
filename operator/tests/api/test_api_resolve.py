"""What a role's engines run with: the role's own word, else the shared one, else the default."""

from __future__ import annotations

from dataclasses import fields

import pytest

from pdcluster_operator.api.rules.validate import check_manifest
from pdcluster_operator.api.spec.engine_types import (
    STARTUP_SECONDS,
    ConnectorSource,
    EngineOverride,
    KvOffload,
    Switch,
)
from pdcluster_operator.api.spec.resolve import resolve_engine
from pdcluster_operator.api.spec.types import Role


def engine_of_role(role, **spec):
    cluster, _ = check_manifest(
        {
            "apiVersion": "pdcluster.dev/v1alpha1",
            "kind": "PDCluster",
            "metadata": {"name": "llama"},
            "spec": {"model": {"source": {"hostPath": {"path": "/models/x"}}}, **spec},
        }
    )
    return resolve_engine(cluster, role)


# JSON name, Python name, (shared value, its meaning), (the role's value, its meaning), default.
FIELDS = [
    ("image", "image", ("docker.io/a/a:1",) * 2, ("docker.io/b/b:2",) * 2, None),
    ("blockSize", "block_size", (16, 16), (32, 32), None),
    ("prefixCaching", "prefix_caching", ("Enabled", Switch.ENABLED),
     ("Disabled", Switch.DISABLED), Switch.ENABLED),
    ("prefixCaching", "prefix_caching", ("Disabled", Switch.DISABLED),
     ("Enabled", Switch.ENABLED), Switch.ENABLED),
    ("kvCacheDtype", "kv_cache_dtype", ("float32",) * 2, ("bfloat16",) * 2, None),
    ("maxModelLen", "max_model_len", (4096, 4096), (512, 512), None),
    ("maxModelLen", "max_model_len", (512, 512), (4096, 4096), None),
    ("attentionBackend", "attention_backend", ("FLASH_ATTN",) * 2, ("TRITON_ATTN",) * 2, None),
    ("connector", "connector", ("Bundled", ConnectorSource.BUNDLED),
     ("Image", ConnectorSource.IMAGE), ConnectorSource.BUNDLED),
    ("connector", "connector", ("Image", ConnectorSource.IMAGE),
     ("Bundled", ConnectorSource.BUNDLED), ConnectorSource.BUNDLED),
    ("kvOffload", "kv_offload", ({"cpuMemory": "1Gi"}, KvOffload(cpu_memory="1Gi")),
     ({"cpuMemory": "2Gi"}, KvOffload(cpu_memory="2Gi")), None),
    ("startupTimeoutSeconds", "startup_timeout_seconds", (7200, 7200), (600, 600), STARTUP_SECONDS),
]  # fmt: skip


def test_every_field_that_a_role_may_set_is_here():
    joined = {"env", "extra_args"}  # not replaced: see below
    assert {field.name for field in fields(EngineOverride)} == joined | {row[1] for row in FIELDS}


@pytest.mark.parametrize("own_role", list(Role))
@pytest.mark.parametrize(("json_name", "name", "shared", "own", "default"), FIELDS)
def test_the_roles_own_value_wins_over_the_shared_one(
    own_role, json_name, name, shared, own, default
):
    (other_role,) = set(Role) - {own_role}
    spec = {
        "engine": {json_name: shared[0]},
        str(own_role): {"engine": {json_name: own[0]}},
    }
    assert getattr(engine_of_role(own_role, **spec), name) == own[1]
    assert getattr(engine_of_role(other_role, **spec), name) == shared[1]
    del spec["engine"]
    assert getattr(engine_of_role(own_role, **spec), name) == own[1]
    if name != "image":  # the default image follows vLLM's releases
        assert getattr(engine_of_role(other_role, **spec), name) == default


@pytest.mark.parametrize("role", list(Role))
def test_variables_and_flags_of_both_are_joined_and_the_role_wins_by_name(role):
    shared = {
        "env": [{"name": "A", "value": "shared"}, {"name": "B", "value": "shared"}],
        "extraArgs": ["--seed", "1", "--max-num-seqs", "8"],
    }
    own = {"env": [{"name": "B", "value": "own"}], "extraArgs": ["--seed=2"]}
    engine = engine_of_role(role, engine=shared, **{str(role): {"engine": own}})
    assert [(var.name, var.value) for var in engine.env] == [("A", "shared"), ("B", "own")]
    assert engine.last("--seed").value == "2"
    assert engine.last("--max-num-seqs").value == "8"


def test_of_a_flag_that_is_given_twice_the_last_value_counts():
    """As in vLLM's own command line."""
    engine = engine_of_role(Role.DECODE, engine={"extraArgs": ["--seed", "1", "--seed=2"]})
    assert engine.last("--seed").value == "2"
    assert engine.last("--max-num-seqs") is None


@pytest.mark.parametrize(
    ("source", "model", "revision"),
    [
        ({"huggingFace": {"repo": "a/b", "revision": "v1"}}, "a/b", "v1"),
        ({"huggingFace": {"repo": "a/b"}}, "a/b", None),
        ({"persistentVolumeClaim": {"claimName": "w", "path": "a/b/"}}, "/models/model/a/b", None),
        ({"persistentVolumeClaim": {"claimName": "w"}}, "/models/model", None),
        ({"hostPath": {"path": "/x"}}, "/models/model", None),
    ],
)
def test_what_vllm_is_given_as_its_model(source, model, revision):
    engine = engine_of_role(Role.PREFILL, model={"source": source})
    assert (engine.model, engine.model_revision) == (model, revision)
