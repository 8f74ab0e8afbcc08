"""What the rules about a pair of engines are told of each role, by field and by flag."""

from __future__ import annotations

import pytest

from pdcluster_connector.compat.shape import EngineShape, Memory
from pdcluster_operator.api.rules.validate import check_manifest
from pdcluster_operator.api.spec.resolve import engine_shape, resolve_engine
from pdcluster_operator.api.spec.types import Role

FOLDER = {"hostPath": {"path": "/models/x"}}
HUB = {"huggingFace": {"repo": "org/m"}}
TAGGED = {"huggingFace": {"repo": "org/m", "revision": "v1"}}
PLAIN = EngineShape(
    model="/models/model", tensor=1, pipeline=1, data=1, context=1, nodes=1,
    prefix_caching=True, memory=Memory.VRAM,
)  # fmt: skip


def shape(role: Role, **spec: object) -> EngineShape:
    spec.setdefault("model", {"source": FOLDER})
    metadata = {"name": "llama", "namespace": "ns"}
    cluster, _ = check_manifest(
        {"apiVersion": "pdcluster.dev/v1alpha1", "kind": "PDCluster",
         "metadata": metadata, "spec": spec}
    )  # fmt: skip
    return engine_shape(cluster, resolve_engine(cluster, role))


def told(found: EngineShape) -> dict[str, object]:
    """The fields that differ from those of the smallest spec."""
    values = {name: getattr(found, name) for name in EngineShape.__struct_fields__}
    return {name: value for name, value in values.items() if value != getattr(PLAIN, name)}


# What a role's engine or parallelism says -> what the rules are told.
OF_ONE_ROLE = [
    ({"engine": {"blockSize": 64}}, {"block_size": 64}),
    ({"engine": {"extraArgs": ["--block-size", "64"]}}, {"block_size": 64}),
    ({"engine": {"extraArgs": ["--block-size", "many"]}}, {}),
    ({"engine": {"kvCacheDtype": "fp8"}}, {"kv_dtype": "fp8_e4m3"}),
    ({"engine": {"kvCacheDtype": "bfloat16"}}, {"kv_dtype": "bfloat16"}),
    ({"engine": {"extraArgs": ["--kv-cache-dtype", "fp8_e5m2"]}}, {"kv_dtype": "fp8_e5m2"}),
    ({"engine": {"extraArgs": ["--dtype", "half"]}}, {"kv_dtype": "float16"}),
    ({"engine": {"extraArgs": ["--dtype", "auto"]}}, {}),
    (
        {"engine": {"kvCacheDtype": "auto", "extraArgs": ["--dtype=float"]}},
        {"kv_dtype": "float32"},
    ),
    (
        {"engine": {"kvCacheDtype": "fp8", "extraArgs": ["--dtype=float"]}},
        {"kv_dtype": "fp8_e4m3"},
    ),
    ({"engine": {"prefixCaching": "Disabled"}}, {"prefix_caching": False}),
    ({"engine": {"extraArgs": ["--no-enable-prefix-caching"]}}, {"prefix_caching": False}),
    (
        {"engine": {"prefixCaching": "Disabled", "extraArgs": ["--enable-prefix-caching"]}},
        {},
    ),
    (
        {"engine": {"attentionBackend": "FLASH_ATTN"}},
        {"token_sliceable": True, "backend": "FLASH_ATTN"},
    ),
    (
        {"engine": {"attentionBackend": "CPU_ATTN"}},
        {"token_sliceable": False, "backend": "CPU_ATTN"},
    ),
    ({"engine": {"attentionBackend": "OTHER"}}, {"backend": "OTHER"}),
    ({"engine": {"extraArgs": ["--mamba-cache-mode", "align"]}}, {"hybrid": True}),
    ({"engine": {"extraArgs": ["--enable-mamba-x"]}}, {"hybrid": True}),
    ({"engine": {"extraArgs": ["--decode-context-parallel-size", "2"]}}, {"context": 2}),
    (
        {"engine": {"extraArgs": ["--prefill-context-parallel-size=4",
                                  "--decode-context-parallel-size=2"]}},
        {"context": 4},
    ),
    ({"engine": {"extraArgs": ["--prefill-context-parallel-size", "x"]}}, {}),
    (
        {"parallelism": {"tensor": 6, "pipeline": 2, "data": 3, "nodes": 4}},
        {"tensor": 6, "pipeline": 2, "data": 3, "nodes": 4},
    ),
    (
        {"engine": {"extraArgs": ["--hf-overrides", '{"a": 1}', "--seed", "1"]}},
        {"model": '/models/model --hf-overrides {"a": 1}'},
    ),
    (
        {"engine": {"extraArgs": ["--quantization", "fp8", "--rope-theta=9"]}},
        {"model": "/models/model --quantization fp8 --rope-theta=9"},
    ),
]  # fmt: skip


@pytest.mark.parametrize("role", list(Role))
@pytest.mark.parametrize(("own", "expected"), OF_ONE_ROLE, ids=str)
def test_what_one_role_says_is_told_of_that_role_alone(role, own, expected):
    (other,) = set(Role) - {role}
    assert told(shape(role, **{role.value: own})) == expected
    assert told(shape(other, **{role.value: own})) == {}


@pytest.mark.parametrize("role", list(Role))
@pytest.mark.parametrize(
    ("own", "expected"), [row for row in OF_ONE_ROLE if "engine" in row[0]], ids=str
)
def test_what_both_roles_share_is_told_of_both(role, own, expected):
    assert told(shape(role, **own)) == expected


@pytest.mark.parametrize("role", list(Role))
@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ({"transfer": {"device": "CPU"}}, {"memory": Memory.DRAM}),
        ({"model": {"source": HUB}}, {"model": "org/m"}),
        ({"model": {"source": TAGGED}}, {"model": "org/m --revision v1"}),
        (
            {"model": {"source": TAGGED}, "engine": {"extraArgs": ["--revision", "v2"]}},
            {"model": "org/m --revision v2"},
        ),
        ({"model": {"source": FOLDER, "name": "other"}}, {}),
        ({"engine": {"maxModelLen": 4096, "env": [{"name": "A", "value": "1"}]}}, {}),
    ],
    ids=str,
)
def test_what_is_said_of_the_whole_cluster_is_told_of_both(role, spec, expected):
    assert told(shape(role, **spec)) == expected
